"""Reports of `penstock check` about an environment or a reward function."""

from collections.abc import Callable
from typing import Any, TypeVar

from msgspec import Struct, field

from envs.call import CallRunner, Failed, Ok, Outcome, describe_failure
from stream.errors import PenstockError
from stream.records import Message, RewardPart
from stream.validity import Reward

LOAD_TIMEOUT_S = 120.0
"""For importing what a reference names, and for constructing it."""
T = TypeVar("T")


class TurnTrial(Struct, kw_only=True):
    """One turn without a tool call: what was said, and what the environment answered."""

    said: str
    reply: str = ""
    """What `respond` returned; empty if there is no such method, or it ended the episode."""
    ends: bool = False
    """The episode was over after it."""
    failure: str = ""
    """Why the completion is invalid; empty: it is not."""


class ToolTrial(Struct, kw_only=True):
    """One call of a tool."""

    name: str
    description: str
    schema: dict[str, Any]
    arguments: dict[str, Any]
    """As given, or samples generated from the schema."""
    reply: str = ""
    """The text that a model would read."""
    is_error: bool = False
    """The reply is an error message for the model; the episode continues."""
    failure: str = ""
    """Reason why the call failed the episode and made the completion invalid; empty: it did not."""
    returned: str = ""
    """What the result is if it is not text: types of content parts, or the type of an object."""
    ends: bool = False
    """The episode was over after it (`done`)."""


class CheckReport(Struct, kw_only=True):
    """Findings about a reference."""

    ref: str
    fields: dict[str, Any]
    args: dict[str, Any] = {}
    ok: bool = False
    """Whether what it names is usable, possibly with warnings."""
    reference_kind: str = ""
    warnings: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    async def load(self, loader: Callable[..., T], caller: CallRunner) -> T | None:
        """Return what the reference and its arguments name; None if that failed, which is then among the errors."""
        loaded = await caller.call(loader, {"ref": self.ref, "args": self.args}, LOAD_TIMEOUT_S)
        if isinstance(loaded, Ok):
            value: T = loaded.value
            return value
        self.errors.append(failure_reason(loaded))
        return None


class EnvironmentReport(CheckReport, kw_only=True):
    """Findings about an environment."""

    kind: str = "environment"
    environment: str = ""
    """Class of the environment as `module:qualname`."""
    observation: Any = None
    """The return value of `reset`."""
    tools: list[ToolTrial] = field(default_factory=list)
    """Calls in order; at least one for each tool, unless calls were given."""
    turns: list[TurnTrial] = field(default_factory=list)
    """Turns without a call, in order."""
    messages: list[Message] = field(default_factory=list)
    """The conversation after the prompt."""
    has_reward: bool = False
    parts: list[RewardPart] = field(default_factory=list)
    reward: Reward | None = None
    """The merged reward parts; None if the environment has no `get_reward`."""
    no_step_reward: Reward | None = None
    """The reward of an episode without a tool call, likewise."""
    sampled_rewards: list[float] = field(default_factory=list)
    """Rewards of random steps, where the environment can take some."""
    snapshot_bytes: int | None = None
    omitted: dict[str, str] = field(default_factory=dict)
    """Attributes that are missing from the snapshot, with the reason."""
    rendered: str = ""
    """What `render` returned for the snapshot; empty without such a method."""


class RewardTrial(Struct, kw_only=True):
    """One sample call of a reward function."""

    input_format: str
    """`text`: prompt and completion are strings; `messages`: both are conversations."""
    completion: Any
    reward: Reward


class RewardReport(CheckReport, kw_only=True):
    """Findings about a reward function; it is usable if it measured at least one row."""

    kind: str = "reward function"
    name: str = ""
    """Name of the reward part."""
    parameters: list[str] = field(default_factory=list)
    """Names of the function's parameters."""
    is_async: bool = False
    trials: list[RewardTrial] = field(default_factory=list)


def failure_reason(outcome: Outcome) -> str:
    """Return why a call failed: the message of a `PenstockError`, else a description of the error."""
    if isinstance(outcome, Failed) and isinstance(outcome.error, PenstockError):
        return str(outcome.error)
    return describe_failure(outcome)
