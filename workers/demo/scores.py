"""Scores a policy on held-out problems, and renders the demo's report.

Episodes and rewards are those of a run, but without its Redis streams. The report is a table of numbers, and
conversations on the same problem before and after training.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from rich.columns import Columns
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from stream.records import Completion, Group
from stream.validity import Measured
from stream.wording import format_counts, format_duration
from workers.datasets.row_mapping import row_to_prompt
from workers.evaluate.standalone_rollout import roll_out_and_score
from workers.runs.summary import RunSummary
from workers.settings import Settings

_EPISODES = 4
"""Sampled episodes of each problem."""
_SHOWN = 3
"""Problems whose first episode is shown to the user."""


class DemoScore(Struct, kw_only=True):
    """Score of a policy on the held-out problems."""

    sampled: float
    """Mean reward of measured episodes, several per problem, at the run's temperature; NaN if there are none."""
    greedy: float
    """Mean reward of measured episodes, one per problem, at temperature 0; NaN if there are none."""
    unmeasured: int
    """Number of episodes without a measured reward, sampled and greedy ones together."""
    turns: float
    """Mean number of turns of the sampled episodes."""
    samples: list[Completion]
    """First sampled episode of each of the first problems, to show to the user."""


async def score_policy(settings: Settings, url: str, model: Path, rows: Sequence[dict[str, Any]]) -> DemoScore:
    """Sample every row several times at the run's temperature, and once greedily, on the engine at `url`.

    Rewards are those of `settings`. A control run may train on permuted rewards: to score its policy, pass settings
    with the real ones.
    """
    sampled = await _play(settings, url, model, rows, _EPISODES, settings.rollout.temperature)
    greedy = await _play(settings, url, model, rows, 1, 0.0)
    completions = [c for group in sampled for c in group.completions]
    return DemoScore(
        sampled=_mean(completions),
        greedy=_mean([c for group in greedy for c in group.completions]),
        unmeasured=sum(not isinstance(c.reward, Measured) for g in (*sampled, *greedy) for c in g.completions),
        turns=sum(c.turns for c in completions) / len(completions),
        samples=[group.completions[0] for group in sampled[:_SHOWN]],
    )


async def _play(
    settings: Settings, url: str, model: Path, rows: Sequence[dict[str, Any]], episodes: int, temperature: float
) -> list[Group]:
    """Return one scored group per row, in the order of the rows."""
    limits = msgspec.structs.replace(settings.rollout, temperature=temperature, group_size=episodes)
    settings = msgspec.structs.replace(settings, rollout=limits)
    prompts = [row_to_prompt(row, number, 0, settings=settings) for number, row in enumerate(rows)]
    return await roll_out_and_score(settings, [url], model, prompts)


def _mean(completions: Sequence[Completion]) -> float:
    values = [c.reward.value for c in completions if isinstance(c.reward, Measured)]
    return sum(values) / len(values) if values else float("nan")


def score_table(before: DemoScore, after: DemoScore, summary: RunSummary) -> RenderableType:
    """Return a table of scores before and after, and a table of the run's figures."""
    scores = Table(title="held-out problems", title_justify="left", box=None, pad_edge=False)
    for heading in ("", "before", "after", "rise"):
        scores.add_column(heading, justify="left" if not heading else "right")
    for name, first, second in (
        ("score, sampled", before.sampled, after.sampled),
        ("score, greedy", before.greedy, after.greedy),
        ("turns", before.turns, after.turns),
    ):
        scores.add_row(name, f"{first:.3f}", f"[bold]{second:.3f}[/]", f"{second - first:+.3f}")
    run = Table(title="the run", title_justify="left", box=None, pad_edge=False, show_header=False)
    dropped = format_counts(dict(sorted(summary.groups_dropped.items()))) or "none"
    staleness = summary.staleness
    was_measured = staleness.mean is not None and math.isfinite(staleness.mean)
    valid, rows = summary.completion_states.get("valid", 0), sum(summary.completion_states.values())
    for name, value in (
        ("steps", f"{summary.steps} in {format_duration(summary.seconds)}"),
        ("groups", f"{summary.groups_trained} trained · dropped: {dropped}"),
        ("completions", f"{valid} of {rows} valid"),
        (
            "staleness",
            f"mean {staleness.mean:.2f} · max {staleness.max:g} versions" if was_measured else "nothing was trained",
        ),
        ("tokens", f"{summary.tokens_per_second:,.0f} trained a second"),
        ("prompts", summary.prompt_counts_text),
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
