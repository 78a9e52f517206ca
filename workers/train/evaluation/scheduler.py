"""Begins and ends evaluations, and delays publications while one is sampled.

::

    publish v ──► due? begin evaluation of v ──► train the next step ──► wait until v is sampled ──► publish v+1
                                                                            └─ write the result once all is scored

Engines serve version v for as long as its evaluation is sampled, so the spans of its completions name v alone. The wait
cannot deadlock: evaluation prompts need no place in pacing. It is also bounded, by half of `abort.stall_timeout_s`
without progress; completions sampled after that count as mixed.

A trainer that resumes from a checkpoint publishes under a new version number. It discards an unfinished evaluation, and
repeats it if `eval.jsonl` has no line for the step of its weights.
"""

import time
from collections.abc import Callable

import anyio
import msgspec
import structlog
from msgspec import Struct

from stream.cancellation import cancel_on
from stream.connection.run_connection import MAX_BLOCK_S, RunConnection
from stream.queue.evaluation import (
    EvaluationProgress,
    create_evaluation_streams,
    read_evaluation_environments,
    read_evaluation_progress,
    read_prompt_evaluations,
)
from stream.trainer.lease import TrainerLease
from workers.runs.evaluations import EvaluationResult
from workers.settings import Settings
from workers.train.evaluation.results import EvaluationLog, evaluation_metrics, summarize

log = structlog.get_logger()

_MIN_POLL_S = 0.01
"""Shortest time between two reads of the progress; an active run changes many times a second."""


class RunningEvaluation(Struct, frozen=True):
    """An evaluation that has begun and has no result yet."""

    version: int
    step: int
    started: float
    """Monotonic time."""


