"""`penstock run` starts, restarts, fails and drains roles; small scripts stand for the roles."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import anyio
import msgspec
import psutil
import pytest

from stream.connection.run_connection import RunConnection
from stream.connection.run_identity import RunIdentity, write_identity
from stream.errors import PenstockError, RunFailedError, RunMismatchError
from stream.operator.control import pause, stop
from stream.queue.feed import Feed
from stream.queue.stage import RetryPolicy, Stage
from stream.records import Group, Prompt
from stream.waiting import Backoff
from workers.launch import engines
from workers.launch.engines import DashboardProcess
from workers.launch.restarts import (
    GiveUp,
    Restart,
    RestartLoop,
    RestartPolicy,
    RunEnding,
    count_oom_kills,
    was_killed_from_outside,
)
from workers.launch.specs import COMMANDS, ProcessSpec
from workers.launch.start import raise_for_failure, supervise
from workers.launch.supervisor import RunOutcome, Supervisor
from workers.runs.folder import lock_folder, write_settings
from workers.runs.identity import check_folder
from workers.runs.live_run import LiveRun, process_start, read_live, write_live
from workers.settings import QueueSettings, Settings
from workers.settings.toml_file import parse_settings
from workers.terminal.progress import SilentDisplay, SupervisorState

STAY = "stay()"
FINISH = "finish(); "

PRELUDE = """
import os, signal, subprocess, sys, time
from pathlib import Path
me, folder, run, url = sys.argv[1:5]
home = Path(folder)
values = " ".join(word for word in sys.argv[6:] if not word.startswith("--"))
with open(home / "lives", "a") as f: f.write(f"{me} {os.getpid()} {values}\\n")
def lives(name):
    return [line for line in open(home / "lives") if line.startswith(name + " ")]
def leave(*_):
    with open(home / "left", "a") as f: f.write(me + "\\n")
    sys.stdout.flush()
    os._exit(0)  # the interpreter may be exiting already
signal.signal(signal.SIGTERM, leave)
def stay(finished=home / "finished"):
    while not finished.exists(): time.sleep(0.02)
def until(condition):
    while not condition(): time.sleep(0.02)
def redis():
    from redis import Redis
    return Redis.from_url(url)
def finish():
    redis().hset("{%s}:meta" % run, "finished", "done")
    (home / "finished").touch()
"""


class Pipeline:
    """A run whose roles are scripts."""

    def __init__(self, folder: Path, run: str, redis: str, scripts: dict[str, str], **delivery: float) -> None:
        self.home = folder
        self.scripts = {"feed": STAY, "rollout": STAY, "score": STAY, "train": STAY} | scripts
        engine = {"count": int(delivery.pop("engines", 1))} if "engine" in scripts else {"urls": ["http://127.0.0.1:1"]}
        self.settings = settings_in(folder / "run", run, redis, engine, delivery)
        self.states: list[SupervisorState] = []

    async def run(self) -> RunOutcome:
        self.settings.folder.mkdir(exist_ok=True)
        self.seen = Seen(self.states)
        with self.commands():
            return await Supervisor(self.settings, Path("run.toml"), self.seen).run()

    def commands(self) -> AbstractContextManager[Any]:
        run = self.settings.run
        given = (str(self.home), run.name, run.redis)
        return patch.dict(COMMANDS, {role: ("-c", PRELUDE + code, role, *given) for role, code in self.scripts.items()})

    def lives(self, role: str) -> list[list[str]]:
        """Return the pid and the options' values of each process of a role."""
        lines = (self.home / "lives").read_text().splitlines()
        return [line.split()[1:] for line in lines if line.split()[0] == role]

    @property
    def stop_order(self) -> list[str]:
        return (self.home / "left").read_text().split()

    async def until_started(self, role: str, lives: int = 1) -> None:
        with anyio.fail_after(20):
            while not (self.home / "lives").exists() or len(self.lives(role)) < lives:
                await anyio.sleep(0.02)

    async def assert_no_process_is_left(self) -> None:
        """Wait for killed processes to disappear: the kernel ends them asynchronously."""
        for line in (self.home / "lives").read_text().splitlines():
            with anyio.move_on_after(5):
                while alive(int(line.split()[1])):
                    await anyio.sleep(0.01)
            assert not alive(int(line.split()[1])), line


