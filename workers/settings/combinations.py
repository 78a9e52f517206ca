"""What is possible key by key, but not together: refused before anything starts, naming both keys and the remedy."""

import math
from collections.abc import Callable, Iterator
from typing import Final
from urllib.parse import urlsplit

from stream.errors import SettingsError
from workers.settings.algorithm import Correction, Critic, Normalization, Shaping
from workers.settings.engine import Engine
from workers.settings.estimators import Gae, OptimalTokenBaseline, Passk, TirOptimalTokenBaseline
from workers.settings.losses import Clipped
from workers.settings.pipeline import Eval, Pacing, Rollout
from workers.settings.presets import PRESETS
from workers.settings.training import LOOPBACK, Lora, Weights
from workers.settings.whole import Settings

RESTRICTING: Final = ("top_p", "top_k", "min_p", "min_tokens", "logit_bias")
"""Settings of `[rollout]` that change the distribution that is sampled from."""
COLDEST: Final = 0.01
"""Temperature."""


def refuse_impossible(settings: Settings, source: str) -> None:
    """Refuse combinations that cannot work, or in which a key would silently have no effect.

    Raises:
        SettingsError: the first of them.
    """
    for check in _CHECKS:
        for problem in check(settings):
            raise SettingsError(f"{source}: {problem}")


def _rewards(s: Settings) -> Iterator[str]:
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


def _data(s: Settings) -> Iterator[str]:
    if bool(s.data.path) == bool(s.data.mix):
        both = "both are" if s.data.path else "neither is"
        yield f"data.path names one data set and [[data.mix]] several, and {both} set; set one of them"
    if s.data.mix and s.data.name:
        yield "data.name is of a single data set; give each of [[data.mix]] its own"
    for number, each in enumerate(s.data.mix):
        if math.isinf(each.weight):
            yield f"data.mix[{number}].weight is inf, which is no share of the prompts; set it to a finite number"
    weighed = [each.weight > 0 for each in s.data.mix]
    if any(weighed) and not all(weighed):
        yield "some of [[data.mix]] have a weight and some have none; give all of them one, or none"
    for place, name in [("data", s.data.environment), *((f"data.mix {m.path!r}", m.environment) for m in s.data.mix)]:
        if name and name not in s.environments:
            known = ", ".join(s.environments) or "none"
            yield f"{place}: environment {name!r} is unknown; [environments] has: {known}"
    if not s.data.prompt and not s.environments:
        yield "data.prompt is empty, so that prompts come from reset, but there are no [environments]; name the column"


def _engines(s: Settings) -> Iterator[str]:
    least, most = s.engine.min_concurrency, s.engine.max_concurrency
    if least > most:
        yield f"engine.min_concurrency is {least} and engine.max_concurrency is {most}; make the first the smaller one"
    if s.engine.dns.startswith("https:"):
        yield (
            "engine.dns is https, but the engines behind a name are reached by their addresses, for which no "
            "certificate holds; write http, or name each engine in engine.urls"
        )
    yield from _own_engines(s)


def _own_engines(s: Settings) -> Iterator[str]:
    engine = s.engine
    named = "engine.urls" if engine.urls else "engine.dns" if engine.dns else ""
    for key in ("count", "devices"):
        if named and getattr(engine, key) != getattr(Engine(), key):
            yield f"engine.{key} is set, but {named} names the engines, so that none is started; leave one of them out"
    for key in ("python", "flags"):
        if engine.server == "local" and getattr(engine, key) != getattr(Engine(), key):
            yield f"engine.{key} is vLLM's, but engine.server is 'local'; set that to 'vllm', or leave the first out"
    if engine.devices and len(engine.devices) != engine.count:
        yield (
            f"engine.devices is for {len(engine.devices)} engines and engine.count is {engine.count}; name the GPUs of "
            "each engine, or of none"
        )


def _weights(s: Settings) -> Iterator[str]:
    weights = s.weights
    if weights.port and weights.transport != "http":
        yield (
            f"weights.port is of the server that weights.transport = 'http' starts, not {weights.transport!r}; set the "
            "second to it, or leave the first out"
        )
    if weights.transport == "files" and weights.host != Weights().host:
        yield "weights.host is set, but with weights.transport = 'files' nobody asks the trainer; leave it out"
    away = [url for url in (*s.engine.urls, s.engine.dns) if url and urlsplit(url).hostname not in LOOPBACK]
    if weights.transport != "files" and weights.host in LOOPBACK and away:
        yield (
            f"weights.host is {weights.host!r}, by which {away[0]} does not reach the trainer; set it to a name or "
            "address of the trainer's machine on the engines' network"
        )


def _rollouts(s: Settings) -> Iterator[str]:
    if s.rollout.max_tokens_per_turn > s.rollout.max_tokens:
        yield (
            f"rollout.max_tokens_per_turn ({s.rollout.max_tokens_per_turn}) is more than rollout.max_tokens "
            f"({s.rollout.max_tokens}); lower the first or raise the second"
        )
    if s.rollout.temperature == 0 and s.train.learning_rate > 0:
        yield (
            "rollout.temperature is 0, so all completions of a group are equal and nothing can be learned while "
            "train.learning_rate is above 0; raise the first or set the second to 0"
        )


