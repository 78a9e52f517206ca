"""Generate docs/algorithms.md from the registries: `python docs/algorithms_page.py > docs/algorithms.md`."""

import json
import sys
from collections.abc import Iterator

from workers.cli.algorithms import AlgorithmEntry, preset_lines, registered_algorithms
from workers.settings.algorithm import PRESETS

HEAD = """# Algorithms

With this page you can look up the formula of each estimator, loss, rule and preset. `penstock algorithms` prints the
same, with `--json` for programs. Choose in the settings:

```toml
[estimator]
name = "rloo"

[loss]
name = "gspo"

[correction]
preset = "decoupled_token_is"
```

In the formulas `r` of an estimator is a reward, and `r` of a loss a probability ratio. `A` is an advantage, `lp` a
log-prob, `sg` stops gradients, `pi` is the policy in training and `mu` the engine's. Only measured rewards enter
([masking](masking.md)). One of your own:
[training](training.md#your-own-estimator). How much a token weighs in a rollout that branched:
[branched rollouts](training.md#branched-rollouts). The page is generated from `workers/train/algorithms/`.
"""
TITLES = {
    "estimator.name": "Estimators: `[estimator] name`",
    "loss.name": "Losses: `[loss] name`",
    "algorithm.aggregation": "Aggregation over tokens: `algorithm.aggregation`",
    "algorithm.kl_estimator": "Divergence from the reference: `algorithm.kl_estimator`",
    "algorithm.reward_normalization, algorithm.advantage_normalization": "Normalization of rewards and advantages",
    "algorithm.reward_clip, overlong_penalty": "Shaping of rewards",
    "filter": "Filters of groups: `[filter]`",
    "correction.weights": "Importance weights: `correction.weights`",
    "correction.reject": "Rejection: `correction.reject`",
}


def options(entry: AlgorithmEntry) -> str:
    """Return an algorithm's options with their defaults."""
    shown = (
        f"`{name}`" if value is None else f"`{name} = {json.dumps(value)}`" for name, value in entry.options.items()
    )
    return "<br>".join(shown)


def code(formula: str) -> str:
    """Return a formula as code in a table."""
    quoted = formula.replace("|", "\\|")
    return f"`` {quoted} ``" if "`" in quoted else f"`{quoted}`"


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    yield HEAD.rstrip("\n")
    for kind, entries in registered_algorithms().items():
        yield from ("", f"## {TITLES[kind]}", "", "| name | formula | options | source |", "|---|---|---|---|")
        for entry in entries:
            yield f"| `{entry.name}` | {code(entry.formula)} | {options(entry)} | {entry.source} |"
    yield from ("", "## Presets: `correction.preset`", "", "| name | meaning |", "|---|---|")
    for name, preset in PRESETS.items():
        yield f"| `{name}` | {' '.join(preset_lines(preset))} |"


if __name__ == "__main__":
    sys.stdout.write("\n".join(page()) + "\n")
