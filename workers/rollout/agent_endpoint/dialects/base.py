"""What a dialect is, and how its parts are read: each names the field that is wrong."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import msgspec

from stream.records import Message
from workers.rollout.agent_endpoint.neutral import ModelReply, ModelRequest, RequestRefusedError

MODEL_NAME = "policy"
"""Name of the only model that is served."""
IDEMPOTENCY_KEY = "idempotency-key"
"""Header by which a client names a request, and names it again when it repeats it."""
RETRY_COUNT = "x-stainless-retry-count"
"""Header in which the vendors' clients say how often they have sent a request before."""


class Dialect(Protocol):
    """Translates the requests and the answers of one API.

    Attributes:
        name: of its rules in `fields`.
        ping: what a stream says while the answer is awaited.
    """

    name: ClassVar[str]
    ping: ClassVar[bytes]

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> ModelRequest:
        """Read a request.

        Raises:
            RequestRefusedError: it is malformed, or asks for what is not to be had.
        """

    def body(self, reply: ModelReply, request: ModelRequest, /) -> dict[str, Any]:
        """Return the answer as one object."""

    def events(self, reply: ModelReply, request: ModelRequest, /) -> Iterable[bytes]:
        """Return the answer as server-sent events."""

    def error(self, status: int, error: Exception) -> dict[str, Any]:
        """Return the body of an answer of 4xx or 5xx."""

    def error_event(self, status: int, error: Exception) -> bytes:
        """Return the same for a stream that has begun."""


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """Return a server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


def is_retry(headers: Mapping[str, str]) -> bool:
    """Whether the vendor's client says that it repeats a request."""
    return headers.get(RETRY_COUNT, "0") != "0"


def items(value: object, field: str) -> list[dict[str, Any]]:
    """Return a list of objects; None is an empty one."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RequestRefusedError(f"{field}: a list of objects expected", field)
    return value


def text(record: Mapping[str, Any], name: str, where: str) -> str:
    """Return a text of an object."""
    value = record.get(name)
    if not isinstance(value, str):
        raise RequestRefusedError(f"{where}.{name}: a text expected", where)
    return value


def count(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of these fields that is set: a number of tokens."""
    for name in names:
        if (value := body.get(name)) is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise RequestRefusedError(f"{name}: a number from 1 expected", name)
            return value
    return None


def texts(value: object, field: str) -> tuple[str, ...]:
    """Return a text or a list of texts as a tuple."""
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list) or not all(isinstance(each, str) and each for each in found):
        raise RequestRefusedError(f"{field}: a text or a list of texts expected", field)
    return tuple(found)


def function(name: str, description: object, parameters: object) -> dict[str, Any]:
    """Return a tool in the form that chat templates expect."""
    described = {"description": description} if isinstance(description, str) and description else {}
    schema = parameters if isinstance(parameters, dict) else {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, **described, "parameters": schema}}


def refuse_prefill(messages: Sequence[Message], field: str) -> None:
    """Refuse a conversation that ends with the beginning of an answer: that beginning would not be sampled."""
    if messages and messages[-1]["role"] == "assistant":
        raise RequestRefusedError(f"{field}: the last message is the assistant's, but an answer cannot be begun", field)
