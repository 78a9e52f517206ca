"""Make environments from a reference, and inspect one of them before the first episode.

An environment may also provide rows of data, by a method `rows()`; `call_rows` and `first_row` call it.
"""

import copy
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from itertools import islice
from threading import Thread
from types import MappingProxyType
from typing import Any, Final

import anyio
import msgspec
import structlog

from envs import contract
from envs.call import describe_error, error_cause, filter_kwargs
from envs.references import Reference, check_arguments, class_key, resolve
from envs.tools import ToolSpec, declared_specs, tool_specs
from stream.errors import DataError, EnvironmentFailure, ReferenceNotFoundError

log = structlog.get_logger()

ENTRY_POINT_GROUP = "penstock.environments"
"""Group of the entry points of environments."""

_CLOSE_TIMEOUT_S = 10.0
_SCHEMAS_TIMEOUT_S = 60.0


class EnvironmentFactory:
    """Makes environments by calling a class or function with the arguments from the settings.

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
        """Class of the environments. Snapshots always thaw to this class, whatever their bytes name."""
        self.runs_own_loop: bool = isinstance(sample, contract.AgentEnvironment)
        """The environments derive from `AgentEnvironment`: they request model turns themselves and have no tools."""
        self.declares_tools: bool = contract.declares_tools(sample) and not self.runs_own_loop
        """Tools are called through `call_tool(name, arguments)`."""
        self.tools: list[ToolSpec] = self._tools_of(sample) if with_tools else []
        self.has_reward: bool = callable(getattr(sample, "get_reward", None))
        self.responds: bool = callable(getattr(sample, "respond", None)) and not self.runs_own_loop
        """It answers turns of the model without a tool call, in `respond`."""
        self.uses_sandboxes: bool = contract.names_sandboxes(sample)
        """Its `reset` names a parameter `sandboxes`, and gets the sandboxes of the episode."""
        self.states_timeouts: bool = contract.states_timeouts(sample)
        """Its class states deadlines, in `timeouts_s` or `episode_timeout_s`."""
        self.is_replayable: bool = contract.is_replayable(sample)
        """The same seed and the same calls have the same results, so a worker can repeat the calls of a dead worker."""
        self.has_effects: bool = contract.has_effects(sample)
        """Its calls change something outside, so that none may be made twice."""
        self.has_rows: bool = contract.offers_rows(sample)
        """Whether the environment provides rows, by its method `rows`."""
        self.has_render: bool = contract.offers_render(sample)
        """It renders snapshots for people, in `render`."""
        self.known_classes: dict[str, type] = _known_classes(reference, type(sample))
        """Classes that snapshots may contain, by `module:qualname`: those defined in the environment's modules, and the
        enums, dataclasses and structs imported there."""
        self._call = call

    @classmethod
    def load(
        cls, ref: str, args: Mapping[str, Any] = MappingProxyType({}), *, with_tools: bool = True
    ) -> "EnvironmentFactory":
        """Resolve a reference, and make and close one environment to inspect it.

        Runs imports and constructors, which may block: on an event loop, call it in a thread.

        Args:
            ref: a reference, see `envs.references`.
            args: keyword arguments of the factory, the same for each environment.
            with_tools: inspect the tools, which may need a running server; thawing snapshots works without them.

        Raises:
            ReferenceNotFoundError: the reference does not resolve, makes no environment, or takes other arguments.
        """
        return cls._from_reference(resolve(ref, ENTRY_POINT_GROUP), args, with_tools=with_tools)

    @classmethod
    def from_callable(
        cls, target: Callable[..., object], args: Mapping[str, Any] = MappingProxyType({})
    ) -> "EnvironmentFactory":
        """Make a factory from a class or function instead of a reference, for tests.

        Raises:
            ReferenceNotFoundError: see `load`.
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
        except BaseException as error:  # user code may even raise SystemExit
            raise ReferenceNotFoundError(
                f"{ref!r} was found, but making an environment, {_callable_name(call)}(), raised "
                f"{describe_error(error)}"
                f"{_reward_function_hint(call)}"
            ) from error
        _check_environment(ref, call, sample)
        try:
            factory = cls(reference, call, sample, with_tools=with_tools)
        finally:
            _close(sample, ref)
        if with_tools and not _always_makes_new_objects(reference.target):
            _check_distinct(ref, call, sample)
        return factory

    def _tools_of(self, sample: Any) -> list[ToolSpec]:
        if self.runs_own_loop:
            return []
        if not self.declares_tools:
            return tool_specs(sample)
        try:
            return declared_specs(run_in_thread(sample.tool_schemas, _SCHEMAS_TIMEOUT_S, self.ref))
        except ReferenceNotFoundError:
            raise
        except Exception as error:
            raise ReferenceNotFoundError(
                f"{self.ref!r} was found, but listing its tools raised {describe_error(error)}"
            ) from error

    def make(self) -> object:
        """Make an environment.

        Raises:
            EnvironmentFailure: the factory raised, although it worked at start-up; the cause is attached.
        """
        try:
            return self._call()
        except Exception as error:
            raise EnvironmentFailure(f"making an environment of {self.ref!r} raised {describe_error(error)}") from error

    def discard(self, env: object) -> None:
        """Close an environment that was made, with a deadline."""
        _close(env, self.ref)

    def reset_arguments(self, env: object, fields: dict[str, Any], seed: int, completion_index: int) -> dict[str, Any]:
        """Return the keyword arguments for `reset`.

        A `reset(self, **row)` receives all fields, plus `seed`, `completion_seed` and `completion_index` unless the row
        has such fields; without `**row` it receives only the parameters it names. An environment that makes its problem
        from `seed` poses the same problem to all completions of a group.

        Args:
            env: the environment.
            fields: the prompt's fields.
            seed: seed of the group.
            completion_index: position of the completion in its group, from 0.
        """
        reset: Callable[..., Any] = env.reset  # type: ignore[attr-defined]
        given = {"seed": seed, "completion_seed": seed + completion_index, "completion_index": completion_index}
        return filter_kwargs(reset, given | fields)


