"""Settings tables that together use every registered function.

Each table takes one choice for each slot, as far as the settings allow the combination; a later table takes
the rest. A new registration therefore appears in a table automatically, or the tables report what they lack.
"""

from typing import Any

from stream.errors import SettingsError
from tests.cases.completions import MAX_AGE
from workers.settings import Settings
from workers.settings.toml_file import parse_settings
from workers.train.algorithms.advantages import ESTIMATORS
from workers.train.algorithms.aggregation import AGGREGATIONS
from workers.train.algorithms.correction import IMPORTANCE_LEVELS, REJECTIONS
from workers.train.algorithms.divergence import DIVERGENCES
from workers.train.algorithms.losses import LOSSES
from workers.train.algorithms.normalization import NORMALIZERS
from workers.train.algorithms.shaping import REWARD_SHAPINGS
from workers.train.algorithms.token_selection import SELECTORS

Table = dict[str, Any]

LEAST: Table = {
    "model": {"path": "none"},
    "data": {"path": "none"},
    "environments": {"a": "calculator"},
    "pacing": {"max_token_age": MAX_AGE},
    "filter": {"min_valid_rows": 1, "zero_variance": False},
    "algorithm": {"truncation": {"length": "exclude"}},
    "rollout": {"max_tokens": 12, "max_tokens_per_turn": 12},
}
OPTIONS: dict[str, Table] = {"passk": {"k": 2}, "clip_cov": {"clip_cov_low": -0.5001, "clip_cov_high": 0.5001}}
"""Options of estimators and losses whose defaults would have no effect on small cases."""
SOME = {"clip_cov": {"clip_cov_ratio": 0.3}, "kl_cov": {"kl_cov_ratio": 0.3}}
ALL = {"clip_cov": {"clip_cov_ratio": 1.0}, "kl_cov": {"kl_cov_ratio": 1.0}}
"""Fraction of the candidates that each selector chooses. A random selector depends on nothing but a token's position,
so tests that move tokens let it choose all of them.
"""
SHAPED: dict[str, Table] = {
    "clipped": {"algorithm": {"reward_clip": 0.75}},
    "overlong": {"algorithm": {"overlong_penalty": [11, 1.0], "truncation": {"tool_errors": "penalty"}}},
}
NORMALISED: dict[str, list[Table]] = {
    "whiten": [],  # in estimators
    "normalize": [
        {"algorithm": {"reward_normalization": ["group_leave_one_out", "none"]}},
        {"algorithm": {"reward_normalization": ["batch", "group"]}},
    ],
    "normalize_tokens": [
        {"algorithm": {"advantage_normalization": ["batch", "batch"]}},
        {"algorithm": {"advantage_normalization": ["group_leave_one_out", "batch"]}},
    ],
}
BOUNDS: dict[str, list[float]] = {
    "token_k1": [0.2503, 4.0003],
    "token_k2": [0.0, 1.0007],
    "token_k3": [0.0, 1.0007],
    "seq_sum_k1": [0.0203, 2000.0003],
    "seq_sum_k2": [0.0, 8.0007],
    "seq_sum_k3": [0.0, 6.0007],
    "seq_mean_k1": [0.2003, 9.0003],
    "seq_mean_k2": [0.0, 2.0007],
    "seq_mean_k3": [0.0, 1.5007],
    "seq_max_k2": [0.0, 5.0007],
    "seq_max_k3": [0.0, 4.0007],
    "m2po": [0.0, 1.5007],
}
"""Bounds of rejection rules: most tokens of the cases are within them, some are not."""


def missing() -> list[str]:
    """Return each registered function that no table can use, with the entry to add."""
    lacking = [f"SHAPED[{name!r}]" for name in set(REWARD_SHAPINGS) - set(SHAPED)]
    lacking += [f"NORMALISED[{name!r}]" for name in set(NORMALIZERS) - set(NORMALISED)]
    lacking += [f"BOUNDS[{name!r}]" for name in REJECTIONS if name not in BOUNDS]
    lacking += [f"SOME[{name!r}] and ALL[{name!r}]" for name in SELECTORS if name not in SOME or name not in ALL]
    return sorted(lacking)


