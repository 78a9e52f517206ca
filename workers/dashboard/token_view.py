"""The tokens of a row with what engine, trainer and mask recorded of each, as colors and in words.

The address of the page *Group* says which tokens its panel shows. The text of a token is decoded from the recorded id;
no chat template is rendered again.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from stream.errors import PenstockError
from stream.records import Completion, Row, TrainedCompletion
from workers.dashboard.templating import format_value, parse_number
from workers.runs.branches import trained_in_row
from workers.runs.run import Run
from workers.runs.tokens import TokenColumns, token_columns, trained_row

if TYPE_CHECKING:
    from tokenizers import Tokenizer


PAGE: Final = 2000
"""Tokens that are loaded at a time."""
TokenColor = Literal["advantage", "difference", "mask", "version", "logprob"]
COLORS: Final[dict[TokenColor, str]] = {
    "advantage": "advantage",
    "difference": "log-prob difference",
    "mask": "mask",
    "version": "policy version",
    "logprob": "engine's log-prob",
}
"""What the color of a token can show, with its name for people."""
_DIFFERENCE_BOUNDS: Final = (0.05, 0.2, 1.0)
"""Differences in nats from which the next darker color begins."""
_LOGPROB_BOUNDS: Final = (-0.5, -1.5, -3.0)
"""Log-probs below which the next darker color begins."""
_VERSION_CSS: Final = ("tint-1", "shade-1", "tint-2", "shade-2", "tint-3", "shade-3")
_RULE_CSS: Final = ("shade-2", "shade-1", "shade-3")


class ShownToken(Struct, frozen=True):
    """One token."""

    text: str
    css: str
    """Class that colors it; empty: none."""
    title: str
    """What is known of it."""


class LegendEntry(Struct, frozen=True):
    """What a color means."""

    css: str
    text: str


class TokenPage(Struct, frozen=True, kw_only=True):
    """Some tokens of a row."""

    tokens: list[ShownToken]
    legend: list[LegendEntry]
    note: str
    """What is not recorded; empty: nothing."""
    start: int
    total: int
    next_start: int | None
    """None: this is the last page."""


Decode = Callable[[bytes, int, int], Sequence[str]]
"""Returns the texts of tokens, from an index to another one, of a row's `token_ids`."""


def token_page(
    row: Row, number: int, trained: TrainedCompletion | None, decode: Decode, color: TokenColor, start: int
) -> TokenPage:
    """Return some tokens of a row, those after the prompt.

    Args:
        row: the row.
        number: its position in its completion.
        trained: what the step did with the completion; None: no step had it, or it was not archived.
        decode: returns the texts of some tokens of a row.
        color: what the color of a token shows.
        start: first token.
    """
    columns = token_columns(row, trained_row(trained, number))
    tokens = _Tokens(columns, trained)
    coloring = _COLORINGS[color](tokens)
    total = len(columns.token_ids)
    end = min(total, start + PAGE)
    shown = []
    for at, text in zip(range(start, end), decode(row.token_ids, start, end), strict=True):
        css = coloring.css(at) if columns.sampled_mask[at] else "context"
        shown.append(ShownToken(_visible(text), css, _title(tokens, at, text)))
    has_trained_tokens = columns.loss_mask is not None or trained is None
    return TokenPage(
        tokens=shown,
        legend=[*coloring.legend, LegendEntry("context", "not sampled")],
        note="" if has_trained_tokens else coloring.without_trained_tokens,
        start=start,
        total=total,
        next_start=end if end < total else None,
    )


def decoder(model: Path) -> Decode:
    """Return a function that decodes with the tokenizer of a model folder. Blocks on files.

    Raises:
        PenstockError: there is none, or the library is not installed.
    """
    _load_tokenizer(model)
    return lambda token_ids, start, end: _decode(model, token_ids, start, end)


@lru_cache(maxsize=64)
def _decode(model: Path, token_ids: bytes, start: int, end: int) -> tuple[str, ...]:
    """Decode each token; one that ends in the middle of a character has no text, the last one of it has it whole."""
    from tokenizers.decoders import DecodeStream

    tokenizer, stream = _load_tokenizer(model), DecodeStream(skip_special_tokens=False)
    ids = memoryview(token_ids).cast("i")[start:end]
    return tuple(stream.step(tokenizer, token) or "" for token in ids)


@lru_cache(maxsize=8)
def _load_tokenizer(model: Path) -> "Tokenizer":
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise PenstockError('tokens need the library tokenizers: pip install "penstock[rollout]"') from error
    file = model / "tokenizer.json"
    if not file.is_file():
        raise PenstockError(f"{file} does not exist here, so tokens cannot be shown as text")
    return Tokenizer.from_file(str(file))


class _Tokens:
    """The columns of a row; if its tokens are not kept, every token has the completion's advantage."""

    def __init__(self, columns: TokenColumns, trained: TrainedCompletion | None) -> None:
        self.columns, self.trained = columns, trained
        sampled = columns.sampled_mask
        mean = trained.advantage if trained is not None and trained.loss_tokens else None
        self.advantages = columns.advantages or [mean if each else None for each in sampled]
        self.differences = columns.logprob_differences or [None] * len(sampled)
        self.rejected_by = columns.rejected_by or [None] * len(sampled)
        has_loss = int(trained is not None and trained.loss_tokens > 0)
        self.loss_mask = columns.loss_mask or [each * has_loss for each in sampled]

    @property
    def why_without_loss(self) -> str:
        """Why the completion bears no loss; empty if it does."""
        if self.trained is None:
            return "no step had the completion"
        return "" if self.trained.loss_tokens else self.trained.state


