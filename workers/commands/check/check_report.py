"""The findings of `penstock check` about an environment or a reward function."""

from typing import Any

from msgspec import Struct, field

from envs import call
from envs.call import Failed, Outcome
from stream.errors import PenstockError
from stream.records import RewardPart
from stream.validity import Reward


class ToolTrial(Struct, kw_only=True):
    """One tool and one call of it."""

    name: str
    description: str
    schema: dict[str, Any]
    arguments: dict[str, Any]
    """Sample arguments, made from the schema."""
    reply: str = ""
    """The text that a model would read."""
    is_error: bool = False
    """The reply is an error message for the model; the episode continues."""
    failure: str = ""
    """The call failed the episode: the completion would be invalid."""


class EnvironmentReport(Struct, kw_only=True):
    """Findings about an environment."""

    ref: str
    kind: str = "environment"
    fields: dict[str, Any]
    args: dict[str, Any] = {}
    ok: bool = False
    """It is usable, possibly with warnings."""
    reference_kind: str = ""
    environment: str = ""
    """Its class as `module:qualname`."""
    observation: Any = None
    """The return value of `reset`."""
    tools: list[ToolTrial] = field(default_factory=list)
    has_reward: bool = False
    parts: list[RewardPart] = field(default_factory=list)
    reward: Reward | None = None
    """The merged parts; None without a `get_reward`."""
    snapshot_bytes: int | None = None
    omitted: dict[str, str] = field(default_factory=dict)
    """Attributes that are missing from the snapshot, with the reason."""
    warnings: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class RewardTrial(Struct, kw_only=True):
    """One row with which a reward function was called."""

    input_format: str
    """`text`: prompt and completion are strings; `messages`: they are conversations."""
    completion: Any
    reward: Reward


class RewardReport(Struct, kw_only=True):
    """Findings about a reward function."""

    ref: str
    kind: str = "reward function"
    fields: dict[str, Any]
    args: dict[str, Any] = {}
    ok: bool = False
    """It measured at least one row, possibly with warnings."""
    reference_kind: str = ""
    name: str = ""
    """Name of its reward part."""
    parameters: list[str] = field(default_factory=list)
    """Names of its parameters."""
    is_async: bool = False
    trials: list[RewardTrial] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def failure_reason(outcome: Outcome) -> str:
    """Return why a call failed, in words; a `PenstockError` already says so."""
    if isinstance(outcome, Failed) and isinstance(outcome.error, PenstockError):
        return str(outcome.error)
    return call.describe_failure(outcome)
