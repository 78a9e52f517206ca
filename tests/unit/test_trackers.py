"""Trackers get the lines of metrics.jsonl in threads of their own, and cannot hurt the trainer."""

import json
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from stream.waiting import Backoff
from workers.check.machine import check_packages
from workers.check.report import Checker
from workers.settings.toml_file import parse_settings
from workers.train import tracker_thread
from workers.train.metrics_log import MetricsLog
from workers.train.tracker_thread import Trackers, TrackerThread, import_early, open_trackers, tracked_run
from workers.train.trackers import TRACKERS, MlflowTracker, TrackedRun, WandbTracker, flatten

LEAST = {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"ref": "a:b", "args": {"key": "secret"}}]}


class Recorder:
    """A tracker that remembers; `fail` is called before each step is accepted."""

    def __init__(self, fail=lambda step: None) -> None:
        self.steps: list[tuple[int, dict, float]] = []
        self.closed = False
        self.fail = fail

    def __call__(self, run: TrackedRun) -> "Recorder":
        self.run = run
        return self

    def log(self, step, metrics, at) -> None:
        self.fail(step)
        self.steps.append((step, dict(metrics), at))

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr("workers.train.tracker_thread._BACKOFF", Backoff(0.001, 0.002))


def tracked(folder, first_step: int = 1) -> TrackedRun:
    return TrackedRun(id="id", name="r", folder=folder, settings={}, first_step=first_step)


def start(folder, recorder, first_step: int = 1) -> TrackerThread:
    return TrackerThread("fake", tracked(folder, first_step), recorder)


def line(step: int) -> dict:
    return {"step": step, "reward/mean": 0.5, "time": 100.0 + step}


def test_each_step_is_delivered_in_order_with_its_time_and_noted(tmp_path):
    recorder = Recorder()
    trackers = Trackers([start(tmp_path, recorder)])
    log = MetricsLog(tmp_path / "metrics.jsonl", 0)
    log.subscribe(trackers.log)
    for step in (1, 2, 3):
        log.append(line(step) | {"not a number": None, "nan": float("nan")})
    trackers.close()
    assert recorder.steps == [(step, {"step": step, "reward/mean": 0.5}, 100.0 + step) for step in (1, 2, 3)]
    assert recorder.closed
    assert json.loads((tmp_path / "trackers" / "fake.json").read_bytes()) == {"step": 3}


def test_a_resumed_run_first_logs_what_its_tracker_lacks(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line(step)) + "\n" for step in range(1, 6)) + '{"st')
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers" / "fake.json").write_text('{"step": 2}')
    recorder = Recorder()
    trackers = Trackers([start(tmp_path, recorder, first_step=6)])
    trackers.log(line(6))
    trackers.close()
    assert [step for step, _, _ in recorder.steps] == [3, 4, 5, 6]


