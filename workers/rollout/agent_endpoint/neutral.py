"""What a program asks the model and what it is answered, in no dialect: all that the rest of the worker sees.

Messages have the form that chat templates expect. A dialect that keeps the reasoning of a turn apart gives its message
a `reasoning` beside the content; the recorder puts the two together as they were sampled.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from msgspec import Struct

from stream.errors import EngineRefusedError
from stream.records import BranchRole, Message

REASONING = "reasoning"
"""Key of an assistant's message under which a dialect keeps its reasoning apart."""


class RequestRefusedError(EngineRefusedError):
    """A request that gets no answer; the error reaches the program.

    Args:
        message: what is wrong, and the remedy.
        field: of the request; empty if it is none.
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class ContextOverflowError(EngineRefusedError):
    """The context is longer than an engine takes. Programs compact their history after it.

    Args:
        tokens: of the context.
        most: that an engine takes; 0 if it is not known.
    """

    def __init__(self, tokens: int, most: int) -> None:
        super().__init__(f"the context has {tokens} tokens, and the engine takes {most or 'fewer'}")
        self.tokens, self.most = tokens, most


class RequestSource(NamedTuple):
    """What the headers of a request say about the part of the program that asks."""

    role: BranchRole | None = None
    """What its conversation is for; None if the headers do not say."""
    name: str = ""
    """The program's own name for the conversation."""
    parent: str = ""
    """Name of the conversation that started it."""
    is_trained: bool = True
    """The program does not ask to leave it untrained."""
    repeats_lost: bool = False
    """A program known to send a request again, unchanged, only if it did not get the answer."""


class ModelRequest(Struct, frozen=True, kw_only=True):
    """A turn that a program asks for."""

    messages: list[Message]
    """The whole conversation."""
    tools: list[dict[str, Any]] | None = None
    """Functions in OpenAI's form; None if there are none, or if the model must not call any."""
    max_tokens: int | None = None
    """Of the answer; the run's limit counts, too."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer."""
    one_call: bool = False
    """Only the first call of the turn is given to the program."""
    streams: bool = False
    """The answer is sent as server-sent events."""
    includes_usage: bool = False
    """A stream ends with the numbers of tokens, in the dialect in which that is a choice."""
    namespaces: Mapping[str, tuple[str, str]] = {}
    """Namespace and own name of each tool in a namespace, by the name that the model sees."""
    source: RequestSource = RequestSource()
    """Who asks."""
    is_retry: bool = False
    """The program says that it repeats a request."""
    idempotency_key: str = ""
    """Requests with the same key, if there is one, are one request."""
    unused: tuple[str, ...] = ()
    """Fields and tools of the request without effect, for a warning."""


class ModelCall(NamedTuple):
    """One tool call of an answer."""

    id: str
    name: str
    """As the model wrote it."""
    arguments: str
    """JSON."""


class ModelReply(Struct, frozen=True, kw_only=True):
    """A turn of the model."""

    id: str
    """Of this turn; the ids of an answer's parts are made of it."""
    message: Message
    """As the recorder keeps it: with the reasoning in its content."""
    text: str
    """The content after the reasoning."""
    reasoning: str = ""
    """The reasoning, without its tags."""
    finish: Literal["stop", "length", "calls"] = "stop"
    """Why the turn ended: by itself, by a limit, or with calls."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    """Number of sampled tokens that are reasoning."""
    cached_tokens: int = 0
    """Number of prompt tokens that the turn before already had."""

    @property
    def calls(self) -> list[ModelCall]:
        """The calls, in order."""
        calls = []
        for index, entry in enumerate(self.message.get("tool_calls", ())):
            name, arguments = entry["function"]["name"], entry["function"]["arguments"]
            written = arguments if isinstance(arguments, str) else json.dumps(arguments)
            calls.append(ModelCall(f"{self.id}_{index}", name, written))
        return calls
