"""Registries of pure functions by name, with the properties that each function declares."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Traits = TypeVar("Traits")
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class RegistryEntry(Generic[Traits]):
    """A registered function with its formula, source and declared properties."""

    name: str
    function: Callable[..., Any]
    formula: str
    """One line, as the docs show it."""
    source: str
    """Origin of the formula: a paper, or a file of another project."""
    input_names: tuple[str, ...]
    """Names of its positional parameters: inputs that the registry knows."""
    option_names: tuple[str, ...]
    """Names of its keyword-only parameters: settings."""
    traits: Traits
    """Declared properties, which the property tests check."""

    def __call__(self, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        """Call the function with the inputs and options that it names; others are ignored.

        Raises:
            KeyError: an input or option is missing.
        """
        return self.function(
            *(inputs[name] for name in self.input_names), **{name: options[name] for name in self.option_names}
        )


class Registry(Mapping[str, RegistryEntry[Traits]]):
    """Functions of one kind by name.

    Args:
        noun: name of the kind, for error messages.
        inputs: inputs that a function may ask for, by name, each with its meaning and shape.

    Example:
        >>> ESTIMATORS["rloo"]({"rewards_C": rewards_C, "groups": groups}, {})
    """

    def __init__(self, noun: str, inputs: Mapping[str, str]) -> None:
        self.noun = noun
        self.inputs = inputs
        self._entries: dict[str, RegistryEntry[Traits]] = {}

    def register(self, name: str, traits: Traits, *, formula: str, source: str) -> Callable[[Function], Function]:
        """Return a decorator that registers a function and leaves it callable as it is.

        Raises:
            ValueError: the name is taken, or a positional parameter is not one of `inputs`.
        """

        def add(function: Function) -> Function:
            if name in self._entries:
                raise ValueError(f"a {self.noun} named {name!r} is registered already")
            parameters = inspect.signature(function).parameters.values()
            input_names = tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
            unknown = [need for need in input_names if need not in self.inputs]
            if unknown:
                raise ValueError(f"{self.noun} {name!r} needs {unknown[0]!r}; there is {', '.join(self.inputs)}")
            self._entries[name] = RegistryEntry(
                name=name,
                function=function,
                formula=formula,
                source=source,
                input_names=input_names,
                option_names=tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY),
                traits=traits,
            )
            return function

        return add

    def __getitem__(self, name: str) -> RegistryEntry[Traits]:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
