"""Evaluation: held-out prompts, sampled and scored by the run's workers in separate streams.

::

    feed ─► eval:dataset ─begin_evaluation─► [eval:prompts] ► rollout ► [eval:groups] ► score ► eval:results ► train

The feeder uploads the evaluation prompts once. The trainer begins an evaluation of the policy version that it has just
published (`TrainerLease.begin_evaluation`), which deletes everything of the previous one. Entries have leases,
retries and dead letters like all others, but they count neither in pacing nor among the run's prompts. Scoring stores
one result per prompt, however often the prompt was sampled, and deletes the group. When every prompt has a result or is
dead, the trainer reads the results and ends the evaluation (`TrainerLease.end_evaluation`).
"""

from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Any, cast

import msgspec
from msgspec import Struct, field

from stream.codec import decode, encode
from stream.connection.keys import EVALUATION_STAGES
from stream.connection.run_connection import RunConnection
from stream.records import Prompt

_CHUNK = 200


class PromptEvaluation(Struct, kw_only=True, omit_defaults=True):
    """The result of one prompt's group. Each completion counts in one of `valid`, `invalid`, `mixed_versions`."""

    environment: str = ""
    valid: int = 0
    """Completions sampled by the evaluated version only, with a measured reward."""
    successes: int = 0
    """Valid completions whose reward is at least the success threshold of the settings."""
    reward_sum: float = 0.0
    """Sum of the rewards of valid completions."""
    invalid: dict[str, int] = field(default_factory=dict)
    """Completions sampled by the evaluated version only, without a measured reward: their number by reason, named as in
    the metrics, for example `failed:engine`."""
    mixed_versions: int = 0
    """Completions with a token sampled by another policy version."""
    group: bytes = b""
    """The scored group, encoded, for people who read it; empty if it is too large, or nothing is archived."""


class EvaluationProgress(Struct, frozen=True):
    """How far the current evaluation has come."""

    wake_id: str
    """Id of the last entry of the stream `wake`; later changes add entries after it."""
    version: int
    """The policy version that the server has as evaluated; -1 if it has none. After the server lost its last writes, it
    may be another one than the trainer's."""
    unsampled: int
    """Prompts that are not sampled yet."""
    unfinished: int
    """Prompts without a result that are not dead."""


async def create_evaluation_streams(connection: RunConnection) -> None:
    """Create the streams of evaluation if they do not exist; call it before the first claim."""
    for stage in EVALUATION_STAGES:
        await connection.create_stream(stage)


async def replace_evaluation_prompts(
    connection: RunConnection, prompts: Sequence[Prompt], *, settings_digest: str, data_fingerprint: str
) -> None:
    """Upload the evaluation prompts in place of the previous ones, unless the server has these already.

    Args:
        connection: to the run.
        prompts: all of them.
        settings_digest: of the settings that made them; `TrainerLease.begin_evaluation` begins only if it is the same.
        data_fingerprint: of the file or data set that they come from.
    """
    uploaded = await connection.read_hash("eval")
    if (uploaded.get("settings"), uploaded.get("data")) == (settings_digest, data_fingerprint):
        return
    # An upload that is interrupted has no digest, so no evaluation begins with it and the next feeder repeats it.
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
    """Return how far the current evaluation has come."""
    wake_id, version, unsampled, unfinished = await connection.run_script("evaluation_progress")
    return EvaluationProgress(wake_id.decode(), version, unsampled, unfinished)


async def read_prompt_evaluations(connection: RunConnection) -> dict[str, PromptEvaluation]:
    """Return the results so far, by prompt id."""
    results: Any = await connection.with_retry(
        lambda: cast("Awaitable[Any]", connection.redis.hgetall(connection.key("eval:results")))
    )
    return {prompt.decode(): msgspec.json.decode(result, type=PromptEvaluation) for prompt, result in results.items()}


async def read_evaluation_environments(connection: RunConnection) -> dict[str, tuple[str, int]]:
    """Return each evaluation prompt's environment and its number of completions, by prompt id."""
    payloads: Any = await connection.with_retry(
        lambda: cast("Awaitable[Any]", connection.redis.hgetall(connection.key("eval:dataset")))
    )
    prompts = [decode(payload, Prompt) for payload in payloads.values()]
    return {prompt.id: (prompt.environment or "", prompt.group_size) for prompt in prompts}
