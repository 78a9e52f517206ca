"""Interpolated proximal log-probs, against a loop, with junk outside the mask. References: conformance."""

import math
import random

import pytest
import torch

from workers.train.algorithms.proximal import METHODS, interpolate_logprobs

torch.set_num_threads(1)

BEHAVIOUR, NOW = [[-1.875, -0.5, -1.375, -0.75, -1.75]], [[-1.475, -1.0, -0.925, -0.65, -1.75]]
VERSIONS = torch.tensor([[-1, 0, 1, 2, 3]])
SAMPLED = torch.ones(1, 5, dtype=torch.bool)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
def test_values_equal_a_loop_and_are_0_outside_the_mask(method, junk):
    draw = random.Random(7)
    tokens = [
        (draw.uniform(-9, 0), draw.uniform(-9, 0), draw.randrange(-1, 12), draw.random() < 0.7) for _ in range(60)
    ]
    behaviour, now, versions, sampled = (list(column) for column in zip(*tokens, strict=True))

    def sheet(values, outside):
        kept = [v if s else outside for v, s in zip(values, sampled, strict=True)]
        return torch.tensor(kept, dtype=torch.float64).reshape(6, 10)

    versions_RT = torch.tensor([v if s else -(10**12) for v, s in zip(versions, sampled, strict=True)]).reshape(6, 10)
    result = interpolate_logprobs(
        sheet(behaviour, junk), sheet(now, junk), versions_RT, torch.tensor(sampled).reshape(6, 10), 9, method=method
    )
    expected = []
    for old, new, version, is_sampled in tokens:
        share = (8 - version) / (9 - version) if 0 <= version <= 8 else 0.0
        if not is_sampled:
            expected.append(0.0)
        elif method == "loglinear":
            expected.append((1 - share) * old + share * new)
        elif method == "linear":
            expected.append(math.log((1 - share) * math.exp(old) + share * math.exp(new)))
        else:
            expected.append(old)
    assert result.flatten().tolist() == pytest.approx(expected, rel=1e-12)


def test_no_gradient_passes():
    now = torch.tensor(NOW).double().requires_grad_()
    for method in METHODS:
        result = interpolate_logprobs(torch.tensor(BEHAVIOUR).double(), now, VERSIONS, SAMPLED, 3, method=method)
        assert not result.requires_grad


def test_improbable_tokens_stay_finite():
    behaviour, now = torch.tensor([[-400.0, -1.0]]), torch.tensor([[-1.0, -400.0]])
    versions, sampled = torch.tensor([[0, 0]]), torch.ones(1, 2, dtype=torch.bool)
    for method in METHODS:
        assert torch.isfinite(interpolate_logprobs(behaviour, now, versions, sampled, 5, method=method)).all()


def test_an_empty_batch_gives_an_empty_result():
    empty = torch.empty(0, 0)
    for method in METHODS:
        assert interpolate_logprobs(empty, empty, empty.long(), empty.bool(), 3, method=method).shape == (0, 0)


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match="loglinear, linear, rollout"):
        interpolate_logprobs(torch.zeros(1, 5), torch.zeros(1, 5), VERSIONS, SAMPLED, 3, method="cubic")