def _sampling(s: Settings) -> Iterator[str]:
    changed = [key for key in RESTRICTING if getattr(s.rollout, key) != getattr(Rollout(), key)]
    if changed and not s.rollout.restricted:
        yield (
            f"rollout.{changed[0]} changes the distribution that is sampled from, and the trainer's stays that of the "
            "whole vocabulary, so their ratio would not be 1 on unchanged weights; leave it out, or accept that with "
            "rollout.restricted = true"
        )
    if s.rollout.restricted and not changed:
        yield (
            f"rollout.restricted is true, but none of {', '.join(RESTRICTING)} is set, so nothing is restricted; leave "
            "it out"
        )
    if s.rollout.min_tokens > s.rollout.max_tokens_per_turn:
        yield (
            f"rollout.min_tokens ({s.rollout.min_tokens}) is more than rollout.max_tokens_per_turn "
            f"({s.rollout.max_tokens_per_turn}); lower the first or raise the second"
        )
    if "" in s.rollout.stop:
        yield "rollout.stop holds an empty string, with which every turn would end before it begins; leave it out"
    if any(token < 0 for token in s.rollout.logit_bias):
        yield f"rollout.logit_bias has the key {min(s.rollout.logit_bias)}, which is no token id; leave it out"
    for key, temperature in (("rollout", s.rollout.temperature), ("eval", s.eval.temperature)):
        if 0 < temperature < COLDEST:
            yield (
                f"{key}.temperature is {temperature:g}, but vLLM samples at {COLDEST:g} where it is asked for less, "
                "other than 0; set it to 0 or to that"
            )


def _pacing(s: Settings) -> Iterator[str]:
    if s.pacing.straggler_timeout_s != Pacing().straggler_timeout_s and s.pacing.late != "wait":
        yield (
            f"pacing.straggler_timeout_s is set, but with pacing.late = {s.pacing.late!r} nobody waits for stragglers; "
            "set the second to 'wait' or leave the first out"
        )


def _evaluation(s: Settings) -> Iterator[str]:
    if not s.eval.path:
        for key in Eval.__struct_fields__:
            if getattr(s.eval, key) != getattr(Eval(), key):
                yield f"eval.{key} is set, but eval.path is empty, so nothing is evaluated; set it too, or leave it out"
        return
    if s.eval.temperature == 0 and s.eval.group_size > 1:
        yield (
            f"eval.temperature is 0, so all {s.eval.group_size} completions of a prompt (eval.group_size) are the "
            "same; raise the first or set the second to 1"
        )
    if s.eval.hold_s >= s.guard.stall_s:
        yield (
            f"eval.hold_s ({s.eval.hold_s:g}) is not less than guard.stall_s ({s.guard.stall_s:g}), so an evaluation "
            "that stands still would end the run; lower the first or raise the second"
        )


def _filters(s: Settings) -> Iterator[str]:
    if s.min_valid_rows > s.rollout.group_size:
        yield (
            f"filter.min_valid_rows ({s.min_valid_rows}; at least 2 unless set) is more than rollout.group_size "
            f"({s.rollout.group_size}), so every group would be dropped; lower the first or raise the second"
        )
    if s.filter.min_mean_reward > s.filter.max_mean_reward:
        yield (
            f"filter.min_mean_reward ({s.filter.min_mean_reward:g}) is more than filter.max_mean_reward "
            f"({s.filter.max_mean_reward:g}), so every group would be dropped; lower the first or raise the second"
        )
    if s.filter.min_advantage > s.filter.max_advantage:
        yield (
            f"filter.min_advantage ({s.filter.min_advantage:g}) is more than filter.max_advantage "
            f"({s.filter.max_advantage:g}), so every group would be dropped; lower the first or raise the second"
        )
    for key, value, off in (
        ("min_advantage", s.filter.min_advantage, 0.0),
        ("max_advantage", s.filter.max_advantage, math.inf),
    ):
        if value != off and (not s.estimator.within_group or s.estimator.per_token):
            yield (
                f"filter.{key} looks at one group at a time, before its tokens are, but estimator.name = "
                f"{s.estimator.name!r} compares over the batch or by token; leave the first out, or use an estimator "
                "that compares completions within the group"
            )


