"""The tokens of a row with what is recorded of each: policy version, log-prob, whether it was sampled, advantage."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from msgspec import Struct

from stream.errors import PenstockError
from stream.records import Row

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAGE: Final = 2000
"""Tokens that are loaded at a time."""
TokenColor = Literal["version", "logprob", "sampled", "advantage"]
COLORS: Final[tuple[TokenColor, ...]] = ("advantage", "version", "logprob", "sampled")
_LOGPROB_BOUNDS: Final = (-0.05, -0.5, -1.5, -3.0)
"""Log-probs from which the next darker color begins."""


class ShownToken(Struct, frozen=True):
    """One token."""

    text: str
    css: str
    """Class that colors it; empty: none."""
    title: str
    """What is known of it."""


class TokenPage(Struct, frozen=True, kw_only=True):
    """Some tokens of a row."""

    tokens: list[ShownToken]
    start: int
    total: int
    next_start: int | None
    """None: this is the last page."""


def token_page(
    row: Row, tokenizer: "Tokenizer", color: TokenColor, start: int, advantages: Sequence[float | None]
) -> TokenPage:
    """Return some tokens of a row, those after the prompt.

    Args:
        row: the row.
        tokenizer: of the run's model.
        color: what the color of a token shows.
        start: first token.
        advantages: one for each token of the row; None where it bears no loss.
    """
    tokens = row.tokens
    end = min(len(tokens), start + PAGE)
    logprobs = _by_token(row)
    versions = {at: span.version for span in row.spans for at in range(max(span.start, start), min(span.end, end))}
    largest = max((abs(value) for value in advantages if value is not None), default=0.0)
    shown = []
    for at in range(start, end):
        advantage = advantages[at] if at < len(advantages) else None
        known = _Known(logprobs.get(at), versions.get(at), advantage)
        text = tokenizer.decode([tokens[at]], skip_special_tokens=False)
        shown.append(ShownToken(text, _css(color, known, largest), _title(at, tokens[at], known)))
    return TokenPage(tokens=shown, start=start, total=len(tokens), next_start=end if end < len(tokens) else None)


@lru_cache(maxsize=8)
def load_tokenizer(model: Path) -> "Tokenizer":
    """Load the tokenizer of a model folder. Blocks on files.

    Raises:
        PenstockError: there is none, or the library is not installed.
    """
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise PenstockError('tokens need the library tokenizers: pip install "penstock[rollout]"') from error
    file = model / "tokenizer.json"
    if not file.is_file():
        raise PenstockError(f"{file} does not exist here, so tokens cannot be shown as text")
    return Tokenizer.from_file(str(file))


class _Known(Struct, frozen=True):
    logprob: float | None
    """None: not sampled."""
    version: int | None
    advantage: float | None


def _by_token(row: Row) -> dict[int, float]:
    positions = (at for start, end in row.sampled_ranges for at in range(start, end))
    return dict(zip(positions, row.sampled_logprobs, strict=False))


def _css(color: TokenColor, known: _Known, largest: float) -> str:
    if known.logprob is None:
        return "token-context"
    match color:
        case "sampled":
            return "token-sampled"
        case "version":
            return "" if known.version is None else f"token-version-{known.version % 6}"
        case "logprob":
            return f"token-logprob-{sum(known.logprob < bound for bound in _LOGPROB_BOUNDS)}"
        case "advantage":
            if known.advantage is None or not largest:
                return "token-no-loss"
            level = min(3, max(1, round(3 * abs(known.advantage) / largest)))
            return f"token-{'good' if known.advantage > 0 else 'bad'}-{level}"


def _title(at: int, token: int, known: _Known) -> str:
    parts = [f"token {at}, id {token}"]
    if known.logprob is None:
        return f"{parts[0]}, not sampled"
    parts.append(f"log-prob {known.logprob:.3f}")
    if known.version is not None:
        parts.append(f"version {known.version}")
    if known.advantage is not None:
        parts.append(f"advantage {known.advantage:+.3g}")
    return ", ".join(parts)
