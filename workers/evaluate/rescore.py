"""Score a run's archived groups with other reward functions, without sampling.

Groups and frozen environment snapshots come from the run's archive. Reward parts that an environment measured itself
(`env`, `env.KEY`) are kept, because the episode cannot be repeated; all other parts are replaced. The run's files are
only read. The comparison has its own folder::

    RUN/rescored/NAME/  completions.jsonl   one line per completion: conversation, old and new reward, old and new parts
                        summary.json        the summary that the command prints

Compare old and new rewards: means, correlation, order within groups, and changes of validity.
"""

import itertools
import math
import os
import shutil
import tomllib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from envs.factory import EnvironmentFactory
from envs.rewards import RewardFunction
from stream.errors import PenstockError, SettingsError
from stream.records import Completion, Group, Message, RewardPart
from stream.trainer.ledger_records import LedgerRecord, encode_outcome
from stream.validity import Measured, Reward
from workers.role.rewards import load_factories, load_reward_function
from workers.runs.find import open_run
from workers.runs.groups import ArchivedRunGroups
from workers.score.worker import score_group
from workers.settings import Settings
from workers.settings.toml_file import parse_rewards
from workers.terminal.output import print_json


@dataclass(frozen=True, slots=True)
class RewardComparison:
    """Old and new reward of one completion."""

    prompt: str
    environment: str
    old: Reward | None
    new: Reward | None


class EnvironmentSummary(Struct, kw_only=True):
    """Comparison for one environment, over the completions that are measured both times."""

    environment: str
    completions: int
    both_measured: int
    old_mean: float | None
    new_mean: float | None
    correlation: float | None
    """Pearson correlation; None if either side is constant."""
    order_agreement: float | None
    """Fraction of pairs that keep their order, over pairs of one group with different old rewards; a new tie counts
    half."""


class RescoreSummary(Struct, kw_only=True):
    """Comparison of old and new rewards over all archived groups."""

    groups: int
    missing: int
    """Groups in the ledger that are missing from the archive."""
    environments: list[EnvironmentSummary]
    """One entry per environment; with several, `all` comes first."""
    validity: dict[str, int]
    """Completions by change of validity: `measured -> raised`; unchanged: `measured`, `timeout`, ..."""


def summarize(comparisons: Sequence[RewardComparison], *, groups: int, missing: int) -> RescoreSummary:
    """Summarize the comparisons by environment and over all."""
    by_environment: dict[str, list[RewardComparison]] = defaultdict(list)
    for each in comparisons:
        by_environment[each.environment].append(each)
    rows = [_summary(name, part) for name, part in sorted(by_environment.items())]
    if len(rows) > 1:
        rows.insert(0, _summary("all", comparisons))
    changes = Counter(_validity_change(each) for each in comparisons)
    return RescoreSummary(groups=groups, missing=missing, environments=rows, validity=dict(changes.most_common()))


