"""Names in Redis. `stream/lua/common.lua` says what each key holds."""

from typing import Literal, get_args

LAYOUT = 2
"""Number of this arrangement of keys and of what scripts keep in them; raised with every change that a process of the
previous version would misread. Processes with different numbers do not work in one run."""

CONSUMER_GROUP = "penstock"
"""The consumer group of every stage."""

RESERVED_CONSUMERS = ("released", "marked")
"""Names in the consumer group that are not workers: they own entries that were given back, or marked by the trainer."""

StageName = Literal["prompts", "groups", "scored"]
STAGES: tuple[StageName, ...] = get_args(StageName)
"""The stages in the order of the flow."""

EvaluationStage = Literal["eval:prompts", "eval:groups"]
EVALUATION_STAGES: tuple[EvaluationStage, ...] = get_args(EvaluationStage)
"""The stages of an evaluation. Their entries are never trained on and do not count in the run's numbers."""

PROMPT_STAGES: tuple[StageName | EvaluationStage, ...] = ("prompts", "eval:prompts")
"""The stages whose entries have their records in their fields; records of groups are keys of their own."""


def key_prefix(run: str) -> str:
    """Return the beginning of every key of a run. The braces keep the keys in one slot of a cluster."""
    return f"{{{run}}}"


def key(run: str, name: str) -> str:
    """Return the full name of a run's key."""
    return f"{key_prefix(run)}:{name}"
