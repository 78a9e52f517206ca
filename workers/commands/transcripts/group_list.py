"""`penstock groups`: list a run's groups, one line each."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from msgspec import Struct
from rich.table import Table
from rich.text import Text

from stream.connection.run_connection import RunConnection
from stream.errors import PenstockError
from stream.operator.unfinished_groups import unfinished_groups
from workers.commands.run_files import saved_settings
from workers.commands.transcripts.run_completions import RunCompletion, unfinished_completions
from workers.commands.transcripts.selection import Filter
from workers.run.run_info import RunLocation, find_run, with_run
from workers.runs.groups import ArchivedRunGroups
from workers.runs.transcript import escape_controls
from workers.terminal.output import make_console, print_json, print_note


class RunGroup(Struct, frozen=True):
    """One group of a run, of which a completion matches the filter."""

    completions: list[RunCompletion]
    """All of them."""

    def describe(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        first = self.completions[0]
        rewards = [each.reward for each in self.completions if each.reward is not None]
        return {
            "prompt_id": first.group.prompt.id,
            "environment": first.group.prompt.environment,
            "outcome": first.outcome,
            "step": first.step,
            "versions": sorted({version for each in self.completions for version in each.versions}),
            "completions": len(self.completions),
            "valid": sum(not each.why_invalid for each in self.completions),
            "ends": [each.end for each in self.completions],
            "rewards": [each.reward for each in self.completions],
            "reward_mean": sum(rewards) / len(rewards) if rewards else None,
            "attempt": first.group.attempt,
            "worker": first.group.worker,
            "sampled_at": first.group.rolled_out_at,
        }


class FoundGroups(Struct, frozen=True):
    """The newest groups that match a filter."""

    groups: list[RunGroup]
    archived: ArchivedRunGroups
    """All groups in the archive."""


def list_groups(target: str | None, redis: str, filter_: Filter, count: int, *, as_json: bool = False) -> None:
    """Print the newest groups with a completion that matches.

    Raises:
        PenstockError: there is no such run, or no group of it matches.
    """
    found = find_groups(target, redis, filter_, count)
    if as_json:
        for group in found.groups:
            print_json(group.describe())
        return
    console = make_console()
    console.print(_table([group.describe() for group in found.groups]))
    shown = f"{len(found.groups):,} group{'' if len(found.groups) == 1 else 's'}"
    text = f"{shown}, the newest first; the archive has {len(found.archived):,}"
    console.print(Text(text, "bright_black"))


def find_groups(target: str | None, redis: str, filter_: Filter, count: int) -> FoundGroups:
    """Return the newest groups with a completion that matches, those without an outcome first.

    Raises:
        PenstockError: there is no such run, or no group of it matches.
    """
    location = find_run(target, redis, must_have_begun=False)
    settings, folder = saved_settings(location, "listing groups")
    archived = ArchivedRunGroups(folder)
    found = _unfinished(location, filter_, count) if location.url and filter_.steps is None else []
    for group in _matching(_archived(archived, filter_), filter_):
        if len(found) >= count:
            break
        found.append(group)
    if not found and not location.url and filter_.steps is None and (folder / "redis").is_dir():
        found = _unfinished(location, filter_, count)  # what a killed run left on its private server
    for note in archived.damaged[:3]:
        print_note(note)
    if not found:
        which = f" matches {filter_}" if str(filter_) else " is there yet"
        raise PenstockError(f"no group of run {settings.run.name!r}{which}; its archive has {len(archived)} groups")
    return FoundGroups(found, archived)


def _archived(archived: ArchivedRunGroups, filter_: Filter) -> Iterator[list[RunCompletion]]:
    completions = archived.completions(filter_.steps, newest_first=True)
    return (list(each) for _, each in groupby(completions, key=lambda found: id(found.group)))


def _matching(groups: Iterable[list[RunCompletion]], filter_: Filter) -> Iterator[RunGroup]:
    return (RunGroup(group) for group in groups if any(map(filter_.matches, group)))


def _unfinished(location: RunLocation, filter_: Filter, count: int) -> list[RunGroup]:
    """Return matching groups that the server has; a server that cannot be read is a note."""

    async def read(connection: RunConnection) -> list[RunGroup]:
        found: list[RunGroup] = []
        async for _, group in unfinished_groups(connection):
            found += _matching([list(unfinished_completions(group))], filter_)
            if len(found) >= count:
                break
        return found

    try:
        return with_run(location, read)
    except PenstockError as error:
        print_note(f"unfinished groups could not be read: {error}")
        return []


def _table(groups: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    table.add_column("group", no_wrap=True, overflow="ellipsis", min_width=12)
    for heading, justify in (("step", "right"), ("outcome", "left"), ("versions", "right"), ("reward", "right")):
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("rewards", no_wrap=True, overflow="ellipsis", min_width=8)
    table.add_column("valid", justify="right", no_wrap=True)
    table.add_column("environment", no_wrap=True, overflow="ellipsis")
    for group in groups:
        versions = group["versions"]
        rewards = " ".join("-" if reward is None else f"{reward:.3g}" for reward in group["rewards"])
        table.add_row(
            escape_controls(group["prompt_id"]),
            "" if group["step"] is None else str(group["step"]),
            Text(group["outcome"], "green" if group["outcome"] == "trained" else "yellow"),
            "-".join(str(version) for version in sorted({*versions[:1], *versions[-1:]})),
            "-" if group["reward_mean"] is None else f"{group['reward_mean']:.3g}",
            rewards,
            f"{group['valid']} of {group['completions']}",
            escape_controls(group["environment"] or ""),
        )
    return table
