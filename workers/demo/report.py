"""Renders the demo's report: a table of numbers, and conversations on the same problem before and after training."""

import math
from typing import Any

from rich.columns import Columns
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from stream.records import Completion
from stream.validity import Measured
from workers.demo.scoring import DemoScore
from workers.runs.summary import RunSummary
from workers.terminal.progress import format_duration


def score_table(before: DemoScore, after: DemoScore, summary: RunSummary) -> RenderableType:
    """Return a table of scores before and after, and a table of the run's figures."""
    scores = Table(title="held-out problems", title_justify="left", box=None, pad_edge=False)
    for heading in ("", "before", "after", "rise"):
        scores.add_column(heading, justify="left" if not heading else "right")
    for name, one, other in (
        ("score, sampled", before.sampled, after.sampled),
        ("score, greedy", before.greedy, after.greedy),
        ("turns", before.turns, after.turns),
    ):
        scores.add_row(name, f"{one:.3f}", f"[bold]{other:.3f}[/]", f"{other - one:+.3f}")
    run = Table(title="the run", title_justify="left", box=None, pad_edge=False, show_header=False)
    dropped = ", ".join(f"{reason} {n}" for reason, n in sorted(summary.groups_dropped.items())) or "none"
    staleness = summary.staleness
    known = staleness.mean is not None and math.isfinite(staleness.mean)
    valid, rows = summary.completion_states.get("valid", 0), sum(summary.completion_states.values())
    for name, value in (
        ("steps", f"{summary.steps} in {format_duration(summary.seconds)}"),
        ("groups", f"{summary.groups_trained} trained · dropped: {dropped}"),
        ("completions", f"{valid} of {rows} valid"),
        (
            "staleness",
            f"mean {staleness.mean:.2f} · max {staleness.max:g} versions" if known else "nothing was trained",
        ),
        ("tokens", f"{summary.tokens_per_second:,.0f} trained a second"),
        ("books", summary.balance),
    ):
        run.add_row(Text(name, style="dim"), value)
    return Lines("", scores, "", run, "")


def conversations(row: dict[str, Any], before: Completion, after: Completion) -> RenderableType:
    """Return two conversations on one problem, before and after training, side by side."""
    panels = [_panel("before", before), _panel("after", after)]
    return Lines("", Text(row["problem"], style="bold"), Columns(panels, equal=True, expand=True))


def _panel(title: str, completion: Completion) -> Panel:
    text = Text()
    for message in completion.messages:
        calls = message.get("tool_calls") or []
        for call in calls:
            function = call.get("function", call)
            arguments = ", ".join(f"{k}={v}" for k, v in dict(function["arguments"]).items())
            text.append(f"{function['name']}({arguments})\n", style="cyan")
        if message["role"] == "tool":
            text.append(f"  = {message['content']}\n", style="dim")
        elif message.get("content") and not calls:
            text.append(f"{message['content']}\n")
    reward = completion.reward
    measured = isinstance(reward, Measured)
    good = measured and reward.value > 0  # type: ignore[union-attr]
    verdict = f"reward {reward.value:g}" if measured else "not measured"  # type: ignore[union-attr]
    text.append(verdict, style="green" if good else "red")
    return Panel(text, title=title, title_align="left", border_style="green" if good else "red")
