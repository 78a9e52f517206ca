"""How other projects turn failures into rewards, row by row, and how Penstock treats each.

Every row names its test by a part of the name. The tests in this file run the whole path: reward functions called by
the scoring stage, parts merged, groups collated, masks derived, advantages estimated. The third column names a more
detailed test.

================================================  ==================================  ==================================
in other projects                                 test, by a part of its name         in more detail
================================================  ==================================  ==================================
a verifier's exception or timeout is reward 0.0   a_verifiers_exception_or_timeout    unit/test_rewards
the verifier raises in 1 of 4: [1, 0, 1, 1]       raises_in_1_of_4                    unit/test_reward_calling
a scoring timeout gives ok, reward 0              scoring_timeout                     unit/test_processes
a 500 of the model server is scored               failed_rollouts_are_not_scored      integration/test_engine_faults
a context overflow on the first call is scored    failed_rollouts_are_not_scored      unit/test_episode
one NaN reward makes its whole group NaN          one_nan_reward                      property/estimators, P1
inf; inf clipped to 20                            infinite_reward                     unit/test_shaping
masked completions count in the baseline          masked_completions                  property/masks, P15
an invalid 0 rescaled to -1                       after_rescaling                     unit/test_shaping
the std of four 0.9s is not 0                     four_equal_rewards                  unit/test_filters
leave-one-out with std cancels to -2075           leave_one_out_with_std              property/twins_advantages
a rejected row's NaN advantage in every gradient  rejected_rows_nan                   property/twins_losses
rejected tokens stay in the denominator           in_the_denominator                  property/the_path, P14
weights normalized before rejection               normalized_after_rejection          property/twins_correction
"no EOS" guessed from the padded width            longest_row                         unit/test_episode, P11
one group of one gets its raw reward              single_completion                   property/estimators, P5
a ratio cap that the code lacks: 4.8e8            ratio_cap                           property/twins_correction
1172 of 1280 failed in reset, trained as 0        failed_resets                       unit/test_invalid_fraction_monitor
`[nan,0,1,1]` earns 1000, a reversed box 1        an_invalid_box                      unit/test_vlm
results of the wrong shape                        wrong_shape                         unit/test_rewards
functions with and without validity, mixed        with_and_without_validity
one invalid step reward in a sum                  one_unmeasured_turn                 unit/test_episode
math-verify's traps; its name left out                                                unit/test_math_verifier
================================================  ==================================  ==================================
"""

import math
import statistics
import time

import anyio
import numpy as np
import pytest
import torch

from envs.builtin.vlm import bbox_giou
from envs.rewards import RewardFunction, environment_reward
from envs.rewards.loading import CallOptions
from envs.rewards.parts import merge_parts
from stream.errors import RunFailedError
from stream.records import Completion, Failure, Group, Prompt, RewardPart
from stream.validity import DropReason, Measured, RewardReason, RolloutReason, TruncationReason, Unmeasured
from tests.cases.rows import sampled_row
from tests.twins.losses import OPTIONS
from workers.score.worker import score_group
from workers.settings.toml_file import parse_settings
from workers.train.algorithms.correction import importance_weights
from workers.train.algorithms.losses import LOSSES, LossInputs, policy_loss
from workers.train.algorithms.masks import reject_tokens
from workers.train.algorithms.sequences import Sequences, log_ratios
from workers.train.groups.invalid_fraction_monitor import InvalidFractionMonitor
from workers.train.step.batch import collate
from workers.train.step.estimation import estimate_advantages
from workers.train.step.group_checks import check_group, filter_reasons, mask_batch

LEAST = {"model": {"path": "m"}, "data": {"path": "d"}, "environments": {"a": "calculator"}}
MEAN = {"estimator": {"name": "grpo", "normalize_std": False}}


def completion(index, reward=None, tokens=2, **facts):
    """Make one turn with this number of sampled tokens, whose text is the completion's index."""
    row = sampled_row([2] * tokens, [-1.0] * tokens, prompt=[1])
    if isinstance(reward, int | float):
        reward = Measured(float(reward))
    messages = [{"role": "assistant", "content": str(index)}]
    return Completion(index=index, rows=[row], messages=messages, reward=reward, turns=1, **facts)


def group_of(*completions, name="p"):
    return Group(prompt=Prompt(id=name, messages=[], is_plain_text=True), completions=list(completions))


async def scored(*functions, completions=4, timeout_s=5.0, group=None, **options):
    """Return a group as the scoring stage completes it."""
    group = group or group_of(*(completion(i) for i in range(completions)))
    options = CallOptions(**options)
    loaded = [RewardFunction(f, f"f{i}", call_options=options) for i, f in enumerate(functions)]
    await score_group(group, loaded, {}, timeout_s)
    return group