def _slots() -> dict[str, dict[str, Table]]:
    return {
        "estimator": {name: {"estimator": {"name": name, **OPTIONS.get(name, {})}} for name in ESTIMATORS},
        "loss": {f"loss:{name}": {"loss": {"name": name, **OPTIONS.get(name, {})}} for name in LOSSES},
        "proximal": {f"proximal:{n}": {"algorithm": {"proximal": n}} for n in ("recompute", "engine", "interpolate")},
        "weights": {
            "": {},
            **{f"{name}": {"correction": {"weights": name, "weight_range": [0.0, 1.7]}} for name in IMPORTANCE_LEVELS},
            **{
                f"{name} normalised": {
                    "correction": {"weights": f"{name}-normalized", "weight_range": [0.4, 3.0], "out_of_range": "zero"}
                }
                for name in IMPORTANCE_LEVELS
            },
        },
        "rejection": {
            **{name: {"correction": {"reject": {name: BOUNDS.get(name, [0.0, 2.0])}}} for name in REJECTIONS},
            "": {},
        },
        "aggregation": {name: {"algorithm": {"aggregation": name}} for name in AGGREGATIONS},
        "divergence": {
            "": {},
            **{f"divergence:{n}": {"algorithm": {"kl_coefficient": 0.1, "kl_estimator": n}} for n in DIVERGENCES},
        },
        "shaping": {"": {}, **{f"shaping:{name}": table for name, table in SHAPED.items()}},
        "normaliser": {
            "": {},
            **{f"{name}:{i}": table for name, some in NORMALISED.items() for i, table in enumerate(some)},
        },
        "zeroed": {
            policy: {"algorithm": {"truncation": {"max_turns": policy}}}
            for policy in ("zero_reward", "zero_reward_in_baseline")
        },
        "silent": {"baseline_only": {"algorithm": {"truncation": {"tool_calls": "baseline_only"}}}},
        "single_sample_policy": {"": {}, "singleton:raw": {"algorithm": {"single_sample_policy": "raw"}}},
        "entropy": {"": {}, "entropy": {"algorithm": {"entropy_coefficient": 0.01}}},
    }


def merged(left: Table, right: Table) -> Table:
    """Merge two tables recursively; where they differ, `right` wins."""
    both = left | right
    for name in left.keys() & right.keys():
        if isinstance(left[name], dict) and isinstance(right[name], dict):
            both[name] = merged(left[name], right[name])
    return both


def settings_of(table: Table, extra: Table | None = None) -> Settings:
    """Return the settings of a table."""
    return parse_settings(merged(merged(LEAST, table), extra or {}))


def choosing(table: Table, number: dict[str, Table]) -> Table:
    """Return the table with its loss's selector choosing this fraction; unchanged without a selector."""
    options = number.get(LOSSES[table["loss"]["name"]].traits.selector, {})
    return merged(table, {"loss": options})


def _tables() -> dict[str, Table]:
    slots, result = _slots(), dict[str, Table]()
    waiting = {slot: list(choices) for slot, choices in slots.items()}
    for turn in range(100):
        if not any(waiting.values()):
            return result
        table, names = dict[str, Table](), []
        for slot, choices in slots.items():
            every = list(choices)
            for name in [*waiting[slot], *every[turn % len(every) :], *every]:
                try:
                    settings_of(merged(table, choices[name]))
                except SettingsError:
                    continue
                table = merged(table, choices[name])
                names += [name] if name else []
                if name in waiting[slot]:
                    waiting[slot].remove(name)
                break
        result[" ".join(names)] = table
    raise AssertionError(f"no table can name {waiting}; the settings refuse it in every combination")


TABLES = _tables()
"""Tables by the names of the functions they use."""
EVERYTHING = [name for slot in _slots().values() for name in slot if name]
