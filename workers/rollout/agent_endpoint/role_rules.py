"""Which sequences of roles a chat template takes, and how a conversation is put into one that it takes.

Programs send a `system` message after a user's, two of them at the start, or two user messages. A template may refuse
these, or leave one of them out. What it does not take becomes a part of the message before. What has been sent so never
changes when more is sent: the rules know no length and no position but the first.
"""

from collections.abc import Iterator, Sequence
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
        if all(self):
            return list(messages)
        result: list[Message] = []
        for given, (role, is_merged) in zip(messages, self._places([m["role"] for m in messages]), strict=True):
            if is_merged:
                before = result[-1]
                result[-1] = before | {"content": _join(before.get("content"), given.get("content"))}
            else:
                result.append(given if role == given["role"] else given | {"role": role})
        return result

    def not_taken(self, roles: Sequence[str]) -> list[str]:
        """Return where the template does not take a role, for example `system after user`; each case once."""
        cases = [
            f"{role} after {before}" if before else role
            for before, role, (becomes, is_merged) in zip(["", *roles], roles, self._places(roles), strict=False)
            if is_merged or becomes != role
        ]
        return list(dict.fromkeys(cases))

    def _places(self, roles: Sequence[str]) -> Iterator[tuple[str, bool]]:
        """Yield for each role the one that its message gets, and whether it is merged into the message before."""
        before, is_start = "", True
        for given in roles:
            role = "user" if given == "system" and not self.system else given
            is_taken = not before or self._is_taken(role, before, is_start=is_start)
            if not is_taken and before == "assistant":
                role, is_taken = "user", True
            if is_taken:
                before, is_start = role, is_start and role == "system"
            yield role, not is_taken

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


def _join(content: object, more: object) -> object:
    if isinstance(content, str) and isinstance(more, str):
        return content + _BETWEEN + more
    return [*_parts(content), {"type": "text", "text": _BETWEEN}, *_parts(more)]


def _parts(content: object) -> list[object]:
    return content if isinstance(content, list) else [{"type": "text", "text": str(content or "")}]