def outcomes(group):
    rewards = [c.reward for c in group.completions]
    return [r.value if isinstance(r, Measured) else r and r.reason for r in rewards]


def trained(*groups, **sections):
    """Return advantages of all completions, the baseline mask, and the reason for dropping each group."""
    settings = parse_settings(LEAST | {"filter": {"min_valid_rows": 1}} | sections)
    batch = collate(groups)
    masks = mask_batch(batch, settings, 0)
    result = estimate_advantages(batch, masks, settings)
    return result.values_C.tolist(), masks.baseline_C.tolist(), filter_reasons(batch, masks, settings)


async def raises(completions):
    raise ValueError("no")


async def exits(completions):
    raise SystemExit(1)


async def hangs(completions):
    await anyio.sleep_forever()


@pytest.mark.parametrize(
    ("verifier", "reason"),
    [(raises, RewardReason.RAISED), (exits, RewardReason.RAISED), (hangs, RewardReason.TIMEOUT)],
)
async def test_a_verifiers_exception_or_timeout_is_not_reward_0(verifier, reason):
    group = await scored(verifier, timeout_s=0.05)
    assert outcomes(group) == [reason] * 4
    assert trained(group) == ([0.0] * 4, [False] * 4, [DropReason.NO_VALID_ROW])


async def test_the_verifier_raises_in_1_of_4():
    def verifier(completions):
        if "1" in completions:
            raise ValueError("crashed")
        return [1.0] * len(completions)

    group = await scored(verifier, granularity="row")
    assert outcomes(group) == [1.0, RewardReason.RAISED, 1.0, 1.0]  # not [1, 0, 1, 1]
    advantages, votes, dropped = trained(group)
    assert (advantages, votes) == ([0.0] * 4, [True, False, True, True])
    assert dropped == [DropReason.ZERO_VARIANCE]  # a score of 0 would spread the right answers


async def test_a_scoring_timeout_is_not_ok_with_reward_0():
    def verifier(completions):
        time.sleep(0.3)
        return [0.0] * len(completions)

    assert outcomes(await scored(verifier, completions=1, timeout_s=0.05)) == [RewardReason.TIMEOUT]


FAILURES = {
    "the model server answers 500": RolloutReason.ENGINE,
    "a context overflow on the first call": RolloutReason.PROMPT_TOO_LONG,
    "the reset failed": RolloutReason.ENV_RESET,
    "a tool's world failed": RolloutReason.ENV_STEP,
    "the environment hung": RolloutReason.ENV_TIMEOUT,
}


@pytest.mark.parametrize("reason", FAILURES.values(), ids=[name.replace(" ", "_") for name in FAILURES])
async def test_failed_rollouts_are_not_scored(reason):
    assert set(FAILURES.values()) == set(RolloutReason)
    asked = []

    def unconditional(completions):
        asked.extend(completions)
        return [1.0] * len(completions)

    failed = completion(1, failure=Failure(reason=reason))
    group = await scored(unconditional, group=group_of(completion(0), failed, completion(2)))
    assert outcomes(group) == [1.0, None, 1.0]
    assert asked == ["0", "2"]
    assert failed.parts == []
    assert trained(group)[1] == [True, False, True]


