"""The page *Groups*: archived and waiting groups, filtered by the address, with a histogram of their rewards."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import anyio.to_thread
from aiohttp import web
from msgspec import Struct, structs

from stream.errors import SettingsError
from stream.operator.unfinished_groups import UnfinishedStage, read_newest_unfinished
from workers.dashboard.dashboard import Dashboard
from workers.dashboard.templating import parse_number
from workers.runs.group_index import GroupIndex, GroupSummary, summarize_group
from workers.runs.run import NoServerError, Run
from workers.runs.selection import CompletionFilter

PAGE_SIZE: Final = 50
MAX_BARS: Final = 24
_SEARCH_S: Final = 0.5
"""Time for one search; the page then says how far it came, and goes on from there."""
_WAITING: Final[dict[str, UnfinishedStage]] = {"trainer": "scored", "rewards": "groups"}
"""Values of the filter `at`, and the stage in which such groups are."""
_QUERY: Final = ("at", "step", "version", "reward", "end", "prompt")


class Bar(Struct, frozen=True):
    """One bar of a histogram: values from `low` to `high`, both of which occur."""

    low: float
    high: float
    count: int

    @property
    def reward_range(self) -> str:
        """The bar as a filter."""
        return repr(self.low) if self.low == self.high else f"{self.low!r}..{self.high!r}"


def histogram(values: Sequence[float], max_bars: int = MAX_BARS) -> list[Bar]:
    """Return a bar for each value if there are few, else bars of equal width, without empty ones."""
    counts: dict[float, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    if len(counts) <= max_bars:
        return [Bar(value, value, counts[value]) for value in sorted(counts)]
    low, high = min(counts), max(counts)
    bars: dict[int, Bar] = {}
    for value in sorted(counts):
        at = min(max_bars - 1, int((value / (high - low) - low / (high - low)) * max_bars))
        known = bars.get(at, Bar(value, value, 0))
        bars[at] = Bar(known.low, value, known.count + counts[value])
    return [bars[at] for at in sorted(bars)]


def parse_filter(query: Mapping[str, str]) -> CompletionFilter:
    """Make a filter of an address, with the words of the command line.

    Raises:
        SettingsError: one of them cannot be read.
    """
    step, version, reward, end, prompt = (
        query.get(name, "") for name in ("step", "version", "reward", "end", "prompt")
    )
    return CompletionFilter.parse(step=step, version=version, reward=reward, end=end, prompt=prompt)


async def groups_page(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """The page *Groups*."""
    run = await dashboard.run(request)
    query = {name: request.query.get(name, "") for name in _QUERY}
    values: dict[str, Any] = {"query": query, "problem": "", "here_before": request.query.get("before", "")}
    try:
        wanted = parse_filter(query)
    except SettingsError as error:
        wanted, values["problem"] = CompletionFilter(), str(error)
    if (stage := _WAITING.get(query.get("at", ""))) is not None:
        values |= await _waiting_groups(run, stage, wanted, values["here_before"])
    else:
        before = parse_number(values["here_before"])
        index = await dashboard.groups(run)
        values |= await anyio.to_thread.run_sync(_archived_groups, index, wanted, before)
    return dashboard.page("groups.html", run, values)


def _archived_groups(index: GroupIndex, wanted: CompletionFilter, before: int | None) -> dict[str, Any]:
    """Return what the page shows of archived groups. Blocks on files."""
    found = index.search(wanted, before, PAGE_SIZE, _SEARCH_S)
    bars = histogram(index.rewards(wanted))
    return {
        "groups": found.groups,
        "before": None if found.next_before is None else str(found.next_before),
        "is_interrupted": found.is_interrupted,
        "bars": bars,
        "most": max((bar.count for bar in bars), default=0),
        "ends": index.counts(),
        "total": len(index),
        "unread": index.unread,
        "missing": index.unreadable,
    }


async def _waiting_groups(run: Run, stage: UnfinishedStage, wanted: CompletionFilter, before: str) -> dict[str, Any]:
    """Return what the page shows of groups on the server."""
    groups: list[GroupSummary] = []
    next_before, problem = "", ""
    try:
        async with run.connect(start_server=False) as connection:
            page = await read_newest_unfinished(connection, stage, before, PAGE_SIZE, _SEARCH_S)
        summaries = [summarize_group(number, "unfinished", 0, group) for number, group in enumerate(page.groups)]
        groups = [each for each in summaries if each.matches(wanted) and wanted.has_text(each.prompt, each.text)]
        next_before = page.next_before
    except NoServerError as error:
        problem = f"{error}: groups without an outcome are on the server only"
    any_reward = structs.replace(wanted, rewards=None)
    bars = histogram([reward for group in groups for reward in group.matching_rewards(any_reward)])
    return {
        "groups": groups,
        "before": next_before or None,
        "is_interrupted": len(groups) < PAGE_SIZE and bool(next_before),
        "bars": bars,
        "most": max((bar.count for bar in bars), default=0),
        "ends": {},
        "total": None,
        "unread": 0,
        "missing": 0,
        "problem": problem,
    }
