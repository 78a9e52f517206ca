"""Evaluation: held-out prompts, sampled and scored by the run's own workers, in streams of their own.

::

    feed ─► held-out set ──examine──► [eval:prompts] ─► rollout ─► [eval:groups] ─► score ──tally──► outcomes ─► train

The feeder brings the set once. The trainer begins an evaluation of the policy version that it has just published
(`TrainerLease.begin_evaluation`), and everything that an earlier one left is gone in that step. The entries go
through leases, retries
and dead letters as all others do, but they are counted nowhere among the run's: not in pacing, not in its balance. What
remains of a group is its outcome, one to a prompt however often it was done. When no prompt is open the trainer reads
the outcomes, and concludes (`TrainerLease.end_evaluation`).
"""

from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Any, cast

import msgspec
from msgspec import Struct, field

from stream.codec import decode, encode
from stream.connection.keys import EVALUATION_STAGES
from stream.connection.run_connection import RunConnection, create_consumer_group
from stream.records import Prompt

_CHUNK = 200


class PromptEvaluation(Struct, kw_only=True, omit_defaults=True):
    """What came of one prompt's group: each completion is in exactly one of `valid`, `invalid` and `mixed`."""

    environment: str = ""
    valid: int = 0
    """Completions sampled by the version alone, with a measured reward."""
    successes: int = 0
    """Of those, the ones whose reward is at least `algorithm.success_threshold`."""
    reward_sum: float = 0.0
    """Sum over those that are valid."""
    invalid: dict[str, int] = field(default_factory=dict)
    """Sampled by no other version, without a reward that counts; by state, as the metrics name it (`failed:engine`)."""
    mixed_versions: int = 0
    """Some token of theirs was sampled by another policy version than the evaluation's."""


class EvaluationProgress(Struct, frozen=True):
    """How far an evaluation has come."""

    wake_id: str
    """To wait after."""
    version: int
    """The policy version that the server knows it to be of: another one where it lost its last writes; -1: of none."""
    unsampled: int
    """Prompts that are not sampled yet."""
    unfinished: int
    """Prompts without an outcome, and not dead."""


async def create_evaluation_streams(connection: RunConnection) -> None:
    """Make the streams of evaluation where they do not exist: before the first claim."""
    for stage in EVALUATION_STAGES:
        await create_consumer_group(connection, stage)


async def replace_evaluation_prompts(
    connection: RunConnection, prompts: Sequence[Prompt], *, settings_digest: str, data_fingerprint: str
) -> None:
    """Bring the held-out prompts, in place of those that were there.

    Args:
        connection: the run's connection.
        prompts: all of them.
        settings_digest: which settings they were made by, as `TrainerLease.begin_evaluation` will ask for it.
        data_fingerprint: the file's fingerprint.
    """
    there = await connection.read_hash("eval")
    if (there.get("settings"), there.get("data")) == (settings_digest, data_fingerprint):
        return
    await connection.with_retry(
        lambda: cast("Awaitable[Any]", connection.redis.hdel(connection.key("eval"), "settings"))
    )
    await connection.with_retry(lambda: cast("Awaitable[Any]", connection.redis.unlink(connection.key("eval:dataset"))))
    for start in range(0, len(prompts), _CHUNK):
        chunk: Any = {prompt.id: encode(prompt) for prompt in prompts[start : start + _CHUNK]}
        await connection.with_retry(partial(_store_prompts, connection, chunk))
    await connection.write_hash(
        "eval", {"data": data_fingerprint, "prompts": str(len(prompts)), "settings": settings_digest}
    )


def _store_prompts(connection: RunConnection, chunk: dict[Any, Any]) -> Awaitable[Any]:
    return cast("Awaitable[Any]", connection.redis.hset(connection.key("eval:dataset"), mapping=chunk))


async def read_evaluation_progress(connection: RunConnection) -> EvaluationProgress:
    """How far the evaluation under way has come."""
    wake, version, unsampled, open_prompts = await connection.run_script("evaluation_progress")
    return EvaluationProgress(wake.decode(), version, unsampled, open_prompts)


async def read_prompt_evaluations(connection: RunConnection) -> dict[str, PromptEvaluation]:
    """What came of each prompt so far, by its id."""
    found: Any = await connection.with_retry(
        lambda: cast("Awaitable[Any]", connection.redis.hgetall(connection.key("eval:results")))
    )
    return {prompt.decode(): msgspec.json.decode(told, type=PromptEvaluation) for prompt, told in found.items()}


async def read_evaluation_environments(connection: RunConnection) -> dict[str, tuple[str, int]]:
    """The held-out prompts by id, each with its environment and the completions that are sampled of it."""
    found: Any = await connection.with_retry(
        lambda: cast("Awaitable[Any]", connection.redis.hgetall(connection.key("eval:dataset")))
    )
    prompts = [decode(payload, Prompt) for payload in found.values()]
    return {prompt.id: (prompt.environment or "", prompt.group_size) for prompt in prompts}
