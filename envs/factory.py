"""Factories: what makes environments, and what is known of them before the first episode."""

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from threading import Thread
from types import MappingProxyType
from typing import Any

import anyio
import msgspec
import structlog

from envs.call import describe_error, filter_kwargs
from envs.contract import AgentEnvironment, declares_tools
from envs.references import Reference, check_arguments, class_key, resolve
from envs.tools import ToolSpec, declared_specs, tool_specs
from stream.errors import EnvironmentFailure, ReferenceNotFoundError

log = structlog.get_logger()

ENTRY_POINT_GROUP = "penstock.environments"
"""Entry points of environments."""

_CLOSE_TIMEOUT_S = 10.0
_SCHEMAS_TIMEOUT_S = 60.0


class EnvironmentFactory:
    """A callable that makes environments: a class, or a function. It takes no argument but those of the settings.

    Example:
        factory = Factory.load("calculator")
        env = factory.make()
        env.reset(**factory.reset_arguments(env, prompt.fields, seed=7, completion_index=0))
    """

    def __init__(
        self, reference: Reference, call: Callable[[], object], sample: object, *, with_tools: bool = True
    ) -> None:
        self.ref = reference.ref
        self.reference = reference
        self.environment_class: type = type(sample)
        """The class of what is made; snapshots of this factory thaw to it, whatever their bytes may say."""
        self.runs_own_loop: bool = isinstance(sample, AgentEnvironment)
        """It leads its episodes itself, and asks an endpoint for each turn; it has no tools of its own."""
        self.declares_tools: bool = declares_tools(sample) and not self.runs_own_loop
        """Its tools are called by `call_tool(name, arguments)`."""
        self.tools: list[ToolSpec] = self._tools_of(sample) if with_tools else []
        self.has_reward: bool = callable(getattr(sample, "get_reward", None))
        self.known_classes: dict[str, type] = _known_classes(reference, type(sample))
        """The closed table for thawing, `module:qualname` to class: what the factory's own modules define, and the
        enums and dataclasses that they import by name."""
        self._call = call

    @classmethod
    def load(
        cls, ref: str, args: Mapping[str, Any] = MappingProxyType({}), *, with_tools: bool = True
    ) -> "EnvironmentFactory":
        """Resolve a reference, and make one environment to see what it is; that one is closed again.

        Imports and constructs, and so may block: on an event loop, call it in a thread.

        Args:
            ref: one of the three spellings.
            args: keyword arguments for the factory, the same for each environment.
            with_tools: find out its tools, for which a server may have to answer; who only thaws snapshots needs none.

        Raises:
            ReferenceNotFoundError: the reference leads nowhere, or to something that makes no environment, or takes
                other arguments.
        """
        return cls._from_reference(resolve(ref, ENTRY_POINT_GROUP), args, with_tools=with_tools)

    @classmethod
    def from_callable(
        cls, target: Callable[..., object], args: Mapping[str, Any] = MappingProxyType({})
    ) -> "EnvironmentFactory":
        """A factory of what is at hand, a class or a function: for tests, where no settings name it.

        Raises:
            ReferenceNotFoundError: as `load`.
        """
        home = sys.modules[getattr(target, "__module__", None) or type(target).__module__]
        name = getattr(target, "__qualname__", type(target).__qualname__)
        return cls._from_reference(Reference(f"{home.__name__}:{name}", "module", target, home), args, with_tools=True)

    @classmethod
    def _from_reference(
        cls, reference: Reference, args: Mapping[str, Any], *, with_tools: bool
    ) -> "EnvironmentFactory":
        ref = reference.ref
        if not callable(reference.target):
            raise ReferenceNotFoundError(
                f"{ref!r} is of type {type(reference.target).__name__}; a factory is a class, or a function"
            )
        check_arguments(reference, args)
        call = partial(reference.target, **copy.deepcopy(dict(args))) if args else reference.target
        try:
            sample = call()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too: it is user code
            raise ReferenceNotFoundError(
                f"{ref!r} was found, but making an environment, {_callable_name(call)}(), raised {describe_error(error)}"
                f"{_reward_function_hint(call)}"
            ) from error
        _check_environment(ref, call, sample)
        try:
            return cls(reference, call, sample, with_tools=with_tools)
        finally:
            _close(sample, ref)

    def _tools_of(self, sample: Any) -> list[ToolSpec]:
        if self.runs_own_loop:
            return []
        if not self.declares_tools:
            return tool_specs(sample)
        try:
            return declared_specs(_run_in_thread(sample.tool_schemas, _SCHEMAS_TIMEOUT_S, self.ref))
        except ReferenceNotFoundError:
            raise
        except Exception as error:
            raise ReferenceNotFoundError(
                f"{self.ref!r} was found, but not its tools: {describe_error(error)}"
            ) from error

    def make(self) -> object:
        """Make an environment.

        Raises:
            EnvironmentFailure: it could not be made, although one could at start-up; the cause is attached.
        """
        try:
            return self._call()
        except Exception as error:
            raise EnvironmentFailure(f"making an environment of {self.ref!r} raised {describe_error(error)}") from error

    def reset_arguments(self, env: object, fields: dict[str, Any], seed: int, completion_index: int) -> dict[str, Any]:
        """Keyword arguments for `reset`; the function of this name."""
        return reset_arguments(env, fields, seed, completion_index)