async def test_one_nan_reward_costs_no_sibling_its_advantage():
    group = await scored(lambda completions: [1.0, 3.0, 2.0, math.nan])
    assert outcomes(group)[3] is RewardReason.NOT_FINITE
    assert trained(group, **MEAN)[0] == [-1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("shaping", [{}, {"algorithm": {"reward_clip": 20.0}}])
async def test_an_infinite_reward_is_unmeasured_and_not_clipped(shaping):
    group = await scored(lambda completions: [1.0, 0.0, math.inf], completions=3)
    assert outcomes(group) == [1.0, 0.0, RewardReason.NOT_FINITE]
    assert trained(group, **MEAN, **shaping)[0] == [0.5, -0.5, 0.0]


def test_masked_completions_are_not_in_the_baseline():
    cut = completion(1, 1.0, truncated=TruncationReason.LENGTH)
    others = completion(0, 1.0), completion(2, 0.0), completion(3, 0.0)
    group = group_of(others[0], cut, *others[1:])
    exclude = {"algorithm": {"truncation": {"length": "exclude"}}}
    advantages, votes, _ = trained(group, **MEAN, **exclude)
    assert votes == [True, False, True, True]
    assert advantages == pytest.approx([2 / 3, 0.0, -1 / 3, -1 / 3])


def test_an_invalid_reward_stays_invalid_after_shaping():
    group = group_of(completion(0, 1.0), completion(1, Unmeasured(RewardReason.TIMEOUT)), completion(2, 0.5))
    shaping = {"algorithm": {"reward_clip": 0.75}}
    assert trained(group, **MEAN, **shaping)[0] == pytest.approx([0.125, 0.0, -0.125])


def test_four_equal_rewards_have_std_0_and_the_group_is_dropped():
    advantages, _, dropped = trained(group_of(*(completion(i, 0.9) for i in range(4))))
    assert (advantages, dropped) == ([0.0] * 4, [DropReason.ZERO_VARIANCE])


def test_leave_one_out_with_std_does_not_cancel():
    rewards = [1e4 + 0.9, 1e4 + 0.9, 1e4 + 0.9, 1e4 + 0.1]
    options = {"estimator": {"name": "grpo", "leave_one_out": True}}
    result = trained(group_of(*(completion(i, r) for i, r in enumerate(rewards))), **options)[0]
    shifted = [0.9, 0.9, 0.9, 0.1]
    spread = statistics.stdev(shifted)
    expected = [(r - statistics.mean([*shifted[:i], *shifted[i + 1 :]])) / spread for i, r in enumerate(shifted)]
    assert result == pytest.approx(expected, rel=1e-3)
    assert min(result) > -3  # and not -2075


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_a_rejected_rows_nan_advantage_reaches_no_gradient(name, junk):
    def gradient(value):
        logprobs = torch.tensor([[-1.0, -0.5], [-2.0, -1.0]], dtype=torch.float64, requires_grad=True)
        output = policy_loss(
            name,
            LossInputs(
                logprobs_RT=logprobs,
                proximal_RT=torch.tensor([[-1.1, -0.6], [value, value]], dtype=torch.float64),
                advantages_RT=torch.tensor([[0.5, 0.5], [value, value]], dtype=torch.float64),
                sequences=Sequences(torch.tensor([[True, True], [False, False]]), torch.arange(2)),
            ),
            torch.tensor([0.5, 0.5], dtype=torch.float64),
            OPTIONS[name][0],
        )
        (result,) = torch.autograd.grad(output.loss, logprobs)
        return output.loss.detach(), result

    (loss, result), (clean_loss, clean) = gradient(junk), gradient(0.0)
    assert torch.equal(loss, clean_loss)
    assert torch.equal(result, clean)
    assert (result[1] == 0).all()


def test_rejected_tokens_are_not_in_the_denominator():
    """The batch's divisor counts loss tokens only, without the tokens of a rejected completion."""
    settings = parse_settings(LEAST | MEAN | {"filter": {"min_valid_rows": 1}})
    batch = collate([group_of(completion(0, 1.0), completion(1, 0.0), completion(2, 1.0, tokens=9))])
    rejected = torch.zeros_like(batch.sampled_RT)
    rejected[2] = True
    masks = reject_tokens(mask_batch(batch, settings, 0), batch.completion_ids_R, {"seq_max_k2": rejected})
    alone = mask_batch(collate([group_of(completion(0, 1.0), completion(1, 0.0))]), settings, 0)
    assert int(masks.loss_tokens_RT.sum()) == int(alone.loss_tokens_RT.sum()) == 4
    assert masks.baseline_C.tolist() == [True, True, False]


def test_importance_weights_are_normalized_after_rejection():
    def weights(rejected_ratio):
        train = torch.log(torch.tensor([[1.5], [0.5], [rejected_ratio]], dtype=torch.float64))
        kept = torch.tensor([[True], [True], [False]])
        result = importance_weights(
            log_ratios(train, torch.zeros_like(train), Sequences(kept, torch.arange(3))),
            level="token",
            lower=0.0,
            upper=math.inf,
            out_of_range="truncate",
            normalize=True,
        )
        return result.weights_RT

    assert torch.equal(weights(1.0), weights(1e6))  # a change of the rejected row has no effect
    assert weights(1e6).squeeze(1).tolist() == pytest.approx([1.5, 0.5, 0.0])


def test_the_longest_row_of_a_batch_does_not_lose_its_reward():
    rows = [completion(0, 1.0, tokens=7), completion(1, 0.0, tokens=2), completion(2, 0.0, tokens=2)]
    exclude = {"algorithm": {"truncation": {"length": "exclude"}}}
    assert trained(group_of(*rows), **exclude)[1] == [
        True,
        True,
        True,
    ]  # it fills the padded width, but was not truncated
    cut = replace_in(rows[1], truncated=TruncationReason.LENGTH)
    assert trained(group_of(rows[0], cut, rows[2]), **exclude)[1] == [True, False, True]  # the short one was truncated


def replace_in(original, **facts):
    return Completion(**{name: getattr(original, name) for name in original.__struct_fields__} | facts)


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo"])
def test_a_single_completion_does_not_get_its_raw_reward_as_advantage(name):
    lone = group_of(completion(0, 5.0), completion(1, Unmeasured(RewardReason.RAISED)))
    assert trained(lone, estimator={"name": name})[0] == [0.0, 0.0]


def test_a_ratio_cap_limits_the_ratio():
    """One token whose ratio is exp(20): 4.8e8 without the cap."""
    train = torch.tensor([[20.0]], dtype=torch.float64)
    weights = importance_weights(
        log_ratios(train, torch.zeros_like(train), Sequences(torch.tensor([[True]]), torch.tensor([0]))),
        level="token",
        lower=0.0,
        upper=2.0,
        out_of_range="truncate",
        normalize=False,
    ).weights_RT
    assert weights.tolist() == [[2.0]]


def test_failed_resets_are_not_zeros_in_the_baseline_and_stop_the_run():
    guard = InvalidFractionMonitor(max_invalid_fraction=0.2, window=4)
    failed = Failure(reason=RolloutReason.ENV_RESET)
    group = group_of(completion(0, 1.0), *(completion(i, failure=failed) for i in range(1, 10)))
    assert trained(group)[:2] == ([0.0] * 10, [True] + [False] * 9)  # none of them is a 0 in the baseline
    without_loss = check_group(group, parse_settings(LEAST), 0, 1_000_000).without_loss
    for _ in range(3):
        guard.observe("sessions", 10, without_loss)
    with pytest.raises(RunFailedError, match="failed:env_reset"):
        guard.observe("sessions", 10, without_loss)


@pytest.mark.parametrize("box", ["[nan,0,1,1]", "[1,1,0,0]"])
def test_an_invalid_box_scores_0(box):
    assert bbox_giou("[0,0,1,1]", f"<answer>{box}</answer>") == Measured(0.0)


@pytest.mark.parametrize(
    "result", [1.0, [[1.0], [1.0], [1.0], [1.0]], [1.0, 1.0, 1.0], [1.0] * 5, np.ones((4, 1)), [1.0, [1.0], 1.0, 1.0]]
)
async def test_a_verifier_result_of_the_wrong_shape_leaves_every_row_unmeasured(result):
    group = await scored(lambda completions: result)
    assert outcomes(group) == [RewardReason.SHAPE] * 4
    assert trained(group)[2] == [DropReason.NO_VALID_ROW]


async def test_environments_with_and_without_validity_can_be_mixed():
    """A finite number without a validity is valid; None and Unmeasured are not."""

    class Silent:
        def get_reward(self):
            return 0.0

    class Speaking:
        def __init__(self, reward):
            self.reward = reward

        def get_reward(self):
            return self.reward

    worlds = [
        Silent(),
        Speaking(Measured(1.0)),
        Speaking(Unmeasured(RewardReason.UNAVAILABLE)),
        Speaking(None),
        Silent(),
    ]
    group = group_of(*(completion(i) for i in range(len(worlds))))
    for result, world in zip(group.completions, worlds, strict=True):
        result.parts = await environment_reward(world, 5.0)
        result.reward = merge_parts(result.parts)
    assert outcomes(group) == [0.0, 1.0, RewardReason.UNAVAILABLE, RewardReason.MISSING, 0.0]
    advantages, votes, _ = trained(group, **MEAN)
    assert votes == [True, True, False, False, True]
    assert advantages == pytest.approx([-1 / 3, 2 / 3, 0.0, 0.0, -1 / 3])


async def test_reward_functions_with_and_without_validity_can_be_mixed():
    """Two functions give the parts of one reward: a row is valid if both measured it."""

    def silent(completions):
        return [0.5] * len(completions)

    def speaking(completions):
        return [Measured(0.5), Unmeasured(RewardReason.UNAVAILABLE, "the judge is away"), 0.5, None]

    group = await scored(silent, speaking)
    assert outcomes(group) == [1.0, RewardReason.COMPONENT, 1.0, RewardReason.COMPONENT]
    kept = [[part.reward for part in c.parts] for c in group.completions]
    assert kept[1] == [Measured(0.5), Unmeasured(RewardReason.UNAVAILABLE, "the judge is away")]


@pytest.mark.parametrize("bad", [None, math.nan, "1"])
async def test_one_unmeasured_turn_leaves_the_sum_unmeasured(bad):
    class Stepping:
        def get_reward(self):
            return [1.0, bad, 1.0]

    turns = [{"role": "assistant", "content": "x"}] * 3
    parts = await environment_reward(Stepping(), 5.0, messages=turns)
    assert merge_parts(parts).reason is RewardReason.COMPONENT
    assert [isinstance(part.reward, Measured) for part in parts] == [
        True,
        False,
        True,
    ]  # each is kept with its validity
    assert [part.turn for part in parts] == [0, 1, 2]


def test_an_unmeasured_part_of_weight_0_makes_the_completion_invalid():
    parts = [
        RewardPart(name="a", reward=Measured(1.0)),
        RewardPart(name="b", reward=Unmeasured(RewardReason.TIMEOUT), weight=0.0),
    ]
    assert merge_parts(parts).reason is RewardReason.COMPONENT
