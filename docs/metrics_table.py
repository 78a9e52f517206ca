"""Print the tables of metrics in docs/run-folder.md: `python docs/metrics_table.py`. A test compares them."""

import sys
from collections.abc import Iterable

from workers.train.evaluations import EVALUATION_METRICS
from workers.train.groups.group_checker import REWARD_LOG_METRICS
from workers.train.step.step_metrics import COLLECTION_METRICS, STEP_METRICS, TRAINER_METRICS

METRICS = STEP_METRICS | COLLECTION_METRICS | REWARD_LOG_METRICS | EVALUATION_METRICS | TRAINER_METRICS
"""Every key of `metrics.jsonl` with what it is measured over."""
_NAMES_BY_UNIT = {
    "number": "step version trained eval/version",
    "reward": "reward/mean reward/std reward/min reward/max reward/part/* trained/reward_mean truncated/reward_mean "
    "eval/mean/valid eval/mean/all",
    "advantage": "advantage/mean advantage/std advantage/min advantage/max",
    "completions": "reward/count trained/reward_count rows/* truncated/* reward/unjudged/* eval/invalid eval/mixed",
    "groups": "groups/kept groups/tie groups/singleton groups/dropped/* stragglers/abandoned",
    "attempts": "attempt/cancelled",
    "calls": "tools/calls tools/errors",
    "fraction": "valid_fraction pass@* clip_fraction clip_fraction_lower branches/discarded/* eval/pass@*",
    "tokens": "length/mean length/max length/by_end/* truncated/length_mean tokens/loss tokens/sampled tokens/too_old "
    "tokens/not_finite tokens/forwarded tokens/shared tokens/branch_*",
    "branches": "branches/role/*",
    "compactions": "branches/compactions",
    "turns": "turns/mean",
    "versions": "staleness/mean staleness/max",
    "nats per token": "entropy kl/k1 kl/k3 kl/abs reference/kl",
    "ratio": "ratio/mean ratio/max",
    "seconds": "seconds step_seconds waiting_seconds publish/seconds publish/waiting_seconds attempt/seconds "
    "attempt/seconds_first stragglers/seconds",
    "Unix seconds": "time publish/time",
    "tokens/s": "tokens_per_second",
    "no unit": "learning_rate loss grad_norm",
    "see below": "correction/* value/*",
    "the function's": "logged/*",
}
UNITS = {name: unit for unit, names in _NAMES_BY_UNIT.items() for name in names.split()}


def metrics_table() -> str:
    """Return the table, in the order of the code."""
    rows = [f"| `{name}` | {UNITS[name]} | {meaning} |" for name, meaning in METRICS.items()]
    return "\n".join(["| key | unit | meaning |", "|---|---|---|", *rows])


def undocumented(keys: Iterable[str]) -> list[str]:
    """Return the keys of `metrics.jsonl` that the table does not have."""
    families = tuple(name.removesuffix("*") for name in METRICS if name.endswith("*"))
    return [key for key in keys if key not in METRICS and not key.startswith(families)]


if __name__ == "__main__":
    sys.stdout.write(metrics_table() + "\n")
