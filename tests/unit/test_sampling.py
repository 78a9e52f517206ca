"""Sampling one token per row: the right distribution, and the log-prob of the token."""

from random import Random

import pytest
import torch

from workers.engine_api.wire import UNKNOWN_LOGPROB, SamplingParams
from workers.local_engine.token_sampling import sample, truncate
from workers.rollout.engine_client.sampling import turn_seed

pytestmark = pytest.mark.models

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def draw(params: SamplingParams, count: int = 20_000) -> tuple[torch.Tensor, dict[int, float]]:
    """Return relative frequencies, and the log-prob of each token."""
    rows = LOGITS.expand(count, -1)
    ids, logprobs, _ = sample(rows, [params] * count, [Random(seed) for seed in range(count)])
    return torch.bincount(torch.tensor(ids), minlength=len(LOGITS)) / count, dict(zip(ids, logprobs, strict=True))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_token_frequencies_match_their_log_probs(temperature: float):
    frequencies, logprobs = draw(SamplingParams(temperature=temperature))
    expected = torch.log_softmax(LOGITS / temperature, dim=-1)
    assert torch.allclose(frequencies, expected.exp(), atol=0.015)
    for token, logprob in logprobs.items():
        assert logprob == pytest.approx(expected[token].item(), abs=1e-6)


def test_greedy_sampling_takes_the_likeliest_token_with_its_raw_log_prob():
    frequencies, logprobs = draw(SamplingParams(temperature=0, top_k=3), 10)
    assert frequencies[0] == 1
    assert logprobs[0] == pytest.approx(torch.log_softmax(LOGITS, dim=-1)[0].item(), abs=1e-6)


@pytest.mark.parametrize(
    ("params", "left"),
    [
        (SamplingParams(top_k=2), [0, 1]),
        (SamplingParams(top_k=100), [0, 1, 2, 3, 4, 5]),
        (SamplingParams(top_k=-1, top_p=0.5), [0]),
        (SamplingParams(top_p=0.8), [0, 1, 2]),  # masses .57 .21 .13: the third reaches .8
        (SamplingParams(min_p=0.3), [0, 1]),  # e^-1 = .37, e^-1.5 = .22
        (SamplingParams(top_k=3, top_p=0.7), [0, 1]),
        (SamplingParams(top_p=1e-9), [0]),
    ],
)
def test_truncated_tokens_are_never_sampled_and_the_rest_is_renormalized(params: SamplingParams, left: list[int]):
    frequencies, logprobs = draw(params, 3000)
    assert frequencies.nonzero().flatten().tolist() == left
    expected = torch.log_softmax(LOGITS[left], dim=-1)
    assert [logprobs[token] for token in left] == pytest.approx(expected.tolist(), abs=1e-6)
    assert truncate(torch.log_softmax(LOGITS, dim=-1), params).exp().sum().item() == pytest.approx(1)


def test_a_rows_samples_do_not_depend_on_the_batch():
    params = SamplingParams(temperature=1.0)
    alone = sample(LOGITS[None], [params], [Random(5)])
    among = sample(
        LOGITS.expand(3, -1), [SamplingParams(temperature=0), params, params], [Random(i) for i in (4, 5, 6)]
    )
    assert (alone[0][0], alone[1][0]) == (among[0][1], among[1][1])


def test_a_random_number_at_the_end_of_its_range_gives_a_possible_token():
    class Last(Random):
        def random(self) -> float:
            return 1 - 2**-53

    logits = torch.tensor([[0.0, 0.3, float("-inf"), float("-inf")]])
    ids, logprobs, _ = sample(logits, [SamplingParams()], [Last()])
    assert ids == [1]
    assert logprobs[0] > -1


def test_invalid_logits_give_an_invalid_log_prob():
    _, logprobs, _ = sample(torch.full((1, 4), float("nan")), [SamplingParams()], [Random(0)])
    assert logprobs[0] != logprobs[0]


def test_a_bias_is_added_before_dividing_by_the_temperature():
    params = SamplingParams(temperature=0.5, logit_bias={3: 2.0, 0: -100.0})
    frequencies, logprobs = draw(params)
    expected = torch.log_softmax((LOGITS + torch.tensor([-100.0, 0, 0, 2, 0, 0])) / 0.5, dim=-1)
    assert frequencies[0] == 0
    assert torch.allclose(frequencies, expected.exp(), atol=0.015)
    assert logprobs[3] == pytest.approx(expected[3].item(), abs=1e-6)
    assert LOGITS[0] == 2, "the model's own logits are not touched"


def test_banned_tokens_are_never_sampled_and_the_rest_is_renormalized():
    rows = LOGITS.expand(3000, -1)
    ids, logprobs, _ = sample(rows, [SamplingParams()] * 3000, list(map(Random, range(3000))), [{0, 1}] * 3000)
    assert set(ids) == {2, 3, 4, 5}
    expected = torch.log_softmax(LOGITS[2:], dim=-1)
    assert dict(zip(ids, logprobs, strict=True))[2] == pytest.approx(expected[0].item(), abs=1e-6)


def test_top_log_probs_are_those_of_the_sampling_distribution():
    *_, likeliest = sample(LOGITS[None], [SamplingParams(temperature=2.0, top_k=2, logprobs=3)], [Random(0)])
    expected = torch.log_softmax(LOGITS[:2] / 2, dim=-1)
    assert [entry.token_id for entry in likeliest[0][:2]] == [0, 1]
    assert [entry.logprob for entry in likeliest[0]] == pytest.approx([*expected.tolist(), UNKNOWN_LOGPROB], abs=1e-6)


@pytest.mark.parametrize("generator", [Random, lambda seed: torch.Generator().manual_seed(seed)])
def test_turns_completions_and_episodes_have_different_seeds(generator):
    """torch's CPU generator, which vLLM uses there, uses only the lowest 32 bits of a seed."""
    seeds = [turn_seed(episode, turn) for episode in (7, 8, 2**61, 2**61 + 2**32) for turn in range(8)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    made = [generator(seed) for seed in seeds]
    drawn = {m.random() if isinstance(m, Random) else torch.rand(1, generator=m).item() for m in made}
    assert len(drawn) == len(seeds)
