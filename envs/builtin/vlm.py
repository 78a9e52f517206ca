r"""The reward `vlm`: parts for image prompts, weighted; after NeMo-RL's, with its rules for boxes and golds put right.

=============  ========================================================================================================
`format`       .25 for `<think>...</think>`, .75 for `<answer>...</answer>`; needs no gold answer
`exact_alnum`  1 where the answer's letters and digits are the gold's, case aside
`math_expr`    1 where the answer is the same expression as the gold (`math_verifier`)
`bbox_giou`    generalised intersection over union of two boxes `[x1, y1, x2, y2]`, from -1 to 1. A box is four finite
               numbers with x2 > x1 and y2 > y1; anything else is no box, and worth 0
`geo3k`        .9 for the right expression in the last `\boxed{}`, .1 for `</think> ... \boxed{}`
=============  ========================================================================================================

The answer is what stands between `<answer>` and `</answer>`; without it the parts that look at it are 0. A gold answer
that a part cannot read makes that part invalid (`invalid_gold`), whatever the model said.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from envs.builtin.gold_answers import invalid_gold
from envs.builtin.math_verifier import PROCESSES, get_verifier
from envs.messages import last_assistant_text
from envs.rewards.loading import CallOptions
from stream.validity import Measured, Reward, Unmeasured

_THINK = re.compile(r"<think>[\s\S]*</think>")
_ANSWER = re.compile(r"<answer>([\s\S]*)</answer>")
_GEO3K = re.compile(r"</think>[\s\S]*\\boxed\{[\s\S]*\}")
_BOX = "\\boxed{"
_GEO3K_FORMAT = 0.1


class Vlm:
    """A weighted mean of parts, within [-1, 1]; each is kept as `NAME.PART`, its weight already in it.

    Args:
        parts: the weight of each part that counts; they are divided by their sum.
        answer: the column with the gold answers.

    Example (settings)::

        [[rewards]]
        ref = "vlm"
        args = { parts = { format = 0.2, bbox_giou = 0.8 }, answer = "box" }
    """

    call_options = CallOptions(processes=PROCESSES, granularity="row")

    def __init__(
        self, parts: Mapping[str, float] = MappingProxyType({"format": 0.2, "exact_alnum": 0.8}), answer: str = "answer"
    ) -> None:
        unknown = [name for name in parts if name not in PARTS]
        if unknown:
            raise ValueError(f"there is no part {unknown[0]!r}; known are: {', '.join(PARTS)}")
        total = math.fsum(parts.values())
        if not (math.isfinite(total) and total > 0 and min(parts.values()) >= 0):
            raise ValueError("the parts' weights are numbers of 0 and more, at least one of them above 0")
        self._weights = {name: weight / total for name, weight in parts.items()}
        self._column = answer
        self._needs_math = not {"math_expr", "geo3k"}.isdisjoint(parts)
        if self._needs_math:
            get_verifier("math_verify")  # refuse now, not in a child

    def prepare(self) -> None:
        """Load what is slow to load, once in each process."""
        if self._needs_math:
            math_expr("1", "<answer>1</answer>")

    def __call__(self, completions: Sequence[Any], **columns: Sequence[Any]) -> list[dict[str, Reward]]:
        """Judge completions.

        Args:
            completions: conversations, or texts.
            **columns: of the data; the gold answers are one of them.
        """
        golds = columns.get(self._column, [None] * len(completions))
        judged = zip(golds, map(last_assistant_text, completions), strict=True)
        return [
            {name: _weighted(PARTS[name](gold, said), weight) for name, weight in self._weights.items()}
            for gold, said in judged
        ]


def format_tags(_: Any, text: str) -> Reward:
    """Whether it thinks, and answers, between tags."""
    return Measured(0.25 * bool(_THINK.search(text)) + 0.75 * bool(_ANSWER.search(text)))


def exact_alnum(gold: Any, text: str) -> Reward:
    """Whether the letters and digits of the answer are the gold's."""
    expected = _alnum(str(gold)) if isinstance(gold, str | int) and not isinstance(gold, bool) else ""
    if not expected:
        return invalid_gold(gold, "has no letter and no digit")
    answer = _answer(text)
    return Measured(float(answer is not None and _alnum(answer) == expected))


def math_expr(gold: Any, text: str) -> Reward:
    """Whether the answer is the gold's expression."""
    answer = _answer(text)
    return get_verifier("math_verify")(gold, "" if answer is None else f"\\boxed{{{answer}}}", 6)


def bbox_giou(gold: Any, text: str) -> Reward:
    """How far the answer's box covers the gold's, and is near it."""
    expected = parse_box(gold)
    if expected is None:
        return invalid_gold(gold, "is no box")
    found = parse_box(_answer(text))
    value = 0.0 if found is None else generalized_iou(expected, found)
    return Measured(min(1.0, max(-1.0, value)) if math.isfinite(value) else 0.0)


def geo3k(gold: Any, text: str) -> Reward:
    """Whether the last box holds the gold's expression, and thinking comes before it."""
    answer = last_boxed(text)
    right = get_verifier("math_verify")(gold, "" if answer is None else f"\\boxed{{{answer}}}", 6)
    if isinstance(right, Unmeasured):
        return right
    return Measured((1 - _GEO3K_FORMAT) * right.value + _GEO3K_FORMAT * bool(_GEO3K.search(text)))


PARTS: dict[str, Callable[[Any, str], Reward]] = {
    "format": format_tags,
    "exact_alnum": exact_alnum,
    "math_expr": math_expr,
    "bbox_giou": bbox_giou,
    "geo3k": geo3k,
}

Box = tuple[float, float, float, float]
"""x1, y1, x2, y2."""


def parse_box(value: Any) -> Box | None:
    """A box from a text, or from a list of numbers; None for anything that is no box."""
    if isinstance(value, str):
        value = value.replace("[", "").replace("]", "").split(",")
    if not isinstance(value, list | tuple) or len(value) != 4:
        return None
    try:
        x1, y1, x2, y2 = (float(number) for number in value)
    except (TypeError, ValueError, OverflowError):
        return None
    is_box = all(map(math.isfinite, (x1, y1, x2, y2))) and x2 > x1 and y2 > y1
    return (x1, y1, x2, y2) if is_box else None


def generalized_iou(a: Box, b: Box) -> float:
    """Generalised intersection over union (Rezatofighi et al. 2019) of two boxes."""
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    both = width * height
    either = _area(a) + _area(b) - both
    hull = _area((min(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])))
    if not (0 < either < math.inf and 0 < hull < math.inf):
        return math.nan  # too small, or too large, for a float to tell
    return both / either - (hull - either) / hull


def last_boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{}`; None without one, or if it does not close."""
    start = text.rfind(_BOX)
    depth = 1
    for i in range(start + len(_BOX), len(text) if start >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start + len(_BOX) : i].strip()
    return None


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def _answer(text: str) -> str | None:
    found = _ANSWER.search(text)
    return found.group(1) if found else None


def _alnum(text: str) -> str:
    return "".join(c for c in text if c.isalnum()).lower()


def _weighted(reward: Reward, weight: float) -> Reward:
    return Measured(weight * reward.value) if isinstance(reward, Measured) else reward