def _estimators(s: Settings) -> Iterator[str]:
    name = s.estimator.name
    if isinstance(s.estimator, Passk) and s.estimator.k > s.rollout.group_size:
        yield (
            f"estimator.k ({s.estimator.k}) is more than rollout.group_size ({s.rollout.group_size}), so pass@k is "
            "never known; lower the first or raise the second"
        )
    if s.estimator.reads != "rewards":
        for key in ("bias", "scale", "clip", "overlong_tokens"):
            if getattr(s.shaping, key) != getattr(Shaping(), key):
                yield _no_effect(f"shaping.{key}", name, s.estimator.reads)
        if s.reward_normalization != Normalization():
            yield _no_effect("reward_normalization", name, s.estimator.reads)
        if "penalty" in s.algorithm.truncation.values():
            yield _no_effect("algorithm.truncation = 'penalty'", name, s.estimator.reads)
        if "zero_reward" in s.algorithm.truncation.values() and s.estimator.reads == "parts":
            yield _no_effect("algorithm.truncation = 'zero_reward'", name, s.estimator.reads)
    if name == "remax" and s.reward_normalization != Normalization():
        yield (
            "reward_normalization would put rewards into other units than the greedy rollout's that estimator.name = "
            "'remax' subtracts; leave the first out, or use another estimator"
        )
    if s.algorithm.singleton == "raw" and (not s.estimator.within_group or s.estimator.reads != "rewards"):
        yield (
            f"algorithm.singleton = 'raw' gives a completion alone in its group its own reward, but estimator.name = "
            f"{name!r} does not compare rewards within a group; set the first to 'zero' or 'drop'"
        )
    if isinstance(s.estimator, OptimalTokenBaseline | TirOptimalTokenBaseline) and (
        "baseline_only" in s.algorithm.truncation.values()
    ):
        yield (
            f"algorithm.truncation = 'baseline_only' has no effect with estimator.name = {name!r}, whose baseline is "
            "made of the log-probs of tokens that bear loss; use exclude or keep, or another estimator"
        )
    if s.critic != Critic() and not isinstance(s.estimator, Gae):
        yield (
            f"[critic] is set, but estimator.name = {name!r} has no use for values; leave [critic] out, or set "
            "estimator.name to 'gae'"
        )


def _shaping(s: Settings) -> Iterator[str]:
    if "penalty" in s.algorithm.truncation.values() and not s.shaping.overlong_tokens:
        yield (
            "algorithm.truncation = 'penalty' asks for the penalty for length, but shaping.overlong_tokens is 0, so "
            "there is none; set the second, or use exclude, keep, zero_reward or baseline_only"
        )
    if s.shaping.overlong_tokens > s.rollout.max_tokens:
        yield (
            f"shaping.overlong_tokens ({s.shaping.overlong_tokens}) is more than rollout.max_tokens "
            f"({s.rollout.max_tokens}); lower the first or raise the second"
        )
    if s.shaping.overlong_penalty != Shaping().overlong_penalty and not s.shaping.overlong_tokens:
        yield (
            "shaping.overlong_penalty is set, but shaping.overlong_tokens is 0, so nothing is too long; set the second "
            "or leave the first out"
        )
    for key in ("reward_normalization", "advantage_normalization"):
        chosen: Normalization = getattr(s, key)
        if chosen.leave_one_out and chosen.mean == "none":
            yield f"{key}.leave_one_out needs a mean, but {key}.mean is 'none'; set the second to 'group' or 'batch'"


def _trainer(s: Settings) -> Iterator[str]:
    if s.train.attention in {"flash_attention_2", "flash_attention_3"} and s.model.dtype == "float32":
        yield (
            f"train.attention = {s.train.attention!r} works in half precision alone, but model.dtype is 'float32'; set "
            "the second to 'bfloat16', or the first to 'auto', 'sdpa' or 'varlen'"
        )


def _losses(s: Settings) -> Iterator[str]:
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


def _corrections(s: Settings) -> Iterator[str]:
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


def _presets(s: Settings) -> Iterator[str]:
    name = s.correction.preset
    if not name:
        return
    if name not in PRESETS:
        yield f"correction.preset: there is no {name!r}; use one of {', '.join(PRESETS)}"
        return
    for key in Correction.__struct_fields__:
        if key != "preset" and getattr(s.correction, key) != getattr(Correction(), key):
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


def _lora(s: Settings) -> Iterator[str]:
    if not s.lora.rank:
        for key in Lora.__struct_fields__:
            if getattr(s.lora, key) != getattr(Lora(), key):
                yield f"lora.{key} is set, but lora.rank is 0, so there is no adapter; set it too, or leave it out"
        return
    if not s.lora.targets:
        yield "lora.targets is empty, so lora.rank has nothing to act on; leave it out for every linear layer"
    if "all-linear" in s.lora.targets and len(s.lora.targets) > 1:
        yield "lora.targets has names beside 'all-linear', which has them all; leave out one or the other"
    if s.lora.publish == "adapter":
        for key in ("transport", "kv", "host", "port"):
            if getattr(s.weights, key) != getattr(Weights(), key):
                yield (
                    f"weights.{key} is set, but with lora.publish = 'adapter' engines read adapters as files, and "
                    "requests under way keep theirs; leave the first out, or set the second to 'merged'"
                )


def _no_effect(key: str, estimator: str, reads: str) -> str:
    told = {"parts": "the parts of the reward", "correct": "right and wrong (algorithm.correct_at)"}[reads]
    return (
        f"{key} has no effect with estimator.name = {estimator!r}, which compares {told}; leave the first out, or use "
        "another estimator"
    )


_CHECKS: Final[tuple[Callable[[Settings], Iterator[str]], ...]] = (
    _rewards,
    _data,
    _engines,
    _weights,
    _rollouts,
    _sampling,
    _pacing,
    _evaluation,
    _filters,
    _estimators,
    _shaping,
    _trainer,
    _losses,
    _presets,
    _corrections,
    _lora,
)
