"""A read-only view of a run: one atomic look, nothing consumed, nothing changed."""

from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import Struct, field

from stream.connection.keys import EVALUATION_STAGES
from stream.connection.run_connection import RunConnection
from stream.errors import PenstockError


class StageStatus(Struct, kw_only=True):
    """One stage at one moment."""

    depth: int
    """Entries in the stream, claimed ones included."""
    claimed: int
    delayed: int
    """Given back, waiting for a back-off to pass."""
    marked: int
    """Marked by the trainer, waiting for a checkpoint to be durable (`scored` only)."""
    lag: int
    """Entries that nobody has claimed yet."""
    oldest_age_ms: float
    rate: float
    """Entries settled a second, over the last minute."""
    consumers: dict[str, int]
    """Entries held, by worker."""


class Pause(Struct, frozen=True):
    """Who paused a run, and when."""

    paused_by: str
    paused_at: float
    """Unix time in seconds, by the server's clock."""

    def __str__(self) -> str:
        return f"paused by {self.paused_by} since {datetime.fromtimestamp(self.paused_at, UTC):%Y-%m-%d %H:%M:%S} UTC"


class EvaluationStatus(Struct, kw_only=True):
    """The evaluation under way, or the last one."""

    stages: dict[str, StageStatus]
    version: int = -1
    """The policy version that it is of; -1 before the first."""
    step: int = 0
    total: int = 0
    """Its prompts."""
    unfinished: int = 0
    """Of those, the prompts that are yet to be sampled and scored."""
    results: int = 0
    finished: str = ""
    """`1` once it is."""
    latest: str = ""

    @property
    def result(self) -> dict[str, Any]:
        """The last result, a line of `eval.jsonl`; empty before the first."""
        return msgspec.json.decode(self.latest) if self.latest else {}

    @property
    def is_running(self) -> bool:
        """Whether one is under way."""
        return self.version >= 0 and not self.finished


class RunStatus(Struct, kw_only=True):
    """A run at one moment."""

    now_ms: float
    stages: dict[str, StageStatus]
    unfinished: int
    """Prompts fed that have met no end yet."""
    outstanding: int
    """Groups that pacing counts: claimed, waiting to be scored or trained."""
    dead: int
    """Dead letters, junk included."""
    counts: dict[str, int]
    """`fed`, `trained`, `dropped:REASON`, `dead`, `duplicates`, `junk`; `cancelled`: attempts, given back for age."""
    feed: dict[str, str] = field(default_factory=dict)
    policy: dict[str, str] = field(default_factory=dict)
    meta: dict[str, str] = field(default_factory=dict)
    latest: str = ""
    evaluation: EvaluationStatus | None = None
    """None where no held-out prompts are evaluated."""

    @property
    def metrics(self) -> dict[str, Any]:
        """The last step's metrics; empty before the first."""
        return msgspec.json.decode(self.latest) if self.latest else {}

    @property
    def version(self) -> int:
        """The published policy version; -1 before the first."""
        return int(self.policy.get("version", -1))

    @property
    def paused(self) -> Pause | None:
        """Who paused the run; None while it goes on."""
        return Pause(self.meta["paused"], int(self.meta["paused_ms"]) / 1000) if "paused" in self.meta else None

    @property
    def dropped(self) -> dict[str, int]:
        """Groups dropped, by reason."""
        return {k.partition(":")[2]: n for k, n in self.counts.items() if k.startswith("dropped:") and n}

    @property
    def balance(self) -> dict[str, int]:
        """Where the prompts fed have ended: `fed = trained + dropped + dead + outstanding`."""
        return {
            "fed": self.counts.get("fed", 0),
            "trained": self.counts.get("trained", 0),
            "dropped": sum(self.dropped.values()),
            "dead": self.counts.get("dead", 0),
            "outstanding": self.unfinished,
        }


async def read_status(connection: RunConnection) -> RunStatus:
    """Look at the run.

    Raises:
        PenstockError: the server knows no run of that name.
    """
    view = msgspec.json.decode(await connection.run_script("run_status"), type=RunStatus, strict=False)
    if not view.meta and not view.counts and not view.policy:
        raise PenstockError(f"the server knows no run called {connection.run!r}")
    if view.evaluation is not None:  # in the order of the flow
        view.evaluation.stages = {name: view.evaluation.stages[name] for name in EVALUATION_STAGES}
    return view
