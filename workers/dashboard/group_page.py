"""The page *Group*: the completions of one prompt side by side, and its way from the feeder to the gradient."""

from typing import Any, Final

import anyio.to_thread
from aiohttp import web
from msgspec import Struct

from stream.operator.unfinished_groups import find_unfinished_group
from stream.records import Completion, Group, TrainedCompletion
from stream.trainer.outcomes import encode_outcome
from workers.dashboard.conversation import ShownMessage
from workers.dashboard.dashboard import Dashboard
from workers.dashboard.group_page import FIRST, LAST, PAGE, visible_parts
from workers.dashboard.rendering import parse_number, render
from workers.dashboard.run_source import RunSource
from workers.dashboard.snapshot_panel import snapshot_panel
from workers.dashboard.token_panel import TokenChoice, TokenPanel
from workers.dashboard.token_view import COLORS
from workers.runs.groups import UNFINISHED, ArchivedRunGroups
from workers.runs.run import NoServerError
from workers.runs.transcript import (
    conversation,
    describe_end,
    describe_outcome,
    describe_part,
    describe_reward,
    describe_versions,
    invalid_reason,
    shorten_message,
)

COLUMNS: Final = 8
"""Completions side by side; links lead to the others."""


class FoundGroup(Struct, frozen=True, kw_only=True):
    """A group, with what is known about its end."""

    group: Group
    outcome: str
    """`trained`, `dropped:REASON` or `unfinished`."""
    place: str
    """Where the group is, in words."""
    step: int | None = None
    version: int | None = None
    """The trainer's policy version at the end of the group."""
    trained: list[TrainedCompletion | None] = []
    """What the step did with each completion; None for a greedy one, or if it was not archived."""

    def trained_of(self, completion: Completion) -> TrainedCompletion | None:
        """Return what the step did with one of the completions."""
        position = next(at for at, each in enumerate(self.group.completions) if each is completion)
        return self.trained[position] if position < len(self.trained) else None


class Column(Struct, frozen=True, kw_only=True):
    """One completion, as it is shown."""

    completion: Completion
    trained: TrainedCompletion | None
    first: list[ShownMessage]
    omitted: int
    """Messages between the first and the last ones."""
    last: list[ShownMessage]
    reward: str
    parts: list[str]
    """Parts of the reward that are not of one turn."""
    end: str
    invalid: str
    versions: str
    tokens: int
    panel: TokenPanel | None
    """None: its tokens are not shown."""


class Phase(Struct, frozen=True, kw_only=True):
    """One part of a group's way, in seconds from the moment when its prompt was fed."""

    name: str
    start: float
    seconds: float
    left: float
    """Share of the whole time before it, in percent."""
    width: float


