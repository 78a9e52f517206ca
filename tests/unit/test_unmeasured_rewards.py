"""How other projects turn failures into rewards, row by row, and how Penstock treats each.

Every row names its test here by a part of the name, or the file that tests it in detail. The tests in this file run the
whole path: reward functions called by the scoring stage, parts merged, groups collated, masks derived, advantages
estimated.

================================================  ==================================  ==================================
in other projects                                 test here, by a part of its name    in detail
================================================  ==================================  ==================================
a verifier's exception or timeout is reward 0.0   a_verifiers_exception_or_timeout    unit/test_rewards
the verifier raises in 1 of 4: [1, 0, 1, 1]       raises_in_1_of_4                    unit/test_reward_calling
a scoring timeout gives ok, reward 0                                                  unit/test_rewards
a 500 of the model server is scored               failed_rollouts_are_not_scored      integration/test_engine_faults
a context overflow on the first call is scored    failed_rollouts_are_not_scored      unit/test_episode
one NaN reward makes its whole group NaN          one_nan_reward                      property/estimators, P1
inf; inf clipped to 20                            infinite_reward                     unit/test_shaping
masked completions count in the baseline          masked_completions                  property/masks, P15
an invalid 0 rescaled to -1                       after_shaping                       unit/test_shaping
the std of four 0.9s is not 0                                                         unit/test_group_checks
leave-one-out with std cancels to -2075                                               property/twins_advantages
a rejected row's NaN advantage in every gradient                                      property/losses, P1
rejected tokens stay in the denominator                                               property/the_path, P14
weights normalized before rejection                                                   property/twins_correction
"no EOS" guessed from the padded width                                                unit/test_episode, P11
one group of one gets its raw reward                                                  property/estimators, P5
a ratio cap that the code lacks: 4.8e8                                                property/twins_correction
1172 of 1280 failed in reset, trained as 0        failed_resets                       unit/test_invalid_fraction_monitor
`[nan,0,1,1]` earns 1000, a reversed box 1                                            unit/test_vlm
results of the wrong shape                                                            unit/test_rewards
functions with and without validity, mixed        with_and_without_validity
one invalid step reward in a sum                                                      unit/test_rewards
math-verify's traps; its name left out                                                unit/test_math_verifier
================================================  ==================================  ==================================
"""

import math

import anyio
import pytest

from envs.rewards import RewardFunction, environment_reward
from envs.rewards.loading import CallOptions
from envs.rewards.parts import merge_parts
from stream.errors import RunFailedError
from stream.records import Failure, Group, Prompt
from stream.validity import DropReason, Measured, RewardReason, RolloutReason, TruncationReason, Unmeasured
from tests.cases import groups
from workers.score.worker import score_group
from workers.settings.toml_file import parse_settings
from workers.train.groups.invalid_fraction_monitor import InvalidFractionMonitor
from workers.train.step.batch import collate
from workers.train.step.estimation import estimate_advantages
from workers.train.step.group_checks import check_group, filter_reasons, mask_batch

LEAST = {"model": {"path": "m"}, "data": {"path": "d"}, "environments": {"a": "calculator"}}
MEAN = {"estimator": {"name": "grpo", "normalize_std": False}}


def completion(index, reward=None, tokens=2, **facts):
    """Make one turn with this number of sampled tokens, whose text is the completion's index."""
    messages = [{"role": "assistant", "content": str(index)}]
    return groups.completion(index, reward, [2] * tokens, messages=messages, **facts)


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


def trained(*made, **sections):
    """Return advantages of all completions, the baseline mask, and the reason for dropping each group."""
    settings = parse_settings(LEAST | {"filter": {"min_valid_rows": 1}} | sections)
    batch = collate(made)
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


FAILURES = {
    "the model server answers 500": RolloutReason.ENGINE,
    "a context overflow on the first call": RolloutReason.PROMPT_TOO_LONG,
    "the reset failed": RolloutReason.ENV_RESET,
    "a tool's world failed": RolloutReason.ENV_STEP,
    "the environment hung": RolloutReason.ENV_TIMEOUT,
    "the sandbox was lost": RolloutReason.SANDBOX,
    "a call with effects is not made twice": RolloutReason.EFFECTS,
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
