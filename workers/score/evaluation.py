"""What came of a group of an evaluation: how many were valid, how many right, and why the others count as neither."""

import math
from collections import Counter

from stream.queue.evaluation import PromptEvaluation
from stream.records import Completion, Group
from stream.validity import Unmeasured
from workers.settings import Settings


def evaluate_group(group: Group, version: int, settings: Settings) -> PromptEvaluation:
    """Judge each completion of a scored group, once.

    Args:
        group: with its rewards.
        version: the policy version that is evaluated. Its tokens' spans prove that it sampled a completion: one with a
            token of another version is set apart as mixed, whatever it was worth.
        settings: of the run: what is right, and which truncations count as nobody's measure.
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


def _invalid_reason(completion: Completion, settings: Settings) -> str:
    """Why nobody measured it, as the training's metrics name it (`rows/*`); empty where somebody did."""
    reward, cut = completion.reward, completion.truncated
    if completion.failure is not None:
        return f"failed:{completion.failure.reason}"
    if reward is None or isinstance(reward, Unmeasured):
        return f"reward:{reward.reason if reward else 'missing'}"
    if cut is not None and settings.truncation_policy(cut) == "exclude":
        return f"truncated:{cut}"
    return ""