async def show_group(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """The page *Group*."""
    source = await dashboard.source(request)
    found = await _find(dashboard, source, request)
    first = _number(request, "first")
    count = len(found.group.completions)
    first = min(first, max(0, count - 1)) // COLUMNS * COLUMNS
    choice = TokenChoice.from_query(request.query)
    values = await anyio.to_thread.run_sync(_page_values, source, found, first, choice)
    return dashboard.page("group.html", source, values)


async def send_messages(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """The messages of one completion that the page has left out, some at a time."""
    source = await dashboard.source(request)
    completion = _completion(await _find(dashboard, source, request), request)
    messages = await anyio.to_thread.run_sync(conversation, completion)
    start, end = _number(request, "from"), len(messages) - LAST
    shown = [shorten_message(message) for message in messages[start : min(end, start + PAGE)]]
    values = {
        "source": source,
        "id": request.query["id"],
        "completion": completion,
        "messages": shown,
        "start": start + len(shown),
        "omitted": max(0, end - start - len(shown)),
    }
    return _fragment("parts/messages.html", values)


async def send_message(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """One long message, whole."""
    source = await dashboard.source(request)
    completion = _completion(await _find(dashboard, source, request), request)
    messages = await anyio.to_thread.run_sync(conversation, completion)
    number = min(_number(request, "message"), len(messages) - 1)
    values = {"source": source, "id": request.query["id"], "completion": completion, "message": messages[number]}
    return _fragment("parts/message.html", values)


async def send_tokens(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """More tokens of one row of a completion."""
    source = await dashboard.source(request)
    found = await _find(dashboard, source, request)
    completion, choice = _completion(found, request), TokenChoice.from_query(request.query)
    panel = await anyio.to_thread.run_sync(
        choice.panel, source, completion, found.trained_of(completion), _number(request, "from")
    )
    values = {"source": source, "id": request.query["id"], "panel": panel, "colors": COLORS}
    return _fragment("parts/tokens.html", values)


async def send_snapshot(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """The final state of one completion's environment."""
    source = await dashboard.source(request)
    found = await _find(dashboard, source, request)
    completion = _completion(found, request)
    if completion.snapshot is None:
        raise web.HTTPNotFound(text=f"Completion {completion.index} has no snapshot.")
    panel = await snapshot_panel(
        source, found.group.prompt.environment, completion.index, completion.snapshot, dashboard.renders
    )
    return _fragment("parts/snapshot.html", {"panel": panel})


def phases(group: Group, now: float | None = None) -> list[Phase]:
    """Return the parts of a group's way whose times are known."""
    known = [
        ("waiting for a worker", group.prompt.fed_at, group.claimed_at),
        ("rollout", group.claimed_at, group.rolled_out_at),
        *(
            [
                ("waiting for a scorer", group.rolled_out_at, group.score_claimed_at),
                ("scoring", group.score_claimed_at, group.scored_at),
            ]
            if group.score_claimed_at
            else [("waiting for rewards, and scoring", group.rolled_out_at, group.scored_at)]
        ),
        *([("waiting for the trainer", group.scored_at, now)] if now else []),
    ]
    spans = [(name, start, end) for name, start, end in known if start and end and end >= start]
    if not spans:
        return []
    origin, total = spans[0][1], max(spans[-1][2] - spans[0][1], 1e-9)
    return [
        Phase(
            name=name,
            start=start - origin,
            seconds=end - start,
            left=round(100 * (start - origin) / total, 2),
            width=round(max(0.3, 100 * (end - start) / total), 2),
        )
        for name, start, end in spans
    ]


def _page_values(source: RunSource, found: FoundGroup, first: int, choice: TokenChoice) -> dict[str, Any]:
    group = found.group
    columns = []
    for completion in group.completions[first : first + COLUMNS]:
        trained = found.trained_of(completion)
        is_shown = completion.index in choice.completions
        panel = choice.panel(source, completion, trained) if is_shown else None
        columns.append(_column(completion, trained, panel))
    rows = [
        {
            "completion": each,
            "trained": found.trained_of(each),
            "reward": describe_reward(each.reward),
            "versions": describe_versions(each),
        }
        for each in group.completions
    ]
    return {
        "found": found,
        "query": {"id": group.prompt.id, "first": first or None, **choice.query},
        "color": choice.color,
        "colors": COLORS,
        "shown_tokens": sorted(choice.completions),
        "group": group,
        "columns": columns,
        "rows": rows,
        "first": first,
        "per_page": COLUMNS,
        "shown_first": FIRST,
        "phases": phases(group),
        "invalid_reason": invalid_reason,
        "why": describe_outcome(found.outcome),
    }


def _column(completion: Completion, trained: TrainedCompletion | None, panel: TokenPanel | None) -> Column:
    first, omitted, last = visible_parts(conversation(completion))
    return Column(
        completion=completion,
        trained=trained,
        first=[shorten_message(message) for message in first],
        omitted=omitted,
        last=[shorten_message(message) for message in last],
        reward=describe_reward(completion.reward),
        parts=[describe_part(part) for part in completion.parts if part.turn is None],
        end=describe_end(completion),
        invalid=invalid_reason(completion),
        versions=describe_versions(completion),
        tokens=sum(row.sampled_count for row in completion.rows),
        panel=panel,
    )


async def _find(dashboard: Dashboard, source: RunSource, request: web.Request) -> FoundGroup:
    """Return the group of an address: from the archive, else from the server.

    Raises:
        HTTPNotFound: neither has it.
    """
    prompt = request.query.get("id", "")
    groups = (await dashboard.groups(source)).groups
    if (number := groups.find(prompt)) is not None:
        return await anyio.to_thread.run_sync(_read_archived, groups, number)
    try:
        async with source.connect() as connection:
            unfinished = await find_unfinished_group(connection, prompt)
    except NoServerError:
        unfinished = None
    if unfinished is None:
        missing = (
            f"Neither the archive nor the server has a group of prompt {prompt!r} now. It may still be rolled out."
        )
        raise web.HTTPNotFound(text=groups.why_none(prompt) or missing)
    stage, group = unfinished
    place = "server, waiting for the trainer" if stage == "scored" else "server, waiting for rewards"
    return FoundGroup(group=group, outcome=UNFINISHED, place=place)


def _read_archived(groups: ArchivedRunGroups, number: int) -> FoundGroup:
    """Read a group from the archive. Blocks on files."""
    record = groups.records[number]
    group, trained = groups.read(number)
    done = iter(groups.annotations(number) or trained)
    return FoundGroup(
        group=group,
        outcome=encode_outcome(record.outcome),
        place="archive",
        step=record.step,
        version=record.version,
        trained=[None if each.greedy else next(done, None) for each in group.completions],
    )


def _completion(found: FoundGroup, request: web.Request) -> Completion:
    index = _number(request, "completion")
    for completion in found.group.completions:
        if completion.index == index:
            return completion
    raise web.HTTPNotFound(text=f"The group has no completion {index}.")


def _number(request: web.Request, name: str) -> int:
    return parse_number(request.query.get(name, "")) or 0


def _fragment(template: str, values: dict[str, Any]) -> web.Response:
    return web.Response(text=render(template, values), content_type="text/html", charset="utf-8")
