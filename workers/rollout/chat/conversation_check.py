"""Check whether a template that only appends to sample conversations also only appends to a real one.

A template may look at what no sample has: SmolLM3's writes another start of a turn after a system message with
`/no_think`. So each prompt is compared once, with two sample turns, and each conversation at its 4th, 8th, 16th, ...
turn, and whenever it gets replies of a new kind, such as a system message. As in the samples, the model's own texts are
replaced: what is compared is what the template writes around them.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import msgspec
import structlog

from stream.errors import PenstockError
from stream.records import Message
from workers.rollout.chat.history_check import HistoryCheck, find_difference, tool_reply
from workers.rollout.chat.renderer import AssistantTurn, ConversationRenderer

log = structlog.get_logger()

_CHECKED_PROMPTS: Final = 32
"""A group's completions mostly share one prompt; a worker has no more different prompts in flight."""


class ConversationCheck:
    """Compares real conversations, rendered as a whole, with the same rendered turn by turn. Threads may share it.

    Args:
        renderer: the model's template with an environment's tools.
        history: what the sample conversations showed.
        roles: of the replies in these.
    """

    def __init__(self, renderer: ConversationRenderer, history: HistoryCheck, roles: Sequence[str]) -> None:
        self._renderer = renderer
        self._history = history
        self._roles = frozenset(roles)
        self._continues_after = lru_cache(maxsize=_CHECKED_PROMPTS)(self._continues_after_key)

    def is_due(self, turns: Sequence[AssistantTurn]) -> bool:
        """Return whether the conversation is to be rendered as a whole after these turns."""
        count = len(turns)
        return (count > 2 and count & (count - 1) == 0) or not self._is_sampled_kind(turns[-1].replies)

    def continues(self, messages: Sequence[Message], turns: Sequence[AssistantTurn]) -> bool:
        """Return whether the template left the conversation before the last replies unchanged, as far as was compared.

        Args:
            messages: the prompt.
            turns: everything after it.
        """
        if len(turns) == 1 and not self._continues_after_prompt(messages, turns[0].replies):
            return False
        return not self.is_due(turns) or self._is_unchanged(messages, [turn.replies for turn in turns])

    def _is_sampled_kind(self, replies: Sequence[Message]) -> bool:
        """Return whether sample conversations had such replies: results alone, or one user message, of text alone."""
        if len(replies) == 1:
            return replies[0].get("role") in self._roles and type(replies[0].get("content")) is str
        roles = {reply.get("role") for reply in replies}
        is_known = len(roles) == 1 and roles <= self._roles and "tool" in roles
        return is_known and all(type(reply.get("content")) is str for reply in replies)

    def _continues_after_prompt(self, messages: Sequence[Message], replies: Sequence[Message]) -> bool:
        role = "tool" if any(reply.get("role") == "tool" for reply in replies) else "user"
        try:
            key = msgspec.msgpack.encode(messages)
        except (TypeError, ValueError, OverflowError):  # images and the like
            return self._is_unchanged(messages, _sample_replies(role))
        return self._continues_after(key, role)

    def _continues_after_key(self, messages: bytes, role: str) -> bool:
        return self._is_unchanged(msgspec.msgpack.decode(messages), _sample_replies(role))

    def _is_unchanged(self, messages: Sequence[Message], replies: Sequence[Sequence[Message]]) -> bool:
        opening, reasoning = self._history.turn_start
        turns = [AssistantTurn((), f"{reasoning}Step.", each, opening) for each in replies]
        try:
            found = find_difference(self._renderer, messages, turns)
        except PenstockError:  # the template refuses it, and says so when the conversation is rendered
            return False
        if found is None or (found.in_space and self._history.ignores_space):
            return True
        log.info("template.conversation_rewritten", turns=len(turns), why=found.text)
        return False


def _sample_replies(role: str) -> list[list[Message]]:
    """Return the replies to two sample turns."""
    return [[tool_reply(text) if role == "tool" else {"role": role, "content": text}] for text in ("3.", "4.")]
