"""`penstock estimators`: every registered function of the mathematics, with its options, formula and source."""

from collections.abc import Mapping
from typing import Any

import click
import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from workers.settings import sections
from workers.settings.presets import PRESETS
from workers.train.algorithms.advantages import ESTIMATORS
from workers.train.algorithms.aggregation import AGGREGATIONS
from workers.train.algorithms.divergence import DIVERGENCES
from workers.train.algorithms.filters import FILTERS
from workers.train.algorithms.importance import IMPORTANCE
from workers.train.algorithms.losses import LOSSES
from workers.train.algorithms.normalization import NORMALIZERS
from workers.train.algorithms.registry import Registered, Registry
from workers.train.algorithms.rejection import REJECTIONS
from workers.train.algorithms.shaping import SHAPINGS

_KINDS: Mapping[str, tuple[str, Registry[Any]]] = {
    "estimators": ("estimator.name", ESTIMATORS),
    "losses": ("loss.name", LOSSES),
    "aggregations": ("algorithm.aggregation", AGGREGATIONS),
    "divergences": ("algorithm.kl_divergence", DIVERGENCES),
    "normalizers": ("reward_normalization, advantage_normalization", NORMALIZERS),
    "shapings": ("shaping", SHAPINGS),
    "filters": ("filter", FILTERS),
    "importance weights": ("correction.weights", IMPORTANCE),
    "rejection rules": ("correction.reject, rule", REJECTIONS),
}


class Entry(Struct, kw_only=True):
    """One function, as `--json` says it."""

    name: str
    options: dict[str, Any]
    """With their defaults, where the settings have a table for this name."""
    formula: str
    source: str


def show_estimators(*, as_json: bool) -> None:
    """Print them all."""
    found = {kind: [_entry(kind, entry) for entry in registry.values()] for kind, (_, registry) in _KINDS.items()}
    presets = {name: preset._asdict() for name, preset in PRESETS.items()}
    if as_json:
        click.echo(msgspec.json.encode(found | {"correction presets": presets}))
        return
    console = Console()
    for kind, entries in found.items():
        table = Table("name", "options", "formula", "source", title=f"{kind} ({_KINDS[kind][0]})", title_justify="left")
        table.columns[0].no_wrap = True
        for entry in entries:
            options = ", ".join(f"{name} = {value}" for name, value in entry.options.items())
            table.add_row(entry.name, options, entry.formula, entry.source)
        console.print(table, markup=False)
    table = Table("name", "proximal", "loss", "weights", "reject", title="correction presets (correction.preset)")
    table.title_justify = "left"
    for name, preset in PRESETS.items():
        bounds = f"{preset.weights} {preset.outside} {preset.lower:g} ... {preset.upper:g}"
        table.add_row(
            name,
            "engine" if preset.bypass else "recompute",
            preset.loss,
            "none" if preset.weights == "none" else bounds,
            ", ".join(f"{rule} {lower:g} ... {upper:g}" for rule, lower, upper in preset.reject),
        )
    console.print(table)


def _entry(kind: str, entry: Registered[Any]) -> Entry:
    table = {"estimators": "estimator", "losses": "loss"}.get(kind, "")
    defaults: dict[str, Any] = {}
    for choice in sections()[table] if table else ():
        if choice.__struct_config__.tag == entry.name:
            defaults = msgspec.structs.asdict(choice())
    options = defaults or dict.fromkeys(entry.options, "")
    return Entry(name=entry.name, options=options, formula=entry.formula, source=entry.source)
