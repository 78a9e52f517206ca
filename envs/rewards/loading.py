"""Load a reward function from a reference, with the options of how to call it."""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Literal

from envs.call import describe_error
from envs.references import Reference, check_arguments, resolve
from envs.rewards.call_report import REPORT_PARAMETERS
from stream.errors import ReferenceNotFoundError

CALL_PARAMETERS: Final = ("prompts", "completions", "completion_ids", "environments", *REPORT_PARAMETERS)
"""Parameters of a reward function that are not columns."""
ENTRY_POINT_GROUP = "penstock.rewards"
"""Group of the entry points of reward functions."""


@dataclass(frozen=True)
class CallOptions:
    """How a reward function is called. A function or class may define them as its attribute `call_options`.

    Args:
        processes: size of a pool of child processes that call it in their main thread, where a call past its deadline
            is killed; 0: call it in a thread of the worker.
        granularity: `group`, the default: one call for all completions of a prompt, never fewer. `row`: one call for
            each completion.
        timeout_s: deadline of each call; 0: the setting `rollout.call_timeout_s`.
        max_concurrency: concurrent calls of an asynchronous function; 0: no limit.
        calls_per_second: rate limit; 0: none.
        environments: names of the environments whose completions it measures; empty: all. Elsewhere it has no part.
        none: meaning of a returned None. `invalid`, the default: the completion's reward is unknown; `not_applicable`:
            the function has no part in it.
        isolation: `sandbox`: its child processes need nothing of this machine but installed packages, so they run in a
            sandbox, or without the worker's environment where no sandbox can be made. `none`, the default, and where
            the function's own module is not installed: they have the worker's environment, files and network.
        worst_value: the worst value that the function can give; the value of a completion that it cannot measure
            because of the completion itself: it reads an attribute that is too large for a snapshot. None: such a
            completion is unmeasured.
    """

    processes: int = 0
    granularity: Literal["", "row", "group"] = ""
    timeout_s: float = 0.0
    max_concurrency: int = 0
    calls_per_second: float = 0.0
    environments: tuple[str, ...] = ()
    none: Literal["", "invalid", "not_applicable"] = ""
    isolation: Literal["", "none", "sandbox"] = ""
    worst_value: float | None = None

    def with_defaults(self, defaults: "CallOptions") -> "CallOptions":
        """Return these options, with unset fields taken from `defaults`."""
        given = {each.name: getattr(self, each.name) or getattr(defaults, each.name) for each in fields(self)}
        worst = defaults.worst_value if self.worst_value is None else self.worst_value  # 0.0 is a value
        return CallOptions(**{**given, "worst_value": worst})


@dataclass(frozen=True)
class LoadedRewardFunction:
    """A reward function, its name and the call options that it defines itself."""

    function: Callable[..., Any]
    name: str
    call_options: CallOptions


def load_reward_function(ref: str, args: Mapping[str, Any] = MappingProxyType({})) -> LoadedRewardFunction:
    """Resolve a reference to a function, to a class that is instantiated, or to a factory that is called.

    A factory is a function that takes nothing of what a reward function gets (`prompts`, `completions`, ..., columns)
    and has a value for each of its parameters from `args` or by default, such as TRL's `get_soft_overlong_punishment`.

    Runs imports and constructors, which may block.

    Args:
        ref: a reference, see `envs.references`.
        args: extra keyword arguments of each call, or of the constructor or factory.

    Raises:
        ReferenceNotFoundError: the reference does not resolve, is not callable, or takes other arguments.
    """
    reference = resolve(ref, ENTRY_POINT_GROUP)
    check_arguments(reference, args)
    is_built = isinstance(reference.target, type) or is_factory(reference.target, args)
    function = _build(reference, args) if is_built else reference.target
    if not callable(function):
        is_env = callable(getattr(function, "reset", None))
        raise ReferenceNotFoundError(
            f"{ref!r} is of type {type(function).__name__}; expected a function, or a class whose instances have "
            "__call__" + ("; it has a reset method like an environment: those belong in [environments]" * is_env)
        )
    wish = inspect.getattr_static(function, "call_options", None)
    if args and not is_built:
        function = partial(function, **copy.deepcopy(dict(args)))
    name = ref if reference.kind == "entry point" else ref.rpartition(":")[2]
    return LoadedRewardFunction(function, name, wish if isinstance(wish, CallOptions) else CallOptions())


def is_factory(target: object, args: Mapping[str, Any]) -> bool:
    """Return whether a function builds a reward function from these arguments, and is none itself."""
    if not inspect.isfunction(target) or inspect.iscoroutinefunction(target):
        return False
    parameters = inspect.signature(target).parameters
    if not parameters.keys().isdisjoint(CALL_PARAMETERS):
        return False
    return all(
        parameter.kind is not parameter.VAR_KEYWORD and (parameter.default is not parameter.empty or name in args)
        for name, parameter in parameters.items()
    )


def _build(reference: Reference, args: Mapping[str, Any]) -> object:
    what = "its constructor" if isinstance(reference.target, type) else "it takes no completions, and as a factory it"
    try:
        return reference.target(**copy.deepcopy(dict(args)))  # type: ignore[operator]
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # user code may even raise SystemExit
        raise ReferenceNotFoundError(
            f"{reference.ref!r} was found, but {what} raised {describe_error(error)}"
        ) from error
