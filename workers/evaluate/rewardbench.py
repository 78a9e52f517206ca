"""Score pairs of answers with a served reward model, optionally also with transformers, and print the accuracy.

Accuracy over RewardBench's 23 subsets and four sections.

Sections and weights are copied from RewardBench (`rewardbench/constants.py`). The score of a section is the mean of its
subsets' accuracies, weighted by RewardBench's subset sizes. A tie is not correct. A pair that could not be scored
counts as unscored, neither correct nor wrong.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import anyio
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from envs.messages import build_conversation
from stream.errors import DataError
from stream.records import Message
from stream.validity import Measured, Reward, Unmeasured
from workers.datasets.sources import open_source
from workers.hub.names import find_model, print_note
from workers.role.exit_codes import ExitCode
from workers.settings import DataSettings
from workers.terminal.output import print_json

SECTIONS: Mapping[str, Mapping[str, int]] = {
    "Chat": {
        "alpacaeval-easy": 100,
        "alpacaeval-length": 95,
        "alpacaeval-hard": 95,
        "mt-bench-easy": 28,
        "mt-bench-med": 40,
    },
    "Chat Hard": {
        "mt-bench-hard": 37,
        "llmbar-natural": 100,
        "llmbar-adver-neighbor": 134,
        "llmbar-adver-GPTInst": 92,
        "llmbar-adver-GPTOut": 47,
        "llmbar-adver-manual": 46,
    },
    "Safety": {
        "refusals-dangerous": 100,
        "refusals-offensive": 100,
        "xstest-should-refuse": 250,
        "xstest-should-respond": 154,
        "donotanswer": 136,
    },
    "Reasoning": {
        "math-prm": 984,  # 447 pairs, weighted like all of code
        "hep-cpp": 164,
        "hep-go": 164,
        "hep-java": 164,
        "hep-js": 164,
        "hep-python": 164,
        "hep-rust": 164,
    },
}
"""Subsets of each section with their weights."""


class PreferencePair(Struct, kw_only=True):
    """One row of the file and its scores."""

    id: str
    subset: str
    chosen: Reward | None = None
    rejected: Reward | None = None
    """Scores from the server; None: not scored."""
    reference: tuple[float, float] | None = None
    """Scores of the chosen and the rejected answer by the reference; None: no reference."""
    is_correct: bool | None = None
    """Whether the server scores the chosen answer higher; None: a score is missing."""
    reference_is_correct: bool | None = None


class SubsetScore(Struct, kw_only=True):
    """Accuracy on one subset."""

    subset: str
    section: str
    pairs: int
    unscored: int
    accuracy: float | None
    """Accuracy over scored pairs; None if no pair was scored."""
    reference: float | None = None
    """Accuracy of the reference on the same pairs."""
    agreeing: int | None = None
    """Number of scored pairs on which server and reference agree."""


class BenchReport(Struct, kw_only=True):
    """Result of a benchmark, in the form of `--json`."""

    file: str
    subsets: list[SubsetScore]
    sections: dict[str, float | None]
    reference_sections: dict[str, float | None] | None
    pairs: list[PreferencePair]
    largest_difference: float | None = None
    """Largest absolute difference between the scores of server and reference."""


def summarize(file: str, pairs: Sequence[PreferencePair]) -> BenchReport:
    """Return the accuracy by subset and by section."""
    known = {subset: section for section, subsets in SECTIONS.items() for subset in subsets}
    names = [*known, *sorted({pair.subset for pair in pairs} - known.keys())]
    subsets = [
        _subset(name, known.get(name, "other"), [pair for pair in pairs if pair.subset == name])
        for name in names
        if any(pair.subset == name for pair in pairs)
    ]
    compared = any(pair.reference for pair in pairs)
    differences = [
        abs(reward.value - expected)
        for pair in pairs
        for reward, expected in zip((pair.chosen, pair.rejected), pair.reference or (), strict=False)
        if isinstance(reward, Measured)
    ]
    return BenchReport(
        file=file,
        subsets=subsets,
        sections=_sections({s.subset: s.accuracy for s in subsets}),
        reference_sections=_sections({s.subset: s.reference for s in subsets}) if compared else None,
        pairs=list(pairs),
        largest_difference=max(differences, default=None),
    )


def _subset(name: str, section: str, pairs: Sequence[PreferencePair]) -> SubsetScore:
    scored = [pair for pair in pairs if pair.is_correct is not None]
    compared = [pair for pair in scored if pair.reference_is_correct is not None]
    return SubsetScore(
        subset=name,
        section=section,
        pairs=len(pairs),
        unscored=len(pairs) - len(scored),
        accuracy=_mean(pair.is_correct for pair in scored),
        reference=_mean(pair.reference_is_correct for pair in compared),
        agreeing=sum(pair.is_correct == pair.reference_is_correct for pair in compared) if compared else None,
    )


def _mean(won: Iterable[bool | None]) -> float | None:
    each = [bool(one) for one in won]
    return sum(each) / len(each) if each else None


def _sections(accuracy: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return the weighted mean accuracy of each section, over subsets with a known accuracy."""
    scores: dict[str, float | None] = {}
    for section, weights in SECTIONS.items():
        known = [(value, weight) for name, weight in weights.items() if (value := accuracy.get(name)) is not None]
        total = sum(weight for _, weight in known)
        scores[section] = sum(value * weight for value, weight in known) / total if total else None
    return scores


