"""What `penstock check` finds out, about an environment or a reward function."""

from typing import Any

from msgspec import Struct, field

from envs import call
from envs.call import Failed, Outcome
from stream.errors import PenstockError
from stream.records import RewardPart
from stream.validity import Reward


class ToolTrial(Struct, kw_only=True):
    """One tool, and one call of it."""

    name: str
    description: str
    schema: dict[str, Any]
    arguments: dict[str, Any]
    """Made up from the schema."""
    reply: str = ""
    """What the model would read."""
    is_error: bool = False
    """The reply is an error's text, which is the model's business."""
    failure: str = ""
    """The tool failed the episode instead: no model would read anything, and the completion would be invalid."""


class EnvironmentReport(Struct, kw_only=True):
    """What was found out about an environment."""

    ref: str
    kind: str = "environment"
    fields: dict[str, Any]
    args: dict[str, Any] = {}
    ok: bool = False
    """It can be used; warnings do not speak against that."""
    reference_kind: str = ""
    environment: str = ""
    """Its class, as `module:qualname`."""
    observation: Any = None
    """What `reset` returned."""
    tools: list[ToolTrial] = field(default_factory=list)
    has_reward: bool = False
    parts: list[RewardPart] = field(default_factory=list)
    reward: Reward | None = None
    """The parts merged; None without a `get_reward`."""
    snapshot_bytes: int | None = None
    omitted: dict[str, str] = field(default_factory=dict)
    """Attributes that the snapshot lacks, and why."""
    warnings: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class RewardTrial(Struct, kw_only=True):
    """One row that a reward function was called with."""

    input_format: str
    """`text`: prompt and completion are strings; `messages`: they are conversations."""
    completion: Any
    reward: Reward


class RewardReport(Struct, kw_only=True):
    """What was found out about a reward function."""

    ref: str
    kind: str = "reward function"
    fields: dict[str, Any]
    args: dict[str, Any] = {}
    ok: bool = False
    """It measured something; warnings do not speak against that."""
    reference_kind: str = ""
    name: str = ""
    """What its part is called."""
    parameters: list[str] = field(default_factory=list)
    """The arguments that it names."""
    is_async: bool = False
    trials: list[RewardTrial] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def failure_reason(outcome: Outcome) -> str:
    """Why a call came to nothing, in words; an error of ours speaks for itself."""
    if isinstance(outcome, Failed) and isinstance(outcome.error, PenstockError):
        return str(outcome.error)
    return call.describe_failure(outcome)
