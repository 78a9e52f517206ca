"""A conformance file: its families, the cases in them, and the comparison of what is expected with what we give."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SHARED = "_inputs"
"""Top-level names that end so hold inputs of a family's cases; `meta` holds the tolerances; the rest are families."""


class UnreadableError(Exception):
    """The file cannot be run at all."""


class NotMappedError(Exception):
    """A word of the file for which the project has nothing."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A field of a case in which we are not what is expected."""

    field: str
    reason: str
    deviation: float = math.nan
    expected: Any = None
    got: Any = None


@dataclass(slots=True)
class Case:
    """One case: its words, its tolerances, and what was found about it so far."""

    family: str
    id: str
    words: Mapping[str, Any]
    meta: Mapping[str, Any]
    file: Mapping[str, Any]
    """The whole file: shared inputs, and other cases that this one speaks of."""
    differences: list[Difference] = field(default_factory=list)
    compared: set[str] = field(default_factory=set)

    def __getitem__(self, name: str) -> Any:
        return self.words[name]

    def get(self, name: str, default: Any = None) -> Any:
        """A word, or the default where it is missing or null."""
        value = self.words.get(name)
        return default if value is None else value

    @property
    def dtype(self) -> torch.dtype:
        """The case's own, else the file's."""
        dtype: torch.dtype = getattr(
            torch, self.get("dtype", str(self.meta.get("default_dtype", "float64")).split()[0])
        )
        return dtype

    def tensor(self, values: Any) -> Tensor:
        """Nested lists as a tensor of the case's dtype; "NaN" and "Infinity" are numbers."""
        return torch.tensor(_numbers(values), dtype=self.dtype)

    def floats(self, name: str, default: Any = None) -> Tensor:
        """A word as such a tensor; the default, where there is one, stands for a missing or null one."""
        return self.tensor(self[name] if default is None else self.get(name, default))

    def mask(self, name: str, default: Any = None) -> Tensor:
        """A word as a tensor of bools."""
        return self.floats(name, default) == 1

    def codes(self, name: str) -> Tensor:
        """Labels as codes, in the order in which they appear."""
        order: dict[Any, int] = {}
        return torch.tensor([order.setdefault(label, len(order)) for label in self[name]], dtype=torch.int64)

    def with_shared(self, name: str) -> "Case":
        """The same case with the file's shared inputs behind its own words."""
        return Case(
            self.family,
            self.id,
            {**self.file.get(name, {}), **self.words},
            self.meta,
            self.file,
            self.differences,
            self.compared,
        )

    def expect(
        self, name: str, got: Any, expected: Any = None, *, within: Tensor | None = None, noise: float = 0.0
    ) -> None:
        """Compare with what is expected under `name` (a dotted path, or given as `expected`).

        Args:
            name: of the field, as it is reported.
            got: ours.
            expected: what it must be, unless it is the case's word of that name.
            within: where the expected value means something; elsewhere ours must be 0.
            noise: of the expected value itself, if it is larger than the case's tolerance.
        """
        self.compared.add(name.partition(".")[0])
        wanted = torch.tensor(_numbers(self[name] if expected is None else expected), dtype=torch.float64)
        if got is None:
            self.differences.append(Difference(name, "ours has no such number", expected=_plain(wanted)))
            return
        ours = torch.as_tensor(got).detach().to(torch.float64)
        if within is not None:
            wanted = torch.where(within, wanted, 0.0)
        if ours.shape != wanted.shape:
            reason = f"shape {tuple(ours.shape)} instead of {tuple(wanted.shape)}"
            self.differences.append(Difference(name, reason, math.inf, _plain(wanted), _plain(ours)))
            return
        atol = max(self._tolerance("atol"), noise)
        close = torch.isclose(ours, wanted, rtol=self._tolerance("rtol"), atol=atol, equal_nan=True)
        if not close.all():
            off = (ours - wanted).abs().nan_to_num(nan=math.inf)
            off = torch.where(close, 0.0, off)
            place = [int(i) for i in torch.unravel_index(off.argmax(), off.shape)]
            reason = f"off by {float(off.max()):.3g}" + (f" at {place}" if place else "")
            self.differences.append(Difference(name, reason, float(off.max()), _plain(wanted), _plain(ours)))

    def expect_mask(self, name: str, got: Tensor, expected: Any = None) -> None:
        """Compare bools."""
        self.expect(name, got.to(torch.float64), expected)

    def expect_numbers(self, name: str, find: Callable[[str], Any]) -> None:
        """Compare every number of a word that holds them by name with what `find` has for that name."""
        self.compared.add(name)
        for key, expected in self.get(name, {}).items():
            self.expect(f"{name}.{key}", find(key), expected)

    def refuse(self, name: str, reason: str) -> None:
        """The case fails for a reason that is no number."""
        self.differences.append(Difference(name, reason))

    def _tolerance(self, name: str) -> float:
        return float(self.get(name, self.meta.get(f"default_{name}", 1e-6)))


