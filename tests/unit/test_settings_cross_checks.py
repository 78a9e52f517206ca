"""What is possible key by key, but not together, is refused with both keys and the remedy."""

import pytest

from stream.errors import SettingsError
from workers.settings import sections
from workers.settings.presets import PRESETS
from workers.settings.toml_file import parse_settings
from workers.train.algorithms.advantages import ESTIMATORS
from workers.train.algorithms.losses import LOSSES
from workers.train.algorithms.token_selection import SELECTORS

LEAST = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": [{"ref": "r.py:f"}]}
GAE, REMAX, GDPO, PASSK = ({"name": name} for name in ("gae", "remax", "gdpo", "passk"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"engine": {"count": 2, "urls": ["http://a"]}}, ["engine.count", "engine.urls"]),
        ({"engine": {"devices": ["0"], "dns": "http://a:1"}}, ["engine.devices", "engine.dns"]),
        ({"engine": {"devices": ["0", "1", "2"], "count": 2}}, ["engine.devices", "engine.count"]),
        ({"engine": {"flags": ["--x"]}}, ["engine.flags", "engine.server", "'vllm'"]),
        ({"engine": {"python": "p"}}, ["engine.python", "engine.server", "'vllm'"]),
        ({"pacing": {"straggler_timeout_s": 5.0}}, ["pacing.straggler_timeout_s", "pacing.late", "'wait'"]),
        ({"weights": {"port": 9000}}, ["weights.port", "weights.transport = 'http'", "leave"]),
        ({"weights": {"host": "trainer"}}, ["weights.host", "weights.transport = 'files'"]),
        (
            {"weights": {"transport": "http"}, "engine": {"urls": ["http://127.0.0.1:1", "http://gpu7:8000"]}},
            ["weights.host", "http://gpu7:8000 does not reach the trainer"],
        ),
        ({"filter": {"min_valid_rows": 9}}, ["filter.min_valid_rows", "rollout.group_size", "lower"]),
        ({"filter": {"min_mean_reward": 1.0, "max_mean_reward": 0.5}}, ["min_mean_reward", "max_mean_reward"]),
        ({"filter": {"min_advantage": 2.0, "max_advantage": 1.0}}, ["filter.min_advantage", "filter.max_advantage"]),
        ({"filter": {"min_advantage": 0.1}, "estimator": GAE}, ["filter.min_advantage", "estimator.name"]),
        (
            {"filter": {"max_advantage": 0.1}, "estimator": {"name": "optimal_token_baseline"}},
            ["filter.max_advantage", "estimator.name"],
        ),
        ({"estimator": {"name": "passk", "k": 9}}, ["estimator.k", "rollout.group_size"]),
        ({"estimator": GDPO, "shaping": {"bias": 1.0}}, ["shaping.bias", "gdpo"]),
        ({"estimator": PASSK, "reward_normalization": {"mean": "group"}}, ["reward_normalization", "passk"]),
        ({"estimator": REMAX, "reward_normalization": {"mean": "group"}}, ["reward_normalization", "remax"]),
        (
            {"estimator": GDPO, "algorithm": {"truncation": {"length": "zero_reward"}}},
            ["algorithm.truncation", "estimator.name"],
        ),
        (
            {
                "estimator": {"name": "tir_optimal_token_baseline"},
                "algorithm": {"truncation": {"length": "baseline_only"}},
            },
            ["algorithm.truncation", "estimator.name", "exclude"],
        ),
        ({"estimator": GAE, "algorithm": {"singleton": "raw"}}, ["algorithm.singleton", "estimator.name"]),
        ({"critic": {"width": 9}}, ["[critic]", "estimator.name", "gae"]),
        ({"algorithm": {"truncation": {"length": "penalty"}}}, ["algorithm.truncation", "shaping.overlong_tokens"]),
        ({"shaping": {"overlong_tokens": 9999}}, ["shaping.overlong_tokens", "rollout.max_tokens"]),
        ({"shaping": {"overlong_penalty": 2.0}}, ["shaping.overlong_penalty", "shaping.overlong_tokens"]),
        ({"reward_normalization": {"leave_one_out": True}}, ["leave_one_out", "reward_normalization.mean"]),
        (
            {"loss": {"name": "gspo"}, "algorithm": {"aggregation": "token-mean"}},
            ["loss.name", "algorithm.aggregation"],
        ),
        ({"algorithm": {"aggregation_constant": 9}}, ["algorithm.aggregation_constant", "algorithm.aggregation"]),
        ({"loss": {"name": "reinforce"}, "train": {"updates_per_batch": 2}}, ["loss.name", "train.updates_per_batch"]),
        ({"train": {"attention": "flash_attention_2"}}, ["train.attention", "model.dtype", "bfloat16"]),
        ({"loss": {"name": "clipped", "dual_clip": 0.5}}, ["loss.dual_clip", "loss.clip_high"]),
        ({"algorithm": {"proximal": "engine"}}, ["correction.weights", "algorithm.proximal", "none"]),
        ({"correction": {"weights": "none", "normalize": True}}, ["correction.normalize", "correction.weights"]),
        ({"correction": {"lower": 3.0}}, ["correction.lower", "correction.upper"]),
        ({"correction": {"reject": [{"rule": "token_k1", "lower": 2.0}]}}, ["reject[0].lower", "upper"]),
        ({"correction": {"reject": [{"rule": "token_k2", "lower": 0.5}]}}, ["reject[0].lower", "token_k2"]),
        ({"correction": {"reject": [{"rule": "token_k2"}, {"rule": "token_k2"}]}}, ["reject[1].rule", "leave one"]),
        ({"correction": {"preset": "best"}}, ["correction.preset", "decoupled_token_is"]),
        ({"correction": {"preset": "decoupled_seq_is", "upper": 3.0}}, ["correction.upper", "correction.preset"]),
        ({"correction": {"preset": "bypass_ppo_clip"}}, ["correction.preset", "algorithm.proximal"]),
        (
            {"correction": {"preset": "bypass_pg_is"}, "algorithm": {"proximal": "engine"}},
            ["correction.preset", "loss.name"],
        ),
    ],
)
def test_both_keys_and_the_remedy_are_named(change, words):
    with pytest.raises(SettingsError) as caught:
        parse_settings(LEAST | change, "my.toml")
    for word in ["my.toml", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_had(name):
    preset = PRESETS[name]
    proximal = "engine" if preset.bypass else "recompute"
    found = parse_settings(
        LEAST | {"correction": {"preset": name}, "algorithm": {"proximal": proximal}, "loss": {"name": preset.loss}}
    )
    resolved = found.correction.resolved()
    assert (resolved.weights, resolved.upper, len(resolved.reject)) == (
        preset.weights,
        preset.upper,
        len(preset.reject),
    )


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_can_be_chosen(name):
    assert parse_settings(LEAST | {"estimator": {"name": name}}).estimator.name == name


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_can_be_chosen(name):
    assert parse_settings(LEAST | {"loss": {"name": name}}).loss.name == name


def test_estimators_in_settings_are_those_that_are_registered():
    choices = {kind.__struct_config__.tag: kind for kind in sections()["estimator"]}
    assert set(choices) == set(ESTIMATORS)
    for name, kind in choices.items():
        assert set(kind.__struct_fields__) == set(ESTIMATORS[name].option_names), name
        assert kind.within_group == ESTIMATORS[name].traits.within_group, name
        assert kind.per_token == (ESTIMATORS[name].traits.level == "token"), name


def test_losses_in_settings_are_those_that_are_registered():
    choices = {kind.__struct_config__.tag: kind for kind in sections()["loss"]}
    assert set(choices) == set(LOSSES)
    for name, kind in choices.items():
        declared = LOSSES[name].traits
        options = set(LOSSES[name].option_names)
        if declared.selector:
            options |= set(SELECTORS[declared.selector].option_names)
        assert set(kind.__struct_fields__) == options, name
        assert (kind.on_policy, kind.aggregation) == (declared.on_policy, declared.aggregation), name
