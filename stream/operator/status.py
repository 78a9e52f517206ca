"""The status of a run, read in one atomic step. Changes nothing."""

import hashlib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct, field

from stream.connection.keys import EVALUATION_STAGES, STAGES
from stream.connection.run_connection import RunConnection
from stream.disk_space import DiskProblem
from stream.errors import NoRunError, PenstockError
from stream.operator.memory import MachineMemory, read_reports
from stream.queue.in_flight import ACTIVITY_TEXTS, CompletionInFlight, GroupInFlight

_EVALUATION_FACTS = ("version", "step", "total", "unfinished", "results", "finished", "latest")
"""What the id of a status covers of an evaluation, besides its stages."""


_DEAD_LETTERS = "dead_letters:"
_DECODER = msgspec.json.Decoder(list[GroupInFlight])


class StageStatus(Struct, kw_only=True):
    """The status of one stage."""

    depth: int
    """Entries in the stream, including claimed ones."""
    claimed: int
    delayed: int
    """Entries that were given back and wait for their retry delay."""
    marked: int
    """Entries that the trainer has ended, waiting for a durable checkpoint (`scored` only)."""
    lag: int
    """Entries that were never claimed."""
    oldest_age_ms: float
    rate: float
    """Entries completed per second, over the last minute."""
    consumers: dict[str, int]
    """Leased entries, by worker."""


class Pause(Struct, frozen=True):
    """Who paused the run, and when."""

    paused_by: str
    paused_at: float
    """Unix time in seconds, by the server's clock."""

    def __str__(self) -> str:
        return f"paused by {self.paused_by} since {datetime.fromtimestamp(self.paused_at, UTC):%Y-%m-%d %H:%M:%S} UTC"


class EvaluationStatus(Struct, kw_only=True):
    """The status of the current evaluation, or of the last one."""

    stages: dict[str, StageStatus]
    version: int = -1
    """The evaluated policy version; -1 before the first evaluation."""
    step: int = 0
    total: int = 0
    """Number of its prompts."""
    unfinished: int = 0
    """Prompts that are not sampled and scored yet."""
    results: int = 0
    finished: str = ""
    """`1` once the evaluation has ended."""
    latest: str = ""

    @property
    def result(self) -> dict[str, Any]:
        """The last result, as in a line of `eval.jsonl`; empty before the first."""
        return msgspec.json.decode(self.latest, type=dict[str, Any]) if self.latest else {}

    @property
    def is_running(self) -> bool:
        """Whether an evaluation is in progress."""
        return self.version >= 0 and not self.finished


class WorkerReport(Struct, frozen=True, array_like=True):
    """What one worker wrote last about its leases of one stage."""

    stage: str
    worker: str
    groups: bytes
    """JSON: a list of `GroupInFlight`."""


class RunStatus(Struct, kw_only=True):
    """The status of a run at one moment."""

    now_ms: float
    stages: dict[str, StageStatus]
    unfinished: int
    """Prompts fed that have no outcome yet."""
    outstanding: int
    """Groups that count against the capacity: claimed, waiting to be scored, trained or published."""
    dead: int
    """Dead letters, also those that end no prompt."""
    counts: dict[str, int]
    """`fed`, `trained`, `dropped:REASON`, `dead`, `duplicates`; `extra_dead_letters`: those that end no prompt;
    `cancelled`: attempts given back as stale."""
    turns: dict[str, int] = field(default_factory=dict)
    """`sampled`, `kept`, `again`: turns of the model; `resumed:METHOD`: completions that another worker restored."""
    dead_reasons: dict[str, int] = field(default_factory=dict)
    """Entries that became dead letters, by reason; retried and dropped ones stay counted."""
    feed: dict[str, str] = field(default_factory=dict)
    policy: dict[str, str] = field(default_factory=dict)
    meta: dict[str, str] = field(default_factory=dict)
    memory: dict[str, str] = field(default_factory=dict)
    """Reports of the memory that processes hold, by who reports; `machines` reads them."""
    latest: str = ""
    evaluation: EvaluationStatus | None = None
    """None if the run evaluates no prompts."""
    in_flight: list[WorkerReport] = []
    """Reports of workers that hold leases; empty unless they were asked for (`groups_in_flight` reads them)."""
    refuses_writes: str = ""
    """Which of its files the server could not write, `append-only file` or `snapshot`; it refuses changes until it can.
    Empty: it writes them."""
    leases: dict[str, str] = {}
    """Ids of the leased entries by stage, with blanks; empty unless reports were asked for."""

    @property
    def status_id(self) -> str:
        """Id of this state of the run: 16 hexadecimal digits. Two readings with one id have equal counts.

        Ages, rates, the time, renewed leases and reports of workers do not change it.
        """
        stages = self.stages | (self.evaluation.stages if self.evaluation else {})
        counted = [
            [[n, s.depth, s.claimed, s.delayed, s.marked, s.lag, s.consumers] for n, s in stages.items()],
            [self.unfinished, self.outstanding, self.dead, self.counts, self.feed, self.meta, self.latest],
            [self.version, self.policy.get("step")],
            None if self.evaluation is None else [getattr(self.evaluation, name) for name in _EVALUATION_FACTS],
        ]
        return hashlib.blake2b(msgspec.json.encode(counted, order="sorted"), digest_size=8).hexdigest()

    @property
    def metrics(self) -> dict[str, Any]:
        """The last step's metrics; empty before the first."""
        return msgspec.json.decode(self.latest, type=dict[str, Any]) if self.latest else {}

    @property
    def machines(self) -> list[MachineMemory]:
        """The machines whose processes report the memory that they hold."""
        return read_reports(self.memory, self.now_ms)

    @property
    def version(self) -> int:
        """The published policy version; -1 before the first."""
        return int(self.policy.get("version", -1))

    @property
    def paused(self) -> Pause | None:
        """Who paused the run; None if it is not paused."""
        return Pause(self.meta["paused"], int(self.meta["paused_ms"]) / 1000) if "paused" in self.meta else None

    @property
    def disk_waits(self) -> list[DiskProblem]:
        """What the trainer waits for before it can write; empty if no trainer is alive."""
        if "disk" not in self.policy or int(self.policy.get("owner_until", 0)) <= self.now_ms:
            return []
        return msgspec.json.decode(self.policy["disk"], type=list[DiskProblem])

    @property
    def dropped(self) -> dict[str, int]:
        """Groups dropped, by reason."""
        return {k.partition(":")[2]: n for k, n in self.counts.items() if k.startswith("dropped:") and n}

    @property
    def prompt_counts(self) -> dict[str, int]:
        """Prompts by outcome: `fed = trained + dropped + dead + outstanding`."""
        return {
            "fed": self.counts.get("fed", 0),
            "trained": self.counts.get("trained", 0),
            "dropped": sum(self.dropped.values()),
            "dead": self.counts.get("dead", 0),
            "outstanding": self.unfinished,
        }


