"""What a callable's signature says, read once for each function: `inspect` takes as long as a whole tool call."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType, GeneratorType, MethodType
from typing import Any


@dataclass(frozen=True, slots=True)
class CallSignature:
    """How a callable may be called.

    Attributes:
        names: of the parameters, in order; without a bound `self`.
        keywords: the parameters that may be given by name.
        takes_any_keyword: it has `**kwargs`.
    """

    names: tuple[str, ...]
    keywords: frozenset[str]
    takes_any_keyword: bool


def call_signature(function: Callable[..., Any]) -> CallSignature | None:
    """Return the signature of a callable; None if it has none, like some C functions."""
    if isinstance(function, MethodType) and isinstance(function.__func__, FunctionType):
        return _of_function(function.__func__, is_bound=True)
    if isinstance(function, FunctionType):
        return _of_function(function, is_bound=False)
    return _read(function)


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a call gives a coroutine: an `async def`, or an object whose `__call__` is one."""
    plain = function.__func__ if isinstance(function, MethodType) else function
    if type(plain) is FunctionType and not plain.__dict__:  # nothing marks it as anything else
        return bool(plain.__code__.co_flags & inspect.CO_COROUTINE)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def is_awaitable(value: object) -> bool:
    """Return `inspect.isawaitable(value)`, which takes several times as long for a value that is none."""
    kind = type(value)
    return inspect.isawaitable(value) if kind is GeneratorType else getattr(kind, "__await__", None) is not None


@lru_cache(maxsize=1024)
def _of_function(function: FunctionType, *, is_bound: bool) -> CallSignature | None:
    return _read(MethodType(function, object()) if is_bound else function)


def _read(function: Callable[..., Any]) -> CallSignature | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return CallSignature(
        names=tuple(p.name for p in parameters),
        keywords=frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)),
        takes_any_keyword=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )
