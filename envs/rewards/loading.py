"""A reference as a function that can be called, and how it wants to be called."""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from envs.call import describe_error
from envs.references import Reference, check_arguments, resolve
from stream.errors import ReferenceNotFoundError

ENTRY_POINT_GROUP = "penstock.rewards"
"""Entry points of reward functions."""


@dataclass(frozen=True)
class CallOptions:
    """How a reward function is called. A function, or its class, may say so itself in an attribute `calling`.

    Args:
        processes: children of a pool that call it, in their main thread; 0: a thread of the worker does. A call past
            its deadline is then ended by SIGKILL.
        granularity: `group`: once for all completions of a prompt, and never otherwise. `row`: once for each
            completion. Empty: as `group`, and where that raised (or was killed) once more for each completion.
        timeout_s: for each call; 0: what the settings say for all.
        max_concurrency: calls of an asynchronous function at once; 0: as many as there are.
        calls_per_second: calls that begin in a second, at most; 0: as many as there are.
    """

    processes: int = 0
    granularity: Literal["", "row", "group"] = ""
    timeout_s: float = 0.0
    max_concurrency: int = 0
    calls_per_second: float = 0.0

    def with_defaults(self, defaults: "CallOptions") -> "CallOptions":
        """Of each field this one's value if it is set, else the other's."""
        return CallOptions(
            **{each.name: getattr(self, each.name) or getattr(defaults, each.name) for each in fields(self)}
        )


@dataclass(frozen=True)
class LoadedRewardFunction:
    """What a reference led to."""

    function: Callable[..., Any]
    name: str
    call_options: CallOptions


def load_reward_function(ref: str, args: Mapping[str, Any] = MappingProxyType({})) -> LoadedRewardFunction:
    """Resolve a reference. A function is called with `args` besides; a class is made an instance of, with `args`.

    Imports and constructs, and so may block.

    Raises:
        ReferenceNotFoundError: the reference leads nowhere, to something that is no function and makes none, or takes
            other arguments.
    """
    reference = resolve(ref, ENTRY_POINT_GROUP)
    check_arguments(reference, args)
    function = _instantiate(reference, args) if isinstance(reference.target, type) else reference.target
    if not callable(function):
        is_world = callable(getattr(function, "reset", None))
        raise ReferenceNotFoundError(
            f"{ref!r} is of type {type(function).__name__}; a function, or a class whose instances have __call__, "
            "expected" + ("; it has a reset, as environments have: those belong into [environments]" * is_world)
        )
    wish = inspect.getattr_static(function, "call_options", None)
    if args and not isinstance(reference.target, type):
        function = partial(function, **copy.deepcopy(dict(args)))
    name = ref if reference.kind == "entry point" else ref.rpartition(":")[2]
    return LoadedRewardFunction(function, name, wish if isinstance(wish, CallOptions) else CallOptions())


def _instantiate(reference: Reference, args: Mapping[str, Any]) -> object:
    try:
        return reference.target(**copy.deepcopy(dict(args)))  # type: ignore[operator]
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: it is user code
        raise ReferenceNotFoundError(
            f"{reference.ref!r} was found, but making one of it raised {describe_error(error)}"
        ) from error
