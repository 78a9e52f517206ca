"""Rows as the prefix tree that they share: the same log-probs, gradients and weights as rows apart."""

import pytest
import torch
import transformers

from tests.cases.models import loaded_once, write_small_qwen3
from tests.unit.test_every_algorithm import CASES, group
from workers.settings.toml_file import parse_settings
from workers.train.step.batch import collate
from workers.train.step.learner import Learner

VOCABULARY = 24


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    with loaded_once():
        yield write_small_qwen3(tmp_path_factory.mktemp("base"), VOCABULARY, layers=2, tied=False)


@pytest.fixture(autouse=True)
def norms_in_float64(monkeypatch):
    """transformers' norms compute in float32 whatever the dtype of the model is."""
    monkeypatch.setattr(
        transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm,
        "forward",
        lambda self, x: self.weight * x * (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt(),
    )


def learner(base, share, *, train=None, **sections):
    least = {"model": {"path": str(base)}, "data": {"path": "none"}, "environments": {"a": "calculator"}}
    own = {"learning_rate": 1e-3, "max_grad_norm": 1e9, "share_history": share} | (train or {})
    return Learner(parse_settings(least | {"train": own} | sections), dtype=torch.float64)


def weights(result):
    trained = result.parameters | result.critic_parameters
    return torch.cat([p.detach().flatten() for p in trained.values()])


@pytest.mark.parametrize("case", CASES)
def test_every_algorithm_ends_with_the_weights_of_rows_apart(base, case):
    apart, shared = (learner(base, share, **CASES[case]) for share in ("off", "on"))
    assert shared.runner.policy.can_share
    for _ in range(3):
        reports = [each.step(collate([group("p"), group("q", shift=1)]), 3) for each in (apart, shared)]
    assert reports[0].metrics["tokens/forwarded"] > reports[1].metrics["tokens/forwarded"]
    assert (weights(apart) - weights(shared)).abs().max() < 1e-9