class Seen(SilentDisplay):
    def __init__(self, states: list[SupervisorState]) -> None:
        self.states = states

        self.lines: list[str] = []

    def show(self, status, state: SupervisorState) -> None:
        self.states.append(state)

    def print_lines(self, lines) -> None:
        self.lines += [line.plain for line in lines]


def settings_in(folder: Path, run: str, redis: str, engine: dict, queue: dict) -> Settings:
    abort = {"stall_timeout_s": queue.pop("stall_timeout_s", 60.0)}
    return parse_settings(
        {
            "run": {"name": run, "folder": str(folder), "redis": redis, "dashboard": "off"},
            "model": {"path": "model"},
            "data": {"path": "prompts.jsonl"},
            "rewards": [{"ref": "module:function"}],
            "engine": engine,
            "queue": {"lease_s": 1.5, "shutdown_timeout_s": 5.0} | queue,
            "abort": abort,
        }
    )


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1][:3] if sys.platform == "linux" else True


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the run more often, and give roles less time to notice its end; scripts are quick."""
    monkeypatch.setattr("workers.launch.supervisor._POLL_S", 0.1)
    monkeypatch.setattr("workers.launch.supervisor._FINISH_TIMEOUT_S", 1.0)


@pytest.fixture
def make_pipeline(tmp_path: Path, run_name: str, redis_url: str) -> Callable[..., Pipeline]:
    return lambda scripts, **delivery: Pipeline(tmp_path, run_name, redis_url, scripts, **delivery)


async def test_the_run_ends_when_the_trainer_finishes_and_the_other_roles_are_stopped(make_pipeline):
    train = "until(lambda: lives('feed') and lives('score') and lives('rollout')); time.sleep(0.3);" + FINISH
    pipeline = make_pipeline({"train": train, "rollout": "stay(home / 'never')"})
    outcome = await pipeline.run()
    assert outcome.failure is None
    assert not outcome.interrupted
    assert outcome.killed == []
    assert pipeline.stop_order == ["rollout"]  # the others exited by themselves
    await pipeline.assert_no_process_is_left()


async def test_live_json_exists_only_during_the_run(make_pipeline, redis_url):
    copy = "import shutil; shutil.copy(home / 'run' / 'live.json', home / 'copy.json');"
    pipeline = make_pipeline({"train": copy + FINISH})
    await pipeline.run()
    live = json.loads((pipeline.home / "copy.json").read_text())
    assert live == {
        "run": pipeline.settings.run.name,
        "redis": redis_url,
        "engines": ["http://127.0.0.1:1"],
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "process_start": await anyio.to_thread.run_sync(process_start, os.getpid()),
        "stopping": "",
    }
    assert not (pipeline.settings.folder / "live.json").exists()


async def test_a_killed_role_is_restarted(make_pipeline):
    pipeline = make_pipeline(
        {
            "rollout": "if len(lives('rollout')) == 1: os.kill(os.getpid(), signal.SIGKILL)\nstay()",
            "train": "until(lambda: len(lives('rollout')) == 2);" + FINISH,
        }
    )
    outcome = await pipeline.run()
    assert outcome.failure is None
    assert pipeline.states[-1].restarts == {"rollout-0": 1}
    await pipeline.assert_no_process_is_left()


async def test_a_role_stopped_from_outside_is_restarted(make_pipeline):
    pipeline = make_pipeline({"train": "until(lambda: len(lives('score')) == 2);" + FINISH, "score": STAY})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_terminate, pipeline, "score")
        outcome = await pipeline.run()
    assert outcome.failure is None
    assert len(pipeline.lives("score")) == 2


async def _terminate(pipeline: Pipeline, role: str) -> None:
    await pipeline.until_started(role)
    os.kill(int(pipeline.lives(role)[0][0]), signal.SIGTERM)


async def test_a_crash_loop_fails_the_run_with_the_roles_last_error(make_pipeline):
    pipeline = make_pipeline({"score": "print('{\"event\": 1}'); print('error: the disk is full'); sys.exit(1)"})
    outcome = await pipeline.run()
    message = str(outcome.failure)
    assert message.startswith("score-0 exited with code 1, and it ended within 10 s of its start 3 times in a row")
    assert "the disk is full" in message
    assert str(pipeline.settings.folder / "logs" / "score-0.log") in message
    assert len(pipeline.lives("score")) == 3
    await pipeline.assert_no_process_is_left()


async def test_a_role_that_crashes_too_often_fails_the_run(make_pipeline):
    pipeline = make_pipeline({"rollout": "os.kill(os.getpid(), signal.SIGSEGV)"})
    outcome = await pipeline.run()
    assert "rollout-0 was killed by SIGSEGV, and it was restarted 5 times" in str(outcome.failure)
    assert len(pipeline.lives("rollout")) == 6


def test_kills_from_outside_are_not_counted_as_restarts(monkeypatch):
    policy = RestartPolicy(QueueSettings())
    for _ in range(20):
        decision = policy.decide(-9, 1.0, now=0.0, killed_from_outside=True)
        assert isinstance(decision, Restart)
        assert decision.delay_s < 10
    assert [type(policy.decide(-11, 1.0, now=0.0)) for _ in range(6)] == [*[Restart] * 5, GiveUp]
    assert was_killed_from_outside(-9, count_oom_kills())
    assert not was_killed_from_outside(-11, count_oom_kills())
    assert not was_killed_from_outside(-9, count_oom_kills() - 1)  # the kernel killed a process meanwhile


def test_deaths_with_work_in_hand_are_no_crash_loop():
    policy = RestartPolicy(QueueSettings())
    for code in [1] * 20 + [-11] * 20:
        decision = policy.decide(code, 1.0, now=0.0, held_work=True)
        assert isinstance(decision, Restart)
        assert decision.delay_s < 1
    assert [type(policy.decide(1, 1.0, now=0.0)) for _ in range(3)] == [Restart, Restart, GiveUp]
    assert isinstance(policy.decide(2, 1.0, held_work=True), GiveUp)


async def test_a_role_that_loses_every_prompt_fails_the_run_long_before_the_data_end(connection, monkeypatch):
    """Each prompt is a dead letter in the end, so without this a broken environment would cost all of them."""
    monkeypatch.setattr("workers.launch.restarts.MAX_LOST_IN_A_ROW", 3)
    prompts = [Prompt(id=f"d:0:{i}", messages=[{"role": "user", "content": "?"}]) for i in range(9)]
    await Feed(connection, 1000).put(prompts, "", "9")
    loop = RestartLoop(connection, QueueSettings(max_attempts=1), RunEnding())
    child = SimpleNamespace(
        spec=ProcessSpec(role="rollout", command=()),
        last_pid=77,
        last_cause=lambda: None,
        describe_end=lambda _: "exited with code 7",
        log_file=Path("rollout-0.log"),
    )
    consumer = f"rollout-{socket.gethostname()}-77-abc"

    async def lose_a_prompt() -> None:
        stage = Stage(connection, "prompts", consumer, RetryPolicy(infra_attempts=1))
        (lease,) = (await stage.claim(1)).leases
        await stage.begin_alone(lease, "environment world")
        await loop._release_work(child, 7, killed_from_outside=False)

    await lose_a_prompt()
    await lose_a_prompt()
    stage = Stage(connection, "prompts", "another", RetryPolicy())
    (lease,) = (await stage.claim(1)).leases
    await stage.complete(lease, "groups", Group(prompt=prompts[2], completions=[]))
    await lose_a_prompt()
    await lose_a_prompt()
    with pytest.raises(RunFailedError, match=r"rollout-0, exited with code 7 \(its log is rollout-0\.log\)"):
        await lose_a_prompt()


async def test_a_permanent_error_fails_the_run_immediately(make_pipeline):
    pipeline = make_pipeline({"train": "print('error: model: no such folder', file=sys.stderr); sys.exit(2)"})
    outcome = await pipeline.run()
    assert "train-0 exited with code 2, and a restart would not help: model: no such folder" in str(outcome.failure)
    assert len(pipeline.lives("train")) == 1
    await pipeline.assert_no_process_is_left()


async def test_ctrl_c_stops_roles_in_pipeline_order(make_pipeline):
    slow = "signal.signal(signal.SIGTERM, lambda *_: time.sleep(0.3) or leave()); stay()"
    scripts = dict.fromkeys(("feed", "score", "train"), slow)
    pipeline = make_pipeline(
        scripts | {"engine": "print('listening on http://127.0.0.1:7'); sys.stdout.flush(); stay()"}
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_interrupt, pipeline)
        outcome = await pipeline.run()
    assert outcome.interrupted
    assert outcome.failure is None
    assert outcome.killed == []
    assert pipeline.stop_order == ["rollout", "feed", "score", "train", "engine"]
    await pipeline.assert_no_process_is_left()


async def _interrupt(pipeline: Pipeline, times: int = 1) -> None:
    for role in pipeline.scripts:
        await pipeline.until_started(role)
    await anyio.sleep(0.3)
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)
        await anyio.sleep(0.2)


async def test_a_role_that_exceeds_the_shutdown_timeout_is_killed(make_pipeline):
    pipeline = make_pipeline(
        {"rollout": "signal.signal(signal.SIGTERM, signal.SIG_IGN); stay()"}, shutdown_timeout_s=0.1
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_interrupt, pipeline)
        outcome = await pipeline.run()
    assert outcome.killed == ["rollout-0"]
    await pipeline.assert_no_process_is_left()


async def test_a_second_ctrl_c_kills_all_roles(make_pipeline):
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); stay()"
    pipeline = make_pipeline(dict.fromkeys(("feed", "rollout", "score", "train"), deaf), shutdown_timeout_s=60)
    began = time.monotonic()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_interrupt, pipeline, 2)
        outcome = await pipeline.run()
    assert time.monotonic() - began < 20
    assert sorted(outcome.killed) == ["feed-0", "rollout-0", "score-0", "train-0"]
    await pipeline.assert_no_process_is_left()


async def test_child_processes_of_a_role_end_with_it(make_pipeline):
    child = "p = subprocess.Popen(['sleep', '1000']); open(home / 'lives', 'a').write(f'grandchild {p.pid}\\n');"
    pipeline = make_pipeline({"train": child + FINISH})
    await pipeline.run()
    assert pipeline.lives("grandchild")
    await pipeline.assert_no_process_is_left()


ENGINE = "port = int(values) or 4321; print(f'listening on http://127.0.0.1:{port}', flush=True);"


async def test_roles_start_when_the_engine_is_ready_and_a_restarted_engine_keeps_its_port(make_pipeline):
    pipeline = make_pipeline(
        {
            "engine": "time.sleep(0.3); print('loading');" + ENGINE
            + "\nif len(lives('engine')) == 1: until(lambda: lives('train')); os.kill(os.getpid(), 9)\nstay()",
            "train": "log = home / 'run' / 'logs' / 'engine-0.log'\n"
            "until(lambda: log.read_text().count('listening') == 2);" + FINISH,
        }
    )  # fmt: skip
    outcome = await pipeline.run()
    assert outcome.failure is None
    assert [rest for _, *rest in pipeline.lives("engine")] == [["0"], ["4321"]]
    assert [rest for _, *rest in pipeline.lives("rollout")] == [["http://127.0.0.1:4321"]]
    log = (pipeline.settings.folder / "logs" / "engine-0.log").read_text()
    assert log.splitlines() == ["loading", "listening on http://127.0.0.1:4321"] * 2
    await pipeline.assert_no_process_is_left()


async def test_roles_start_when_all_engines_are_ready_and_each_engine_keeps_its_port(make_pipeline):
    dying = "lives('engine')[1].split()[1] == str(os.getpid())"
    one_dies = f"\nif {dying}: until(lambda: lives('train')); os.kill(os.getpid(), 9)\nstay()"
    pipeline = make_pipeline(
        {
            "engine": "time.sleep(1.5); port = int(values) or os.getpid();"
            "print(f'listening on http://127.0.0.1:{port}', flush=True);" + one_dies,
            "train": "until(lambda: len(lives('engine')) == 4);" + FINISH,
        },
        engines=3,
    )
    outcome = await pipeline.run()
    assert outcome.failure is None
    ports = [rest[0] for _, *rest in pipeline.lives("engine")]
    assert ports[:3] == ["0"] * 3
    ((_, *urls),) = pipeline.lives("rollout")
    assert len(set(urls)) == 3
    assert f"http://127.0.0.1:{ports[3]}" in urls
    (name,) = pipeline.states[-1].restarts
    assert name in {"engine-0", "engine-1", "engine-2"}
    assert any(state.phase.startswith("starting 3 engines: ") for state in pipeline.states)
    assert {path.name for path in (pipeline.settings.folder / "logs").glob("engine-*")} == {
        "engine-0.log",
        "engine-1.log",
        "engine-2.log",
    }
    await pipeline.assert_no_process_is_left()


async def test_an_engine_may_take_longer_to_start_than_the_stall_timeout(make_pipeline):
    pipeline = make_pipeline({"engine": "time.sleep(6);" + ENGINE + "stay()", "train": FINISH}, stall_timeout_s=5.0)
    assert (await pipeline.run()).failure is None


async def test_an_engine_that_exits_before_it_is_ready_fails_the_run_immediately(make_pipeline):
    pipeline = make_pipeline({"engine": "print('error: CUDA out of memory', file=sys.stderr); sys.exit(1)"})
    outcome = await pipeline.run()
    assert "engine-0 exited with code 1, and it has never listened: CUDA out of memory" in str(outcome.failure)
    assert len(pipeline.lives("engine")) == 1


async def test_each_engine_sees_only_its_configured_gpus(make_pipeline):
    tell = "open(home / 'gpus', 'a').write(os.environ['CUDA_VISIBLE_DEVICES'] + ' ');"
    pipeline = make_pipeline(
        {"engine": tell + "print('listening on http://127.0.0.1:7', flush=True); stay()", "train": FINISH}, engines=2
    )
    engine = msgspec.structs.replace(pipeline.settings.engine, devices=("1", "2,3"))
    pipeline.settings = msgspec.structs.replace(pipeline.settings, engine=engine)
    assert (await pipeline.run()).failure is None
    assert sorted((pipeline.home / "gpus").read_text().split()) == ["1", "2,3"]


async def test_a_stalled_run_fails_and_reports_where_the_work_is(make_pipeline, connection):
    await Feed(connection, 10).put([Prompt(id="a", messages=[])], "", "1")
    pipeline = make_pipeline({}, stall_timeout_s=1.5)
    outcome = await pipeline.run()
    assert "nothing was trained or dropped for 1.5 s" in str(outcome.failure)
    assert "1 prompts are unfinished: prompts has 1 waiting, 0 claimed" in str(outcome.failure)
    await pipeline.assert_no_process_is_left()


async def test_a_run_that_no_role_begins_fails_with_the_time_that_it_waited(make_pipeline):
    outcome = await make_pipeline({}, stall_timeout_s=1.0).run()
    assert str(outcome.failure) == "the run had not begun after 1 s"


async def test_code_that_blocks_a_worker_is_named_once_on_the_screen(make_pipeline):
    blocked = """
