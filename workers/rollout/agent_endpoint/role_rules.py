"""Which sequences of roles a chat template takes, and how a conversation is put into one that it takes.

Programs send a `system` message after a user's, two of them at the start, or two user messages. A template may refuse
these, or leave one of them out. What it does not take becomes a part of the message before. What has been sent so never
changes when more is sent: the rules know no length and no position but the first.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from stream.errors import DataError
from stream.records import Message
from workers.rollout.chat.chat_tokenizer import ChatTokenizer

_BETWEEN: Final = "\n\n"
_MARKS: Final = ("alpha-mark", "beta-mark", "gamma-mark")


class RoleRules(NamedTuple):
    """What a chat template takes as it is."""

    system: bool = True
    """A system message, at the start."""
    late_system: bool = True
    """A system message after another message."""
    repeated_system: bool = True
    """Two system messages at the start."""
    repeated_user: bool = True
    """Two user messages in sequence."""

    def apply(self, messages: Sequence[Message]) -> list[Message]:
        """Return the conversation with what the template does not take merged into the message before it."""
        result: list[Message] = []
        for given in messages:
            message = given if self.system or given["role"] != "system" else given | {"role": "user"}
            before = result[-1] if result else None
            if before is None or self._is_taken(message["role"], before["role"], is_start=_is_start(result)):
                result.append(message)
            elif before["role"] == "assistant":
                result.append(message | {"role": "user"})
            else:
                result[-1] = before | {"content": _join(before.get("content"), message.get("content"))}
        return result

    def _is_taken(self, role: str, before: str, *, is_start: bool) -> bool:
        if role == "system":
            return self.repeated_system if is_start else self.late_system
        return role != "user" or before != "user" or self.repeated_user


def find_role_rules(chat: ChatTokenizer) -> RoleRules:
    """Find out by trying what a chat template takes."""
    system, user, answer = ("system", "user", "assistant")
    return RoleRules(
        system=_shows_all(chat, (system, user)),
        late_system=_shows_all(chat, (system, user, system)) and _shows_all(chat, (user, answer, system)),
        repeated_system=_shows_all(chat, (system, system, user)),
        repeated_user=_shows_all(chat, (user, user)),
    )


def _shows_all(chat: ChatTokenizer, roles: Sequence[str]) -> bool:
    """Whether the template writes the text of every message, in order."""
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, _MARKS, strict=False)]
    try:
        text = chat.renderer.render_prompt(messages)
    except DataError:
        return False
    places = [text.find(str(message["content"])) for message in messages]
    return -1 not in places and places == sorted(places)


def _is_start(messages: Sequence[Message]) -> bool:
    return all(message["role"] == "system" for message in messages)


def _join(content: object, more: object) -> object:
    if isinstance(content, str) and isinstance(more, str):
        return content + _BETWEEN + more
    return [*_parts(content), {"type": "text", "text": _BETWEEN}, *_parts(more)]


def _parts(content: object) -> list[object]:
    return content if isinstance(content, list) else [{"type": "text", "text": str(content or "")}]
