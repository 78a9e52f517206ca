"""`penstock groups`: list a run's groups, one line each."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from stream.errors import PenstockError
from stream.wording import escape_controls, quantity
from workers.runs.run import Run
from workers.runs.selection import CompletionFilter
from workers.terminal.output import make_console, print_json, print_note


def list_groups(run: Run, wanted: CompletionFilter, count: int, *, as_json: bool = False) -> None:
    """Print the newest groups with a completion that matches.

    Raises:
        PenstockError: no group of it matches.
    """
    groups = run.groups(wanted, count=count)
    for note in groups.notes:
        print_note(note)
    if not groups:
        raise PenstockError(f"run {run.name!r} has {groups.why_empty()}")
    if as_json:
        for group in groups:
            print_json(group.describe())
        return
    console = make_console()
    console.print(_table([group.describe() for group in groups]))
    text = f"{quantity(len(groups), 'group')}, the newest first; the archive has {len(groups.archived):,}"
    console.print(Text(text, "bright_black"))


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
