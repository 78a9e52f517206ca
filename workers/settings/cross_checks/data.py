"""Where prompts come from, and what judges completions."""

import math
from collections.abc import Iterator

from workers.settings.settings import Settings


def check_rewards(s: Settings) -> Iterator[str]:
    """`[[rewards]]`: something measures, and what it measures can be told apart."""
    if not s.environments and not s.rewards:
        yield "neither [environments] nor [[rewards]] is set, so nothing would measure a reward; add one"
    names = [reward.name or reward.ref.rpartition(":")[2] for reward in s.rewards]
    for place, name in enumerate(names):
        if name in names[:place]:
            yield (
                f"rewards[{names.index(name)}] and rewards[{place}] are both called {name!r}, so that their parts "
                "could not be told apart; give one of them another name"
            )
        if name == "env":
            yield f"rewards[{place}].name is 'env', as the environment's own part is called; set it to another name"
    for place, reward in enumerate(s.rewards):
        if not math.isfinite(reward.weight):
            yield f"rewards[{place}].weight is {reward.weight}, so no reward would be a finite number; set it to one"


def check_datasets(s: Settings) -> Iterator[str]:
    """`[data]`: one data set or several, and environments that there are."""
    if bool(s.data.path) == bool(s.data.mix):
        both = "both are" if s.data.path else "neither is"
        yield f"data.path names one data set and [[data.mix]] several, and {both} set; set one of them"
    if s.data.mix and s.data.name:
        yield "data.name is of a single data set; give each of [[data.mix]] its own"
    for number, each in enumerate(s.data.mix):
        if math.isinf(each.weight):
            yield f"data.mix[{number}].weight is inf, which is no share of the prompts; set it to a finite number"
    has_weight = [each.weight > 0 for each in s.data.mix]
    if any(has_weight) and not all(has_weight):
        yield "some of [[data.mix]] have a weight and some have none; give all of them one, or none"
    for place, name in [("data", s.data.environment), *((f"data.mix {m.path!r}", m.environment) for m in s.data.mix)]:
        if name and name not in s.environments:
            known = ", ".join(s.environments) or "none"
            yield f"{place}: environment {name!r} is unknown; [environments] has: {known}"
    if not s.data.prompt and not s.environments:
        yield "data.prompt is empty, so that prompts come from reset, but there are no [environments]; name the column"
