"""Score pairs of answers with a served reward model, optionally also with transformers, and print the accuracy."""

from collections.abc import Sequence
from pathlib import Path

import anyio
from rich.console import Console
from rich.table import Table

from envs.messages import build_conversation
from stream.errors import DataError
from stream.records import Message
from stream.validity import Measured, Unmeasured
from workers.commands.rewardbench.accuracy import BenchReport, PreferencePair, summarize
from workers.datasets.sources import open_source
from workers.role.exit_codes import ExitCode
from workers.settings import Data
from workers.terminal.output import print_json

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

        score = ReferenceClassifier(reference).score
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
    source = open_source(Data(path=str(file)))
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
