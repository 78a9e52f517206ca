"""The figures at the end of a run, and its plot."""

import json

import msgspec
import pytest

from stream.errors import PenstockError
from stream.operator.status import RunStatus
from stream.trainer.ledger_records import read_events
from workers.runs.live_run import read_live
from workers.runs.metrics_file import make_charts, read_metrics
from workers.runs.progress import Progress
from workers.runs.progress_picture import draw_progress, make_figure, smooth
from workers.runs.summary import (
    RunSummary,
    describe_early_end,
    describe_rewards,
    latest_progress,
    read_summary,
    summarize,
)
from workers.runs.warnings import WARNINGS_FILE, read_warnings
from workers.settings.toml_file import parse_settings

KEYS = [
    "finished", "steps", "groups_trained", "groups_dropped", "completion_states", "score_before", "score_after",
    "staleness", "tokens_per_second", "seconds", "fed", "outstanding", "dead", "duplicates", "rejected_rows",
    "totals", "causes", "why_untrained", "failure",
]  # fmt: skip


def run_status(is_open: int, **counts: int) -> RunStatus:
    named = {name.replace("__", ":"): n for name, n in counts.items()}
    return RunStatus(now_ms=0, stages={}, unfinished=is_open, outstanding=0, dead=0, counts=named)


def summary_of(status: RunStatus, before=Progress(), after=Progress(), seconds=10.0) -> RunSummary:  # noqa: B008
    return summarize(status, before, after, seconds)


def test_the_report_has_these_keys():
    assert list(json.loads(msgspec.json.encode(summary_of(run_status(0))))) == KEYS


def test_damaged_utf8_in_a_runs_files_is_no_crash(tmp_path):
    damaged = b'{"step": 1, "\xff": "\xff"}'
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "live.json").write_bytes(damaged)
    for name in ("summary.json", "checkpoints/step-000001/checkpoint.json"):
        (tmp_path / name).write_bytes(damaged)
    for name in ("metrics.jsonl", WARNINGS_FILE, "ledger.jsonl"):
        (tmp_path / name).write_bytes(damaged + b"\n")
    assert read_summary(tmp_path) is None
    assert latest_progress(tmp_path) == Progress()
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    assert read_warnings(tmp_path, 0) == ([], len(damaged) + 1)
    assert read_events(tmp_path / "ledger.jsonl") == []
    with pytest.raises(PenstockError, match="is damaged"):
        read_live(tmp_path)


def test_every_prompt_is_accounted_for():
    summary = summary_of(run_status(2, fed=10, trained=4, dropped__operator=1, dropped__zero_variance=2, dead=1))
    assert summary.is_balanced
    assert summary.groups_dropped == {"operator": 1, "zero_variance": 2}
    assert summary.prompt_counts_text == "10 fed = 4 trained + 3 dropped + 1 dead + 2 outstanding"


def test_an_extra_or_missing_prompt_is_detected():
    assert not summary_of(run_status(1, fed=10, trained=10)).is_balanced
    assert not summary_of(run_status(0, fed=10, trained=9)).is_balanced


def test_speed_covers_this_start_and_staleness_the_whole_run():
    before = Progress(step=5, tokens=1000)
    after = Progress(
        step=9, tokens=3000, staleness_sum=30.0, staleness_count=20, staleness_max=3, completion_states={"valid": 7}
    )
    summary = summary_of(run_status(0), before, after)
    assert summary.steps == 9
    assert summary.tokens_per_second == 200.0
    assert summary.staleness.mean == 1.5
    assert summary.staleness.max == 3
    assert summary.completion_states == {"valid": 7}


def test_missing_measurements_are_null_and_not_0():
    report = json.loads(msgspec.json.encode(summary_of(run_status(0))))
    assert report["staleness"] == {"mean": None, "max": None}
    assert report["score_before"] is None


def test_progress_comes_from_the_newest_readable_checkpoint(tmp_path):
    assert latest_progress(tmp_path).step == 0
    for name, text in {
        "step-000009": '{"progress": {"step": 9, "unknown": 1}, "files": {}, "saved_at": "2026-01-01"}',
        "step-000010": '{"progress": {"step": 10, "tokens": 1}, "saved_at": "2026-01-02"}',
        "step-000010-2": '{"progress": {"step": 10, "tokens": 2}, "saved_at": "2026-01-03"}',
        "step-000011": '{"progress": {"st',
        "step-000012": '{"progress": {"step": 12}, "files": {"checkpoint.json": {"size": 3, "blake2b": ""}}}',
        "step-000013": '{"progress": {"step": 13}, "files": {"gone": {"size": 3, "blake2b": ""}}}',
    }.items():
        folder = tmp_path / "checkpoints" / name
        folder.mkdir(parents=True)
        (folder / "checkpoint.json").write_text(text)
    assert latest_progress(tmp_path) == Progress(step=10, tokens=2)


def settings(**sections):
    table = {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"ref": "a:b"}]}
    return parse_settings(table | sections)


