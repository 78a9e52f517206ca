"""What a worker's leases are doing now: records that workers write for people, and that expire with the leases.

A worker has one key for each stage, `{run}:in_flight:STAGE:WORKER`, which it overwrites at most once a second. Nothing
depends on it: a run whose records are lost only shows less.
"""

from enum import StrEnum

from msgspec import Struct


class Activity(StrEnum):
    """What a completion, or a group as a whole, is doing. Records may have others, of newer workers."""

    RESET = "reset"
    ENGINE_WAIT = "engine_wait"
    """Waiting for an engine that is healthy, new enough and has a free slot."""
    SAMPLING = "sampling"
    TOOL = "tool"
    RESPOND = "respond"
    """The environment answers a turn without a tool call."""
    OWN_LOOP = "own_loop"
    """An environment that runs its own loop is between two turns of the model."""
    REWARD = "reward"
    """A completion computes its environment's own reward, or a group runs reward functions."""
    SNAPSHOT = "snapshot"
    COMPLETE = "complete"
    """The group is done, and the server is asked to take it."""


ENVIRONMENT_ACTIVITIES = frozenset(
    (Activity.RESET, Activity.TOOL, Activity.RESPOND, Activity.OWN_LOOP, Activity.REWARD, Activity.SNAPSHOT)
)
"""Activities of a completion in which its environment's code runs."""
ACTIVITY_TEXTS: dict[str, str] = {
    "": "starting",
    Activity.ENGINE_WAIT: "waiting for an engine",
    Activity.OWN_LOOP: "own loop",
    Activity.COMPLETE: "completing",
}
"""Words for activities whose names are not their words."""
MAX_COMPLETIONS = 32
"""Completions in one record; those that changed longest ago come first."""
MAX_NAME = 120
"""Characters of a name in a record."""


class CompletionInFlight(Struct, kw_only=True, array_like=True):
    """One completion that has not ended."""

    index: int
    turn: int
    """The model's turn, from 0."""
    activity: str
    detail: str
    """Names of the tools that are running, with commas."""
    since: float
    """Unix time in seconds at which the activity was first seen; at most a second late."""
    engine: str
    """URL of the engine that samples, or that sampled last; empty before the first turn."""
    versions: list[int]
    """Policy versions that sampled so far, ascending."""


class GroupInFlight(Struct, kw_only=True, omit_defaults=True):
    """One lease of a worker, and what its group is doing."""

    entry: str
    """The entry's id in its stage."""
    prompt: str
    """Id of the prompt, and of its group."""
    claimed_at: float
    """Unix time in seconds."""
    stage: str = ""
    worker: str = ""
    environment: str = ""
    activity: str = ""
    """What the group as a whole does: `reward` or `complete`; empty while its completions run."""
    detail: str = ""
    """Names of the reward functions that are running, with commas."""
    since: float = 0.0
    """Unix time in seconds at which that activity was first seen."""
    total: int = 0
    """Completions of the group, the greedy one included."""
    ended: int = 0
    """Completions that have ended."""
    completions: list[CompletionInFlight] = []
    """Those that have not ended, at most `MAX_COMPLETIONS`."""

    @property
    def unchanged_since(self) -> float:
        """Unix time since which its longest activity goes on."""
        return min((each.since for each in self.completions), default=self.since or self.claimed_at)
