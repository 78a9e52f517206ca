"""Selectors over a whole batch, by hand. References: conformance; twins: test_twins_of_losses."""

import math

import torch

from workers.train.algorithms.token_selection import SELECTORS, m2po, select_tokens

torch.set_num_threads(1)

CLIP_COV = {"clip_low": 0.2, "clip_high": 0.28, "clip_cov_ratio": 0.1, "clip_cov_low": 0.0, "clip_cov_high": 5.0}


def test_m2po_keeps_the_smallest_if_no_mean_is_below_the_threshold():
    behaviour = torch.tensor([[3.0, 1.0, 2.0]])
    kept = m2po(behaviour, torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool), threshold=0.5)
    assert kept.tolist() == [[False, True, False]]


def test_m2po_requires_a_mean_below_the_threshold():
    behaviour, mask = torch.tensor([[1.0, 0.0]]), torch.ones(1, 2, dtype=torch.bool)
    assert m2po(behaviour, torch.zeros(1, 2), mask, threshold=0.5).tolist() == [[False, True]]
    assert m2po(behaviour, torch.zeros(1, 2), mask, threshold=0.5001).tolist() == [[True, True]]


def test_m2po_keeps_or_removes_equal_tokens_together():
    behaviour = torch.tensor([[2.0, 1.0, -2.0, 0.0]])
    # Without one of the two 2s the mean would be 5/3: below the threshold, but which of them?
    kept = m2po(behaviour, torch.zeros(1, 4), torch.ones(1, 4, dtype=torch.bool), threshold=2.0)
    assert kept.tolist() == [[False, True, False, True]]


def test_an_empty_mask_and_an_empty_batch_select_nothing():
    for shape in ((2, 3), (0, 0), (2, 0)):
        junk, mask = torch.full(shape, math.nan), torch.zeros(shape, dtype=torch.bool)
        assert not m2po(junk, junk, mask, threshold=1.0).any()
        for name in SELECTORS:
            options = CLIP_COV | {"kl_cov_ratio": 1.0}
            chosen = select_tokens(name, junk, junk, junk, mask, torch.Generator(), options)
            assert chosen.shape == shape
            assert not chosen.any()


def test_kl_cov_chooses_the_largest_covariances_of_the_whole_batch():
    logprobs = torch.tensor([[-1.0, -3.0, math.nan], [-2.0, -2.0, -4.0]])
    advantages = torch.tensor([[1.0, -1.0, math.nan], [1.0, -1.0, 1.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    # Means 0.2 and -2.4: covariances 1.12, 0.72, 0.32, -0.48, -1.28.
    for share, expected in (
        (0.2, [[1, 0, 0], [0, 0, 0]]),
        (0.7, [[1, 1, 0], [1, 0, 0]]),
        (1e-4, [[1, 0, 0], [0, 0, 0]]),
    ):
        chosen = select_tokens("kl_cov", logprobs, logprobs, advantages, mask, None, {"kl_cov_ratio": share})
        assert chosen.int().tolist() == expected


def test_clip_cov_skips_tokens_that_are_already_clipped():
    logprobs = torch.tensor([[-1.0, -3.0]])
    advantages, mask = torch.tensor([[1.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool)
    options = CLIP_COV | {"clip_cov_ratio": 1.0}
    chosen = select_tokens("clip_cov", logprobs, logprobs, advantages, mask, torch.Generator(), options)
    assert chosen.tolist() == [[True, True]]
    risen = select_tokens("clip_cov", logprobs, logprobs - 0.5, advantages, mask, torch.Generator(), options)
    assert risen.tolist() == [[False, True]]


def test_clip_cov_selects_at_random_and_equally_for_equal_seeds():
    logprobs = torch.linspace(-3, -1, 40).reshape(4, 10)
    advantages = torch.linspace(-1, 1, 40).reshape(4, 10)
    mask = torch.ones(4, 10, dtype=torch.bool)

    def choose(seed):
        return select_tokens(
            "clip_cov", logprobs, logprobs, advantages, mask, torch.Generator().manual_seed(seed), CLIP_COV
        )

    assert torch.equal(choose(1), choose(1))
    assert all(int(choose(seed).sum()) == 4 for seed in range(20))
    hits = sum(choose(seed).int() for seed in range(400))
    # Each of the 40 tokens is expected 40 times, with a standard deviation of 6.
    assert int(hits.min()) > 10
    assert int(hits.max()) < 70


def test_random_selection_does_not_depend_on_padding():
    logprobs, advantages = torch.linspace(-3, -1, 20).reshape(2, 10), torch.linspace(-1, 1, 20).reshape(2, 10)
    mask = torch.ones(2, 10, dtype=torch.bool)

    def choose(pad):
        wide = [
            torch.nn.functional.pad(t, (0, pad, 0, pad), value=v)
            for t, v in ((logprobs, 7.0), (advantages, 7.0), (mask, False))
        ]
        return select_tokens("clip_cov", wide[0], wide[0], wide[1], wide[2], torch.Generator().manual_seed(5), CLIP_COV)

    assert torch.equal(choose(0), choose(3)[:2, :10])
