"""Requests and responses of vLLM's `POST /classify`, one conversation for each request, and its model's context."""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

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
    """Return the longest sequence of the served model, in tokens, from a response to `GET /v1/models`; 0 if unknown."""
    try:
        return max(0, int(json.loads(payload)["data"][0]["max_model_len"]))
    except (ValueError, KeyError, TypeError, IndexError, RecursionError, OverflowError):
        return 0


def parse_score(payload: bytes, url: str) -> Reward:
    """Return the score in a response; `Unmeasured` unless there is exactly one finite number."""
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
        found = f"{len(classes)} classes" if isinstance(classes, list) else type(classes).__name__
        return Unmeasured(RewardReason.SHAPE, f"{url} returned {found}; a reward model has one class")
    if classes[0] is None:  # how JSON spells NaN and infinity
        return Unmeasured(RewardReason.NOT_FINITE, f"{url} returned null instead of a number")
    return measure(classes[0])
