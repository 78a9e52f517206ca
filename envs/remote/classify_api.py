"""Requests and responses of vLLM's `POST /classify`, with one conversation in each request.

`probe_server` and `check_same_model` check, before any score is used, that servers serve the same reward model and
return raw scores.
"""

import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from envs.messages import build_conversation
from stream.errors import RunFailedError, ServiceRefusedError, ServiceUnavailableError
from stream.records import Message
from stream.validity import Reward, RewardReason, Unmeasured, measure

CLASSIFY_PATH = "/classify"
MODELS_PATH = "/v1/models"


def classify_request(
    messages: Sequence[Message],
    chat_template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    *,
    use_activation: bool = False,
) -> bytes:
    """Return the request body that scores one conversation.

    Args:
        messages: the conversation; the server renders it with its model's chat template.
        chat_template_kwargs: extra arguments of that template.
        use_activation: apply the model's activation, a sigmoid for Bradley-Terry models; vLLM's default is true.
    """
    body: dict[str, Any] = {"messages": list(messages), "use_activation": use_activation}
    if chat_template_kwargs:
        body["chat_template_kwargs"] = dict(chat_template_kwargs)
    return msgspec.json.encode(body)


def parse_context_tokens(payload: bytes) -> int:
    """Return the context length of the served model, in tokens, from a response to `GET /v1/models`; 0 if unknown."""
    try:
        return max(0, int(json.loads(payload)["data"][0]["max_model_len"]))
    except (ValueError, KeyError, TypeError, IndexError, RecursionError, OverflowError):
        return 0


def parse_score(payload: bytes, url: str) -> Reward:
    """Return the score in a response of `url`; `Unmeasured` unless the response has exactly one finite number."""
    try:
        data = json.loads(payload)["data"]
        scores = [entry["probs"] for entry in data]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return Unmeasured(
            RewardReason.SHAPE, f"{url} returned something other than scores: {type(error).__name__}: {error}"
        )
    if len(scores) != 1:
        return Unmeasured(RewardReason.SHAPE, f"{url} returned {len(scores)} scores for one conversation")
    classes = scores[0]
    if not isinstance(classes, list) or len(classes) != 1:
        returned = f"{len(classes)} classes" if isinstance(classes, list) else type(classes).__name__
        return Unmeasured(RewardReason.SHAPE, f"{url} returned {returned}; a reward model has one class")
    if classes[0] is None:  # how JSON spells NaN and infinity
        return Unmeasured(RewardReason.NOT_FINITE, f"{url} returned null instead of a number")
    return measure(classes[0])


_QUESTION = "What is the capital of France?"
PROBE_CONVERSATIONS: Sequence[Sequence[Message]] = (
    build_conversation(_QUESTION, "The capital of France is Paris."),
    build_conversation(_QUESTION, "no no no 17 17"),
)
"""A good answer, then a bad one."""
_ABSOLUTE_TOLERANCE, _RELATIVE_TOLERANCE = 0.1, 0.05
"""Allowed differences between servers of one model: bfloat16, another GPU or another batch change scores slightly."""

Post = Callable[[bytes], Awaitable[bytes]]
"""Sends one request body and returns the response body."""


async def probe_server(
    post: Post, url: str, chat_template_kwargs: Mapping[str, Any], *, scores_in_unit_interval: bool
) -> list[float]:
    """Score `PROBE_CONVERSATIONS`, and check that the scores are raw logits.

    Args:
        post: sends a request to the server.
        url: URL of the server, for messages.
        chat_template_kwargs: extra arguments of the server's chat template.
        scores_in_unit_interval: the model's raw scores lie between 0 and 1; skips the check.

    Returns:
        The raw scores of `PROBE_CONVERSATIONS`.

    Raises:
        RunFailedError: the server is not a reward model, or its scores went through an activation.
        ServiceUnavailableError: the server does not respond.
    """
    raw = [await _score(post, url, messages, chat_template_kwargs) for messages in PROBE_CONVERSATIONS]
    if scores_in_unit_interval or not all(0 <= score <= 1 for score in raw):
        return raw
    # Raw scores may lie in [0, 1] by chance. With the activation requested, raw scores become their sigmoids; a server
    # that applies it to every request returns the same scores again.
    try:
        activated = [
            await _score(post, url, messages, chat_template_kwargs, use_activation=True)
            for messages in PROBE_CONVERSATIONS
        ]
    except RunFailedError:
        activated = raw
    from_same = sum(abs(now - before) for now, before in zip(activated, raw, strict=True))
    from_sigmoid = sum(abs(now - 1 / (1 + math.exp(-before))) for now, before in zip(activated, raw, strict=True))
    if from_same <= from_sigmoid:
        raise RunFailedError(
            f"{url}: the scores seem to have passed an activation: two very different conversations get {raw[0]:.4g} "
            f"and {raw[1]:.4g}, whether `use_activation` is false or true. Serve raw logits (with a vLLM that supports "
            "`use_activation`, and without a proxy that drops it), or set args.scores_in_unit_interval = true if the "
            "model's raw scores lie between 0 and 1"
        )
    return raw


def check_same_model(scores: Mapping[str, Sequence[float]]) -> None:
    """Check that all servers serve the same model.

    Args:
        scores: scores of `PROBE_CONVERSATIONS` by server URL.

    Raises:
        RunFailedError: scores differ by more than rounding.
    """
    (first_url, first_scores), *others = scores.items()
    for url, url_scores in others:
        for score, first in zip(url_scores, first_scores, strict=True):
            if abs(score - first) > max(_ABSOLUTE_TOLERANCE, _RELATIVE_TOLERANCE * abs(first)):
                raise RunFailedError(
                    f"{first_url} and {url} score the same conversation {first:.4g} and {score:.4g}: they do not serve "
                    "the same reward model"
                )


async def _score(
    post: Post,
    url: str,
    messages: Sequence[Message],
    chat_template_kwargs: Mapping[str, Any],
    *,
    use_activation: bool = False,
) -> float:
    try:
        payload = await post(classify_request(messages, chat_template_kwargs, use_activation=use_activation))
    except ServiceUnavailableError:
        raise
    except ServiceRefusedError as error:
        raise RunFailedError(
            f"{url} does not serve a reward model: {error}. Serve one with `vllm serve MODEL --runner pooling` or "
            "`penstock serve MODEL`; the model needs a chat template"
        ) from error
    reward = parse_score(payload, url)
    if isinstance(reward, Unmeasured):
        raise RunFailedError(f"{url} does not serve a reward model: {reward.detail} ({reward.reason})")
    return reward.value