def test_a_tracker_that_hangs_delays_neither_a_step_nor_the_end_beyond_its_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(tracker_thread, "_CLOSE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(tracker_thread, "_MAX_QUEUED", 5)
    hang = threading.Event()
    trackers = Trackers([start(tmp_path, Recorder(lambda _: hang.wait(20) and None))])
    started = time.monotonic()
    with capture_logs() as logs:
        for step in range(50):
            trackers.log(line(step))
        assert time.monotonic() - started < 0.2
        trackers.close()
    assert time.monotonic() - started < 2
    hang.set()
    assert [entry["event"] for entry in logs] == ["tracker.queue_full", "tracker.not_finished"]


def test_a_step_is_tried_again_and_given_up_in_the_end(tmp_path):
    failures = {2: 2, 3: 99}

    def fail(step: int) -> None:
        if failures.get(step, 0):
            failures[step] -= 1
            raise SystemExit("no network")

    recorder = Recorder(fail)
    trackers = Trackers([start(tmp_path, recorder)])
    with capture_logs() as logs:
        for step in (1, 2, 3, 4):
            trackers.log(line(step))
        trackers.close()
    assert [step for step, _, _ in recorder.steps] == [1, 2, 4]
    assert [entry["step"] for entry in logs if entry["event"] == "tracker.failed"] == [2, 2, 3, 3, 3, 3]


def test_libraries_are_imported_while_the_model_is_loaded(tmp_path, monkeypatch):
    imported = threading.Event()
    monkeypatch.setattr(tracker_thread.importlib, "import_module", lambda name: name == "wandb" and imported.set())
    import_early(parse_settings(LEAST | {"train": {"trackers": ["wandb"]}}))
    assert imported.wait(5)


def test_a_result_of_the_last_step_is_delivered_besides_the_steps_metrics(tmp_path):
    recorder = Recorder()
    trackers = Trackers([start(tmp_path, recorder)])
    trackers.log(line(3))
    trackers.log({})
    trackers.log({"step": 3, "time": 104.0, "eval/mean/valid": 0.9})
    trackers.close()
    assert recorder.steps[1:] == [(3, {"step": 3, "eval/mean/valid": 0.9}, 104.0)]


def test_a_tracker_that_cannot_start_is_a_warning(tmp_path):
    def broken(_run):
        raise RuntimeError("not logged in")

    with capture_logs() as logs:
        trackers = Trackers([start(tmp_path, broken)])
        trackers.log(line(1))
        trackers.close()
    assert [(entry["event"], entry["why"]) for entry in logs] == [("tracker.failed", "RuntimeError: not logged in")]


async def test_the_settings_name_the_trackers_and_a_missing_package_is_found_first(tmp_path, monkeypatch):
    settings = parse_settings(LEAST | {"train": {"trackers": ["wandb", "mlflow"]}, "run": {"folder": str(tmp_path)}})
    recorders = {"wandb": Recorder(), "mlflow": Recorder()}
    monkeypatch.setattr(tracker_thread, "TRACKERS", recorders)
    async with open_trackers(settings, 7) as trackers:
        trackers.log(line(7))
    for recorder in recorders.values():
        assert [step for step, _, _ in recorder.steps] == [7]
        assert recorder.run.first_step == 7
    monkeypatch.setattr("workers.check.machine.find_spec", lambda name: None if name == "wandb" else name)
    checker = Checker(settings)
    check_packages(checker)
    (finding,) = checker.findings
    assert (finding.message, finding.remedy) == ("wandb is not installed", "pip install 'penstock[wandb]' brings it")


def test_a_tracker_is_given_no_secret_of_the_run():
    settings = parse_settings(
        LEAST
        | {
            "run": {"name": "run", "redis": "redis://:secret@host"},
            "environments": {"a": {"ref": "a:b", "args": {"k": "secret"}}},
        }
    )
    run = tracked_run(settings, 1)
    assert "secret" not in json.dumps(run.settings)
    assert flatten(run.settings)["train.learning_rate"] == 1e-6
    assert (run.name, run.id) == ("run", "run")


def test_every_setting_has_a_tracker_and_an_extra():
    import tomllib
    from pathlib import Path
    from typing import get_args

    from workers.settings.training import Tracker

    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(get_args(Tracker)) == set(TRACKERS)
    assert set(TRACKERS) <= set(extras)


def test_wandb_continues_the_run_of_the_same_id(tmp_path, monkeypatch):
    calls = []
    run = SimpleNamespace(
        define_metric=lambda *names, **options: calls.append(("define", names, options)),
        log=lambda metrics: calls.append(("log", metrics)),
        finish=lambda: calls.append("finish"),
    )
    fake = SimpleNamespace(
        init=lambda **options: calls.append(("init", options)) or run, Settings=lambda **options: None
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    tracker = WandbTracker(tracked(tmp_path))
    tracker.log(3, {"a": 1.0}, 0.0)
    tracker.close()
    options = calls[0][1]
    assert (options["id"], options["resume"], options["project"]) == ("id", "allow", "penstock")
    assert calls[-2:] == [("log", {"a": 1.0, "step": 3}), "finish"]


# The real trackers; each is skipped by name where it is not installed.


def real(name: str):
    return pytest.mark.skipif(
        __import__("importlib.util").util.find_spec(name) is None, reason=f'{name} is not installed: "penstock[{name}]"'
    )


@pytest.mark.full
@real("tensorboard")
def test_tensorboard_has_each_step_once_after_a_restart(tmp_path):
    for first, last in ((1, 4), (3, 6)):
        tracker = TRACKERS["tensorboard"](tracked(tmp_path, first))
        for step in range(first, last):
            tracker.log(step, {"reward/mean": float(first)}, 100.0 + step)
        tracker.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert found == [(1, 1.0), (2, 1.0), (3, 3.0), (4, 3.0), (5, 3.0)]


@pytest.mark.full
@real("mlflow")
@pytest.mark.filterwarnings("ignore")
def test_mlflow_continues_its_run(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for first in (1, 3):
        tracker = MlflowTracker(tracked(tmp_path / "run", first))
        for step in (first, first + 1):
            tracker.log(step, {"pass@1/valid": 0.5, "reward/mean": float(step)}, 100.0)
        tracker.close()
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    [run] = client.search_runs([client.get_experiment_by_name("penstock").experiment_id])
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert sorted((point.step, point.value) for point in history) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert run.data.metrics["pass_1/valid"] == 0.5


@pytest.mark.full
@real("wandb")
@pytest.mark.filterwarnings("ignore")
def test_wandb_writes_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    thread = TrackerThread("wandb", tracked(tmp_path), WandbTracker)
    trackers = Trackers([thread])
    for step in (1, 2):
        trackers.log(line(step))
    trackers.close()
    assert list((tmp_path / "wandb").glob("offline-run-*-id/run-id.wandb"))


@pytest.mark.full
@real("trackio")
@pytest.mark.filterwarnings("ignore")
def test_trackio_continues_its_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for first in (1, 3):
        tracker = TRACKERS["trackio"](tracked(tmp_path, first))
        for step in (first, first + 1):
            tracker.log(step, {"reward/mean": float(step)}, 100.0)
        tracker.close()
    from trackio.sqlite_storage import SQLiteStorage

    [name] = SQLiteStorage.get_runs("penstock")
    found = [(entry["step"], entry["reward/mean"]) for entry in SQLiteStorage.get_logs("penstock", name)]
    assert found == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
