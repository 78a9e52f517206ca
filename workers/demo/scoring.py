"""Scores a policy on held-out problems with the pipeline's episode loop and reward, without streams."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from stream.records import Completion, Group
from stream.validity import Measured
from workers.datasets.row_mapping import row_to_prompt
from workers.evaluate.standalone_rollout import roll_out_and_score
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
    """Run every row several times at the run's temperature and once greedily on the engine at `url`.

    The reward is the one in `settings`; for a control run, pass settings with the real reward.
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
