r"""The reward `vlm`: weighted parts for image prompts, after NeMo-RL, with corrected rules for boxes and gold answers.

=============  ========================================================================================================
`format`       .25 for `<think>...</think>` plus .75 for `<answer>...</answer>`; needs no gold answer
`exact_alnum`  1 if the answer's letters and digits equal the gold's, ignoring case
`math_expr`    1 if the answer is mathematically equal to the gold (`math_verifier`)
`bbox_giou`    generalized intersection over union of two boxes `[x1, y1, x2, y2]`, from -1 to 1. A box is four finite
               numbers with x2 > x1 and y2 > y1; any other answer gives 0. A box too large for floating-point numbers
               gives -1 as an answer, and is unusable as a gold answer
`geo3k`        .9 for the right expression in the last `\boxed{}` plus .1 for `</think> ... \boxed{}`
=============  ========================================================================================================

The answer is the text between `<answer>` and `</answer>`; without it, parts that need it are 0. A gold answer that a
part cannot read makes the part invalid (`bad_reference`), whatever the model answered. An answer on which the verifier
of `math_expr` or `geo3k` hangs is wrong, and the part keeps the reason. A text that could not be read in time has the
worst value of each part. Texts are searched without regular expressions, whose time could grow faster than the text.
"""

import decimal
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from envs.builtin.math_verifier import PROCESSES, UNMANAGEABLE, bad_reference, get_verifier, is_comparable
from envs.messages import last_assistant_text
from envs.rewards.loading import CallOptions
from stream.validity import Measured, Reward, RewardReason, Unmeasured, worst_reward

_BOX = "\\boxed{"
_GEO3K_FORMAT = 0.1


class Vlm:
    """A weighted mean of parts, in [-1, 1].

    Each part is stored as `NAME.PART`, where NAME is the reward's name, and is already multiplied by its weight.

    Args:
        parts: weight of each part, by its name; weights are normalized to sum to 1.
        answer: name of the column with the gold answers.

    Example (settings)::

        [[rewards]]
        ref = "vlm"
        args = { parts = { format = 0.2, bbox_giou = 0.8 }, answer = "box" }
    """

    call_options = CallOptions(processes=PROCESSES, granularity="row", isolation="sandbox")

    def __init__(
        self, parts: Mapping[str, float] = MappingProxyType({"format": 0.2, "exact_alnum": 0.8}), answer: str = "answer"
    ) -> None:
        unknown = [name for name in parts if name not in PARTS]
        if unknown:
            raise ValueError(f"there is no part {unknown[0]!r}; known parts: {', '.join(PARTS)}")
        total = math.fsum(parts.values())
        if not (math.isfinite(total) and total > 0 and min(parts.values()) >= 0):
            raise ValueError("the weights of the parts must be at least 0, and one of them above 0")
        self._weights = {name: weight / total for name, weight in parts.items()}
        self._column = answer
        self._needs_math = not _MATH_PARTS.keys().isdisjoint(parts)
        if self._needs_math:
            get_verifier("math_verify")  # fail here rather than in a child process

    def prepare(self) -> None:
        """Run once in each process, so that slow imports do not count towards a call's deadline."""
        if self._needs_math:
            math_expr("1", "<answer>1</answer>")

    def __call__(
        self, completions: Sequence[Any], set_fallback: Callable[[list[Any]], None] | None = None, **columns: Any
    ) -> list[dict[str, Reward]]:
        """Score completions.

        Args:
            completions: conversations, or texts.
            set_fallback: gets the rewards that count if this call is killed.
            **columns: columns of the data, among them the gold answers.

        Returns:
            The weighted parts of each completion, by name.
        """
        golds = columns.get(self._column, [None] * len(completions))
        rewards: list[dict[str, Reward]] = []
        for gold, text in zip(golds, map(last_assistant_text, completions), strict=True):
            later = [Unmeasured(RewardReason.TIMEOUT, "the call ended first")] * (len(completions) - len(rewards) - 1)
            can_fall_back = set_fallback is not None and (not self._needs_math or is_comparable(gold))
            weighted: dict[str, Reward] = {}
            for parts in self._score(gold, text):  # each time more complete
                weighted = {name: _scaled(parts[name], weight) for name, weight in self._weights.items()}
                if can_fall_back and set_fallback is not None:
                    set_fallback([*rewards, weighted, *later])
            rewards.append(weighted)
        return rewards

    def _score(self, gold: Any, text: str) -> Iterator[dict[str, Reward]]:
        """Yield the parts of one completion two or three times, each time more complete.

        First come the worst values, before anything reads the text. Then, if a part needs the verifier, the parts that
        do not need it are measured. Last come all parts.
        """
        rewards = {name: _unjudged_part(name, gold) for name in self._weights}
        yield rewards
        rewards |= {name: PARTS[name](gold, text) for name in self._weights if name not in _MATH_PARTS}
        if self._needs_math:
            yield rewards | {name: part(UNMANAGEABLE, text) for name, part in _MATH_PARTS.items()}
        yield rewards | {name: PARTS[name](gold, text) for name in self._weights if name in _MATH_PARTS}


def format_tags(_: Any, text: str) -> Reward:
    """Score the tags around reasoning and answer."""
    has_reasoning = _between(text, "<think>", "</think>") is not None
    return Measured(0.25 * has_reasoning + 0.75 * (_answer(text) is not None))