class _Coloring(Struct, frozen=True):
    """One choice of colors for a row."""

    css: Callable[[int], str]
    """Returns the class of a sampled token."""
    legend: list[LegendEntry]
    without_trained_tokens: str = ""
    """What to say of a step whose trained tokens are not kept."""


def _color_advantages(tokens: _Tokens) -> _Coloring:
    largest = max((abs(value) for value in tokens.advantages if value is not None), default=0.0)

    def css(at: int) -> str:
        value = tokens.advantages[at]
        if value is None:
            return "no-loss"
        return _tinted(value, max(1, round(3 * abs(value) / largest)) if value else 0)

    legend = [LegendEntry("no-loss", f"no loss{_because(tokens.why_without_loss)}")]
    if largest:
        high = format_value(largest)
        more = LegendEntry("tint-3", f"up to +{high}: becomes more likely")
        legend = [more, LegendEntry("shade-3", f"down to \u2212{high}: becomes less likely"), *legend]
    note = "This step's trained tokens are not kept: each has the mean advantage of its completion."
    return _Coloring(css, legend, note)


def _color_differences(tokens: _Tokens) -> _Coloring:
    def css(at: int) -> str:
        value = tokens.differences[at]
        return "no-loss" if value is None else _tinted(value, sum(abs(value) >= each for each in _DIFFERENCE_BOUNDS))

    low, _, high = _DIFFERENCE_BOUNDS
    legend = [
        LegendEntry("tint-3", f"trainer's log-prob higher by {high:g} nat or more"),
        LegendEntry("shade-3", f"lower by {high:g} nat or more"),
        LegendEntry("", f"within {low:g} nat"),
        LegendEntry("no-loss", "not computed"),
    ]
    return _Coloring(css, legend, "This step's trained tokens are not kept, so the trainer's log-probs are not known.")


def _color_masks(tokens: _Tokens) -> _Coloring:
    rules = list(dict.fromkeys(rule for rule in tokens.rejected_by if rule is not None))
    by_rule = {rule: f"{_RULE_CSS[at % len(_RULE_CSS)]} rejected" for at, rule in enumerate(rules)}

    def css(at: int) -> str:
        rule = tokens.rejected_by[at]
        if rule is not None:
            return by_rule[rule]
        return "tint-2" if tokens.loss_mask[at] else "no-loss"

    legend = [LegendEntry(css, f"rejected by {rule}") for rule, css in by_rule.items()]
    if tokens.why_without_loss:
        legend.append(LegendEntry("no-loss", f"no loss{_because(tokens.why_without_loss)}"))
    else:
        legend = [LegendEntry("tint-2", "bears loss"), *legend]
    note = "This step's trained tokens are not kept: those that a rule rejected singly are not marked."
    return _Coloring(css, legend, note)


def _color_versions(tokens: _Tokens) -> _Coloring:
    found = sorted({version for version in tokens.columns.versions if version is not None})
    by_version = {version: _VERSION_CSS[at % len(_VERSION_CSS)] for at, version in enumerate(found)}

    def css(at: int) -> str:
        version = tokens.columns.versions[at]
        return "" if version is None else by_version[version]

    return _Coloring(css, [LegendEntry(css, f"version {version}") for version, css in by_version.items()])


def _color_logprobs(tokens: _Tokens) -> _Coloring:
    def css(at: int) -> str:
        level = sum((tokens.columns.logprobs[at] or 0.0) < bound for bound in _LOGPROB_BOUNDS)
        return f"shade-{level}" if level else ""

    bounds = enumerate(_LOGPROB_BOUNDS, start=1)
    legend = [LegendEntry(f"shade-{level}", f"below {format_value(bound)}") for level, bound in bounds]
    return _Coloring(css, [LegendEntry("", f"above {format_value(_LOGPROB_BOUNDS[0])}"), *legend])


_COLORINGS: Final[dict[TokenColor, Callable[[_Tokens], _Coloring]]] = {
    "advantage": _color_advantages,
    "difference": _color_differences,
    "mask": _color_masks,
    "version": _color_versions,
    "logprob": _color_logprobs,
}


def _tinted(value: float, level: int) -> str:
    return f"{'tint' if value > 0 else 'shade'}-{level}" if level else ""


def _because(why: str) -> str:
    return f": {why}" if why else ""


def _visible(text: str) -> str:
    """Return the text of a token so that it can be seen: a line end has a sign, a part of a character another."""
    return text.replace("\n", "\u21b5\n") if text else "\u00b7"


def _title(tokens: _Tokens, at: int, text: str) -> str:
    columns = tokens.columns
    parts = [f"{text!r}" if text else "part of a character", f"token {at}, id {columns.token_ids[at]}"]
    logprob = columns.logprobs[at]
    if logprob is None:
        return " \u00b7 ".join([*parts, "not sampled"])
    parts.append(f"engine's log-prob {logprob:.3f}")
    if (difference := tokens.differences[at]) is not None:
        parts.append(f"trainer's {difference:+.3f}")
    if (advantage := tokens.advantages[at]) is not None:
        parts.append(f"advantage {advantage:+.3g}")
    if (rule := tokens.rejected_by[at]) is not None:
        parts.append(f"no loss: rejected by {rule}")
    elif not tokens.loss_mask[at]:
        parts.append(f"no loss{_because(tokens.why_without_loss)}")
    if (version := columns.versions[at]) is not None:
        parts.append(f"version {version}")
    return " \u00b7 ".join(parts)


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
        trained = trained_in_row(completion, number, trained)
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
    named = settings.model.folder  # a folder that was moved may have its model in it
    return decoder(named if named.is_dir() else run.file(named.name))
