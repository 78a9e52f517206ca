"""`penstock show`: print completions of a run as conversations."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
from rich.console import Console
from rich.text import Text

from envs.snapshot.rendering import RenderedSnapshot
from stream.connection.run_connection import RunConnection
from stream.errors import PenstockError, ReferenceNotFoundError
from stream.operator.unfinished_groups import unfinished_groups
from stream.records import Row
from workers.commands.run_files import saved_settings
from workers.commands.transcripts.run_completions import RunCompletion, describe_run_completion, unfinished_completions
from workers.commands.transcripts.selection import Chosen, Filter
from workers.run.run_info import RunLocation, find_run, with_run
from workers.runs.export import token_rows
from workers.runs.groups import ArchivedRunGroups
from workers.runs.snapshots import render_of_run
from workers.runs.tokens import logprob_differences, rejected_tokens
from workers.runs.transcript import DecodeRow, describe_outcome, escape_controls
from workers.runtime.transcript import wrapped_lines
from workers.settings import Settings
from workers.terminal.lines import completion_lines
from workers.terminal.output import print_json, print_note

_MAX_MESSAGE_CHARACTERS: Final = 3000
"""Longer messages are shortened without `--full`."""
_MIN_WIDTH, _MAX_WIDTH = 40, 140


def show_completions(
    target: str | None, redis: str, filter_: Filter, chosen: Chosen, *, full: bool = False, as_json: bool = False
) -> None:
    """Print chosen completions of a run.

    Raises:
        PenstockError: there is no such run, or no completion of it matches.
    """
    location = find_run(target, redis, must_have_begun=False)
    settings, folder = saved_settings(location, "showing completions")
    archived = ArchivedRunGroups(folder)
    notes: list[str] = []
    if location.url and filter_.steps is None:
        notes += _offer_unfinished(location, filter_, chosen)
    _offer_archived(archived, filter_, chosen)
    if not location.url and not chosen.offered and filter_.steps is None and (folder / "redis").is_dir():
        notes += _offer_unfinished(location, filter_, chosen)  # what a killed run left on its private server
    notes += archived.damaged[:3]
    for note in notes:
        print_note(note)
    found = [archived.annotate(each) for each in chosen.result()]
    if not found:
        raise PenstockError(_why_nothing(settings, archived, filter_))
    rendered = _render_snapshots(settings, found)
    if as_json:
        for each, state in zip(found, rendered, strict=True):
            print_json(completion_as_json(each) | {"rendered": state.text or None, "render_error": state.error or None})
        return
    _print(list(zip(found, rendered, strict=True)), chosen, archived, settings, full=full)


def _render_snapshots(settings: Settings, found: Sequence[RunCompletion]) -> list[RenderedSnapshot]:
    """Return what the environments' own `render` says of each completion's final state."""
    by_environment: dict[str | None, list[tuple[int, bytes]]] = {}
    for position, each in enumerate(found):
        if each.completion.snapshot is not None:
            of_environment = by_environment.setdefault(each.group.prompt.environment, [])
            of_environment.append((position, each.completion.snapshot))
    rendered = [RenderedSnapshot()] * len(found)

    async def render() -> None:
        for environment, snapshots in by_environment.items():
            try:
                states = await render_of_run(settings, environment, [snapshot for _, snapshot in snapshots])
            except ReferenceNotFoundError as error:
                print_note(f"final states are not rendered: {error}")
                continue
            for (position, _), state in zip(snapshots, states, strict=True):
                rendered[position] = state

    anyio.run(render)
    return rendered


def _offer_unfinished(location: RunLocation, filter_: Filter, chosen: Chosen) -> list[str]:
    """Offer the groups that the server has; a server that cannot be read is a note."""

    async def offer(connection: RunConnection) -> None:
        async for _, group in unfinished_groups(connection):
            for found in filter(filter_.matches, unfinished_completions(group)):
                chosen.offer(found)
            if chosen.is_complete:
                return

    try:
        with_run(location, offer)
    except PenstockError as error:
        return [f"unfinished groups could not be read: {error}"]
    return []


def _offer_archived(archived: ArchivedRunGroups, filter_: Filter, chosen: Chosen) -> None:
    for found in archived.completions(filter_.steps, newest_first=True):
        if chosen.is_complete:
            return
        if filter_.matches(found):
            chosen.offer(found)


def _why_nothing(settings: Settings, archived: ArchivedRunGroups, filter_: Filter) -> str:
    if why := archived.why_none(filter_.prompt):
        return f"{why} `penstock dead list` shows dead letters with their errors"
    if not len(archived):
        kept = " (archive.keep = 'none' keeps no group)" if settings.archive.keep == "none" else ""
        return f"run {settings.run.name!r} has no completion yet{kept}"
    first, last = archived.steps or (0, 0)
    return (
        f"no completion of run {settings.run.name!r} matches {filter_}; its archive has {len(archived)} groups of "
        f"steps {first} to {last}"
    )


def completion_as_json(found: RunCompletion) -> dict[str, Any]:
    """Return a completion as `--json` prints it."""
    completion = found.completion
    return describe_run_completion(found) | {
        "parts": msgspec.to_builtins(completion.parts),
        "prompt_messages": completion.prompt_messages,
        "messages": completion.messages,
        "tool_runs": [{"seconds": run.seconds, "is_error": run.is_error} for run in completion.tool_runs],
        "extra": completion.extra,
        "seconds": completion.seconds,
        "rows": token_rows(found),
    }


def _print(
    found: list[tuple[RunCompletion, RenderedSnapshot]],
    chosen: Chosen,
    archived: ArchivedRunGroups,
    settings: Settings,
    *,
    full: bool,
) -> None:
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    width = min(_MAX_WIDTH, max(_MIN_WIDTH, console.width))
    decode = _tokenizer(settings)
    for each, state in found:
        console.print(heading(each, width))
        for line in completion_lines(
            each.completion, width=width, max_characters=0 if full else _MAX_MESSAGE_CHARACTERS, decode=decode
        ):
            console.print(line.rich_text())
        for label, text in (*state_paragraphs(state), *step_paragraphs(each)):
            for line in wrapped_lines(label, text, width):
                console.print(line.rich_text())
        console.print()
    steps = archived.steps
    of = f"steps {steps[0]} to {steps[1]}" if steps else "no step yet"
    missing = f", {archived.missing:,} more are not archived any more (archive.keep)" if archived.missing else ""
    more = "" if chosen.is_complete else f" of {chosen.offered:,} that match"
    shown = f"{len(found):,} completion{'' if len(found) == 1 else 's'}{more}"
    text = f"{shown}; the archive of {settings.run.name} has {len(archived):,} groups, {of}{missing}"
    console.print(text, style="bright_black")


def heading(found: RunCompletion, width: int) -> Text:
    """Return the line above a completion."""
    trained = found.trained
    advantage = "" if trained is None or trained.advantage is None else f" · advantage {trained.advantage:+.3g}"
    masks = trained is not None and not trained.loss_tokens and trained.state != found.outcome
    masked = f" · no loss: {trained.state}" if trained is not None and masks else ""
    parts = [
        f"{escape_controls(found.group.prompt.id)} #{found.completion.index}",
        *([f"step {found.step}"] if found.step is not None else []),
        f"{found.outcome}{advantage}{masked}",
        *([found.group.prompt.environment] if found.group.prompt.environment else []),
        *(["greedy"] if found.completion.greedy else []),
    ]
    head = Text(f"── {'  '.join(parts)} ", "bold")
    return head.append("─" * max(0, width - head.cell_len))


def state_paragraphs(state: RenderedSnapshot) -> list[tuple[str, str]]:
    """Return label and text of the rendered final state of the environment, or why it cannot be rendered."""
    text = state.error or state.text.rstrip("\n")
    return [("state", text)] if text else []


def step_paragraphs(found: RunCompletion) -> list[tuple[str, str]]:
    """Return label and text of why the group was not trained, or what the step did with the completion's tokens."""
    if why := describe_outcome(found.outcome):
        return [("trainer", why)]
    trained = found.trained
    if trained is None or not trained.rows:
        return []
    sampled = sum(row.sampled_count for row in found.completion.rows)
    parts = [f"loss on {trained.loss_tokens:,} of {sampled:,} sampled tokens"]
    parts += [f"{count:,} rejected by {rule}" for rule, count in rejected_tokens(trained).items()]
    if differences := logprob_differences(trained):
        mean, largest = sum(differences) / len(differences), max(differences, key=abs)
        parts.append(f"log-prob against the engine's {mean:+.2g} on average, {largest:+.2g} at most")
    return [("trainer", "; ".join(parts))]


def _tokenizer(settings: Settings) -> DecodeRow:
    """Return a function that decodes rows with the run's tokenizer, which is loaded when it is first needed."""
    loaded: list[Callable[[list[int]], str]] = []

    def decode(row: Row) -> tuple[str, str]:
        if not loaded:
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(Path(settings.model.path) / "tokenizer.json"))
            loaded.append(partial(tokenizer.decode, skip_special_tokens=False))
        return loaded[0](row.prompt.tolist()), loaded[0](row.tokens.tolist())

    return decode
