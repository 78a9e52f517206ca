"""Import libraries that only some environments need."""

import importlib
from types import ModuleType

from stream.errors import PenstockError


class MissingExtraError(PenstockError, ImportError):
    """A library is not installed; the message names the extra that installs it."""


def import_extra(module: str, extra: str) -> ModuleType:
    """Import a library of an optional extra.

    Args:
        module: name of the module.
        extra: the extra of this distribution that installs it.

    Raises:
        MissingExtraError: the library is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise missing_extra(module, extra) from error


def missing_extra(module: str, extra: str) -> MissingExtraError:
    """Return the error for a library that is not installed."""
    return MissingExtraError(f'{module} is not installed; pip install "penstock[{extra}]"')
