"""Reward functions in processes that can be killed: arguments there, verdicts back, as msgpack."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from envs.call import Ok, Outcome, call_inline
from envs.processes.pool import ProcessPool
from envs.rewards.call_results import CallResult, classify_call
from envs.rewards.loading import load_reward_function


class RewardJobHandler:
    """In the child: calls the function that a reference leads to.

    Args:
        ref: one of the three spellings.
        args: of the settings.
    """

    def __init__(self, ref: str, args: Mapping[str, Any]) -> None:
        self._function = load_reward_function(ref, args).function
        prepare = getattr(self._function, "prepare", None)
        if callable(prepare):
            prepare()  # imports and the like, which no call's deadline should pay for
        self._decoder = msgspec.msgpack.Decoder(tuple[int, dict[str, Any]])
        self._encoder = msgspec.msgpack.Encoder()

    def __call__(self, job: bytes) -> bytes:
        """One call; classified here, so that numbers of any library come back as numbers."""
        rows, arguments = self._decoder.decode(job)
        return self._encoder.encode(classify_call(call_inline(self._function, arguments), rows))


class RewardProcessPool:
    """In the worker: a reward function whose calls run in a pool."""

    def __init__(self, pool: ProcessPool) -> None:
        self.pool = pool
        self._decoder = msgspec.msgpack.Decoder(CallResult)

    @classmethod
    @asynccontextmanager
    async def open(cls, ref: str, args: Mapping[str, Any], processes: int) -> AsyncIterator["RewardProcessPool"]:
        """The pool, until the end.

        Raises:
            ProcessPoolError: no child can be made that calls it.
        """
        handler = f"{RewardJobHandler.__module__}:{RewardJobHandler.__qualname__}"
        async with ProcessPool.open(handler, {"ref": ref, "args": dict(args)}, processes) as pool:
            yield cls(pool)

    async def call(self, calls: Sequence[tuple[int, dict[str, Any]]], timeout_s: float) -> list[CallResult]:
        """One verdict for each call, a number of rows and the arguments."""
        outcomes = await self.pool.map([msgspec.msgpack.encode(call) for call in calls], timeout_s)
        return [self._call_result(outcome, rows) for outcome, (rows, _) in zip(outcomes, calls, strict=True)]

    def _call_result(self, outcome: Outcome, rows: int) -> CallResult:
        if isinstance(outcome, Ok):
            return self._decoder.decode(outcome.value)
        verdict = classify_call(outcome, rows)
        verdict.rows_retryable = True  # it is gone, so that calling again is safe
        return verdict
