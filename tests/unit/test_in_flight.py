"""What a worker reports about its leases, and how it is shown."""

import io
import json
from types import SimpleNamespace

import anyio
import msgspec
import pytest
from rich.console import Console
from rich.screen import Screen

from stream.errors import ServerError
from stream.operator.status import RunStatus, StageStatus, WorkerReport, groups_in_flight, ongoing_activities
from stream.queue.in_flight import MAX_COMPLETIONS, Activity, CompletionInFlight, GroupInFlight
from stream.queue.lease import Lease
from stream.queue.stage import RetryPolicy
from workers.role import in_flight_reporter
from workers.role.in_flight_reporter import CompletionProgress, GroupProgress, InFlightReporter
from workers.runs.run import Run
from workers.runs.status import activities, in_flight_report, queue_report
from workers.terminal import queues
from workers.terminal.queues import WatchScreen, render_in_flight

NAMED = SimpleNamespace


class FakeStage:
    """Keeps what is reported."""

    name = "prompts"
    retry_policy = RetryPolicy(lease_s=0.3)

    def __init__(self) -> None:
        self.leases: dict[str, Lease] = {}
        self.reports: list[list[GroupInFlight]] = []

    async def report_in_flight(self, groups):
        self.reports.append(groups)

    def hold(self, entry: str) -> Lease:
        self.leases[entry] = Lease(id=entry, prompt_id=f"prompt {entry}", payload=b"")
        return self.leases[entry]


def running(turn: int = 0, versions: frozenset[int] = frozenset()) -> CompletionProgress:
    progress = CompletionProgress()
    progress.episode = NAMED(turn=turn, versions=lambda: versions)
    return progress


def test_an_activity_is_as_old_as_its_first_sight_and_a_new_turn_is_a_new_one():
    progress = running(versions={4, 3})
    progress.activity, progress.engine = Activity.SAMPLING, "http://e:1"
    assert progress.describe(5, 10.0).since == 10.0
    seen = progress.describe(5, 12.0)
    assert (seen.index, seen.activity, seen.since) == (5, "sampling", 10.0)
    assert (seen.engine, seen.versions) == ("http://e:1", [3, 4])
    progress.episode.turn = 1
    assert progress.describe(5, 13.0).since == 13.0
    progress.activity, progress.calls = Activity.TOOL, [NAMED(name="add"), NAMED(name="su\udcffb")]
    assert (progress.describe(5, 14.0).since, progress.describe(5, 15.0).detail) == (14.0, "add, su?b")


def test_a_record_is_bounded_and_keeps_what_changed_longest_ago():
    group = GroupProgress("shell", total=1000)
    for index in range(1000):
        group.completions[index] = progress = running()
        progress.activity, progress.calls = Activity.TOOL, [NAMED(name="x" * 10_000)] * 50
        progress.describe(index, 2000.0 - index)
    record = group.describe(Lease(id="1-1", prompt_id="p" * 10_000, payload=b""), 3000.0)
    assert [each.index for each in record.completions] == list(range(999, 999 - MAX_COMPLETIONS, -1))
    assert len(msgspec.json.encode(record)) < 8000


def test_completions_end_even_if_they_fail():
    group = GroupProgress()
    with pytest.raises(ValueError), group.completion(3):  # noqa: PT011, PT012
        assert list(group.completions) == [3]
        raise ValueError
    assert (group.completions, group.ended) == ({}, 1)


async def test_a_worker_reports_at_once_then_changes_and_again_before_its_report_expires(monkeypatch):
    monkeypatch.setattr(in_flight_reporter, "_INTERVAL_S", 0.02)
    stage = FakeStage()
    reporter = InFlightReporter(stage)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reporter.run)
        await anyio.wait_all_tasks_blocked()
        assert stage.reports == []
        with reporter.group(stage.hold("1-0"), "shell", 4) as progress:
            await anyio.sleep(0.01)
            assert [each.entry for each in stage.reports[0]] == ["1-0"]
            progress.activity = Activity.COMPLETE
            await anyio.sleep(0.06)
            assert [each[0].activity for each in stage.reports] == ["", "complete"]
            await anyio.sleep(0.12)  # more than a third of the lease, in which nothing changes
            assert len(stage.reports) >= 3
            stage.leases.clear()  # the lease is lost
            await anyio.sleep(0.06)
            assert stage.reports[-1] == []
        written = len(stage.reports)
        await anyio.sleep(0.2)
        assert len(stage.reports) == written
        tasks.cancel_scope.cancel()


async def test_a_server_that_takes_no_report_is_no_error(monkeypatch):
    monkeypatch.setattr(in_flight_reporter, "_INTERVAL_S", 0.005)
    stage = FakeStage()

    async def refuse(groups):
        stage.reports.append(groups)
        raise ServerError("the ACL refuses us")

    stage.report_in_flight = refuse
    reporter = InFlightReporter(stage)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reporter.run)
        with reporter.group(stage.hold("1-0"), None) as progress:
            await anyio.sleep(0.02)
            progress.activity = Activity.COMPLETE
            await anyio.sleep(0.02)
        tasks.cancel_scope.cancel()
    assert len(stage.reports) >= 2


async def test_an_entry_claimed_again_by_the_same_worker_is_still_reported():
    stage = FakeStage()
    reporter = InFlightReporter(stage)
    lease = stage.hold("1-0")
    lost = reporter.group(lease, "old")
    lost.__enter__()
    with reporter.group(lease, "new"):
        lost.__exit__(None, None, None)
        assert [each.environment for each in reporter._describe(stage.leases)] == ["new"]