def _check_environment(ref: str, call: Callable[..., object], sample: object) -> None:
    if inspect.isawaitable(sample):
        if inspect.iscoroutine(sample):
            sample.close()
        raise ReferenceNotFoundError(f"{ref!r} is async; a factory is a plain callable (use an async reset to await)")
    if not callable(getattr(sample, "reset", None)):
        raise ReferenceNotFoundError(
            f"{ref!r} was found, but {_callable_name(call)}() makes an object of type {type(sample).__name__} without "
            "a reset method, which is not an environment"
        )


def _always_makes_new_objects(target: object) -> bool:
    """Return whether calling `target` cannot return an object twice: it is a class that is made in Python's own way."""
    new: Any = getattr(target, "__new__", None)
    return isinstance(target, type) and new is object.__new__ and type(target).__call__ is type.__call__


def _check_distinct(ref: str, call: Callable[..., object], sample: object) -> None:
    """Make a second environment, and require another object than the first.

    Raises:
        ReferenceNotFoundError: it is the same object, or cannot be made.
    """
    try:
        other = call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # user code may even raise SystemExit
        raise ReferenceNotFoundError(
            f"{ref!r} made an environment, but making a second one raised {describe_error(error)}; a worker needs one "
            "for each episode that it plays at the same time"
        ) from error
    if other is sample:
        raise ReferenceNotFoundError(
            f"{ref!r}: {_callable_name(call)}() returned the same object twice; episodes run at the same time, so each "
            "needs an environment of its own: make a new one in each call"
        )
    _close(other, ref)


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
    """Return whether a class only holds data, so that snapshots may contain it even if it is merely imported."""
    return issubclass(cls, Enum | msgspec.Struct) or is_dataclass(cls)


def _nested_classes(cls: type) -> Iterator[type]:
    yield cls
    for value in vars(cls).values():
        if isinstance(value, type) and value.__qualname__.startswith(f"{cls.__qualname__}."):
            yield from _nested_classes(value)


def _close(sample: Any, ref: str) -> None:
    """Close the inspected environment, with a deadline."""
    try:
        if callable(close := getattr(sample, "close", None)):
            run_in_thread(close, _CLOSE_TIMEOUT_S, ref)
    except Exception as error:  # noqa: BLE001  (user code; the environment is discarded anyway)
        log.warning("environment.close_failed", environment=ref, why=describe_error(error))


