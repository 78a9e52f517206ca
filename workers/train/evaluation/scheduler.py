"""The trainer's part in evaluations: it begins them, holds publications meanwhile, and writes down what came of them.

::

    publish v ──► due? examine v ──► train the step that follows ──► hold: wait until v is sampled ──► publish v+1
                                                                        └─ conclude, once all is scored

The engines have version v for as long as the evaluation of v is sampled, so its spans name v alone. Nothing that it
waits for waits for the trainer: prompts of an evaluation need no place in pacing. Still each wait is bounded, by
`eval.publish_wait_s` without anything new; what is sampled after that is counted as mixed.

A trainer that was killed begins from a checkpoint, under a new version number: the evaluation that was under way is
given up, and done again where the step that the weights are of has no line yet.
"""

import time
from collections.abc import Callable

import anyio
import msgspec
import structlog

from stream.connection.run_connection import MAX_BLOCK_S, RunConnection
from stream.queue.evaluation import (
    EvaluationProgress,
    create_evaluation_streams,
    read_evaluation_environments,
    read_evaluation_progress,
    read_prompt_evaluations,
)
from stream.trainer.lease import TrainerLease
from workers.settings import Settings
from workers.train.evaluation.results import EvaluationLog, EvaluationResult, summarize

log = structlog.get_logger()

_MIN_POLL_S = 0.01
"""Between two looks: a run that goes on wakes many times a second."""


class EvaluationScheduler:
    """The trainer's part in evaluations.

    Args:
        settings: of the run.
        trainer_lease: the right to train it.
        results: what was found so far; None where nothing is evaluated.
        stopping: set when the trainer is asked to stop: then nothing is waited for.
    """

    def __init__(
        self, settings: Settings, trainer_lease: TrainerLease, results: EvaluationLog | None, stopping: anyio.Event
    ) -> None:
        self._settings = settings.eval
        self._publish_every = settings.train.publish_every
        self._settings_digest = settings.evaluation_digest
        self._trainer_lease = trainer_lease
        self._results = results
        self._stopping = stopping
        self._running: tuple[int, int, float] | None = None
        """Version, step and monotonic time of the beginning."""
        self._timed_out = False
        """It was held for in vain."""
        self._new_result: EvaluationResult | None = None

    @property
    def _connection(self) -> RunConnection:
        return self._trainer_lease.connection

    async def discard_unfinished(self) -> None:
        """Give up what a trainer before us had begun: its version is not ours."""
        if self._results is not None:
            await create_evaluation_streams(self._connection)
            await self._trainer_lease.end_evaluation(_last_result(self._results))

    async def begin_if_due(self, version: int, step: int, *, last: bool = False) -> None:
        """Begin an evaluation of a version that the engines have now, if one is due."""
        if not self._is_due(step, last) or self._stopping.is_set():
            return
        await self._end()
        since = time.monotonic()
        while after := await self._trainer_lease.begin_evaluation(version, step, self._settings_digest):
            if self._stopping.is_set():
                return
            left_s = self._settings.publish_wait_s - (time.monotonic() - since)
            if left_s <= 0:
                log.error("evaluation.skipped", version=version, why="no feeder has brought the held-out prompts")
                return
            await self._wait(after, left_s)
        self._running, self._timed_out = (version, step, since), False
        log.info("evaluation.started", version=version, step=step)

    async def wait_until_sampled(self) -> None:
        """Before a publication: wait until the evaluation under way has been sampled."""
        if self._running is None or self._timed_out:
            return
        self._timed_out = not await self._wait_until(self._running, lambda seen: not seen.unsampled)
        if self._timed_out and not self._stopping.is_set():
            log.warning("evaluation.timed_out", version=self._running[0], hold_s=self._settings.publish_wait_s)

    async def end_if_complete(self) -> None:
        """Write down the evaluation under way, if all of it has come."""
        if self._running is None:
            return
        now = await read_evaluation_progress(self._connection)
        if now.version == self._running[0] and not now.unfinished:
            await self._end()

    async def evaluate_final(self, version: int, step: int) -> None:
        """The run is over: evaluate its last policy, if that has not been done, and wait for what came of it."""
        await self.begin_if_due(version, step, last=True)
        await self._end()

    def is_final_due(self, step: int) -> bool:
        """Whether the policy of this step is yet to be evaluated, if it is the last."""
        return self._is_due(step, last=True)

    def pop_metrics(self) -> dict[str, float]:
        """Of an evaluation that was concluded since this was last asked."""
        news, self._new_result = self._new_result, None
        return news.metrics() if news is not None else {}

    def _is_due(self, step: int, last: bool) -> bool:
        if self._results is None:
            return False
        done = [line.step for line in self._results.results]
        done += [self._running[1]] if self._running is not None else []
        if last:
            return step not in done
        publication = step // self._publish_every
        return publication % self._settings.every == 0 and publication not in {s // self._publish_every for s in done}

    async def _end(self) -> None:
        """Wait until all of the evaluation under way has come, within bounds, and write it down."""
        if self._running is None or self._results is None:
            return
        whole = await self._wait_until(self._running, lambda seen: not seen.unfinished)
        if self._stopping.is_set() and not whole:
            return
        version, step, began = self._running
        prompts = await read_evaluation_environments(self._connection)
        found = await read_prompt_evaluations(self._connection)
        score, by_environment = await anyio.to_thread.run_sync(
            summarize, found, prompts, "dead" if whole else "missing"
        )
        line = EvaluationResult(
            version=version,
            step=step,
            time=time.time(),
            seconds=time.monotonic() - began,
            overall=score,
            environments=by_environment,
        )
        await anyio.to_thread.run_sync(self._results.append, line)
        self._running, self._new_result = None, line
        await self._trainer_lease.end_evaluation(_last_result(self._results))
        log.info("evaluation.ended", version=version, step=step, mean=score.mean_valid, mixed=score.mixed)

    async def _wait_until(self, under_way: tuple[int, int, float], done: Callable[[EvaluationProgress], bool]) -> bool:
        """Wait for it; False where nothing new came for `hold_s`, or a stop was asked for."""
        version, step, _ = under_way
        seen: tuple[int, int] | None = None
        last = time.monotonic()
        while True:
            now = await read_evaluation_progress(self._connection)
            if now.version != version:
                log.warning("evaluation.state_lost", version=version, server_has=now.version)
                await self._trainer_lease.begin_evaluation(version, step, self._settings_digest)
            elif done(now):
                return True
            if now.version == version and (now.unsampled, now.unfinished) != seen:
                seen, last = (now.unsampled, now.unfinished), time.monotonic()
            left_s = self._settings.publish_wait_s - (time.monotonic() - last)
            if left_s <= 0 or self._stopping.is_set():
                return False
            await self._wait(now.wake_id, left_s)

    async def _wait(self, after: str, at_most_s: float) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_when, self._stopping, tasks.cancel_scope)
            await self._connection.wait_for_change(after, max(0.001, min(at_most_s, MAX_BLOCK_S)))
            await anyio.sleep(_MIN_POLL_S)
            tasks.cancel_scope.cancel()


def _last_result(book: EvaluationLog) -> bytes:
    return msgspec.json.encode(book.last) if book.last is not None else b""


async def _cancel_when(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()
