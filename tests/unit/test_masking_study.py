"""The study of masking, on groups small enough to enumerate all failures."""

import itertools
import math

import pytest
import torch

from benchmarks.masking.advantage_bias import FAILURES, Stored, advantages, compare, draw, mean, summarise
from benchmarks.masking.curve_figure import differences, interval
from benchmarks.masking.failing import SHARE, NumberedCalculator, fails, raising, scoring_zero

RIGHT_ONLY, ANY = FAILURES
PLAIN = "grpo without std"


def group(*rewards: float) -> Stored:
    """Make one group whose answers have equal lengths."""
    codes = torch.zeros(len(rewards), dtype=torch.int64)
    return Stored(torch.tensor(rewards, dtype=torch.float64), torch.full_like(codes, 10), codes)


def every_way(stored: Stored, failures: str) -> torch.Tensor:
    """Return each set of failures once: at probability 0.5 all are equally likely, so a mean over them is exact."""
    may_fail = stored.right.tolist() if failures == RIGHT_ONLY else [True] * len(stored.rewards)
    return torch.tensor(list(itertools.product(*[(False, True) if may else (False,) for may in may_fail])))


def biases(stored: Stored, label: str, failures: str, handling: str) -> tuple[float, float]:
    """Return the biases of right and of wrong answers that bear loss."""
    sums = compare(stored, label, every_way(stored, failures), handling)
    return tuple(summarise(sums, right)["bias"][0] for right in (1, 0))


def test_a_pair_whose_right_answer_fails_half_the_time():
    # Truth: 0.5 and -0.5. Masked: the right one has 0.5 unless it failed; the wrong one is then alone, with 0.
    assert biases(group(1, 0), PLAIN, RIGHT_ONLY, "masked") == pytest.approx((0.0, 0.25))
    # Scored 0: a failure makes a tie, so both have half of their true advantage.
    assert biases(group(1, 0), PLAIN, RIGHT_ONLY, "scored zero") == pytest.approx((-0.25, 0.25))


def test_masking_is_biased_if_only_right_answers_fail():
    # Both right ones stay (1/4): 1/2, -1/2. One stays (1/2): 2/3, -1/3. None stays (1/4): 0 for the wrong ones.
    right = (2 * 1 / 2 + 2 * 2 / 3) / 4 - 1 / 2  # both right answers remain in the first case, one in two other cases
    wrong = (1 * -1 / 2 + 2 * -1 / 3 + 0) / 4 + 1 / 2
    assert biases(group(1, 1, 0, 0), PLAIN, RIGHT_ONLY, "masked") == pytest.approx((right, wrong))
    # Scored 0: 1/2, -1/2; then 3/4 for one, -1/4 for the failed one and the wrong ones; then a tie.
    right = (2 * 1 / 2 + 2 * (3 / 4 - 1 / 4) + 0) / 8 - 1 / 2
    wrong = (1 * -1 / 2 + 2 * -1 / 4 + 0) / 4 + 1 / 2
    assert biases(group(1, 1, 0, 0), PLAIN, RIGHT_ONLY, "scored zero") == pytest.approx((right, wrong))


@pytest.mark.parametrize("rewards", [(1, 0), (1, 0, 0), (1, 1, 0, 0, 0, 0, 1, 0)])
def test_rloo_is_unbiased_under_random_failures_except_for_single_completions(rewards):
    stored = group(*rewards)
    alone = 0.5 ** (len(rewards) - 1)  # probability that all siblings failed: the advantage is 0
    truth = advantages(stored, "rloo", torch.zeros(1, len(rewards), dtype=torch.bool), "masked")[0]
    right, wrong = truth.max().item(), truth.min().item()
    assert biases(stored, "rloo", ANY, "masked") == pytest.approx((-alone * right, -alone * wrong))
    # Scored 0, the expected reward of a right answer is half, as is its siblings' mean: everything is halved.
    assert biases(stored, "rloo", ANY, "scored zero") == pytest.approx((-right / 2, -wrong / 2))


def test_scoring_0_pushes_a_right_answer_down_and_masking_never_does():
    ways = every_way(group(1, 1, 1, 0), RIGHT_ONLY)
    result = {how: summarise(compare(group(1, 1, 1, 0), PLAIN, ways, how), 1) for how in ("masked", "scored zero")}
    assert result["masked"]["wrong_way"][0] == 0.0
    # Half of all right answers fail; they are below the mean unless all three fail (1 case of 8), which is a tie.
    assert result["scored zero"]["wrong_way"][0] == pytest.approx((12 - 3) / 24)


def test_every_draw_is_a_separate_batch():
    stored = Stored(torch.tensor([1.0, 0, 0, 1, 1]).double(), torch.full((5,), 9), torch.tensor([0, 1, 0, 1, 1]))
    failed = draw(stored, ANY, 0.5, 20, torch.Generator().manual_seed(3))
    for handling in ("masked", "scored zero"):
        together = advantages(stored, "grpo", failed, handling)
        alone = torch.cat([advantages(stored, "grpo", row.unsqueeze(0), handling) for row in failed])
        assert torch.equal(together, alone)
        assert bool(together.isfinite().all())


def test_only_right_answers_fail_under_that_failure_model():
    stored = group(1, 0, 1, 0)
    failed = draw(stored, RIGHT_ONLY, 0.5, 4000, torch.Generator().manual_seed(1))
    assert not failed[:, [1, 3]].any()
    assert failed[:, [0, 2]].double().mean().item() == pytest.approx(0.5, abs=0.03)


def test_the_interval_over_draws_is_that_of_a_mean_of_equally_weighted_draws():
    sums, counts = torch.tensor([2.0, 4.0, 6.0]).double(), torch.full((3,), 2.0).double()
    middle, half = mean(sums, counts)
    assert middle == 2.0
    assert half == pytest.approx(1.959964 * 1.0 / math.sqrt(3))  # of 1, 2, 3, whose standard deviation is 1
    assert mean(sums, torch.zeros(3)) is None


def test_the_same_fifth_of_rewards_fails_in_both_variants():
    places = [(1, f"prompts:0:{number}", index) for number in range(500) for index in range(8)]
    failing = [fails(*place) for place in places]
    assert sum(failing) / len(failing) == pytest.approx(SHARE, abs=0.02)
    assert failing != [fails(2, prompt, index) for _, prompt, index in places]
    for (seed, prompt, index), failed in zip(places[:40], failing, strict=False):
        calculator = NumberedCalculator()
        calculator.reset(answer=3, completion_index=index)
        calculator.add(1, 2)
        turns = [[{"role": "assistant", "content": "Answer: 3"}]]
        row = {"run_seed": [seed], "prompt_id": [prompt], "completions": turns, "environments": [calculator]}
        [zero] = scoring_zero(**row, answer=[3])
        assert (zero == 0.0) == failed
        if failed:
            with pytest.raises(RuntimeError):
                raising(**row, answer=[3])
        else:
            assert raising(**row, answer=[3]) == [zero]


def test_differences_are_paired_by_seed_with_students_interval():
    one = {seed: {0: 0.3, 100: 0.5 + seed / 10} for seed in (1, 2, 3)}
    other = {seed: {0: 0.3, 100: 0.5} for seed in (3, 2, 1, 4)}
    paired = differences(one, other)
    assert paired[100] == pytest.approx([0.1, 0.2, 0.3])
    assert paired[-1] == pytest.approx([0.1, 0.2, 0.3])  # after the warm start
    middle, half = interval(paired[100])
    assert (middle, half) == pytest.approx((0.2, 4.303 * 0.1 / math.sqrt(3)))