def test_only_the_last_execution_of_a_repeated_step_counts(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n{"step": 2, "a": 3}\n{"st')
    assert [row["a"] for row in read_metrics(file)] == [1, 3]


def test_a_running_mean_preserves_constants_and_length_and_ends_as_the_data_do():
    assert smooth([2.0] * 20) == [2.0] * 20
    assert smooth([0.0, 3.0, 9.0]) == [0.0, 4.0, 9.0]


def test_a_run_is_plotted_even_with_missing_measurements(tmp_path):
    with pytest.raises(PenstockError, match="no step yet"):
        draw_progress(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "time": 1.0, "version": 1, "reward/mean": 0.5, "staleness/mean": null}\n'
    )
    assert draw_progress(tmp_path).read_bytes().startswith(b"\x89PNG")


def row(step: int, **metrics: float) -> dict[str, object]:
    common = {
        "reward/mean": 0.1,
        "loss": 0.2,
        "length/mean": 9.0,
        "entropy": 0.3,
        "grad_norm": 1.0,
        "valid_fraction": 1.0,
    }
    return {"step": step, "version": step - 1, "step_seconds": 30.0} | common | metrics


@pytest.mark.parametrize(
    ("metrics", "panels"),
    [
        ({}, ["Reward", "Loss", "Gradient norm", "Completion length", "Entropy", "Validity"]),
        (
            {"reference/kl": 0.1},
            ["Reward", "Loss", "Completion length", "Entropy", "KL divergence", "Validity"],
        ),
        (
            {"reference/kl": 0.1, "reward/part/a/mean": 1.0, "reward/part/b.c/mean": 0.0},
            [
                "Reward",
                "Reward parts",
                "Loss",
                "Gradient norm",
                "Completion length",
                "Entropy",
                "KL divergence",
                "Validity",
            ],
        ),
    ],
)
def test_a_plot_shows_what_was_measured(metrics, panels):
    figure = make_figure(make_charts([row(7, **metrics)]), "my", "")
    assert [axes.get_title(loc="left") for axes in figure.axes] == panels


def test_a_plot_names_step_and_version_as_the_terminal_does_and_begins_with_the_data(tmp_path, monkeypatch):
    facts = []
    monkeypatch.setattr(
        "workers.runs.progress_picture.make_figure", lambda *words: facts.append(words[2]) or make_figure(*words)
    )
    rows = [row(41), row(42)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status = run_status(0)
    draw_progress(tmp_path, status)
    status.policy |= {"step": "42", "version": "42"}
    draw_progress(tmp_path, status)
    assert facts == ["step 42, policy version 41, 1.0 min", "step 42, policy version 42, 1.0 min"]
    assert {axes.get_xlim() for axes in make_figure(make_charts(rows), "my", "").axes} == {(40.5, 42.5)}


def rewarded(served: float, clean: float) -> dict[str, float]:
    parts = {"reward/part/env.served/mean": served, "reward/part/env.clean/mean": clean}
    return {"reward/mean": served + clean, **parts}


def test_the_reward_and_its_parts_are_compared_from_the_first_steps_to_the_last():
    steps = [rewarded(0.5, 0.25)] * 5 + [rewarded(9, 9)] * 3 + [rewarded(0.125, 1.5)] * 5
    assert describe_rewards(steps) == (
        "reward of the first 5 steps 0.75, of the last 5 steps 1.62; env.clean 0.25 → 1.5, env.served 0.5 → 0.125"
    )


@pytest.mark.parametrize("steps", [[], [{"reward/mean": 1.0}], [{}, {}], [{"reward/mean": float("nan")}] * 4])
def test_without_two_measured_steps_nothing_is_compared(steps):
    assert describe_rewards(steps) == ""


def test_a_single_part_is_not_named_again():
    steps = [{"reward/mean": value, "reward/part/env/mean": value} for value in (0.0, 1.0, 1.0)]
    assert describe_rewards(steps) == "reward of the first step 0, of the last step 1"


def test_data_that_end_before_the_last_step_are_named():
    table = {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"ref": "a:b"}]}
    wanted = parse_settings(table | {"train": {"max_steps": 30}})
    assert describe_early_end(15, 362, wanted) == (
        "the data were used up after 15 of train.max_steps = 30 steps, and 362 groups were dropped: more rows, or more "
        "than data.epochs = 1, give more steps"
    )
    assert describe_early_end(30, 362, wanted) == ""
    assert describe_early_end(15, 0, parse_settings(table)) == ""


def test_a_part_that_no_completion_earned_at_the_end_is_shown():
    first = {"reward/mean": 0.5, "reward/part/env.a/mean": 0.4, "reward/part/env.b/mean": 0.1}
    last = {"reward/mean": 0.9, "reward/part/env.a/mean": 0.9}
    assert describe_rewards([first, last]).endswith("; env.a 0.4 → 0.9, env.b 0.1 → none")
