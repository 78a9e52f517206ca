"""Reward functions: found, called with TRL's signature, and every result classified.

`reward(prompts, completions, completion_ids, environments, **columns) -> list[float | None]`, sync or async, asking for
as few of those as it likes. Nothing that such a function does becomes a number, but a number that it returned.
"""

import inspect
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import chain
from types import MappingProxyType
from typing import Any

import anyio
import structlog
from anyio import CapacityLimiter

from envs.call import CallRunner, RateLimiter, filter_kwargs, is_async
from envs.rewards.call_results import CallResult, NamedRewards, RowResult, classify_call
from envs.rewards.loading import CallOptions, load_reward_function
from envs.rewards.reward_batch import RewardBatch
from envs.rewards.reward_processes import RewardProcessPool
from stream.errors import ReferenceNotFoundError
from stream.records import RewardPart
from stream.validity import Unmeasured

log = structlog.get_logger()


class RewardFunction:
    """A reward function, its weight, and `where` it runs: in the scoring stage (`score`) or the `rollout` worker.

    Synchronous ones run in a thread, one call at a time, since none was promised that two threads would be in it; or,
    with `calling.processes`, in the main threads of processes that are killed past their deadline.
    One that is an asynchronous context manager is entered before the first call and left after the last (`opened`):
    the place to open connections, to see that a server answers, to start processes.

    Example:
        exact = RewardFunction.load("calculator_answer", weight=1.0)
        async with exact.opened():
            rewards = await exact(batch_from_group(group, environments), timeout_s=30)
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        weight: float = 1.0,
        run_in: str = "score",
        call_options: CallOptions = CallOptions(),  # noqa: B008  (it is frozen)
    ) -> None:
        self.function = function
        self.name = name
        self.weight = weight
        self.run_in = run_in
        self.call_options = call_options
        self._runner = CallRunner(CapacityLimiter(1))
        self._limiter = CapacityLimiter(call_options.max_concurrency or math.inf)
        self._rate_limiter = RateLimiter(call_options.calls_per_second)
        self._source: tuple[str, Mapping[str, Any]] = ("", {})
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
        """Resolve a reference. A function is called with `args` besides; a class is made an instance of, with `args`.

        Imports and constructs, and so may block.

        Raises:
            ReferenceNotFoundError: the reference leads nowhere, to something that is no function and makes none, takes
                other arguments, or cannot be called in the way that is asked for.
        """
        found = load_reward_function(ref, args)
        call_options = call_options.with_defaults(found.call_options)
        if call_options.processes:
            _check_process_compatible(ref, found.function)
        made = cls(found.function, name or found.name, weight, run_in, call_options)
        made._source = (ref, args)
        return made

    @asynccontextmanager
    async def open(self) -> AsyncIterator["RewardFunction"]:
        """Ready to be called: entered, where the function is an asynchronous context manager; its processes started."""
        if self.call_options.processes:
            ref, args = self._source
            async with RewardProcessPool.open(ref, args, self.call_options.processes) as processes:
                self._process_pool = processes
                try:
                    yield self
                finally:
                    self._process_pool = None
        elif isinstance(self.function, AbstractAsyncContextManager):
            async with self.function:
                yield self
        else:
            yield self

    def to_parts(self, result: RowResult) -> list[RewardPart]:
        """A completion's entry as parts of its reward: one of the function's name, or a `NAME.KEY` for each named."""
        if not isinstance(result, NamedRewards):
            return [RewardPart(name=self.name, reward=result, weight=self.weight)]
        return [
            RewardPart(name=f"{self.name}.{key}", reward=reward, weight=self.weight)
            for key, reward in result.by_name.items()
        ]

    async def __call__(self, batch: RewardBatch, timeout_s: float) -> list[RowResult]:
        """Measure a batch.

        Args:
            batch: the completions.
            timeout_s: for each call of the function, unless it has a deadline of its own.

        Returns:
            One entry for each completion. Where the call raised, it is repeated row by row, so that only rows that
            raise by themselves are unmeasured (unless `calling.each` says otherwise); a result of the wrong shape, or
            none in time, is so for all of them.
        """
        if batch.size == 0:
            return []
        timeout_s = self.call_options.timeout_s or timeout_s
        if self.call_options.granularity != "row":
            (verdict,) = await self._call_batches([batch], timeout_s)
            if not verdict.rows_retryable or batch.size == 1 or self.call_options.granularity == "group":
                return verdict.rows
            log.warning("reward.call_failed", reward=self.name, rows=batch.size, why=_first_detail(verdict))
        rows = await self._call_batches([batch.row(i) for i in range(batch.size)], timeout_s)
        return list(chain.from_iterable(verdict.rows for verdict in rows))

    async def _call_batches(self, batches: Sequence[RewardBatch], timeout_s: float) -> list[CallResult]:
        """One call for each batch, all at once as far as the function can take it."""
        if self._process_pool is not None and not self.call_options.calls_per_second:
            return await self._process_pool.call([self._kwargs_for(batch) for batch in batches], timeout_s)
        found: dict[int, CallResult] = {}

        async def call(place: int) -> None:
            found[place] = await self._call_batch(batches[place], timeout_s)

        async with anyio.create_task_group() as calls:
            for place in range(len(batches)):
                calls.start_soon(call, place)
        return [found[place] for place in range(len(batches))]

    async def _call_batch(self, batch: RewardBatch, timeout_s: float) -> CallResult:
        if self.call_options.processes and self._process_pool is None:
            raise RuntimeError(
                f"reward function {self.name!r} runs in processes: enter its opened() before the first call"
            )
        async with self._limiter:
            await self._rate_limiter.acquire()
            if self._process_pool is not None:
                return (await self._process_pool.call([self._kwargs_for(batch)], timeout_s))[0]
            _, arguments = self._kwargs_for(batch)
            return classify_call(await self._runner.call(self.function, arguments, timeout_s), batch.size)

    def _kwargs_for(self, batch: RewardBatch) -> tuple[int, dict[str, Any]]:
        """How many rows, and what the function is called with."""
        arguments = batch.to_kwargs()
        if self.call_options.processes:
            arguments.pop("environments", None)  # objects of this process
        return batch.size, filter_kwargs(self.function, arguments)


def _check_process_compatible(ref: str, function: Callable[..., Any]) -> None:
    if is_async(function) or isinstance(function, AbstractAsyncContextManager):
        raise ReferenceNotFoundError(
            f"{ref!r} is asynchronous, and processes are for synchronous functions; leave out `processes`"
        )
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C, without a signature
        return
    if "environments" in parameters:
        raise ReferenceNotFoundError(
            f"{ref!r} asks for `environments`, which are objects of the worker's own process; leave out `processes`"
        )


def _first_detail(verdict: CallResult) -> str:
    return next((entry.detail for entry in verdict.rows if isinstance(entry, Unmeasured)), "")