Family = Callable[[Case], None]
FAMILIES: dict[str, Family] = {}
"""By name; each runs one case."""


def family(name: str) -> Callable[[Family], Family]:
    """Register what runs the cases of a family."""

    def enter(function: Family) -> Family:
        FAMILIES[name] = function
        return function

    return enter


def named(registry: Mapping[str, Any], name: str, noun: str) -> Any:
    """The registered function of this name.

    Raises:
        NotMappedError: there is none.
    """
    if name not in registry:
        raise NotMappedError(f"unknown {noun} {name!r}; there is {', '.join(sorted(registry))}")
    return registry[name]


def read(path: Path) -> dict[str, Any]:
    """Read a conformance file.

    Raises:
        UnreadableError: says what is wrong with it.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnreadableError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"{path}: not JSON: {error}") from error
    if not isinstance(result, dict) or not isinstance(result.get("meta", {}), dict):
        raise UnreadableError(f"{path}: not a conformance file: an object of families, with `meta`, is expected")
    if not any(cases_of(result, name) for name in families_of(result)):
        raise UnreadableError(f"{path}: holds no case")
    return result


def families_of(file: Mapping[str, Any]) -> list[str]:
    """Names of the families in the file."""
    return [name for name in file if name != "meta" and not name.endswith(SHARED)]


def cases_of(file: Mapping[str, Any], name: str) -> list[Case]:
    """The cases of a family; what is no case stands for one that fails."""
    held, meta = file[name], file.get("meta", {})
    listed = held.items() if isinstance(held, dict) else enumerate(held if isinstance(held, list) else [held])
    results = []
    for key, words in listed:
        label = str(words.get("id", "")) if isinstance(words, dict) else ""
        named_by = key if isinstance(held, dict) else f"{name}[{key}]"
        results.append(Case(name, label or str(named_by), words if isinstance(words, dict) else {}, meta, file))
    return results


def run(case: Case) -> list[Difference]:
    """Run one case: what differs from what is expected; nothing where it passes."""
    if case.family not in FAMILIES:
        case.refuse("family", f"unknown family {case.family!r}; there is {', '.join(FAMILIES)}")
        return case.differences
    try:
        FAMILIES[case.family](case)
    except NotMappedError as error:
        case.refuse("name", str(error))
    except Exception as error:  # whatever it is, this case failed and the next ones are run
        case.refuse("error", f"{type(error).__name__}: {error}")
    if not case.differences:
        forgotten = [name for name in case.words if name.startswith("expected") and name not in case.compared]
        for name in forgotten:
            case.refuse(name, "nothing here is compared with it")
        if not case.compared:
            case.refuse("expected", "the case expects nothing that is known here")
    return case.differences


def _numbers(value: Any) -> Any:
    """Nested lists with every leaf a float; JSON has no word for NaN and infinities but a string."""
    if isinstance(value, list | tuple):
        return [_numbers(item) for item in value]
    return float(value)


def _plain(values: Tensor) -> Any:
    return values.tolist()
