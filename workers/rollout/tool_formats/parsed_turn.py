"""What parsing a turn yields: its text, its tool calls, and errors for malformed calls."""

from typing import Any, ClassVar, Protocol

from msgspec import Struct


class ToolCall(Struct):
    """One well-formed call.

    Attributes:
        name: as the model wrote it; there may be no such tool.
        arguments: by name.
        raw: the call's text, without its tags.
        id: the model's own id of nine letters and digits; None if it gave none, until it is given one.
    """

    name: str
    arguments: dict[str, Any]
    raw: str
    id: str | None = None


class ParsedTurn(Struct):
    """One turn of the model.

    Attributes:
        content: the text without its well-formed calls; the whole text if there are none.
        calls: in order.
        errors: one message per malformed call, for the model to read.
    """

    content: str
    calls: list[ToolCall] = []
    errors: list[str] = []


class ToolFormat(Protocol):
    """A syntax of tool calls.

    Attributes:
        openings: texts with which calls may begin; what comes before the first one is content.
    """

    openings: ClassVar[tuple[str, ...]]

    def parse(self, text: str, *, starts_in_reasoning: bool = False) -> ParsedTurn:
        """Parse a turn. Never raises.

        Args:
            text: the sampled text, including special tokens except for the one that ended the turn.
            starts_in_reasoning: the prompt ended inside a reasoning block, so the text starts with reasoning.
        """
