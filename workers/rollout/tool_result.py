"""What a tool returned, as the model reads it."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from envs.call import is_async, replace_surrogates
from envs.contract import is_content_parts
from stream.errors import EnvironmentFailure


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the model reads."""

    text: str
    is_error: bool = False
    parts: tuple[dict[str, Any], ...] = ()
    """Content parts, where the tool returned a list of them; `text` is then what of it is text."""

    @property
    def content(self) -> str | list[dict[str, Any]]:
        """What its message holds."""
        return list(self.parts) or self.text


def to_text(value: Any) -> str:
    """A tool's result as the model reads it: strings as they are, else JSON, else `str`."""
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON would say null
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError):
        return replace_surrogates(str(value))


def to_tool_result(value: Any) -> ToolResult:
    """A tool's result: content parts as they are, anything else as text.

    Raises:
        EnvironmentFailure: parts that no record can hold, an image as an object for one.
    """
    if not is_content_parts(value):
        return ToolResult(to_text(value))
    try:
        parts = msgspec.msgpack.decode(msgspec.msgpack.encode(value))  # a copy: the tool may go on changing its own
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise EnvironmentFailure(f"it returned content parts that are not plain data: {error}") from error
    return ToolResult(
        replace_surrogates("\n".join(part["text"] for part in parts if part["type"] == "text")), parts=tuple(parts)
    )


def returning_tool_result(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method with its result converted where it is called: in the same thread, or once it was awaited."""

    async def convert_awaited(value: Any) -> ToolResult:
        return to_tool_result(await value)

    async def asynchronous(**arguments: Any) -> ToolResult:
        return await convert_awaited(method(**arguments))

    def synchronous(**arguments: Any) -> Any:
        value = method(**arguments)
        return convert_awaited(value) if inspect.isawaitable(value) else to_tool_result(value)

    return asynchronous if is_async(method) else synchronous
