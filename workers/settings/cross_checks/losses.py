"""The loss, and how it is corrected for what the engine sampled from."""

from collections.abc import Iterator

from workers.settings.losses import Clipped
from workers.settings.presets import PRESETS
from workers.settings.settings import Settings


def check_loss(s: Settings) -> Iterator[str]:
    """`[loss]`: what it is defined with."""
    name, chosen = s.loss.name, s.algorithm.aggregation
    if chosen not in {"auto", s.loss.aggregation} and s.loss.aggregation:
        yield (
            f"loss.name = {name!r} is defined with algorithm.aggregation = {s.loss.aggregation!r}, not {chosen!r}; set "
            "the second to 'auto', or use another loss"
        )
    if s.algorithm.aggregation_constant and s.aggregation != "seq-mean-token-sum-norm":
        yield (
            f"algorithm.aggregation_constant is set, but algorithm.aggregation = {s.aggregation!r} divides by no "
            "constant; leave the first out, or set the second to 'seq-mean-token-sum-norm'"
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
    """`correction.preset`: what it sets, and what it goes with."""
    name = s.correction.preset
    if not name:
        return
    if name not in PRESETS:
        yield f"correction.preset: there is no {name!r}; use one of {', '.join(PRESETS)}"
        return
    for key in s.correction.non_default():
        if key != "preset":
            yield (
                f"correction.{key} is set beside correction.preset = {name!r}, which sets it too; leave one of them out"
            )
    preset = PRESETS[name]
    if preset.bypass != (s.algorithm.proximal == "engine"):
        proximal = "'engine'" if preset.bypass else "'recompute' or 'interpolate'"
        yield (
            f"correction.preset = {name!r} goes with algorithm.proximal = {proximal}, not {s.algorithm.proximal!r}; "
            "set the second to it, or use another preset"
        )
    if (preset.loss == "reinforce") != s.loss.on_policy:
        loss = "'reinforce'" if preset.loss == "reinforce" else "a loss with a ratio, such as 'clipped'"
        yield (
            f"correction.preset = {name!r} goes with loss.name = {loss}, not {s.loss.name!r}; set the second to it, "
            "or use another preset"
        )


def check_correction(s: Settings) -> Iterator[str]:
    """`[correction]`: weights that correct once, bounds that leave something."""
    correction = s.correction.resolved() if s.correction.preset in PRESETS else s.correction
    if s.algorithm.proximal == "engine" and correction.weights != "none" and not s.loss.on_policy:
        yield (
            f"correction.weights = {correction.weights!r} and algorithm.proximal = 'engine' would correct twice: the "
            f"ratio of loss.name = {s.loss.name!r} is taken against the engine's log-probs already; set the first "
            "to 'none', or the second to 'recompute'"
        )
    if correction.normalize and correction.weights == "none":
        yield (
            "correction.normalize divides importance weights by their mean, but correction.weights is 'none'; leave "
            "the first out, or set the second to 'token' or 'sequence'"
        )
    if correction.lower >= correction.upper:
        yield (
            f"correction.lower ({correction.lower:g}) is not below correction.upper ({correction.upper:g}); lower the "
            "first or raise the second"
        )
    for place, rule in enumerate(correction.reject):
        if rule.rule in [earlier.rule for earlier in correction.reject[:place]]:
            yield f"correction.reject[{place}].rule = {rule.rule!r} is there already; leave one of the two out"
        if rule.rule.endswith("_k1") and rule.lower >= rule.upper:
            yield (
                f"correction.reject[{place}].lower ({rule.lower:g}) is not below its upper ({rule.upper:g}); lower "
                "the first or raise the second"
            )
        if not rule.rule.endswith("_k1") and rule.lower:
            yield (
                f"correction.reject[{place}].lower has no effect with its rule = {rule.rule!r}, which has an upper "
                "bound alone; leave it out"
            )
