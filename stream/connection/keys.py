"""Names in Redis. What each key holds is told once, in `lua/common.lua`."""

from typing import Literal, get_args

CONSUMER_GROUP = "penstock"
"""The consumer group of every stage."""

RESERVED_CONSUMERS = ("released", "marked")
"""Consumers in it that are nobody: entries given back, and entries marked by the trainer."""

StageName = Literal["prompts", "groups", "scored"]
STAGES: tuple[StageName, ...] = get_args(StageName)
"""The stages in the order of the flow."""

EvaluationStage = Literal["eval:prompts", "eval:groups"]
EVALUATION_STAGES: tuple[EvaluationStage, ...] = get_args(EvaluationStage)
"""Those of evaluation, beside them; what they hold is never trained on, and counts in nothing of the others."""


def key_prefix(run: str) -> str:
    """What every key of a run begins with; the braces keep them in one slot of a cluster."""
    return f"{{{run}}}"


def key(run: str, name: str) -> str:
    """The full name of one key of a run."""
    return f"{key_prefix(run)}:{name}"