def exact_alnum(gold: Any, text: str) -> Reward:
    """Return 1 if the answer's letters and digits equal the gold's, ignoring case; otherwise 0."""
    expected = _alnum(str(gold)) if isinstance(gold, str | int) and not isinstance(gold, bool) else ""
    if not expected:
        return bad_reference(gold, "has no letter and no digit")
    answer = _answer(text)
    return Measured(float(answer is not None and _alnum(answer) == expected))


def math_expr(gold: Any, text: str) -> Reward:
    """Return 1 if the answer is mathematically equal to the gold; otherwise 0."""
    answer = _answer(text)
    return get_verifier("math_verify")(gold, "" if answer is None else f"\\boxed{{{answer}}}", 6)


def bbox_giou(gold: Any, text: str) -> Reward:
    """Return the generalized intersection over union of the answer's box and the gold's; 0 if the answer has no box."""
    expected = parse_box(gold)
    if expected is None:
        return bad_reference(gold, "is not a box")
    box = _read_box(_answer(text))
    if box is None:
        return Measured(0.0)
    value = generalized_iou(expected, box)
    if not math.isfinite(value):
        detail = "the answer's box is too large for floating-point numbers"
        return worst_reward(_WORST["bbox_giou"], RewardReason.TOO_LARGE, detail)
    return Measured(min(1.0, max(-1.0, value)))


def geo3k(gold: Any, text: str) -> Reward:
    r"""Score the expression in the last `\boxed{}`, and reasoning before it."""
    answer = last_boxed(text)
    return _geo3k(get_verifier("math_verify")(gold, "" if answer is None else f"\\boxed{{{answer}}}", 6), text)


def _geo3k(right: Reward, text: str) -> Reward:
    """Combine the reward of the expression, `right`, with the score of the format."""
    if isinstance(right, Unmeasured):
        return right
    value = (1 - _GEO3K_FORMAT) * right.value + _GEO3K_FORMAT * _has_box_after_reasoning(text)
    return msgspec.structs.replace(right, value=value)


PARTS: dict[str, Callable[[Any, str], Reward]] = {
    "format": format_tags,
    "exact_alnum": exact_alnum,
    "math_expr": math_expr,
    "bbox_giou": bbox_giou,
    "geo3k": geo3k,
}
_MATH_PARTS: dict[str, Callable[[Reward, str], Reward]] = {"math_expr": lambda right, _: right, "geo3k": _geo3k}
"""Parts that need the verifier; each makes its reward from the verifier's reward and the text."""

_WORST = dict.fromkeys(PARTS, 0.0) | {"bbox_giou": -1.0}
"""The worst value that each part can have."""

Box = tuple[float, float, float, float]
"""x1, y1, x2, y2."""


def parse_box(value: Any) -> Box | None:
    """Parse a box from a text or a list of numbers; None for anything else, or if its area overflows or underflows."""
    box = _read_box(value)
    return box if box is not None and 0 < _area(box) < math.inf else None


def _read_box(value: Any) -> Box | None:
    """Read four finite numbers with x2 > x1 and y2 > y1; numbers beyond the range of a float become infinite."""
    if isinstance(value, str):
        value = value.replace("[", "").replace("]", "").split(",")
    if not isinstance(value, list | tuple) or len(value) != 4:
        return None
    try:
        x1, y1, x2, y2 = (decimal.Decimal(n) if isinstance(n, str | int) else decimal.Decimal(float(n)) for n in value)
    except (TypeError, ValueError, decimal.InvalidOperation):
        return None
    is_box = all(number.is_finite() for number in (x1, y1, x2, y2)) and x2 > x1 and y2 > y1
    return (float(x1), float(y1), float(x2), float(y2)) if is_box else None


def generalized_iou(a: Box, b: Box) -> float:
    """Return the generalized intersection over union (Rezatofighi et al. 2019); NaN if an area over- or underflows."""
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    intersection = width * height
    union = _area(a) + _area(b) - intersection
    hull = _area((min(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])))
    if not (0 < union < math.inf and 0 < hull < math.inf):
        return math.nan  # not computable in floating point
    return intersection / union - (hull - union) / hull


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{}`; None if there is none or it does not close."""
    start = text.rfind(_BOX)
    depth = 1
    for i in range(start + len(_BOX), len(text) if start >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start + len(_BOX) : i].strip()
    return None


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def _unjudged_part(part: str, gold: Any) -> Reward:
    """Return the reward of a part if the answer could not be judged; `Unmeasured` if its gold answer is unusable."""
    if part in _MATH_PARTS:
        return UNMANAGEABLE
    unanswered = PARTS[part](gold, "")
    if isinstance(unanswered, Unmeasured):
        return unanswered
    return worst_reward(_WORST[part], RewardReason.TIMEOUT, "the answer could not be judged")


def _answer(text: str) -> str | None:
    return _between(text, "<answer>", "</answer>")


def _between(text: str, opening: str, closing: str) -> str | None:
    """Return the text between the first opening tag and the last closing tag; None without both, in this order."""
    start, end = text.find(opening) + len(opening), text.rfind(closing)
    return text[start:end] if opening in text and end >= start else None


def _has_box_after_reasoning(text: str) -> bool:
    r"""Return whether the text has `</think>`, `\boxed{` and `}` in this order."""
    position = 0
    for words in ("</think>", _BOX, "}"):
        start = text.find(words, position)
        if start < 0:
            return False
        position = start + len(words)
    return True


def _alnum(text: str) -> str:
    return "".join(c for c in text if c.isalnum()).lower()


def _scaled(reward: Reward, weight: float) -> Reward:
    return msgspec.structs.replace(reward, value=weight * reward.value) if isinstance(reward, Measured) else reward