def completion(index: int, activity: str, since: float, **fields) -> CompletionInFlight:
    facts = {
        "index": index,
        "turn": 1,
        "activity": activity,
        "detail": "",
        "since": since,
        "engine": "",
        "versions": [],
    }
    return CompletionInFlight(**(facts | fields))


def status_of(*groups: GroupInFlight) -> RunStatus:
    report = WorkerReport("prompts", "rollout-1\x07", msgspec.json.encode(groups))
    return RunStatus(
        now_ms=1_000_000.0, stages={}, unfinished=1, outstanding=1, dead=0, counts={}, in_flight=[report],
        leases={"prompts": " ".join(group.entry for group in groups)},
    )  # fmt: skip


def shown(status: RunStatus, width: int = 160, **options) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    console.print(render_in_flight(activities(status), **({"count": 40, "stuck_s": 60.0} | options)))
    return console.file.getvalue()


def test_the_longest_unchanged_comes_first_and_what_is_stuck_is_counted():
    hanging = completion(2, "tool", 820.0, detail="search", versions=[3, 4, 7], engine="http://gpu:8000")
    status = status_of(
        GroupInFlight(entry="1-0", prompt="a:0:1", claimed_at=999.0, activity="reward", detail="judge", since=990.0),
        GroupInFlight(entry="2-0", prompt="a:0:2", claimed_at=800.0, environment="web",
                      completions=[completion(0, "sampling", 999.5), hanging]),
    )  # fmt: skip
    first, second, third = ongoing_activities(groups_in_flight(status))
    assert [first.text, second.text, third.text] == ["tool search", "reward judge", "sampling"]
    lines = shown(status).splitlines()
    assert lines[1].split() == [
        "3",
        "min",
        "00",
        "s",
        "tool",
        "search",
        "a:0:2",
        "#2",
        "2",
        "3-7",
        "web",
        "gpu:8000",
        "rollout-1\\x07",
    ]
    assert lines[2].split()[:6] == ["10", "s", "reward", "judge", "a:0:1", "(group)"]
    assert lines[-1] == "3 in flight; 1 unchanged for over 1 min 00 s"
    assert "the 1 longest unchanged are shown" in shown(status, count=1)
    report = in_flight_report("demo", status, 60.0)
    assert (report["stuck"], report["status_id"]) == (1, status.status_id)
    assert report["groups"][0]["completions"][1]["detail"] == "search"


def test_hostile_names_are_shown_escaped_and_fit_the_terminal():
    name = "\x1b[2J\u202etxt.<script>"
    seen = completion(0, "tool", 999.0, detail=name, engine=name)
    output = shown(
        status_of(GroupInFlight(entry="1-0", prompt=name, claimed_at=1.0, environment=name, completions=[seen])), 100
    )
    assert "\x1b" not in output
    assert "\u202e" not in output
    assert "tool \\x1b[2J\\u202etxt" in output
    assert all(len(line) <= 100 for line in output.splitlines())


def test_nothing_in_flight_says_so():
    assert shown(status_of()) == "0 in flight\n"


@pytest.mark.parametrize(("width", "height"), [(80, 24), (140, 50), (60, 12)])
def test_a_watch_fills_the_terminal_whatever_its_size(width, height):
    completions = [completion(index, "sampling", 900.0 + index) for index in range(30)]
    groups = [GroupInFlight(entry=f"{n}-0", prompt=f"p{n}", claimed_at=1.0, completions=completions) for n in range(9)]
    status = status_of(*groups)
    empty = StageStatus(depth=0, claimed=0, delayed=0, marked=0, lag=0, oldest_age_ms=0.0, rate=0.0, consumers={})
    status.stages = dict.fromkeys(("prompts", "groups", "scored"), empty)
    console = Console(file=io.StringIO(), width=width, height=height, highlight=False, markup=False)
    console.print(Screen(WatchScreen(queue_report("demo", status), activities(status), 60.0)))
    lines = console.file.getvalue().splitlines()
    assert len(lines) == height
    assert all(len(line) <= width for line in lines)
    shown_rows = [line for line in lines if " sampling " in line]
    assert (len(shown_rows) > height // 3) == (height > 12)
    if shown_rows:
        assert "270 in flight" in lines[-1]


@pytest.mark.parametrize("in_flight", [True, False])
async def test_a_watch_prints_json_lines_without_a_terminal_until_the_run_has_finished(in_flight, monkeypatch, capsys):
    status = status_of(GroupInFlight(entry="1-0", prompt="p", claimed_at=1.0))
    empty = StageStatus(depth=0, claimed=0, delayed=0, marked=0, lag=0, oldest_age_ms=0.0, rate=0.0, consumers={})
    status.stages = dict.fromkeys(("prompts", "groups", "scored"), empty)
    answers = iter([status, msgspec.structs.replace(status, meta={"finished": "done"})])

    async def read(connection, *, with_in_flight):
        return next(answers)

    async def first(connection):
        return await read(connection, with_in_flight=True)

    monkeypatch.setattr(queues, "first_status", first)
    monkeypatch.setattr(queues, "read_status", read)
    monkeypatch.setattr(queues, "_WATCH_INTERVAL_S", 0.0)
    await queues._print_lines(Run("demo"), in_flight, 60.0, SimpleNamespace())
    first, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["run"] == last["run"] == "demo"
    assert first["status_id"] == status.status_id
    assert ("groups" in first, "stages" in first) == (in_flight, not in_flight)
    assert in_flight or (first["finished"], last["finished"]) == ("", "done")
