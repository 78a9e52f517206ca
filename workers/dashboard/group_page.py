"""The page *Group*: the completions of one prompt side by side, and its way from the feeder to the gradient."""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import anyio.to_thread
from aiohttp import web
from msgspec import Struct, structs

from stream.operator.unfinished_groups import find_unfinished_group
from stream.records import Completion, Group, TrainedCompletion
from stream.trainer.ledger_records import encode_outcome
from workers.dashboard.dashboard import Dashboard
from workers.dashboard.templating import html_response, parse_number
from workers.dashboard.timeline_page import Axis, Bar
from workers.dashboard.token_view import COLORS, TokenChoice, TokenPanel
from workers.runs.branches import BranchView, describe_branches
from workers.runs.evaluations import read_groups
from workers.runs.groups import EVALUATED, UNFINISHED, ArchivedRunGroups
from workers.runs.phases import GroupTimes, StepTimes, main_phases
from workers.runs.run import NoServerError, Run
from workers.runs.snapshots import describe_snapshot
from workers.runs.transcript import (
    ConversationMessage,
    conversation,
    describe_end,
    describe_outcome,
    describe_part,
    describe_reward,
    describe_versions,
    invalid_reason,
    shorten_message,
)

_EVALUATED_ID: Final = re.compile(r"evaluation-(\d{1,9})/.+")
"""The id of a group of an evaluation in an address: its step, then the prompt's id."""
FIRST: Final = 4
LAST: Final = 3
"""Messages at the beginning and the end of a long conversation that are shown at once."""
PAGE: Final = 40
"""Messages that are loaded at a time."""
SHOWN: Final = 32
"""Messages after which further branches of a completion show none, until they are asked for."""
COLUMNS: Final = 8
"""Completions side by side; links lead to the others."""


_LINKED_ROWS: Final = 6
"""Rows of a branch with a link each; the token view leads to the others."""


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


class Section(Struct, frozen=True, kw_only=True):
    """The messages of one branch, or of a completion without branches, of which some may be left out."""

    branch: BranchView | None
    first: list[ConversationMessage]
    start: int
    """Position in the conversation of the first message that is left out."""
    omitted: int
    last: list[ConversationMessage]


class Column(Struct, frozen=True, kw_only=True):
    """One completion, as it is shown."""

    completion: Completion
    trained: TrainedCompletion | None
    branches: list[BranchView]
    row_labels: dict[int, str]
    """The branch of each row; empty without branches."""
    sections: list[Section]
    reward: str
    parts: list[str]
    """Parts of the reward that are not of one turn."""
    end: str
    invalid: str
    versions: str
    tokens: int
    panel: TokenPanel | None
    """None: its tokens are not shown."""


def visible_parts(
    messages: Sequence[ConversationMessage],
) -> tuple[list[ConversationMessage], int, list[ConversationMessage]]:
    """Return the first messages, the number of those between, and the last ones."""
    if len(messages) <= FIRST + LAST + 1:
        return list(messages), 0, []
    return list(messages[:FIRST]), len(messages) - FIRST - LAST, list(messages[-LAST:])


