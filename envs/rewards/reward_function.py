"""Reward functions: called with TRL's signature, and every result validated.

`reward(prompts, completions, completion_ids, environments, **columns) -> list[float | None]`, sync or async, with any
subset of these parameters. An exception, a timeout, None or a result of the wrong shape is `Unmeasured`, never a
number.
"""

import inspect
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import MappingProxyType
from typing import Any

import anyio
from anyio import CapacityLimiter, to_thread

from envs.call import CallRunner, RateLimiter, TimedOut, filter_kwargs, is_async
from envs.rewards.call_report import CallReport, use_fallback
from envs.rewards.call_results import CallResult, NamedRewards, RowResult, classify_rows, join_results
from envs.rewards.loading import CallOptions, load_reward_function
from envs.rewards.reward_batch import RewardBatch, copy_arguments
from envs.rewards.reward_processes import RewardCall, RewardProcessPool
from envs.sandboxes.pools.isolation import is_importable_in_sandbox
from stream.errors import ReferenceNotFoundError
from stream.records import RewardPart
from stream.validity import RETURNED_NONE, Reward


class RewardFunction:
    """A reward function with a name, a weight, and where it runs: in the scoring stage or the rollout worker.

    A synchronous function runs in a thread, one call at a time, or with `call_options.processes` in killable child
    processes. Enter `open` before the first call: it starts the processes, or enters a function that is an
    asynchronous context manager (to open connections, or wait for a server).

    Example:
        exact = RewardFunction.load("calculator_answer", weight=1.0)
        async with exact.open():
            rewards = await exact(RewardBatch.from_group(group, environments), timeout_s=30)

    Args:
        function: the callable.
        name: name of its reward part.
        weight: weight of the part in the completion's reward.
        run_in: `score` or `rollout`.
        call_options: how it is called.
        source: reference and arguments from which a child process can load it.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        weight: float = 1.0,
        run_in: str = "score",
        call_options: CallOptions = CallOptions(),  # noqa: B008  (frozen)
        source: tuple[str, Mapping[str, Any]] = ("", MappingProxyType({})),
    ) -> None:
        self.function = function
        self.name = name
        self.weight = weight
        self.run_in = run_in
        self.call_options = call_options
        self._runner = CallRunner(CapacityLimiter(1))
        self._limiter = CapacityLimiter(call_options.max_concurrency or math.inf)
        self._rate_limiter = RateLimiter(call_options.calls_per_second)
        self._source = source
        self._process_pool: RewardProcessPool | None = None

    @classmethod
    def load(
        cls,
        ref: str,
        weight: float = 1.0,
        run_in: str = "score",
        name: str = "",
        args: Mapping[str, Any] = MappingProxyType({}),
        call_options: CallOptions = CallOptions(),  # noqa: B008
    ) -> "RewardFunction":
        """Resolve a reference to a function, or to a class that is instantiated.

        Runs imports and constructors, which may block.

        Args:
            ref: a reference, see `envs.references`.
            weight: weight of the part in the completion's reward.
            run_in: `score` or `rollout`.
            name: name of the reward part; empty: the name in `ref`.
            args: extra keyword arguments of each call, or of the constructor if the reference names a class.
            call_options: how it is called; unset fields come from the function's own `call_options`.

        Raises:
            ReferenceNotFoundError: the reference does not resolve, is not callable, takes other arguments, or cannot
                be called with these options.
        """
        loaded = load_reward_function(ref, args)
        call_options = call_options.with_defaults(loaded.call_options)
        if call_options.processes:
            _check_process_compatible(ref, loaded.function)
        return cls(loaded.function, name or loaded.name, weight, run_in, call_options, (ref, args))

    @asynccontextmanager
    async def open(self) -> AsyncIterator["RewardFunction"]:
        """Start the child processes, or enter the function if it is an asynchronous context manager."""
        if self.call_options.processes:
            ref, args = self._source
            sandboxed = self.call_options.isolation == "sandbox" and await to_thread.run_sync(self._is_installed)
            async with RewardProcessPool.open(ref, args, self.call_options.processes, sandboxed=sandboxed) as pool:
                self._process_pool = pool
                try:
                    yield self
                finally:
                    self._process_pool = None
        elif isinstance(self.function, AbstractAsyncContextManager):
            async with self.function:
                yield self
        else:
            yield self

    def _is_installed(self) -> bool:
        """Return whether a child in a sandbox can import the function, by its reference and from its own module."""
        named = self._source[0].rpartition(":")[0]
        own = str(getattr(self.function, "__module__", ""))
        return all(map(is_importable_in_sandbox, filter(None, (named, own))))

    def to_parts(self, result: RowResult) -> list[RewardPart]:
        """Convert one completion's result to reward parts: one `NAME`, or `NAME.KEY` for each named reward.

        With `call_options.none` `not_applicable`, a returned None is no part.
        """
        named: dict[str, Reward] = (
            {f"{self.name}.{key}": reward for key, reward in result.by_name.items()}
            if isinstance(result, NamedRewards)
            else {self.name: result}
        )
        omitted = RETURNED_NONE if self.call_options.none == "not_applicable" else None
        return [
            RewardPart(name=name, reward=reward, weight=self.weight)
            for name, reward in named.items()
            if reward != omitted
        ]

    def applies_to(self, environment: str | None) -> bool:
        """Return whether the function measures completions of an environment, or of none."""
        return not self.call_options.environments or environment in self.call_options.environments

    async def __call__(self, batch: RewardBatch, timeout_s: float) -> list[RowResult]:
        """Compute the rewards of a batch, as `measure` does, without what the function logged."""
        return (await self.measure(batch, timeout_s)).rows

    async def measure(self, batch: RewardBatch, timeout_s: float) -> CallResult:
        """Compute the rewards of a batch.

        Args:
            batch: the completions.
            timeout_s: deadline of each call, unless `call_options` has one.

        Returns:
            One result for each completion. If a call raises, times out or returns a result of the wrong shape, all of
            its completions are unmeasured: one completion with `call_options.granularity` `row`, else the group.
        """
        if batch.size == 0:
            return CallResult([])
        by_row = self.call_options.granularity == "row"
        batches = [batch.row(i) for i in range(batch.size)] if by_row else [batch]
        results = await self._call_batches(batches, self.call_options.timeout_s or timeout_s)
        return join_results(results)

    async def _call_batches(self, batches: Sequence[RewardBatch], timeout_s: float) -> list[CallResult]:
        """Call the function once for each batch, concurrently within its limits."""
        if self._process_pool is not None and not self.call_options.calls_per_second:
            return await self._process_pool.call([self._process_call(batch) for batch in batches], timeout_s)
        results: dict[int, CallResult] = {}

        async def call(i: int) -> None:
            results[i] = await self._call_batch(batches[i], timeout_s)

        async with anyio.create_task_group() as calls:
            for i in range(len(batches)):
                calls.start_soon(call, i)
        return [results[i] for i in range(len(batches))]

    async def _call_batch(self, batch: RewardBatch, timeout_s: float) -> CallResult:
        if self.call_options.processes and self._process_pool is None:
            raise RuntimeError(
                f"reward function {self.name!r} runs in processes: enter its open() before the first call"
            )
        async with self._limiter:
            await self._rate_limiter.acquire()
            if self._process_pool is not None:
                return (await self._process_pool.call([self._process_call(batch)], timeout_s))[0]
            arguments = filter_kwargs(self.function, batch.to_kwargs())
            report = CallReport(batch.size)
            reporting = report.kwargs(self.function, batch.trainer_state)
            if is_async(self.function):
                outcome = await self._runner.call(self.function, copy_arguments(arguments) | reporting, timeout_s)
            else:
                outcome = await self._runner.call(_call_with_copies(self.function), arguments | reporting, timeout_s)
            if isinstance(outcome, TimedOut) and report.fallback is not None:
                return use_fallback(report.result(report.fallback), outcome)
            return report.result(classify_rows(outcome, batch.size))

    def _process_call(self, batch: RewardBatch) -> RewardCall:
        """Return the call for a child process; encoding it copies the arguments."""
        arguments = filter_kwargs(self.function, batch.to_kwargs())
        arguments.pop("environments", None)  # objects of this process
        return RewardCall(batch.size, arguments, batch.trainer_state)


def _call_with_copies(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with copied arguments; they are copied in its thread, not on the event loop."""

    def call(**arguments: Any) -> Any:
        return function(**copy_arguments(arguments))

    return call


def _check_process_compatible(ref: str, function: Callable[..., Any]) -> None:
    if is_async(function) or isinstance(function, AbstractAsyncContextManager):
        raise ReferenceNotFoundError(
            f"{ref!r} is asynchronous, and processes run synchronous functions only; leave out `processes`"
        )
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a C function without a signature
        return
    if "environments" in parameters:
        raise ReferenceNotFoundError(
            f"{ref!r} takes `environments`, which are objects of the worker's own process; leave out `processes`"
        )