class EvaluationScheduler:
    """Schedules the evaluations of a run.

    Args:
        settings: of the run.
        trainer_lease: the right to begin and end evaluations.
        results: earlier results; None if the run has no evaluation.
    """

    def __init__(self, settings: Settings, trainer_lease: TrainerLease, results: EvaluationLog | None) -> None:
        self._settings = settings.eval
        self._wait_s = settings.abort.trainer_wait_s
        self._publish_every = settings.train.publish_every
        self._settings_digest = settings.evaluation_digest
        self._trainer_lease = trainer_lease
        self._results = results
        self._running: RunningEvaluation | None = None
        self._timed_out = False
        """A publication stopped waiting for the running evaluation."""
        self._new_result: EvaluationResult | None = None

    async def discard_unfinished(self) -> None:
        """End the evaluation of an earlier trainer, whose version this one does not have."""
        if self._results is not None:
            await create_evaluation_streams(self._connection)
            await self._trainer_lease.end_evaluation(_last_result(self._results))

    async def begin_if_due(self, version: int, step: int, *, last: bool = False) -> None:
        """Begin an evaluation of a version that the engines serve, if one is due.

        Args:
            version: the published version.
            step: of its weights.
            last: the run ends with this version, which is evaluated in any case.
        """
        if not self._is_due(step, last) or self._is_stopping:
            return
        await self._end()
        started = time.monotonic()
        while wake_id := await self._trainer_lease.begin_evaluation(version, step, self._settings_digest):
            if self._is_stopping:
                return
            remaining_s = self._wait_s - (time.monotonic() - started)
            if remaining_s <= 0:
                log.error("evaluation.skipped", version=version, why="no feeder has uploaded the evaluation prompts")
                return
            await self._wait(wake_id, remaining_s)
        self._running, self._timed_out = RunningEvaluation(version, step, started), False
        log.info("evaluation.started", version=version, step=step)

    async def wait_until_sampled(self) -> None:
        """Wait until the running evaluation has been sampled; call it before a publication."""
        if self._running is None or self._timed_out:
            return
        self._timed_out = not await self._wait_until(self._running, lambda progress: not progress.unsampled)
        if self._timed_out and not self._is_stopping:
            log.warning("evaluation.timed_out", version=self._running.version, after_s=self._wait_s)

    async def end_if_complete(self) -> None:
        """Write the result of the running evaluation if all of it is scored."""
        if self._running is None:
            return
        progress = await read_evaluation_progress(self._connection)
        if progress.version == self._running.version and not progress.unfinished:
            await self._end()

    async def evaluate_final(self, version: int, step: int) -> None:
        """Evaluate the run's last policy, unless that has been done, and wait for the result."""
        await self.begin_if_due(version, step, last=True)
        await self._end()

    def is_final_due(self, step: int) -> bool:
        """Whether the policy of this step must still be evaluated if it is the last."""
        return self._is_due(step, last=True)

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of an evaluation that ended since the previous call."""
        result, self._new_result = self._new_result, None
        return evaluation_metrics(result) if result is not None else {}

    @property
    def _connection(self) -> RunConnection:
        return self._trainer_lease.connection

    @property
    def _is_stopping(self) -> bool:
        return self._connection.stopping.is_set()

    def _is_due(self, step: int, last: bool) -> bool:
        if self._results is None:
            return False
        evaluated = [result.step for result in self._results.results]
        evaluated += [self._running.step] if self._running is not None else []
        if last:
            return step not in evaluated
        publication = step // self._publish_every
        is_due = publication % self._settings.every == 0
        return is_due and publication not in {each // self._publish_every for each in evaluated}

    async def _end(self) -> None:
        """Wait, within bounds, until the running evaluation is scored, and write its result."""
        if self._running is None or self._results is None:
            return
        running = self._running
        complete = await self._wait_until(running, lambda progress: not progress.unfinished)
        if self._is_stopping and not complete:
            return
        prompts = await read_evaluation_environments(self._connection)
        evaluations = await read_prompt_evaluations(self._connection)
        missing_state = "dead" if complete else "missing"
        overall, by_environment = await anyio.to_thread.run_sync(summarize, evaluations, prompts, missing_state)
        result = EvaluationResult(
            version=running.version,
            step=running.step,
            time=time.time(),
            seconds=time.monotonic() - running.started,
            overall=overall,
            environments=by_environment,
        )
        groups = [each.group for each in evaluations.values() if each.group]
        await anyio.to_thread.run_sync(self._results.append, result, groups)
        self._running, self._new_result = None, result
        await self._trainer_lease.end_evaluation(_last_result(self._results))
        log.info(
            "evaluation.ended",
            version=running.version,
            step=running.step,
            mean=overall.mean_valid,
            mixed=overall.mixed,
        )

    async def _wait_until(self, running: RunningEvaluation, is_done: Callable[[EvaluationProgress], bool]) -> bool:
        """Wait for a condition; False after too long without progress, or when a stop is requested."""
        seen: tuple[int, int] | None = None
        last_change = time.monotonic()
        while True:
            progress = await read_evaluation_progress(self._connection)
            if progress.version != running.version:
                # The server lost its last writes.
                log.warning("evaluation.state_lost", version=running.version, server_has=progress.version)
                await self._trainer_lease.begin_evaluation(running.version, running.step, self._settings_digest)
            elif is_done(progress):
                return True
            elif (progress.unsampled, progress.unfinished) != seen:
                seen, last_change = (progress.unsampled, progress.unfinished), time.monotonic()
            remaining_s = self._wait_s - (time.monotonic() - last_change)
            if remaining_s <= 0 or self._is_stopping:
                return False
            await self._wait(progress.wake_id, remaining_s)

    async def _wait(self, wake_id: str, timeout_s: float) -> None:
        """Wait until the run changes, a stop is requested, or the timeout."""
        async with cancel_on(self._connection.stopping):
            await self._connection.wait_for_change(wake_id, max(0.001, min(timeout_s, MAX_BLOCK_S)))
            await anyio.sleep(_MIN_POLL_S)


def _last_result(results: EvaluationLog) -> bytes:
    return msgspec.json.encode(results.last) if results.last is not None else b""
