"""Checks of `[data]`, `[environments]` and `[[rewards]]`."""

import math
from collections.abc import Iterator

from workers.settings.settings import Settings


def check_rewards(s: Settings) -> Iterator[str]:
    """`[[rewards]]`: something measures a reward, and the parts have different names."""
    if not s.environments and not s.rewards:
        yield "neither [environments] nor [[rewards]] is set, so nothing would measure a reward; add one"
    names = [reward.name or reward.ref.rpartition(":")[2] for reward in s.rewards]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield (
                f"rewards[{names.index(name)}] and rewards[{index}] both have the name {name!r}, so their "
                "parts could not be distinguished; give one of them another name"
            )
        if name == "env":
            yield f"rewards[{index}].name is 'env', the name of the environment's own part; choose another name"
    for index, reward in enumerate(s.rewards):
        if not math.isfinite(reward.weight):
            yield f"rewards[{index}].weight is {reward.weight}, so no reward would be finite; set a finite number"
        for name in reward.environments:
            if name not in s.environments:
                known = ", ".join(s.environments) or "none"
                yield f"rewards[{index}].environments names {name!r}, which is unknown; [environments] has: {known}"


def check_datasets(s: Settings) -> Iterator[str]:
    """`[data]`: one data set or several, and environments that exist."""
    given = sum(map(bool, (s.data.path, s.data.rows, s.data.sets)))
    if given > 1 or (not given and not s.environments):
        count = "several are" if given else "none is"
        yield (
            "data.path names one data set, [[data.sets]] several, data.rows counts problems that the environment "
            f"makes, and {count} set; set one of them"
        )
    for index, dataset in enumerate(s.data.sets):
        if bool(dataset.path) == bool(dataset.rows) and (dataset.path or not dataset.environment):
            yield (
                f"data.sets[{index}] needs either path, a file, or rows, a number of problems, or an environment with "
                "its own rows(); set one of them"
            )
    if (s.data.rows or any(dataset.rows for dataset in s.data.sets)) and not s.environments:
        yield "data.rows counts problems that the environment makes, but [environments] is empty; name one, or a file"
    has_weight = [dataset.weight > 0 for dataset in s.data.sets]
    if any(has_weight) and not all(has_weight):
        yield "some of [[data.sets]] have a weight and some have none; give all of them a weight, or none"
    for index, dataset in enumerate(s.data.sets):
        if dataset.environment and dataset.environment not in s.environments:
            known = ", ".join(s.environments) or "none"
            yield f"data.sets[{index}].environment {dataset.environment!r} is unknown; [environments] has: {known}"
    if not s.data.prompt and not s.environments:
        yield "data.prompt is empty, so prompts come from reset, but [environments] is empty; name the prompt column"