def describe_stages(status: RunStatus) -> str:
    """Describe in one line what waits in each stage, and how many entries each worker has claimed."""
    parts = []
    for name, stage in status.stages.items():
        consumers = ", ".join(f"{consumer} {count}" for consumer, count in sorted(stage.consumers.items()) if count)
        claimed = f"{stage.claimed} claimed by {consumers}" if consumers else f"{stage.claimed} claimed"
        parts.append(f"{name} has {stage.lag} waiting, {claimed}, {stage.delayed} delayed")
    if status.feed.get("done") != "1":
        parts.append("feed has not finished")
    return "; ".join(parts)


async def read_status(connection: RunConnection, *, with_in_flight: bool = False) -> RunStatus:
    """Read the status of the run.

    Args:
        connection: to the run.
        with_in_flight: also read what workers report about their leases, at the same moment.

    Raises:
        NoRunError: the server has no run of that name.
    """
    answer = await connection.run_script("run_status", *(["in_flight"] if with_in_flight else []))
    return _parse_status(answer, connection.run)


def _parse_status(answers: Sequence[bytes], run: str) -> RunStatus:
    """Return the status in the answer of the script, all of it read once.

    Raises:
        NoRunError: the server has no run of that name.
        PenstockError: it cannot be read.
    """
    try:
        status = _decode_status(answers)
        _ = (
            status.version,
            status.metrics,
            str(status.paused),
            status.disk_waits,
            status.evaluation and status.evaluation.result,
        )
        numbers = (status.policy.get("step"), status.meta.get("capacity"), status.feed.get("rejected_rows"))
        _ = [int(number) for number in numbers if number is not None]
    except (ValueError, TypeError, LookupError) as error:
        raise PenstockError(
            f"the server's status of run {run!r} cannot be read: {error}. If another version of Penstock runs it, use "
            "that version here, too"
        ) from error
    if not status.meta and not status.counts and not status.policy:
        raise NoRunError(f"the server has no run named {run!r}")
    return status


def _decode_status(answers: Sequence[bytes]) -> RunStatus:
    answer, *reports = answers
    status = msgspec.json.decode(answer, type=RunStatus, strict=False)
    for stage, worker, groups in zip(*[iter(reports)] * 3, strict=True):
        status.in_flight.append(WorkerReport(stage.decode(), worker.decode(errors="replace"), groups))
    for name in [name for name in status.counts if name.startswith(_DEAD_LETTERS)]:
        status.dead_reasons[name.removeprefix(_DEAD_LETTERS)] = status.counts.pop(name)
    status.stages = {name: status.stages[name] for name in STAGES}  # in the order of the flow
    if status.evaluation is not None:
        status.evaluation.stages = {name: status.evaluation.stages[name] for name in EVALUATION_STAGES}
    return status


class OngoingActivity(NamedTuple):
    """What one completion is doing, or a group as a whole."""

    group: GroupInFlight
    completion: CompletionInFlight | None
    """None: the group as a whole does it."""
    activity: str
    since: float
    """Unix time in seconds."""

    @property
    def text(self) -> str:
        """The activity in words, with the names of tools or reward functions: `tool add`, `waiting for an engine`."""
        detail = self.group.detail if self.completion is None else self.completion.detail
        return f"{ACTIVITY_TEXTS.get(self.activity, self.activity)} {detail}".rstrip()


def groups_in_flight(status: RunStatus) -> list[GroupInFlight]:
    """Return the groups of a status that was read with its workers' reports, the longest unchanged first.

    A group whose lease has ended since its worker's last report is left out; so is a report that cannot be read.
    """
    leases = {stage: frozenset(ids.split()) for stage, ids in status.leases.items()}
    found: dict[tuple[str, str], GroupInFlight] = {}
    for report in status.in_flight:
        try:
            groups = _DECODER.decode(report.groups)
        except ValueError:
            continue
        for group in groups:
            if group.entry in leases.get(report.stage, ()):
                group.stage, group.worker = report.stage, report.worker
                found[report.stage, group.entry] = group
    return sorted(found.values(), key=lambda group: (group.unchanged_since, group.prompt))


def ongoing_activities(groups: Iterable[GroupInFlight]) -> list[OngoingActivity]:
    """Return what each completion is doing, and each group as a whole, the longest unchanged first."""
    found = [
        OngoingActivity(group, each, each.activity, each.since or group.claimed_at)
        for group in groups
        for each in group.completions
    ]
    found += [
        OngoingActivity(group, None, group.activity, group.since or group.claimed_at)
        for group in groups
        if not group.completions
    ]
    return sorted(found, key=lambda each: each.since)