def _summary(name: str, comparisons: Sequence[RewardComparison]) -> EnvironmentSummary:
    pairs = [
        (each.prompt, each.old.value, each.new.value)
        for each in comparisons
        if isinstance(each.old, Measured) and isinstance(each.new, Measured)
    ]
    old, new = [pair[1] for pair in pairs], [pair[2] for pair in pairs]
    return EnvironmentSummary(
        environment=name,
        completions=len(comparisons),
        both_measured=len(pairs),
        old_mean=_mean(old),
        new_mean=_mean(new),
        correlation=correlation(old, new),
        order_agreement=order_agreement(pairs),
    )


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Return the Pearson correlation; None for fewer than two values, or if either side is constant."""
    mean_x, mean_y = _mean(xs), _mean(ys)
    if len(xs) < 2 or mean_x is None or mean_y is None or len(set(xs)) == 1 or len(set(ys)) == 1:
        return None
    dx, dy = [x - mean_x for x in xs], [y - mean_y for y in ys]
    together, alone_x, alone_y = (
        math.fsum(a * b for a, b in zip(left, right, strict=True)) for left, right in ((dx, dy), (dx, dx), (dy, dy))
    )
    return together / math.sqrt(alone_x * alone_y)


def order_agreement(triples: Sequence[tuple[str, float, float]]) -> float | None:
    """Return how often two completions of a prompt keep their order.

    Args:
        triples: (prompt, old reward, new reward).

    Returns:
        Fraction of the pairs of one prompt with different old rewards; a new tie counts half; None without pairs.
    """
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for prompt, old, new in triples:
        groups[prompt].append((old, new))
    kept = [
        0.5 if a[1] == b[1] else float((a[0] < b[0]) == (a[1] < b[1]))
        for group in groups.values()
        for a, b in itertools.combinations(group, 2)
        if a[0] != b[0]
    ]
    return _mean(kept)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _validity_change(comparison: RewardComparison) -> str:
    before, now = _validity(comparison.old), _validity(comparison.new)
    return now if before == now else f"{before} -> {now}"


def _validity(reward: Reward | None) -> str:
    if reward is None:
        return "not scored"
    return "measured" if isinstance(reward, Measured) else str(reward.reason)


_GROUPS_IN_FLIGHT = 8
"""Groups scored concurrently, so that a reward model gets batches."""


class RescoredCompletion(Struct, kw_only=True):
    """One line of `completions.jsonl`."""

    prompt: str
    hash: str
    """Content hash of the group, as in the ledger."""
    outcome: str
    """Outcome of the group: `trained` or `dropped:REASON`."""
    completion: int
    environment: str | None
    old: Reward | None
    new: Reward | None
    old_parts: list[RewardPart]
    new_parts: list[RewardPart]
    prompt_messages: list[Message]
    messages: list[Message]


def rescore_and_print(
    target: str, file: Path | None, refs: Sequence[str], *, name: str, out: Path | None, as_json: bool = False
) -> None:
    """Score a run's archived groups again, write the comparison, and print its summary.

    Raises:
        PenstockError: there is no such run, no archived group, no such reward function, or the folder already exists.
    """
    settings, run_folder = open_run(target).files("rescoring")
    functions = _load_functions(file, refs)
    if name != Path(name).name or name == "..":
        raise SettingsError(
            f"--name {name}: a name without / is stored in {run_folder / 'rescored'}; use --out for another folder"
        )
    folder = out or run_folder / "rescored" / (name or (file.stem if file else "rescored"))
    if folder.exists():
        raise PenstockError(f"{folder} exists already: give this comparison another --name, or remove that folder")
    summary = anyio.run(rescore, settings, run_folder, functions, folder)
    if as_json:
        print_json({"folder": str(folder)} | msgspec.to_builtins(summary))
    else:
        _show(summary, folder)


def _load_functions(file: Path | None, refs: Sequence[str]) -> list[RewardFunction]:
    if file is None:
        return [RewardFunction.load(ref) for ref in refs]
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file}: not TOML: {error}") from error
    return [load_reward_function(reward) for reward in parse_rewards(table, str(file))]


async def rescore(
    settings: Settings, run_folder: Path, functions: Sequence[RewardFunction], folder: Path
) -> RescoreSummary:
    """Score every archived group of a run.

    Args:
        settings: settings of the run; its environments thaw the snapshots.
        run_folder: folder of the run; only read.
        functions: reward functions that replace the run's.
        folder: folder for the comparison; it appears when the comparison is complete.

    Raises:
        PenstockError: no group of the run is archived.
    """
    factories = await anyio.to_thread.run_sync(load_factories, settings)
    archived = await anyio.to_thread.run_sync(ArchivedRunGroups, run_folder)
    comparisons: list[RewardComparison] = []
    async with _atomic_folder(folder) as making, AsyncExitStack() as stack:
        ready = [await stack.enter_async_context(function.open()) for function in functions]
        file = await stack.enter_async_context(await anyio.open_file(making / "completions.jsonl", "wb"))
        async for lines in _rescore_in_chunks(archived, ready, factories, settings.rollout.call_timeout_s):
            await file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
            comparisons += [
                RewardComparison(line.prompt, line.environment or "", line.old, line.new)
                for line in lines
                if line.new is not None
            ]
        if not comparisons:
            raise PenstockError(f"{run_folder / 'groups'}: none of the run's groups is archived (archive.keep)")
        summary = summarize(comparisons, groups=len(archived), missing=archived.missing)
        text = msgspec.json.format(msgspec.json.encode(summary)) + b"\n"
        await anyio.Path(making / "summary.json").write_bytes(text)
    return summary


@asynccontextmanager
async def _atomic_folder(folder: Path) -> AsyncIterator[Path]:
    """Yield a temporary folder; rename it to `folder` on success, remove it on an error."""
    making = folder.with_name(f".{folder.name}.{os.getpid()}.making")
    await anyio.Path(making).mkdir(parents=True)
    try:
        yield making
        await anyio.Path(making).rename(folder)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(partial(shutil.rmtree, making, ignore_errors=True))
        raise


async def _rescore_in_chunks(
    archived: ArchivedRunGroups,
    functions: Sequence[RewardFunction],
    factories: dict[str, EnvironmentFactory],
    timeout_s: float,
) -> AsyncIterator[list[RescoredCompletion]]:
    """Yield the lines of `_GROUPS_IN_FLIGHT` groups at a time, in order."""
    groups = ((archived.records[number], archived.read(number)[0]) for number in archived.numbers())
    while chunk := await anyio.to_thread.run_sync(_next_chunk, groups):
        found: dict[int, list[RescoredCompletion]] = {}

        async def again(
            position: int, record: LedgerRecord, group: Group, found: dict[int, list[RescoredCompletion]]
        ) -> None:
            found[position] = await _rescore_group(record, group, functions, factories, timeout_s)

        async with anyio.create_task_group() as tasks:
            for position, (record, group) in enumerate(chunk):
                tasks.start_soon(again, position, record, group, found)
        yield [line for position in range(len(chunk)) for line in found[position]]


def _next_chunk(groups: Iterator[tuple[LedgerRecord, Group]]) -> list[tuple[LedgerRecord, Group]]:
    return [group for _, group in zip(range(_GROUPS_IN_FLIGHT), groups, strict=False)]


async def _rescore_group(
    record: LedgerRecord,
    group: Group,
    functions: Sequence[RewardFunction],
    factories: dict[str, EnvironmentFactory],
    timeout_s: float,
) -> list[RescoredCompletion]:
    """Score one group again, and return one line per completion."""
    fresh = msgspec.structs.replace(group, completions=[_keep_environment_parts(c) for c in group.completions])
    await score_group(fresh, functions, factories, timeout_s)
    return [
        RescoredCompletion(
            prompt=group.prompt.id,
            hash=record.hash,
            outcome=encode_outcome(record.outcome),
            completion=old.index,
            environment=group.prompt.environment,
            old=old.reward,
            new=new.reward,
            old_parts=old.parts,
            new_parts=new.parts,
            prompt_messages=old.prompt_messages,
            messages=old.messages,
        )
        for old, new in zip(group.completions, fresh.completions, strict=True)
    ]


def _keep_environment_parts(completion: Completion) -> Completion:
    """Return a copy with only the reward parts that the environment measured."""
    own = [part for part in completion.parts if part.name == "env" or part.name.startswith("env.")]
    return msgspec.structs.replace(completion, parts=own, reward=None)


def _show(summary: RescoreSummary, folder: Path) -> None:
    """Print the summary: a table of environments, and completions by change of validity."""
    console = Console(highlight=False, markup=False)
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column("environment")
    for title in ("completions", "both measured", "old mean", "new mean", "correlation", "same order"):
        table.add_column(title, justify="right")
    for row in summary.environments:
        numbers = (row.old_mean, row.new_mean, row.correlation, row.order_agreement)
        cells = ("-" if number is None else f"{number:.4g}" for number in numbers)
        table.add_row(row.environment or "-", str(row.completions), str(row.both_measured), *cells)
    console.print(table)
    for change, count in summary.validity.items():
        console.print(f"{change}: {count}")
    note = f", {summary.missing} more are not archived" if summary.missing else ""
    console.print(f"{summary.groups} groups{note}; {folder / 'completions.jsonl'}", soft_wrap=True)