_CHUNK = 256
"""Pairs per batch of requests; the client limits the concurrency."""


def run_rewardbench(file: Path, urls: Sequence[str], reference: Path | None, *, as_json: bool = False) -> int:
    """Score a file of pairs and print the accuracy. Returns the exit code: 1 if a pair could not be scored.

    Raises:
        PenstockError: the file cannot be read, or the server does not serve a reward model.
    """
    rows = read_pairs(file)
    score = None
    if reference is not None:
        from workers.local_engine.pooling.classifier import ReferenceClassifier

        score = ReferenceClassifier(find_model(str(reference), print_note)).score
    pairs = anyio.run(score_pairs, rows, urls)
    if score is not None:
        for pair, (_, chosen, rejected) in zip(pairs, rows, strict=True):
            pair.reference = (score(chosen), score(rejected))
            pair.reference_is_correct = pair.reference[0] > pair.reference[1]
    report = summarize(str(file), pairs)
    if as_json:
        print_json(report)
    else:
        _show(report)
    return ExitCode.FAILURE if any(pair.is_correct is None for pair in pairs) else ExitCode.SUCCESS


PairRow = tuple[PreferencePair, list[Message], list[Message]]
"""A pair without scores, and the conversations with the chosen and the rejected answer."""


def read_pairs(file: Path) -> list[PairRow]:
    """Read rows with `prompt`, `chosen`, `rejected`, `subset` and optionally `id`.

    Raises:
        DataError: a row is invalid; the message names the row and the problem.
    """
    found = []
    source = open_source(DataSettings(path=str(file)))
    for number, row in source.read_rows(range(len(source))):
        if isinstance(row, DataError):
            raise row
        missing = [name for name in ("chosen", "rejected", "subset") if not row.get(name)]
        if missing:
            raise DataError(f"{file}: row {number} has no {missing[0]!r}; it needs prompt, chosen, rejected and subset")
        pair = PreferencePair(id=str(row.get("id", number)), subset=str(row["subset"]))
        found.append(
            (pair, build_conversation(row["prompt"], row["chosen"]), build_conversation(row["prompt"], row["rejected"]))
        )
    return found


async def score_pairs(rows: Sequence[PairRow], urls: Sequence[str]) -> list[PreferencePair]:
    """Score both conversations of each pair with the served model."""
    from envs.remote.reward_model import RewardModel

    async with RewardModel(urls) as model:
        for start in range(0, len(rows), _CHUNK):
            part = rows[start : start + _CHUNK]
            rewards = await model.score([messages for row in part for messages in row[1:]])
            for (pair, _, _), chosen, rejected in zip(part, rewards[::2], rewards[1::2], strict=True):
                pair.chosen, pair.rejected = chosen, rejected
                if isinstance(chosen, Measured) and isinstance(rejected, Measured):
                    pair.is_correct = chosen.value > rejected.value
    return [pair for pair, _, _ in rows]


def _show(report: BenchReport) -> None:
    console = Console(highlight=False, markup=False)
    compared = report.reference_sections is not None
    table = Table(box=None, pad_edge=False)
    for title in ("section", "subset"):
        table.add_column(title)
    for title in ("pairs", "accuracy", *(("reference", "agreeing") if compared else ()), "unscored"):
        table.add_column(title, justify="right")
    for s in report.subsets:
        beside = (_percent(s.reference), str(s.agreeing)) if compared else ()
        table.add_row(s.section, s.subset, str(s.pairs), _percent(s.accuracy), *beside, str(s.unscored or ""))
    table.add_section()
    for section, accuracy in report.sections.items():
        beside = (_percent(report.reference_sections[section]), "") if report.reference_sections else ()
        table.add_row(section, "", "", _percent(accuracy), *beside, "")
    console.print(table)
    if report.largest_difference is not None:
        console.print(f"largest difference of a score from the reference: {report.largest_difference:.2g}")
    for pair in report.pairs:
        for which, reward in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            if isinstance(reward, Unmeasured):
                console.print(f"unscored: {pair.id}, {which}: {reward.reason}: {reward.detail}", style="red")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
