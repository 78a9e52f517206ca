"""The result of an evaluation's group: how many completions are valid, successful, or invalid for which reason."""

import math
from collections import Counter
from typing import Final

from msgspec import structs

from stream.codec import encode
from stream.queue.evaluation import PromptEvaluation
from stream.records import Completion, Group
from stream.validity import Unmeasured
from workers.settings import Settings

_MAX_BYTES: Final = 1_000_000
"""Of one group: the results of all prompts are in memory at once."""


def evaluate_group(group: Group, version: int, settings: Settings) -> PromptEvaluation:
    """Classify each completion of a scored group.

    Args:
        group: with its rewards.
        version: the evaluated policy version. Spans prove which version sampled each token; a completion with a token
        of
            another version counts as `mixed_versions`, whatever its reward.
        settings: of the run: the success threshold, and which truncated completions are invalid.
    """
    mixed, rewards, invalid = 0, list[float](), Counter[str]()
    for completion in group.completions:
        reward = completion.reward
        if any(span.version != version for row in completion.rows for span in row.spans):
            mixed += 1
        elif (state := _invalid_reason(completion, settings)) or reward is None or isinstance(reward, Unmeasured):
            invalid[state] += 1
        else:
            rewards.append(reward.value)
    return PromptEvaluation(
        environment=group.prompt.environment or "",
        valid=len(rewards),
        successes=sum(reward >= settings.algorithm.success_threshold for reward in rewards),
        reward_sum=math.fsum(rewards),
        invalid=dict(invalid),
        mixed_versions=mixed,
    )


def encode_transcript(group: Group) -> bytes:
    """Encode a group without final states of environments; empty if it is larger than an evaluation keeps."""
    completions = [structs.replace(completion, snapshot=None) for completion in group.completions]
    payload = encode(structs.replace(group, completions=completions))
    return payload if len(payload) <= _MAX_BYTES else b""


def _invalid_reason(completion: Completion, settings: Settings) -> str:
    """Return why the reward is unknown, as in the training metrics (`failed:engine`); empty if it is known."""
    reward, truncation = completion.reward, completion.truncated
    if completion.failure is not None:
        return f"failed:{completion.failure.reason}"
    if reward is None or isinstance(reward, Unmeasured):
        return f"reward:{reward.reason if reward else 'missing'}"
    if truncation is not None and settings.truncation_policy(truncation) == "exclude":
        return f"truncated:{truncation}"
    return ""
