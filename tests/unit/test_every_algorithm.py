"""Every estimator, loss, aggregation, correction and normaliser by name, through the learner of a run."""

from array import array

import pytest
import torch

from stream.records import RewardPart
from stream.validity import Measured, RewardReason, TruncationReason, Unmeasured
from tests.cases import groups
from tests.cases.models import loaded_once, write_small_qwen3
from tests.cases.path import measured
from workers.settings.algorithm import PRESETS, Rule
from workers.settings.toml_file import parse_settings
from workers.train.algorithms.advantages import ESTIMATORS
from workers.train.algorithms.aggregation import AGGREGATIONS
from workers.train.algorithms.correction import REJECTIONS
from workers.train.algorithms.divergence import DIVERGENCES
from workers.train.algorithms.losses import LOSSES
from workers.train.model.logprobs import token_logprobs
from workers.train.step.batch import collate
from workers.train.step.learner import Learner

VOCABULARY = 24
WIDE = [1e-9, 1e9]
"""Bounds that reject nothing from an untrained model."""
OF_THE_PASSES = {"seconds", "tokens/forwarded", "tokens/shared"}
"""Metrics that depend on how rows are dealt to micro-batches."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    with loaded_once():
        yield write_small_qwen3(tmp_path_factory.mktemp("base"), VOCABULARY, layers=1, tied=False)


def learner(base, *, train=None, **sections):
    least = {"model": {"path": str(base)}, "data": {"path": "none"}, "environments": {"a": "calculator"}}
    return Learner(
        parse_settings(least | {"train": {"learning_rate": 1e-3, "max_grad_norm": 1e9} | (train or {})} | sections)
    )


def completion(index, tokens, reward, **facts):
    """Token 0 is a tool's answer. Log-probs are close to an untrained model's."""
    parts = [
        RewardPart(name="env", reward=reward),
        RewardPart(name="format", reward=Measured(float(index % 2)), weight=0.0),
    ]
    facts = {"parts": parts if isinstance(reward, Measured) else []} | facts
    return groups.completion(index, reward, tokens, version=3, logprobs=(-3.1, -3.15, -3.2), **facts)


def group(name, *others, shift=0):
    rolled = [
        completion(0, [3, 4, 0, 5 + shift], Measured(1.0)),
        completion(1, [6, 7, 8], Measured(0.0)),
        completion(2, [9, 0, 10, 11, 12], Measured(0.75)),
        completion(3, [13, 14 + shift], Measured(0.25)),
        completion(4, [3, 3], Measured(0.5), greedy=True),
    ]
    return groups.group(*rolled, *others, name=name)


def junk():
    """Return invalid completions with the most harmful values; they must have no effect."""
    return [
        completion(5, [20, 21, 22], Unmeasured(RewardReason.RAISED)),
        completion(6, [21, 22], Measured(1e9), truncated=TruncationReason.WALL_CLOCK),
    ]


def weights(result):
    trained = result.parameters | result.critic_parameters
    return torch.cat([p.detach().double().flatten() for p in trained.values()])


CASES = {
    **{f"estimator {name}": {"estimator": {"name": name}} for name in ESTIMATORS},
    "estimator passk": {"estimator": {"name": "passk", "k": 2}},
    **{f"loss {name}": {"loss": {"name": name}} for name in LOSSES},
    **{f"aggregation {name}": {"algorithm": {"aggregation": name}} for name in AGGREGATIONS},
    **{f"divergence {n}": {"algorithm": {"kl_coefficient": 0.1, "kl_estimator": n}} for n in DIVERGENCES},
    **{f"proximal {n}": {"algorithm": {"proximal": n}} for n in ("recompute", "interpolate")},
    "proximal engine": {"algorithm": {"proximal": "engine"}, "correction": {"weights": "none"}},
    "sequence weights": {"correction": {"weights": "sequence", "out_of_range": "zero", "weight_range": WIDE}},
    "normalised weights": {"correction": {"weights": "sequence-normalized"}},
    "entropy": {"algorithm": {"entropy_coefficient": 0.01}},
    "turn baseline": {"estimator": {"name": "tir_optimal_token_baseline"}, "loss": {"name": "geo_mean"}},
    "shaping": {
        "algorithm": {"reward_clip": 1.5, "overlong_penalty": [510, 1.0]},
        "rollout": {"max_tokens": 512},
    },
    **{
        f"{kind} {mean} {std}": {"algorithm": {kind: [mean, std]}}
        for kind in ("reward_normalization", "advantage_normalization")
        for mean, std in (("group", "none"), ("batch", "batch"), ("group", "group"))
    },
}


def rejecting(name):
    return {"correction": {"reject": {name: WIDE if name.endswith("k1") else [0.0, 1e9]}}}


CASES |= {f"rejection {name}": rejecting(name) for name in REJECTIONS}


def two_steps(trained, *extra, **options):
    batch = [group("p", *extra), group("q", shift=1)]
    return [trained.step(collate(batch), 3, **options) for _ in range(2)]


def assert_same_steps(one, other, first, second):
    """Compare what two learners trained; another width of a micro-batch rounds differently."""
    assert torch.allclose(weights(one), weights(other), rtol=0, atol=2e-5)
    for mine, other_report in zip(first, second, strict=True):
        ours, theirs = measured(mine.metrics), measured(other_report.metrics)
        for name in {*ours, *theirs} - OF_THE_PASSES:
            assert theirs[name] == pytest.approx(ours[name], rel=2e-3, abs=1e-4), name


@pytest.mark.parametrize("case", CASES)
def test_it_trains_and_neither_invalid_completions_nor_micro_batches_change_anything(base, case):
    clean, other = learner(base, **CASES[case]), learner(base, **CASES[case], train={"micro_batch_tokens": 1})
    before = weights(clean)
    first = two_steps(clean)
    assert all(report.trained for report in first), first
    assert not torch.equal(weights(clean), before)
    assert_same_steps(clean, other, first, two_steps(other, *junk()))


@pytest.mark.parametrize("case", ["loss gspo", "estimator gae", "divergence k3", "entropy", "normalised weights"])
@pytest.mark.parametrize("train", [{"packing": "on"}, {"packing": "on", "attention": "sdpa", "micro_batch_tokens": 12}])
def test_packing_and_gradient_checkpointing_change_nothing(base, case, train):
    checkpointed = train | {"gradient_checkpointing": True}
    plain, packed = learner(base, **CASES[case]), learner(base, **CASES[case], train=checkpointed)
    assert (plain.runner.policy.packed, packed.runner.policy.packed) == (False, True)
    assert_same_steps(plain, packed, two_steps(plain), two_steps(packed))


def sampled_by(trained, *made, shift=0.0):
    """Collate groups with the learner's log-probs plus `shift` as the engine's."""
    for row in (row for each in made for completion in each.completions for row in completion.rows):
        prompt, tokens = array("i", row.prompt_ids), array("i", row.token_ids)
        ids = torch.tensor([[*prompt, *tokens]])
        sampled = torch.zeros_like(ids, dtype=torch.bool)
        for start, end in row.sampled_ranges:
            sampled[0, len(prompt) + start : len(prompt) + end] = True
        with torch.no_grad():
            own = token_logprobs(trained.runner.policy, ids, sampled, temperature=trained.settings.rollout.temperature)
        row.logprobs = array("f", (own.logprobs_N + shift).tolist()).tobytes()
    return collate(made)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_trains_on_policy_samples_and_rejects_off_policy_ones(base, name):
    preset = PRESETS[name]
    proximal = "engine" if preset.bypass else "recompute"
    chosen = {"correction": {"preset": name}, "algorithm": {"proximal": proximal}, "loss": {"name": preset.loss}}
    trained = learner(base, **chosen)
    before = weights(trained)
    report = trained.step(sampled_by(trained, group("p"), group("q", shift=1)), 3)
    assert (report.trained, report.dropped) == (True, {})
    assert report.metrics["tokens/loss"] == report.metrics["tokens/sampled"] > 0
    assert not torch.equal(weights(trained), before)
    far = learner(base, **chosen)
    report = far.step(sampled_by(far, group("p"), group("q", shift=1), shift=-1.0), 3)
    assert set(report.dropped) == ({"p", "q"} if preset.reject else set())
    assert report.trained == (not preset.reject)


def test_every_rule_of_the_settings_is_registered():
    assert set(Rule.__args__) == set(REJECTIONS)


def test_a_rejected_completion_leaves_the_baseline_and_its_group_if_too_few_are_left(base):
    """Three of four completions are far from the engine's log-probs, so one is left, and its group is dropped."""
    far = group("p")
    for one in far.completions[:3]:
        one.rows[0].logprobs = array("f", [-30.0] * one.rows[0].sampled_count).tobytes()
    chosen = {
        "correction": {"reject": {"seq_mean_k1": [0.2, 5.0]}},
        "filter": {"min_valid_rows": 2},
    }
    report = learner(base, **chosen).step(collate([far, group("q", shift=1)]), 3)
    assert report.trained
    assert report.dropped == {"p": "min_valid_rows"}
    assert report.metrics["groups/dropped/min_valid_rows"] == 1
    assert report.metrics["rows/rejected:seq_mean_k1"] == 3
    assert report.metrics["rows/dropped:min_valid_rows"] == 1
    assert report.metrics["reward/count"] == 4
