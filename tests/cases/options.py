"""Options of registered functions: two or more values each; with the first, the other options have an effect."""

import math
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from workers.train.algorithms.registry import Registry, RegistryEntry

VALUES: dict[str, tuple[Any, ...]] = {
    # estimators
    "normalize_std": (True, False),
    "leave_one_out": (False, True),
    "epsilon": (1e-6, 0.5),
    "f_norm": (1.0, 2.5),
    "k": (2, 1),
    "discount": (1.0, 0.75),
    "gae_lambda": (0.95, 0.5),
    "whiten": (True, False),
    "center": ("completions", "tokens"),
    "zero_tail": (True, False),
    # normalisers
    "mean": ("group", "batch", "none"),
    "std": ("batch", "group", "none"),
    "unbiased": (True, False),
    "shift": (True, False),
    # losses
    "clip_low": (0.5, 0.001),
    "clip_high": (0.5, 0.001),
    "dual_clip": (0.0, 1.1),
    "level": ("token", "sequence"),
    "tau_positive": (1.0, 3.0),
    "tau_negative": (1.05, 3.0),
    "ratio_cap": (20.0, 1.1),
    "dro_beta": (0.1, 0.5),
    "kl_cov_coefficient": (1.0, 0.25),
    # selectors
    "clip_cov_ratio": (0.02, 1.0),
    "clip_cov_low": (-0.5001, 0.0101),
    "clip_cov_high": (0.5001, 0.0501),
    "kl_cov_ratio": (0.3, 1.0),
    # rejection rules
    "lower": (0.2003, 0.9003),
    "upper": (1.5003, 0.0503),
    # aggregations
    "constant": (1.0, 4.0),
    # shapings
    "limit": (0.75, math.inf),
    "max_length": (4, 3),
    "tail": (2, 3),
    "factor": (0.5, 1.0),
    # filters
    "min_valid_rows": (1, 3),
    "min_mean_reward": (-math.inf, 0.75),
    "max_mean_reward": (math.inf, 0.75),
    "min_advantage": (0.0, 1.5),
    "max_advantage": (math.inf, 1.5),
}


def values_of(option: str) -> tuple[Any, ...]:
    """Return the values of an option.

    Raises:
        AssertionError: no values are listed yet.
    """
    assert option in VALUES, f"a new option {option!r}: add values of it to tests/cases/options.py"
    return VALUES[option]


def defaults(registered: RegistryEntry[Any]) -> dict[str, Any]:
    """Return the first value of each option."""
    return {option: values_of(option)[0] for option in registered.option_names}


def drawn(registered: RegistryEntry[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy for all combinations of option values."""
    return st.fixed_dictionaries({option: st.sampled_from(values_of(option)) for option in registered.option_names})


def options_of(registry: Registry[Any]) -> list[tuple[str, str]]:
    """List every option of every registered function, for a parametrised test."""
    return [(name, option) for name, registered in registry.items() for option in registered.option_names]


def needed(inputs: Mapping[str, Any], registered: RegistryEntry[Any]) -> Mapping[str, Any]:
    """Return the inputs, which must include everything that the function needs.

    Raises:
        AssertionError: an input is missing.
    """
    lacking = [need for need in registered.input_names if need not in inputs]
    assert not lacking, f"{registered.name} needs {lacking}: add them to tests/cases/inputs.py"
    return inputs
