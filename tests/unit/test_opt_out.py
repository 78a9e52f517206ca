"""A policy that can make its own completions invalid does not learn to, unless the settings warn of it."""

import pytest
import torch

from benchmarks.masking.opt_out import SCENARIOS, START, opt_out_curve
from tests.cases.tables import settings_of
from workers.train.algorithms.advantages import ESTIMATORS

torch.set_num_threads(1)

CENTERED = [name for name, entry in ESTIMATORS.items() if "center" in entry.option_names]
NOT_NEUTRAL = {"remax", "reinforce_plus_plus", "gae", "opo"}
"""Estimators under which the mathematics cannot prevent it."""
VARIANTS = {
    **{name: {"estimator": {"name": name}} for name in ESTIMATORS},
    **{f"{name}, center tokens": {"estimator": {"name": name, "center": "tokens"}} for name in CENTERED},
    "gspo": {"loss": {"name": "gspo"}},
    "seq-mean-token-mean": {"algorithm": {"aggregation": "seq-mean-token-mean"}},
    "seq-mean-token-sum": {"algorithm": {"aggregation": "seq-mean-token-sum"}},
    "advantages normalized over the batch": {"algorithm": {"advantage_normalization": ["batch", "batch"]}},
    "advantages normalized over the group": {"algorithm": {"advantage_normalization": ["group", "none"]}},
    "advantages divided only": {"algorithm": {"advantage_normalization": ["none", "batch"]}},
    "rewards normalized over the batch": {"algorithm": {"reward_normalization": ["batch", "batch"]}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_opting_out_grows_only_where_the_settings_warn_of_it(name):
    """The estimators and options without a warning hold the probability, or lower it."""
    sections = VARIANTS[name]
    warned = bool(settings_of(sections).opt_out_risks)
    grown = max(float(opt_out_curve(toy, sections, steps=8, groups=8).max()) for toy in SCENARIOS.values())
    assert (grown > START + 1e-3) == warned
    assert warned or grown < START + 1e-6


def test_eleven_of_fifteen_estimators_are_neutral_at_default_settings():
    warned = {name for name in ESTIMATORS if settings_of({"estimator": {"name": name}}).opt_out_risks}
    assert warned == NOT_NEUTRAL
