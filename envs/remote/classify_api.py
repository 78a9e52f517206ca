"""What goes over HTTP to and from a served reward model: vLLM's `POST /classify`, one conversation a request."""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from stream.records import Message
from stream.validity import Reward, RewardReason, Unmeasured, measure

CLASSIFY_PATH = "/classify"


def classify_request(
    messages: Sequence[Message],
    template_args: Mapping[str, Any] = MappingProxyType({}),
    *,
    use_activation: bool = False,
) -> bytes:
    """The body that asks for a conversation's score.

    Args:
        messages: the conversation; the server renders it by its model's chat template.
        template_args: further arguments of that template.
        use_activation: on unless told otherwise; it squashes Bradley-Terry scores into (0, 1).
    """
    body: dict[str, Any] = {"messages": list(messages), "use_activation": use_activation}
    return msgspec.json.encode(body | ({"chat_template_kwargs": dict(template_args)} if template_args else {}))


def parse_score(payload: bytes, url: str) -> Reward:
    """The one score of a conversation, believed only where there is exactly one."""
    try:
        data = json.loads(payload)["data"]
        scores = [entry["probs"] for entry in data]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return Unmeasured(
            RewardReason.SHAPE, f"{url} answers something else than scores: {type(error).__name__}: {error}"
        )
    if len(scores) != 1:
        return Unmeasured(RewardReason.SHAPE, f"{url} answers {len(scores)} scores to one conversation")
    classes = scores[0]
    if not isinstance(classes, list) or len(classes) != 1:
        many = f"{len(classes)} classes" if isinstance(classes, list) else type(classes).__name__
        return Unmeasured(RewardReason.SHAPE, f"{url} answers {many}; a reward model has one")
    if classes[0] is None:  # JSON has no other word for it
        return Unmeasured(RewardReason.NOT_FINITE, f"{url} answers null for a number")
    return measure(classes[0])
