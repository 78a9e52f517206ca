"""Convert what a tool returned to what the model reads."""

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from envs.call import is_awaitable, replace_surrogates
from envs.contract import is_content_parts
from stream.causes import ErrorCause
from stream.errors import EnvironmentFailure

MAX_CHARACTERS_PER_TOKEN = 32
"""More than any tokenizer packs into a token on average, except for long runs of blanks."""


@dataclass(slots=True)
class ToolResult:
    """What the model reads."""

    text: str
    is_error: bool = False
    parts: tuple[dict[str, Any], ...] = ()
    """Content parts, if the tool returned a list of them; `text` is then their text."""
    object_type: str = ""
    """Type of an object that JSON cannot hold, of which the model reads only `str()`."""
    seconds: float = field(default=0.0, compare=False)
    """Wall time of the call; 0 if it could not be made."""
    cause: ErrorCause | None = field(default=None, compare=False)
    """Where the tool raised or hung; the model does not read it."""

    @property
    def content(self) -> str | list[dict[str, Any]]:
        """Content of the tool message."""
        return list(self.parts) or self.text


def to_text(value: Any) -> str:
    """Return strings unchanged, other values as JSON, and what JSON cannot hold as `str(value)`."""
    text = _plain_text(value)
    return replace_surrogates(str(value)) if text is None else text


def _plain_text(value: Any) -> str | None:
    """Return strings unchanged and other values as JSON; None if JSON cannot hold the value."""
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON would say null
    try:
        return _encode_plain(msgspec.json.encode, value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None


def _encode_plain(encode: Callable[[Any], bytes], value: Any) -> bytes:
    """Encode a value, with `?` for lone surrogates in its texts and keys."""
    try:
        return encode(value)
    except UnicodeEncodeError:
        return encode(_without_surrogates(value))


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(entry) for key, entry in value.items()}
    return [_without_surrogates(entry) for entry in value] if isinstance(value, list | tuple) else value


def to_tool_result(value: Any) -> ToolResult:
    """Keep content parts, and convert anything else to text.

    Raises:
        EnvironmentFailure: the parts hold objects that a record cannot hold, such as an image object.
    """
    if not is_content_parts(value):
        text = _plain_text(value)
        if text is not None:
            return ToolResult(text)
        return ToolResult(to_text(value), object_type=f"{type(value).__module__}.{type(value).__qualname__}")
    try:
        # A copy: the tool may change its own later.
        parts = msgspec.msgpack.decode(_encode_plain(msgspec.msgpack.encode, value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise EnvironmentFailure(f"it returned content parts that are not plain data: {error}") from error
    text = "\n".join(part["text"] for part in parts if part["type"] == "text")
    return ToolResult(replace_surrogates(text), parts=tuple(parts))


def call_tool(method: Callable[..., Any], arguments: Mapping[str, Any]) -> ToolResult | Awaitable[ToolResult]:
    """Call a tool and convert its result, both in the thread that this runs in."""
    value = method(**arguments)
    return _convert_awaited(value) if is_awaitable(value) else to_tool_result(value)


async def call_async_tool(method: Callable[..., Awaitable[Any]], arguments: Mapping[str, Any]) -> ToolResult:
    """Call a coroutine function and convert its result, both in the task that this runs in."""
    return await _convert_awaited(method(**arguments))


async def _convert_awaited(value: Awaitable[Any]) -> ToolResult:
    return to_tool_result(await value)


def truncate_result(content: str | list[dict[str, Any]], max_tokens: int) -> str | list[dict[str, Any]]:
    """Cut each text of a tool's result that could not fit into `max_tokens` tokens, and add a note to the text.

    Without this, the tokenizer would spend minutes and gigabytes on a result of 50 MB, only to find it too long.

    Args:
        content: text, or content parts; parts without text stay unchanged.
        max_tokens: limit of the completion.

    Example:
        >>> truncate_result("x" * 1000, max_tokens=1).splitlines()[1]
        '(cut off: it has 1,000 characters)'
    """
    max_characters = MAX_CHARACTERS_PER_TOKEN * max_tokens
    if isinstance(content, str):
        return _truncate(content, max_characters)
    return [
        part | {"text": _truncate(part["text"], max_characters)} if isinstance(part.get("text"), str) else part
        for part in content
    ]


def _truncate(text: str, max_characters: int) -> str:
    return (
        text if len(text) <= max_characters else f"{text[:max_characters]}\n(cut off: it has {len(text):,} characters)"
    )