async def group_page(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """The page *Group*."""
    run = await dashboard.run(request)
    found = await _find(dashboard, run, request)
    first = _number(request, "first")
    count = len(found.group.completions)
    first = min(first, max(0, count - 1)) // COLUMNS * COLUMNS
    choice = TokenChoice.from_query(request.query)
    values = await anyio.to_thread.run_sync(_page_values, run, found, first, choice)
    steps = await anyio.to_thread.run_sync(dashboard.metrics(run).step_times)
    values["phase_bars"] = _phase_bars(found, steps)
    return dashboard.page("group.html", run, values)


async def messages_fragment(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """The messages of one completion that the page has left out, some at a time."""
    run = await dashboard.run(request)
    completion = _completion(await _find(dashboard, run, request), request)
    messages = await anyio.to_thread.run_sync(conversation, completion)
    start, end = _number(request, "from"), min(_number(request, "to"), len(messages))
    shown = [shorten_message(message) for message in messages[start : min(end, start + PAGE)]]
    values = {
        "run": run,
        "id": request.query["id"],
        "completion": completion,
        "messages": shown,
        "start": start + len(shown),
        "omitted": max(0, end - start - len(shown)),
    }
    return html_response("parts/messages.html", values)


async def message_fragment(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """One long message, whole."""
    run = await dashboard.run(request)
    completion = _completion(await _find(dashboard, run, request), request)
    messages = await anyio.to_thread.run_sync(conversation, completion)
    number = min(_number(request, "message"), len(messages) - 1)
    values = {"run": run, "id": request.query["id"], "completion": completion, "message": messages[number]}
    return html_response("parts/message.html", values)


async def tokens_fragment(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """More tokens of one row of a completion."""
    run = await dashboard.run(request)
    found = await _find(dashboard, run, request)
    completion, choice = _completion(found, request), TokenChoice.from_query(request.query)
    panel = await anyio.to_thread.run_sync(
        choice.panel, run, completion, found.trained_of(completion), _number(request, "from")
    )
    values = {"run": run, "id": request.query["id"], "panel": panel, "colors": COLORS}
    return html_response("parts/tokens.html", values)


async def snapshot_fragment(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """The final state of one completion's environment."""
    run = await dashboard.run(request)
    found = await _find(dashboard, run, request)
    completion = _completion(found, request)
    if completion.snapshot is None:
        raise web.HTTPNotFound(text=f"Completion {completion.index} has no snapshot.")
    settings = await anyio.to_thread.run_sync(lambda: run.settings)
    async with dashboard.renders:
        view = await describe_snapshot(settings, found.group.prompt.environment, completion.snapshot)
    return html_response("parts/snapshot.html", {"panel": view, "completion": completion.index})


def _phase_bars(found: FoundGroup, steps: Mapping[int, StepTimes]) -> list[Bar]:
    """Return the phases of a group whose times are known, as bars."""
    step = steps.get(found.step or 0) if found.outcome == "trained" else None
    phases = main_phases(GroupTimes.of_group(found.group), step)
    return Axis.of_phases(phases).bars(phases) if phases else []


def _page_values(run: Run, found: FoundGroup, first: int, choice: TokenChoice) -> dict[str, Any]:
    group = found.group
    columns = []
    for completion in group.completions[first : first + COLUMNS]:
        trained = found.trained_of(completion)
        is_shown = completion.index in choice.completions
        panel = choice.panel(run, completion, trained) if is_shown else None
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
        "shown_rows": _LINKED_ROWS,
        "invalid_reason": invalid_reason,
        "why": describe_outcome(found.outcome),
    }


def _column(completion: Completion, trained: TrainedCompletion | None, panel: TokenPanel | None) -> Column:
    branches = describe_branches(completion, trained)
    return Column(
        completion=completion,
        trained=trained,
        branches=branches,
        row_labels={row: branch.label for branch in branches for row in branch.rows},
        sections=_sections(conversation(completion), branches),
        reward=describe_reward(completion.reward),
        parts=[describe_part(part) for part in completion.parts if part.turn is None],
        end=describe_end(completion),
        invalid=invalid_reason(completion),
        versions=describe_versions(completion),
        tokens=sum(row.sampled_count for row in completion.rows),
        panel=panel,
    )


def _sections(messages: Sequence[ConversationMessage], branches: Sequence[BranchView]) -> list[Section]:
    """Return the messages of each branch, in the order of the conversation."""
    views = {branch.number: branch for branch in branches}
    sections: list[Section] = []
    shown = 0
    for number, group in itertools.groupby(messages, key=lambda message: message.branch):
        said = list(group)
        first, omitted, last = visible_parts(said) if shown < SHOWN else ([], len(said), [])
        shown += len(first) + len(last)
        section = Section(
            branch=None if number is None else views[number],
            first=[shorten_message(message) for message in first],
            start=said[0].number + len(first),
            omitted=omitted,
            last=[shorten_message(message) for message in last],
        )
        sections.append(section)
    return sections


async def _find(dashboard: Dashboard, run: Run, request: web.Request) -> FoundGroup:
    """Return the group of an address: of an evaluation, from the archive, or else from the server.

    Raises:
        HTTPNotFound: neither has it.
    """
    prompt = request.query.get("id", "")
    if (evaluated := _EVALUATED_ID.fullmatch(prompt)) is not None:
        return await anyio.to_thread.run_sync(_read_evaluated, run, prompt, int(evaluated[1]))
    groups = (await dashboard.groups(run)).groups
    if (number := groups.find(prompt)) is not None:
        return await anyio.to_thread.run_sync(_read_archived, groups, number)
    try:
        async with run.connect(start_server=False) as connection:
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


def _read_evaluated(run: Run, address: str, step: int) -> FoundGroup:
    """Read a group of an evaluation; its id becomes the one in the address, for links. Blocks on files."""
    for group in read_groups(run.file(), step):
        if group.prompt.id == address.partition("/")[2]:
            group.prompt = structs.replace(group.prompt, id=address)
            return FoundGroup(group=group, outcome=EVALUATED, place=f"evaluation of step {step}")
    raise web.HTTPNotFound(text=f"The evaluation of step {step} has no such group, or is not kept any more.")


def _read_archived(groups: ArchivedRunGroups, number: int) -> FoundGroup:
    """Read a group from the archive. Blocks on files."""
    record = groups.records[number]
    group, trained = groups.read(number)
    done = iter(groups.trained_tokens(number) or trained)
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
