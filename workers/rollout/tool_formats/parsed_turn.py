"""The words of a turn: what an assistant said, what it calls, what of it could not be read."""

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One well-formed call.

    Attributes:
        name: as the model wrote it; no promise that there is such a tool.
        arguments: by name.
        raw: the call as it stood in the text, without its tags.
        id: what the model called it, nine letters or digits; None where it gave it no name.
    """

    name: str
    arguments: dict[str, Any]
    raw: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """What an assistant's turn says and asks for.

    Attributes:
        content: the text without its well-formed calls; the whole text where there are none.
        calls: in order.
        errors: one text for each malformed call, for the model to read.
    """

    content: str
    calls: list[ToolCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class ToolFormat(Protocol):
    """A way of writing tool calls."""

    def parse(self, text: str, *, starts_in_reasoning: bool = False) -> ParsedTurn:
        """Read a turn's text. Never raises.

        Args:
            text: what was sampled, special tokens included, the one that ended the turn not.
            starts_in_reasoning: the prompt ended within a reasoning block, so that the text begins with a thought.
        """
