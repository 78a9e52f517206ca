"""`penstock algorithms`: list every estimator, loss, rule and preset with options, formula and source."""

import json
from collections.abc import Mapping
from typing import Any, Final

import click
import msgspec
from msgspec import Struct
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from workers.settings import sections
from workers.settings.algorithm import PRESETS, Preset
from workers.train.algorithms.advantages import ESTIMATORS
from workers.train.algorithms.aggregation import AGGREGATIONS
from workers.train.algorithms.correction import IMPORTANCE_LEVELS, REJECTIONS
from workers.train.algorithms.divergence import DIVERGENCES
from workers.train.algorithms.losses import LOSSES
from workers.train.algorithms.normalization import NORMALIZERS
from workers.train.algorithms.registry import Registry, RegistryEntry
from workers.train.algorithms.shaping import FILTERS, REWARD_SHAPINGS

_KINDS: Final[tuple[tuple[str, Registry[Any]], ...]] = (
    ("estimator.name", ESTIMATORS),
    ("loss.name", LOSSES),
    ("algorithm.aggregation", AGGREGATIONS),
    ("algorithm.kl_estimator", DIVERGENCES),
    ("algorithm.reward_normalization, algorithm.advantage_normalization", NORMALIZERS),
    ("algorithm.reward_clip, overlong_penalty", REWARD_SHAPINGS),
    ("filter", FILTERS),
    ("correction.weights", IMPORTANCE_LEVELS),
    ("correction.reject", REJECTIONS),
)
"""Registries by the settings key that selects from each."""


class AlgorithmEntry(Struct, kw_only=True):
    """One registered function, in the form of `--json`."""

    name: str
    options: dict[str, Any]
    """Option names with their defaults; null if the settings have no table for this name."""
    formula: str
    source: str


def registered_algorithms() -> dict[str, list[AlgorithmEntry]]:
    """Return the entries of each registry, by the settings key that selects from it."""
    return {
        kind: [_entry(kind, registry[name]) for name in _names_in_settings_order(kind, registry)]
        for kind, registry in _KINDS
    }


def show_algorithms(*, as_json: bool) -> None:
    """Print all entries of all registries."""
    found = registered_algorithms()
    presets = {name: preset._asdict() | {"reject": dict(preset.reject)} for name, preset in PRESETS.items()}
    if as_json:
        click.echo(msgspec.json.encode(found | {"correction.preset": presets}))
        return
    console = Console()
    for kind, entries in found.items():
        _print(console, kind, {entry.name: _lines(entry) for entry in entries})
    _print(console, "correction.preset", {name: preset_lines(preset) for name, preset in PRESETS.items()})


def _print(console: Console, kind: str, entries: Mapping[str, list[str]]) -> None:
    """Print the entries of one registry: names on the left, descriptions on the right."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column()
    for name, lines in entries.items():
        grid.add_row(name, Text("\n".join(lines)))
    console.print(Text(kind, style="bold underline"), Padding(grid, (0, 0, 1, 2)))


def _lines(entry: AlgorithmEntry) -> list[str]:
    options = ", ".join(
        f"{name} = {json.dumps(value)}" if value is not None else name for name, value in entry.options.items()
    )
    return [entry.formula, *([options] if options else []), entry.source]


def preset_lines(preset: Preset) -> list[str]:
    """Describe what a preset of the correction does."""
    low, high = preset.weight_range
    weights = f"{preset.weights}, {preset.out_of_range} outside {low:g} ... {high:g}"
    rules = [f"reject {rule} {low:g} ... {high:g}" for rule, (low, high) in preset.reject.items()]
    parts = [f"weights {weights}" if preset.weights != "none" else "no weights", *rules]
    loss = "reinforce" if preset.loss == "reinforce" else "a loss with a ratio"
    return ["; ".join([*parts, f"proximal {'engine' if preset.bypass else 'recompute'}, {loss}"])]


def _names_in_settings_order(kind: str, registry: Registry[Any]) -> list[str]:
    """Return the names in the order of the settings; for registries without such an order, in their own order."""
    table = sections().get(kind.partition(".")[0], [])
    return [str(k.__struct_config__.tag) for k in table] if len(table) > 1 else list(registry)


def _entry(kind: str, entry: RegistryEntry[Any]) -> AlgorithmEntry:
    defaults: dict[str, Any] = {}
    for choice in sections().get(kind.partition(".")[0], []):
        if choice.__struct_config__.tag == entry.name:
            defaults = msgspec.structs.asdict(choice())
    options = defaults or dict.fromkeys(entry.option_names)
    return AlgorithmEntry(name=entry.name, options=options, formula=entry.formula, source=entry.source)