import json
from datetime import UTC, datetime
event = {"event": "event_loop.blocked", "by": "/me/world.py:13 World.look"}
for _ in range(2):
    print(json.dumps(event | {"timestamp": datetime.now(UTC).isoformat()}), flush=True)
    time.sleep(0.3)
(home / "named").touch()
stay()
"""
    train = "until((home / 'named').exists); time.sleep(0.3);" + FINISH
    pipeline = make_pipeline({"rollout": blocked, "train": train})
    await pipeline.run()
    (line,) = pipeline.seen.lines
    assert "World.look blocks the event loop of rollout" in line
    assert "/me/world.py, line 13" in line


async def test_a_paused_run_is_not_stalled(make_pipeline, connection):
    await Feed(connection, 10).put([Prompt(id="a", messages=[])], "", "1")
    await pause(connection, "ann@box")
    pipeline = make_pipeline({"train": "time.sleep(2.5);" + FINISH}, stall_timeout_s=1.0)
    outcome = await pipeline.run()
    assert outcome.failure is None
    assert not outcome.interrupted


async def test_penstock_stop_drains_like_ctrl_c(make_pipeline, connection):
    copy = "import shutil; copy = lambda: shutil.copy(home / 'run' / 'live.json', home / 'copy.json');"
    slow = "signal.signal(signal.SIGTERM, lambda *_: copy() and (time.sleep(1.5) or leave())); stay()"
    pipeline = make_pipeline({"train": copy + slow})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_ask_to_stop, pipeline, connection)
        outcome = await pipeline.run()
    assert outcome.interrupted
    assert outcome.failure is None
    assert outcome.killed == []
    assert sorted(pipeline.stop_order[:2]) == ["feed", "rollout"]
    assert pipeline.stop_order[2:] == ["score", "train"]
    assert "draining, as `penstock stop` asked" in {state.phase for state in pipeline.states}
    assert json.loads((pipeline.home / "copy.json").read_text())["stopping"] == "draining, as `penstock stop` asked"
    await pipeline.assert_no_process_is_left()


async def _ask_to_stop(pipeline: Pipeline, connection: RunConnection) -> None:
    for role in ("feed", "rollout", "score", "train"):
        await pipeline.until_started(role)
    await anyio.sleep(0.3)
    await stop(connection, "ann@box")


@pytest.mark.parametrize("code", [0, 1])
async def test_a_role_that_sees_a_stop_before_the_supervisor_is_not_restarted(make_pipeline, connection, code):
    heard = "until(lambda: redis().hget('{%s}:meta' % run, 'stop')); sys.exit(" + str(code) + ")"
    pipeline = make_pipeline({"rollout": heard, "feed": heard})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_ask_to_stop, pipeline, connection)
        outcome = await pipeline.run()
    assert (outcome.interrupted, outcome.failure) == (True, None)
    assert pipeline.states[-1].restarts == {}
    assert (len(pipeline.lives("rollout")), len(pipeline.lives("feed"))) == (1, 1)


async def test_a_stop_does_not_stop_the_next_start(make_pipeline, connection):
    await Feed(connection, 10).put([Prompt(id="a", messages=[])], "", "1")
    await stop(connection, "ann@box")
    pipeline = make_pipeline({"train": "time.sleep(1.5);" + FINISH})
    outcome = await pipeline.run()
    assert (outcome.interrupted, outcome.failure) == (False, None)


async def test_other_roles_are_restarted_when_a_finished_trainer_starts_again(make_pipeline):
    pipeline = make_pipeline(
        {
            "feed": "stay(home / 'never')",
            "score": "stay(home / 'never')",
            "rollout": "until(lambda: redis().hget('{%s}:meta' % run, 'finished'))",
            "train": "if len(lives('train')) == 1: finish(); time.sleep(1.5); sys.exit(1)\n"
            "until(lambda: len(lives('rollout')) == 2); finish()",
        }
    )
    outcome = await pipeline.run()
    assert outcome.failure is None
    assert len(pipeline.lives("train")) == 2


async def test_a_run_stopped_before_its_engine_is_ready_does_nothing(make_pipeline):
    pipeline = make_pipeline({"engine": "stay()"})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_stop_early, pipeline)
        outcome = await pipeline.run()
    assert outcome.interrupted
    assert outcome.failure is None
    assert outcome.status is not None
    assert set(outcome.status.prompt_counts.values()) == {0}
    assert not pipeline.lives("train")


async def _stop_early(pipeline: Pipeline) -> None:
    await pipeline.until_started("engine")
    assert (pipeline.settings.folder / "live.json").exists()
    os.kill(os.getpid(), signal.SIGINT)


def test_the_summary_is_written_to_the_run_folder_and_balances(make_pipeline):
    ends = (
        "r = redis(); k = '{%s}:' % run; r.hset(k + 'counts', mapping={'fed': 3, 'trained': 2, 'dropped:operator': 1});"
        "c = home / 'run' / 'checkpoints' / 'step-000004'; c.mkdir(parents=True);"
        '(c / \'checkpoint.json\').write_text(\'{"progress": {"step": 4, "tokens": 100, '
        '"completion_states": {"valid": 8}}}\');'
    )
    pipeline = make_pipeline({"train": ends + FINISH})
    with pipeline.commands():
        ended = supervise(pipeline.settings, quiet=True)
    raise_for_failure(ended, pipeline.settings)
    report = json.loads((pipeline.settings.folder / "summary.json").read_text())
    assert report["steps"] == 4
    assert report["groups_trained"] == 2
    assert report["groups_dropped"] == {"operator": 1}
    assert report["completion_states"] == {"valid": 8}
    assert report["tokens_per_second"] == pytest.approx(100 / report["seconds"], rel=0.01)
    events = [
        json.loads(line) for line in (pipeline.settings.folder / "logs" / "supervisor.log").read_text().splitlines()
    ]
    assert "role.started" in {event["event"] for event in events}


def test_a_summary_that_does_not_balance_fails_the_run(make_pipeline):
    lose = "redis().hset('{%s}:counts' % run, mapping={'fed': 3, 'trained': 2});"
    pipeline = make_pipeline({"train": lose + FINISH})
    with pipeline.commands():
        ended = supervise(pipeline.settings, quiet=True)
    with pytest.raises(PenstockError, match="does not account for every prompt: 3 fed ≠ 2 trained"):
        raise_for_failure(ended, pipeline.settings)


def test_a_folder_has_one_supervisor(tmp_path):
    with (
        lock_folder(tmp_path),
        pytest.raises(PenstockError, match=f"in use by process {os.getpid()}"),
        lock_folder(tmp_path),
    ):
        pass
    with lock_folder(tmp_path):
        pass


def test_a_folder_belongs_to_one_run(tmp_path):
    there = check_folder(settings_in(tmp_path, "one", "", {}, {}))
    write_identity(tmp_path, RunIdentity(id="a", fixed=there.fixed))
    other = settings_in(tmp_path, "two", "", {}, {})
    with pytest.raises(RunMismatchError, match=r'run\.name is "one" there and "two" here'):
        check_folder(other)


def test_a_killed_supervisor_is_not_reported_as_running(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    (tmp_path / "live.json").write_text(json.dumps({"run": "r", "redis": "unix://x", "pid": process.pid}))
    assert read_live(tmp_path) is None
    (tmp_path / "live.json").write_text(json.dumps({"run": "r", "redis": "unix://x", "pid": os.getpid()}))
    assert read_live(tmp_path) == LiveRun(run="r", redis="unix://x", pid=os.getpid())


def test_a_process_that_got_the_supervisors_id_is_not_taken_for_it(tmp_path):
    written = LiveRun.of_this_process("r", "unix://x")
    write_live(tmp_path, written)
    assert read_live(tmp_path) == written
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        write_live(tmp_path, msgspec.structs.replace(written, pid=other.pid))
        assert read_live(tmp_path) is None
        boot, ticks = written.process_start.split("/")
        write_live(tmp_path, msgspec.structs.replace(written, process_start=f"{boot[::-1]}/{ticks}"))
        assert read_live(tmp_path) is None, "the machine has been started again"
        write_live(tmp_path, msgspec.structs.replace(written, pid=other.pid, host="elsewhere"))
        assert read_live(tmp_path) is not None, "nobody here knows what runs on another host"
    finally:
        other.communicate(b"\n")


DRIVER = """
import sys
from pathlib import Path
from workers.launch.start import supervise
from workers.launch.specs import COMMANDS
from workers.settings.toml_file import load_settings

script = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
COMMANDS.update(dict.fromkeys(("feed", "rollout", "score", "train"), ("-c", script)))
supervise(load_settings(Path(sys.argv[1])), quiet=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_no_process_outlives_a_killed_supervisor(tmp_path):
    settings = settings_in(tmp_path / "run", "killed", "", {"urls": ["http://127.0.0.1:1"]}, {})
    settings.folder.mkdir()
    file = write_settings(settings)
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(file)])
    logs = [settings.folder / "logs" / f"{role}-0.log" for role in ("feed", "rollout", "score", "train")]
    _until(lambda: all(log.exists() and log.read_text().strip() for log in logs))
    children = _children(driver.pid)
    assert len(children) == 5  # four roles and the private server
    driver.kill()
    driver.wait()
    _until(lambda: not any(map(alive, children)))
    assert read_live(settings.folder) is None


def _children(parent: int) -> list[int]:
    return [child.pid for child in psutil.Process(parent).children()]


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


async def test_a_dashboard_that_fails_leaves_the_run_alone_and_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "_BACKOFF", Backoff(0.01, 0.01))
    settings = settings_in(tmp_path / "run", "failing", "", {"urls": ["http://127.0.0.1:1"]}, {})
    failing = ProcessSpec(
        role="dashboard", command=(sys.executable, "-c", "raise SystemExit('error: the port is taken')")
    )
    monkeypatch.setattr(engines, "dashboard_spec", lambda _: failing)
    shown: list[str] = []
    dashboard = DashboardProcess(settings, tmp_path, shown.append)
    with anyio.fail_after(30):
        await dashboard.keep_running()
    assert shown == ['no dashboard: the port is taken (run.dashboard = "off" starts none)']
    assert (tmp_path / "dashboard-0.log").read_text().count("the port is taken") == 3
    assert dashboard.child.exited.is_set()
