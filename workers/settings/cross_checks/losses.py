"""Checks of `[loss]` and `[correction]`."""

from collections.abc import Iterator

from workers.settings.losses import Clipped
from workers.settings.presets import PRESETS
from workers.settings.settings import Settings


def check_loss(s: Settings) -> Iterator[str]:
    """`[loss]`: aggregation, updates and bounds fit the loss."""
    name, chosen = s.loss.name, s.algorithm.aggregation
    if chosen not in {"auto", s.loss.aggregation} and s.loss.aggregation:
        yield (
            f"loss.name = {name!r} is defined with algorithm.aggregation = {s.loss.aggregation!r}, not {chosen!r}; set "
            "the second to 'auto', or use another loss"
        )
    if s.loss.on_policy and s.train.updates_per_batch > 1:
        yield (
            f"loss.name = {name!r} has no ratio, so it is wrong from the second pass over a batch on, but "
            f"train.updates_per_batch is {s.train.updates_per_batch}; set the second to 1, or use a loss with a ratio"
        )
    if isinstance(s.loss, Clipped) and 0 < s.loss.dual_clip <= 1:
        yield (
            f"loss.dual_clip ({s.loss.dual_clip:g}) must be above 1 (3 is common), or 0 for none: at 1 or less it "
            "would cut what loss.clip_high allows"
        )


def check_preset(s: Settings) -> Iterator[str]:
    """`correction.preset`: it exists, and the rest of the settings fits it."""
    name = s.correction.preset
    if not name:
        return
    if name not in PRESETS:
        yield f"correction.preset: unknown preset {name!r}; use one of {', '.join(PRESETS)}"
        return
    for key in s.correction.non_default():
        if key != "preset":
            yield f"correction.{key} is set, and correction.preset = {name!r} sets it too; leave one of them out"
    preset = PRESETS[name]
    if preset.bypass != (s.algorithm.proximal == "engine"):
        proximal = "'engine'" if preset.bypass else "'recompute' or 'interpolate'"
        yield (
            f"correction.preset = {name!r} needs algorithm.proximal = {proximal}, not {s.algorithm.proximal!r}; change "
            "the second, or use another preset"
        )
    if (preset.loss == "reinforce") != s.loss.on_policy:
        loss = "'reinforce'" if preset.loss == "reinforce" else "a loss with a ratio, such as 'clipped'"
        yield (
            f"correction.preset = {name!r} needs loss.name = {loss}, not {s.loss.name!r}; change the second, or use "
            "another preset"
        )


def check_correction(s: Settings) -> Iterator[str]:
    """`[correction]`: weights correct once, and their range is not empty."""
    correction = s.correction.resolved() if s.correction.preset in PRESETS else s.correction
    if s.algorithm.proximal == "engine" and correction.weights != "none" and not s.loss.on_policy:
        yield (
            f"correction.weights = {correction.weights!r} and algorithm.proximal = 'engine' would correct twice: the "
            f"ratio of loss.name = {s.loss.name!r} already uses the engine's log-probs; set the first to 'none', or "
            "the second to 'recompute'"
        )
    low, high = correction.weight_range
    if low >= high:
        yield f"correction.weight_range = [{low:g}, {high:g}] is empty; write the lower bound first"


def check_rejection(s: Settings) -> Iterator[str]:
    """`correction.reject`: every rule has the bounds that it uses."""
    for rule, (low, high) in s.correction.reject.items():
        if low and not rule.endswith("_k1"):
            yield f"correction.reject.{rule} has no lower bound; write {rule} = [0.0, {high:g}]"
        elif low >= high:
            yield f"correction.reject.{rule} = [{low:g}, {high:g}] is empty; write the lower bound first"
