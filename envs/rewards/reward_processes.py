"""Reward functions in killable child processes; arguments and results travel as msgpack."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from anyio import to_thread

from envs.call import Ok, Outcome, call_inline
from envs.rewards.call_report import CallReport, TrainerState, use_fallback
from envs.rewards.call_results import CallResult, classify_rows
from envs.rewards.loading import load_reward_function
from envs.sandboxes.bubblewrap import warn_without_sandbox
from envs.sandboxes.pools.child_main import report_interim
from envs.sandboxes.pools.isolation import Isolation, strongest_isolation
from envs.sandboxes.pools.pool import ProcessPool

WITHOUT_SANDBOX = "its child processes can read files and use the network"


class RewardCall(msgspec.Struct, frozen=True):
    """One call of a reward function."""

    rows: int
    """Number of completions."""
    arguments: dict[str, Any]
    """The function's keyword arguments, without those in `call_report.REPORT_PARAMETERS`."""
    trainer_state: TrainerState = TrainerState()


class RewardJobHandler:
    """The handler in a child process: loads a reward function once and calls it for each job.

    Args:
        ref: reference of the reward function.
        args: its arguments from the settings.
    """

    def __init__(self, ref: str, args: Mapping[str, Any]) -> None:
        self._function = load_reward_function(ref, args).function
        prepare = getattr(self._function, "prepare", None)
        if callable(prepare):
            prepare()  # slow imports happen here, outside of any call's deadline
        self._decoder = msgspec.msgpack.Decoder(RewardCall)
        self._encoder = msgspec.msgpack.Encoder()

    def __call__(self, job: bytes) -> bytes:
        """Call the function once and classify the result, so that numbers of any library become plain floats."""
        call = self._decoder.decode(job)
        report = CallReport(call.rows, lambda fallback: report_interim(self._encoder.encode(fallback)))
        arguments = call.arguments | report.kwargs(self._function, call.trainer_state)
        rows = classify_rows(call_inline(self._function, arguments), call.rows)
        return self._encoder.encode(report.result(rows))


class RewardProcessPool:
    """The worker's side: calls a reward function in a process pool."""

    def __init__(self, pool: ProcessPool) -> None:
        self.pool = pool
        self._decoder = msgspec.msgpack.Decoder(CallResult)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, ref: str, args: Mapping[str, Any], processes: int, *, sandboxed: bool = False
    ) -> AsyncIterator["RewardProcessPool"]:
        """Open a pool of children, and close it on exit.

        Args:
            ref: reference of the function.
            args: its arguments from the settings.
            processes: number of children.
            sandboxed: they run in sandboxes, or without this process's environment where no sandbox can be made.

        Raises:
            ProcessPoolError: no child can load the function.
        """
        handler = f"{RewardJobHandler.__module__}:{RewardJobHandler.__qualname__}"
        isolation = Isolation()
        if sandboxed:
            isolation = Isolation(await to_thread.run_sync(strongest_isolation))
            await to_thread.run_sync(warn_without_sandbox, ref, WITHOUT_SANDBOX)
        source = {"ref": ref, "args": dict(args)}
        async with ProcessPool.open(handler, source, processes, isolation=isolation) as pool:
            yield cls(pool)

    async def call(self, calls: Sequence[RewardCall], timeout_s: float) -> list[CallResult]:
        """Run calls and return their results in order."""
        outcomes = await self.pool.map([msgspec.msgpack.encode(call) for call in calls], timeout_s)
        return [self._call_result(outcome, call.rows) for outcome, call in zip(outcomes, calls, strict=True)]

    def _call_result(self, outcome: Outcome, rows: int) -> CallResult:
        if isinstance(outcome, Ok):
            return self._decoder.decode(outcome.value)
        if outcome.interim is not None:
            return use_fallback(self._decoder.decode(outcome.interim), outcome)
        return CallResult(classify_rows(outcome, rows))
