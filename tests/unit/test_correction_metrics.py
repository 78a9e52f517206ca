"""Metrics of a correction, on batches small enough to compute by hand."""

import math
import statistics

import pytest
import torch

from workers.train.algorithms.correction import RejectionRule, importance_weights, reject
from workers.train.algorithms.correction_metrics import (
    policy_metrics,
    rejection_metrics,
    weight_metrics,
)
from workers.train.algorithms.sequences import Sequences, log_ratios

# Two completions, the first in two rows; the last row is masked and holds junk.
TRAIN = torch.tensor([[-1.0, -3.0], [-2.0, math.nan], [-1.0, -1.0], [math.inf, math.nan]], dtype=torch.float64)
ROLLOUT = torch.tensor([[-1.0, -2.0], [-2.0, 1e30], [-1.0, -2.0], [math.nan, -math.inf]], dtype=torch.float64)
MASK = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 0]]).bool()
IDS = torch.tensor([4, 4, 9, 6])
RATIOS = log_ratios(TRAIN, ROLLOUT, Sequences(MASK, IDS))
BOUNDS = {"lower": 0.0, "upper": 2.0, "out_of_range": "truncate", "normalize": False}


def floats(metrics: dict[str, torch.Tensor]) -> dict[str, float]:
    assert all(value.shape == () and value.dtype == torch.float64 for value in metrics.values())
    return {name: float(value) for name, value in metrics.items()}


def test_policies_are_compared_over_tokens_and_over_completions():
    result = floats(policy_metrics(TRAIN, ROLLOUT, RATIOS))
    assert result == pytest.approx(
        {
            "training_log_ppl": (2 + 1) / 2,
            "rollout_log_ppl": (5 / 3 + 1.5) / 2,
            "training_ppl": (math.exp(2) + math.exp(1)) / 2,
            "rollout_ppl": (math.exp(5 / 3) + math.exp(1.5)) / 2,
            "log_ppl_diff": (1 / 3 - 1 / 2) / 2,
            "log_ppl_abs_diff": (1 / 3 + 1 / 2) / 2,
            "log_ppl_diff_max": 1 / 3,
            "log_ppl_diff_min": -1 / 2,
            "ppl_ratio": (math.exp(1 / 3) + math.exp(-1 / 2)) / 2,
            "kl": (1 - 1) / 5,
            "k3_kl": (math.exp(-1) + math.exp(1) - 2) / 5,
            "chi2_token": (3 + math.exp(-2) + math.exp(2)) / 5 - 1,
            "chi2_seq": (math.exp(-2) + math.exp(2)) / 2 - 1,
        }
    )


def test_metrics_of_a_token_rule():
    result = floats(rejection_metrics(reject([RejectionRule("token_k1", 0.5, 4.0)], RATIOS)))
    low = math.log(0.5)
    inside = [0, 1, 0, 0, low]  # k1 of the first completion is 0, 1, 0; of the second, 0, -1
    assert result == pytest.approx(
        {
            "rollout_rs_token_k1_mean": 0.0,
            "rollout_rs_token_k1_max": 1.0,
            "rollout_rs_token_k1_min": -1.0,
            "rollout_rs_token_k1_std": statistics.pstdev(inside),
            "rollout_rs_token_k1_fraction_high": 0.0,
            "rollout_rs_token_k1_fraction_low": 1 / 5,
            "rollout_rs_token_k1_seq_mean": (1 / 3 - 1 / 2) / 2,
            "rollout_rs_token_k1_seq_std": (1 / 3 + 1 / 2) / math.sqrt(2),
            "rollout_rs_token_k1_seq_max": 1 / 3,
            "rollout_rs_token_k1_seq_min": -1 / 2,
            "rollout_rs_token_k1_seq_max_deviation": 1 / 2,
            "rollout_rs_token_k1_seq_fraction_high": 0.0,
            "rollout_rs_token_k1_seq_fraction_low": 0.0,
            "rollout_rs_token_k1_masked_fraction": 1 / 5,
            "rollout_rs_token_k1_seq_masked_fraction": 1 / 2,
            "rollout_rs_masked_fraction": 1 / 5,
            "rollout_rs_seq_masked_fraction": 1 / 2,
        },
        abs=1e-12,
    )


def test_metrics_of_token_weights():
    weights = importance_weights(RATIOS, level="token", **BOUNDS | {"normalize": True})
    result = floats(weight_metrics(weights))
    w = [1, math.exp(-1), 1, 1, 2.0]
    mean, squares = sum(w) / 5, sum(x * x for x in w) / 5
    first, second = (2 + math.exp(-1)) / 3, 1.5
    assert result == pytest.approx(
        {
            "rollout_is_mean": mean,
            "rollout_is_std": math.sqrt(squares - mean**2),
            "rollout_is_max": 2.0,
            "rollout_is_min": math.exp(-1),
            "rollout_is_eff_sample_size": mean**2 / squares,
            "rollout_is_ratio_fraction_high": 1 / 5,
            "rollout_is_ratio_fraction_low": 1 / 5,
            "rollout_is_seq_mean": (first + second) / 2,
            "rollout_is_seq_std": (second - first) / math.sqrt(2),
            "rollout_is_seq_max": second,
            "rollout_is_seq_min": first,
            "rollout_is_seq_max_deviation": 0.5,
            "rollout_is_seq_fraction_high": 0.0,
            "rollout_is_seq_fraction_low": 0.0,
            "rollout_is_batch_norm_factor": mean,
        }
    )


def test_effective_sample_size_is_1_for_equal_weights_and_0_if_all_are_zeroed():
    one = importance_weights(log_ratios(TRAIN, TRAIN, Sequences(MASK, IDS)), level="token", **BOUNDS)
    assert float(weight_metrics(one)["rollout_is_eff_sample_size"]) == 1.0
    none = importance_weights(
        log_ratios(TRAIN, TRAIN, Sequences(MASK, IDS)), level="token", **BOUNDS | {"upper": 0.5, "out_of_range": "zero"}
    )
    result = floats(weight_metrics(none))
    assert (result["rollout_is_eff_sample_size"], result["rollout_is_oob_ratio"]) == (0.0, 1.0)
