"""Why completions of a group failed: the first exception for each reason."""

import msgspec

from stream.causes import ErrorCause
from stream.records import Completion, Failure, Group, RewardPart
from stream.validity import Unmeasured

TOOL_ERROR = "tool_error"
"""Key of the cause of a tool's error, which the model reads and which makes no completion invalid."""


def failure_causes(group: Group) -> dict[str, ErrorCause]:
    """Return one cause for each state of the group's completions (`reward:raised`), and one for a tool's error."""
    causes: dict[str, ErrorCause] = {}
    for completion in group.completions:
        if completion.failure is not None:
            causes.setdefault(f"failed:{completion.failure.reason}", _failure_cause(completion.failure, group))
        elif isinstance(completion.reward, Unmeasured):
            causes.setdefault(f"reward:{completion.reward.reason}", _reward_cause(completion, completion.reward, group))
        for run in completion.tool_runs:
            if run.cause is not None:
                causes.setdefault(TOOL_ERROR, run.cause)
    return causes


def _failure_cause(failure: Failure, group: Group) -> ErrorCause:
    environment = group.prompt.environment
    source = f"environment {environment}" if environment else "rollout"
    return failure.cause or ErrorCause(exception=failure.detail or str(failure.reason), source=source)


def _reward_cause(completion: Completion, reward: Unmeasured, group: Group) -> ErrorCause:
    part = next((part for part in completion.parts if isinstance(part.reward, Unmeasured)), None)
    if part is None:
        return ErrorCause(exception=reward.detail or str(reward.reason), source="reward")
    return part_cause(part, group.prompt.environment)


def part_cause(part: RewardPart, environment: str | None) -> ErrorCause:
    """Return the cause of an unmeasured part of a reward, with the name of what should have measured it."""
    reward = part.reward
    is_own = part.name == "env" or part.name.startswith("env.")
    source = f"environment {environment}, get_reward" if is_own and environment else f"reward function {part.name}"
    if isinstance(reward, Unmeasured) and reward.cause is not None:
        return msgspec.structs.replace(reward.cause, source=source)
    detail = f"{reward.reason}: {reward.detail}" if isinstance(reward, Unmeasured) else ""
    return ErrorCause(exception=detail.rstrip(": "), source=source)
