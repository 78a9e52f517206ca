"""Is this a reward model, and are its scores raw? Asked of each server before anything is believed."""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from envs.messages import build_conversation
from envs.remote.classify_api import classify_request, parse_score
from stream.errors import RunFailedError, ServiceRefusedError, ServiceUnavailableError
from stream.records import Message
from stream.validity import Unmeasured

_QUESTION = "What is the capital of France?"
PROBE_CONVERSATIONS: Sequence[Sequence[Message]] = (
    build_conversation(_QUESTION, "The capital of France is Paris."),
    build_conversation(_QUESTION, "no no no 17 17"),
)
"""An answer, and what is none."""
_ABSOLUTE_TOLERANCE, _RELATIVE_TOLERANCE = 0.1, 0.05
"""Servers of one model may differ by so much, or by this part of the score: bfloat16, another GPU, another batch."""

Post = Callable[[bytes], Awaitable[bytes]]
"""Asks the server once."""


async def probe_server(post: Post, url: str, template_args: Mapping[str, Any], *, from_0_to_1: bool) -> list[float]:
    """Score a pair of conversations, and see that the scores are raw logits.

    Args:
        post: asks the server.
        url: of it, for messages.
        template_args: of its chat template.
        from_0_to_1: this model's own scores lie between 0 and 1.

    Returns:
        The scores of `PAIR`.

    Raises:
        RunFailedError: it is no reward model, or its scores went through an activation; says what to do.
        ServiceUnavailableError: it does not answer.
    """
    raw = [await _score(post, url, messages, template_args) for messages in PROBE_CONVERSATIONS]
    if from_0_to_1 or not all(0 <= score <= 1 for score in raw):
        return raw
    # Between 0 and 1 by chance, or squashed? With the activation on, an honest server answers something else.
    try:
        squashed = [
            await _score(post, url, messages, template_args, use_activation=True) for messages in PROBE_CONVERSATIONS
        ]
    except RunFailedError:
        squashed = raw
    as_raw = sum(abs(now - before) for now, before in zip(squashed, raw, strict=True))
    as_sigmoid = sum(abs(now - 1 / (1 + math.exp(-before))) for now, before in zip(squashed, raw, strict=True))
    if as_raw <= as_sigmoid:
        raise RunFailedError(
            f"{url}: the scores look squashed: {raw[0]:.4g} and {raw[1]:.4g} for two unlike conversations, and the "
            "same whether `use_activation` is false or true. Serve raw logits (a vLLM that knows `use_activation`, "
            "nothing between that drops it), or say args.from_0_to_1 = true if this model's own scores are like that"
        )
    return raw


def check_same_model(scores: Mapping[str, Sequence[float]]) -> None:
    """See that all servers serve the same model.

    Args:
        scores: of `PAIR`, by server.

    Raises:
        RunFailedError: they differ by more than rounding.
    """
    (first, expected), *others = scores.items()
    for url, found in others:
        for here, there in zip(found, expected, strict=True):
            if abs(here - there) > max(_ABSOLUTE_TOLERANCE, _RELATIVE_TOLERANCE * abs(there)):
                raise RunFailedError(
                    f"{first} and {url} score the same conversation {there:.4g} and {here:.4g}: they do not serve the "
                    "same reward model"
                )


async def _score(
    post: Post,
    url: str,
    messages: Sequence[Message],
    template_args: Mapping[str, Any],
    *,
    use_activation: bool = False,
) -> float:
    try:
        payload = await post(classify_request(messages, template_args, use_activation=use_activation))
    except ServiceUnavailableError:
        raise
    except ServiceRefusedError as error:
        raise RunFailedError(
            f"{url} is no reward model that can be asked: {error}. Serve one with `vllm serve MODEL --runner pooling`, "
            "or `penstock serve MODEL`, with a chat template"
        ) from error
    reward = parse_score(payload, url)
    if isinstance(reward, Unmeasured):
        raise RunFailedError(f"{url} is no reward model: {reward.detail} ({reward.reason})")
    return reward.value
