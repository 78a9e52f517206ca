"""Keys that conflict are refused; the message names both keys and the remedy."""

import pytest

from stream.errors import SettingsError
from workers.settings import sections
from workers.settings.algorithm import PRESETS
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
        ({"engine": {"devices": ["0"], "urls": ["dns+http://a:1"]}}, ["engine.devices", "engine.urls"]),
        ({"engine": {"urls": ["dns+https://a:1"]}}, ["engine.urls", "dns+https", "write http"]),
        ({"engine": {"urls": ["http://a:1", "file:"]}}, ["engine.urls", "file:PATH"]),
        ({"engine": {"devices": ["0", "1"], "count": 2}}, ["engine.devices", "engine.server is 'local'", "'vllm'"]),
        (
            {"engine": {"devices": ["0", "1", "2"], "count": 2, "server": "vllm"}},
            ["engine.devices", "engine.count"],
        ),
        ({"engine": {"flags": ["--x"]}}, ["engine.flags", "engine.server", "'vllm'"]),
        ({"engine": {"python": "p"}}, ["engine.python", "engine.server", "'vllm'"]),
        (
            {"weights": {"transport": "http"}, "engine": {"urls": ["http://127.0.0.1:1", "http://gpu7:8000"]}},
            ["run.address", "http://gpu7:8000 cannot reach the trainer"],
        ),
        ({"data": {"path": "d.jsonl", "prompt": ""}}, ["data.prompt is empty", "[environments] is empty", "name the"]),
        ({"filter": {"min_valid_rows": 9}}, ["filter.min_valid_rows", "rollout.group_size", "lower"]),
        ({"filter": {"mean_reward_range": [1.0, 0.5]}}, ["filter.mean_reward_range", "lower bound first"]),
        ({"filter": {"advantage_range": [2.0, 1.0]}}, ["filter.advantage_range", "lower bound first"]),
        ({"filter": {"advantage_range": [0.1, 9.0]}, "estimator": GAE}, ["filter.advantage_range", "estimator.name"]),
        (
            {"filter": {"advantage_range": [0.0, 0.1]}, "estimator": {"name": "optimal_token_baseline"}},
            ["filter.advantage_range", "estimator.name"],
        ),
        ({"estimator": {"name": "passk", "k": 9}}, ["estimator.k", "rollout.group_size"]),
        ({"estimator": GDPO, "algorithm": {"reward_clip": 1.0}}, ["algorithm.reward_clip", "gdpo"]),
        (
            {"estimator": PASSK, "algorithm": {"reward_normalization": ["group", "none"]}},
            ["reward_normalization", "passk"],
        ),
        (
            {"estimator": REMAX, "algorithm": {"reward_normalization": ["group", "none"]}},
            ["reward_normalization", "remax"],
        ),
        (
            {"estimator": GDPO, "algorithm": {"truncation": {"length": "zero_reward_in_baseline"}}},
            ["algorithm.truncation", "estimator.name"],
        ),
        (
            {"estimator": GAE, "algorithm": {"truncation": {"length": "zero_reward"}}},
            ["algorithm.truncation", "estimator.name = 'gae'", "zero_reward_in_baseline"],
        ),
        (
            {"correction": {"weights": "token-normalized"}, "algorithm": {"truncation": {"length": "zero_reward"}}},
            ["algorithm.truncation", "correction.weights = 'token-normalized'"],
        ),
        (
            {"correction": {"reject": {"m2po": [0.0, 1.0]}}, "algorithm": {"truncation": {"length": "zero_reward"}}},
            ["algorithm.truncation", "correction.reject = 'm2po'"],
        ),
        (
            {"loss": {"name": "kl_cov"}, "algorithm": {"truncation": {"length": "zero_reward"}}},
            ["algorithm.truncation", "loss.name = 'kl_cov'"],
        ),
        (
            {
                "estimator": {"name": "tir_optimal_token_baseline"},
                "algorithm": {"truncation": {"length": "baseline_only"}},
            },
            ["algorithm.truncation", "estimator.name", "exclude"],
        ),
        (
            {"estimator": GAE, "algorithm": {"single_sample_policy": "raw"}},
            ["algorithm.single_sample_policy", "estimator.name"],
        ),
        ({"algorithm": {"truncation": {"length": "penalty"}}}, ["algorithm.truncation", "algorithm.overlong_penalty"]),
        ({"algorithm": {"overlong_penalty": [9999, 1.0]}}, ["algorithm.overlong_penalty", "rollout.max_tokens"]),
        ({"algorithm": {"overlong_penalty": [0, 2.0]}}, ["algorithm.overlong_penalty", "0 tokens"]),
        (
            {"loss": {"name": "gspo"}, "algorithm": {"aggregation": "token-mean"}},
            ["loss.name", "algorithm.aggregation"],
        ),
        ({"loss": {"name": "reinforce"}, "train": {"updates_per_batch": 2}}, ["loss.name", "train.updates_per_batch"]),
        ({"train": {"attention": "flash_attention_2"}}, ["train.attention", "model.dtype", "bfloat16"]),
        ({"loss": {"name": "clipped", "dual_clip": 0.5}}, ["loss.dual_clip", "loss.clip_high"]),
        ({"algorithm": {"proximal": "engine"}}, ["correction.weights", "algorithm.proximal", "none"]),
        ({"correction": {"weight_range": [3.0, 2.0]}}, ["correction.weight_range", "lower bound first"]),
        ({"correction": {"reject": {"token_k1": [2.0, 2.0]}}}, ["correction.reject.token_k1", "lower bound first"]),
        ({"correction": {"reject": {"token_k2": [0.5, 2.0]}}}, ["correction.reject.token_k2", "[0.0, 2]"]),
        ({"correction": {"preset": "best"}}, ["correction.preset", "decoupled_token_is"]),
        (
            {"correction": {"preset": "decoupled_seq_is", "weight_range": [0.0, 3.0]}},
            ["correction.weight_range", "correction.preset"],
        ),
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
def test_every_preset_can_be_selected(name):
    preset = PRESETS[name]
    proximal = "engine" if preset.bypass else "recompute"
    result = parse_settings(
        LEAST | {"correction": {"preset": name}, "algorithm": {"proximal": proximal}, "loss": {"name": preset.loss}}
    )
    resolved = result.correction.resolved()
    assert (resolved.weights, resolved.weight_range, resolved.reject) == (
        preset.weights,
        preset.weight_range,
        dict(preset.reject),
    )


def test_settings_and_registry_have_the_same_estimators():
    choices = {kind.__struct_config__.tag: kind for kind in sections()["estimator"]}
    assert set(choices) == set(ESTIMATORS)
    for name, kind in choices.items():
        assert set(kind.__struct_fields__) - set(kind.trainer_options) == set(ESTIMATORS[name].option_names), name
        assert kind.within_group == ESTIMATORS[name].traits.within_group, name
        assert kind.affine == ESTIMATORS[name].traits.affine, name
        assert kind.per_token == (ESTIMATORS[name].traits.level == "token"), name


def test_settings_and_registry_have_the_same_losses():
    choices = {kind.__struct_config__.tag: kind for kind in sections()["loss"]}
    assert set(choices) == set(LOSSES)
    for name, kind in choices.items():
        declared = LOSSES[name].traits
        options = set(LOSSES[name].option_names)
        if declared.selector:
            options |= set(SELECTORS[declared.selector].option_names)
        assert set(kind.__struct_fields__) == options, name
        assert (kind.on_policy, kind.aggregation) == (declared.on_policy, declared.aggregation), name