def run_in_thread(function: Callable[[], Any], timeout_s: float, ref: str) -> Any:
    """Call a sync or async function in a new thread with its own event loop, and return its result.

    Raises:
        TimeoutError: the function did not return in time.
        Exception: the function raised it.
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
        except BaseException as error:  # noqa: BLE001  (user code may raise SystemExit; raised again below)
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
    """Return a hint for an error message if a reward function is configured as an environment."""
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):  # a C function without a signature
        return ""
    hint = "; it takes `completions` like a reward function: reward functions belong in [[rewards]]"
    return hint if "completions" in parameters else ""


def _callable_name(call: object) -> str:
    function = call.func if isinstance(call, partial) else call
    return getattr(function, "__qualname__", None) or repr(call)


MAX_ROWS: Final = 1_000_000
"""Rows of one environment. They are held in memory once; larger sets belong in a file."""
NO_TOOL: Final = (
    "a method rows() that needs no argument is the environment's data, and no tool: if this one is meant for the "
    "model, give it another name"
)


def call_rows(factory: EnvironmentFactory, name: str, split: str, limit: int, timeout_s: float) -> list[bytes] | None:
    """Make an environment and call its `rows()`.

    Args:
        factory: makes the environment; it is closed afterwards.
        name: of the environment in the settings, for messages.
        split: `train` or `eval`, passed if the method has a parameter `split`; one without it has no held-out rows.
        limit: rows to take; 0: all.
        timeout_s: deadline of the call, including the iteration over what it returns.

    Returns:
        Each row as JSON; None if the environment has no `rows`, or none for this split.

    Raises:
        DataError: it raised, took too long, or a row is not a mapping of JSON values.
    """
    env: Any = factory.make()
    try:
        if not contract.offers_rows(env):
            return None
        arguments = filter_kwargs(env.rows, {"split": split})
        if split != "train" and not arguments:
            return None
        found = run_in_thread(lambda: _take(env.rows(**arguments), limit), timeout_s, factory.ref)
    except Exception as error:
        raise _failed(name, f"rows() raised {type(error).__name__}: {error}; {NO_TOOL}", error) from error
    finally:
        factory.discard(env)
    if len(found) > MAX_ROWS:
        raise _failed(name, f"rows() has more than {MAX_ROWS:,} rows; write them to a file and name it in data.path")
    if not found:
        raise _failed(name, "rows() has no rows")
    return [_encode(row, f"environments.{name}: row {number} of rows()") for number, row in enumerate(found)]


def first_row(factory: EnvironmentFactory, name: str, timeout_s: float) -> dict[str, Any]:
    """Return the first row that an environment provides; no columns if it provides none.

    Raises:
        DataError: see `call_rows`.
    """
    rows = call_rows(factory, name, "train", 1, timeout_s)
    return dict(json.loads(rows[0])) if rows else {}


def _take(value: Any, limit: int) -> Any:
    """Return the rows in a list; if `rows` is async, an awaitable of the list."""

    def take(rows: Iterable[Any]) -> list[Any]:
        return list(islice(rows, limit or MAX_ROWS + 1))

    async def wait() -> list[Any]:
        return take(await value)

    return wait() if hasattr(value, "__await__") else take(value)


def _encode(row: Any, place: str) -> bytes:
    if not isinstance(row, Mapping):
        raise DataError(f"{place} is {type(row).__name__}, not a mapping of columns; {NO_TOOL}")
    plain = dict(row)
    try:
        text = json.dumps(plain, allow_nan=False, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{place} has a value that JSON cannot hold: {error}; return text, numbers, lists") from error
    return text.encode(errors="surrogatepass")


def _plain(value: Any) -> Any:
    """Convert scalars and arrays of numpy."""
    if callable(convert := getattr(value, "tolist", None)):
        return convert()
    raise TypeError(f"a value of type {type(value).__name__}")


def _failed(name: str, what: str, error: Exception | None = None) -> DataError:
    found = DataError(f"environments.{name}: {what}")
    if error is not None:
        found.cause = error_cause(error, f"environment {name}, rows")
    return found
