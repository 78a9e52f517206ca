"""Which tokens the page *Group* shows, as its address says, and the panel with them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from stream.errors import PenstockError
from stream.records import Completion, Row, TrainedCompletion
from workers.dashboard.rendering import parse_number
from workers.dashboard.token_view import COLORS, Decode, TokenColor, TokenPage, decoder, token_page
from workers.runs.run import Run

_PROMPT_END: Final = 2000
"""Tokens of a long prompt that are shown of its beginning and of its end."""
_DEFAULT: Final[TokenColor] = "advantage"


class TokenPanel(Struct, frozen=True, kw_only=True):
    """Tokens of one row of a completion."""

    completion: int
    """Its index."""
    row: int
    rows: int
    color: TokenColor
    page: TokenPage | None = None
    prompt: str = ""
    """The prompt as the model saw it, from its recorded tokens; empty beyond the first page."""
    problem: str = ""
    """Why there is no page."""


class TokenChoice(Struct, frozen=True):
    """What a page shows of tokens."""

    color: TokenColor
    completions: frozenset[int]
    """Indices of the completions whose tokens are shown."""
    row: int
    """Number of the row, for completions with several."""

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> "TokenChoice":
        """Read it from the parameters `color`, `tokens` (such as `0,3`) and `row` of an address."""
        color = next((known for known in COLORS if known == query.get("color")), _DEFAULT)
        numbers = [parse_number(text) for text in query.get("tokens", "").split(",")]
        completions = frozenset(number for number in numbers if number is not None)
        return cls(color, completions, parse_number(query.get("row", "")) or 0)

    @property
    def query(self) -> dict[str, Any]:
        """The parameters, without defaults."""
        return {
            "tokens": ",".join(map(str, sorted(self.completions))),
            "color": None if self.color == _DEFAULT else self.color,
            "row": self.row or None,
        }

    def panel(self, run: Run, completion: Completion, trained: TrainedCompletion | None, start: int = 0) -> TokenPanel:
        """Return some tokens of a completion. Blocks on files."""
        number = min(self.row, max(0, len(completion.rows) - 1))
        panel = TokenPanel(completion=completion.index, row=number, rows=len(completion.rows), color=self.color)
        if not completion.rows:
            return replace(panel, problem="nothing was sampled")
        row = completion.rows[number]
        try:
            decode = _decoder(run)
        except PenstockError as error:
            return replace(panel, problem=str(error))
        page = token_page(row, number, trained, decode, self.color, min(start, len(row.tokens)))
        return replace(panel, page=page, prompt="" if start else prompt_text(row, decode))


def prompt_text(row: Row, decode: Decode) -> str:
    """Return the text of a row's prompt, special tokens included; the middle of a long one is left out."""
    count = len(row.prompt_ids) // 4
    if count <= 2 * _PROMPT_END:
        return "".join(decode(row.prompt_ids, 0, count))
    first, last = decode(row.prompt_ids, 0, _PROMPT_END), decode(row.prompt_ids, count - _PROMPT_END, count)
    return f"{''.join(first)}\n\n… {count - 2 * _PROMPT_END:,} tokens are left out …\n\n{''.join(last)}"


def _decoder(run: Run) -> Decode:
    settings = run.settings
    if settings is None:
        raise PenstockError("the run's settings are not here, so tokens cannot be shown as text")
    named = Path(settings.model.path)  # a folder that was moved may have its model in it
    return decoder(named if named.is_dir() else run.file(named.name))