def reset_arguments(env: object, fields: dict[str, Any], seed: int, completion_index: int) -> dict[str, Any]:
    """What `reset` is called with.

    A `reset(self, **row)` gets all fields, and `seed` and `completion_index` where no field is called so; one without
    `**` gets just what it names.

    Args:
        env: the environment.
        fields: the prompt's fields.
        seed: of this completion.
        completion_index: its position within the group, from 0.
    """
    reset: Callable[..., Any] = env.reset  # type: ignore[attr-defined]
    return filter_kwargs(reset, {"seed": seed, "completion_index": completion_index} | fields)


def _check_environment(ref: str, call: Callable[..., object], sample: object) -> None:
    if inspect.isawaitable(sample):
        if inspect.iscoroutine(sample):
            sample.close()
        raise ReferenceNotFoundError(
            f"{ref!r} is async; a factory is a plain callable (await things in an async reset)"
        )
    if not callable(getattr(sample, "reset", None)):
        raise ReferenceNotFoundError(
            f"{ref!r} was found, but what {_callable_name(call)}() makes, of type {type(sample).__name__}, has no reset method, "
            "so it is no environment"
        )


def _known_classes(reference: Reference, environment: type) -> dict[str, type]:
    homes = [reference.module.__name__, *(c.__module__ for c in environment.__mro__)]
    homes = [name for name in dict.fromkeys(homes) if name.partition(".")[0] not in sys.stdlib_module_names]
    known = {class_key(environment): environment}
    for name in homes:
        for value in list(vars(sys.modules[name]).values()) if name in sys.modules else ():
            if isinstance(value, type) and (value.__module__ in homes or _is_record(value)):
                known.update((class_key(cls), cls) for cls in _nested_classes(value))
    return known


def _is_record(cls: type) -> bool:
    """Made to hold data, so that one which is merely imported by name is known too."""
    return issubclass(cls, Enum | msgspec.Struct) or is_dataclass(cls)


def _nested_classes(cls: type) -> Iterator[type]:
    yield cls
    for value in vars(cls).values():
        if isinstance(value, type) and value.__qualname__.startswith(f"{cls.__qualname__}."):
            yield from _nested_classes(value)


def _close(sample: Any, ref: str) -> None:
    """Close the sample, for a limited time."""
    close = getattr(sample, "close", None)
    if not callable(close):
        return
    try:
        _run_in_thread(close, _CLOSE_TIMEOUT_S, ref)
    except Exception as error:  # noqa: BLE001  (user code; the sample is thrown away whatever happens)
        log.warning("environment.close_failed", environment=ref, why=describe_error(error))


def _run_in_thread(function: Callable[[], Any], timeout_s: float, ref: str) -> Any:
    """Call a function in a thread of its own; what it returns is awaited there.

    Raises:
        TimeoutError: it did not return in time.
        Exception: what it raised.
    """
    returned: list[Any] = []
    raised: list[BaseException] = []

    async def wait(awaitable: Any) -> Any:
        with anyio.fail_after(timeout_s):
            return await awaitable

    def run() -> None:
        try:
            value = function()
            returned.append(anyio.run(wait, value) if inspect.isawaitable(value) else value)
        except BaseException as error:  # noqa: BLE001  (SystemExit too: it is user code; raised where it was called)
            raised.append(error)

    thread = Thread(target=run, daemon=True, name=f"{getattr(function, '__name__', 'call')} {ref}")
    thread.start()
    thread.join(timeout_s)
    if raised:
        error = raised[0]
        raise error if isinstance(error, Exception) else EnvironmentFailure(describe_error(error))
    if not returned:
        raise TimeoutError(f"it did not return within {timeout_s:g} s")
    return returned[0]


def _reward_function_hint(call: Callable[..., object]) -> str:
    """A word on a reward function that stands where an environment should."""
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):  # written in C, without a signature
        return ""
    return "; it asks for completions, as reward functions do: those belong into [[rewards]]" * (
        "completions" in parameters
    )


def _callable_name(call: object) -> str:
    function = call.func if isinstance(call, partial) else call
    return getattr(function, "__qualname__", None) or repr(call)
