"""Public names of a package that are imported at their first use, so that importing the package is cheap."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_names(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return the function `__getattr__` of a package.

    Args:
        package: its `__name__`.
        names: public names, by the module that defines them.
    """
    modules = {name: module for module, found in names.items() for name in found}

    def __getattr__(name: str) -> Any:  # noqa: N807  (the name that Python calls)
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__
