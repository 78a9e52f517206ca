"""Adapt content parts to what a chat template can render for each role.

Some templates render lists of parts, some fail, and some silently write nothing for them, or the first text alone. So
each combination of role and type is tested once: parts that the template renders stay unchanged, text parts that it
does not are joined, and an image that it would leave out is an error.
"""

from collections.abc import Sequence
from typing import Any

from stream.errors import DataError
from stream.records import Message
from workers.rollout.chat.template import ChatTemplate

_MARK, _SECOND_MARK = "part-5f1c", "second-5f1c"
_CALL_ID = "call00000"


class ContentAdapter:
    """Adapts messages to one template. Threads may share it."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._support: dict[tuple[str, str, bool], bool] = {}

    def adapt(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages in a form that the template renders.

        Raises:
            DataError: the template would leave a part out.
        """
        return [self._adapt(message) if isinstance(message.get("content"), list) else message for message in messages]

    def _adapt(self, message: Message) -> Message:
        role, parts = str(message.get("role")), message["content"]
        found = [str(part.get("type", "text")) for part in parts]
        kinds = sorted(set(found))
        if all(self._supports(role, kind, is_repeated=found.count(kind) > 1) for kind in kinds):
            return message
        other = [kind for kind in kinds if kind != "text"]
        if other:
            raise DataError(
                f"the chat template of {self._template.folder} renders no content parts of type {other[0]!r} in "
                f"messages of the role {role!r}: the model would never see them"
            )
        text = "\n".join(str(part.get("text", "")) for part in parts)
        as_part = self._supports(role, "text", is_repeated=False)
        return {**message, "content": [{"type": "text", "text": text}] if as_part else text}

    def _supports(self, role: str, kind: str, *, is_repeated: bool) -> bool:
        key = role, kind, is_repeated and kind == "text"
        if key not in self._support:
            self._support[key] = self._test_rendering(*key)
        return self._support[key]

    def _test_rendering(self, role: str, kind: str, is_repeated: bool) -> bool:
        """Whether the template writes something for such a part; of repeated ones, for the second, too."""
        second = [{"type": kind, kind: _SECOND_MARK}] * is_repeated
        with_part, without = self._render_parts(role, [_part(kind), *second]), self._render_parts(role, [])
        if with_part is None:
            return False
        if kind != "text":
            return with_part != without
        return _MARK in with_part and (_SECOND_MARK in with_part or not is_repeated)

    def _render_parts(self, role: str, parts: list[dict[str, Any]]) -> str | None:
        message: Message = {"role": role, "content": parts}
        before: list[Message] = []
        if role == "tool":
            function = {"name": "f", "arguments": {}}
            call = {"id": _CALL_ID, "type": "function", "function": function}
            message |= {"name": "f", "tool_call_id": _CALL_ID}
            before = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        elif role == "assistant":
            before = [{"role": "user", "content": "u"}]
        elif role == "system":
            return self._try_render([message, {"role": "user", "content": "u"}])
        return self._try_render([*before, message])

    def _try_render(self, messages: list[Message]) -> str | None:
        try:
            return self._template.render(messages, None, add_generation_prompt=True)
        except DataError:
            return None


def _part(kind: str) -> dict[str, Any]:
    """Return a part of that type, with the fields that templates read."""
    if kind == "image_url":
        return {"type": kind, "image_url": {"url": _MARK}}
    return {"type": kind, kind: _MARK}
