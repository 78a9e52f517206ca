"""The trainer's part in evaluations: begins and ends them, and delays publications while one is sampled.

Results are pass@k and the mean reward over both denominators, by environment, in `eval.jsonl`.
"""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import anyio
import msgspec
import structlog
import torch
from msgspec import Struct

from stream.connection.run_connection import MAX_BLOCK_S, RunConnection
from stream.disk_space import persist
from stream.queue.evaluation import (
    EvaluationProgress,
    PromptEvaluation,
    create_evaluation_streams,
    read_evaluation_environments,
    read_evaluation_progress,
    read_prompt_evaluations,
)
from stream.trainer.folder_lock import RunFolderLock
from stream.trainer.trainer_lease import TrainerLease
from stream.waiting import cancel_on
from workers.runs.evaluations import FILE, GROUPS, EvaluationResult, EvaluationStats, read_lines, write_groups
from workers.settings import Settings
from workers.train.algorithms.pass_at_k import pass_at_k
from workers.train.metrics_log import MetricsLog

EVALUATION_METRICS: Final[dict[str, str]] = {
    "eval/version": "the evaluated policy version; these metrics are in the line of the step after the evaluation",
    "eval/mean/valid": "mean over valid completions of held-out prompts",
    "eval/mean/all": "the same over all completions, with invalid ones as 0",
    "eval/pass@*": "`pass@K/valid`: of valid completions; `pass@K/all`: of all, with invalid ones counted as wrong",
    "eval/invalid": "invalid completions",
    "eval/mixed": "completions with a token of another policy version; they count in no mean",
}
"""Metrics of an evaluation that ended since the previous step; the trainer adds them."""


def evaluation_metrics(result: EvaluationResult) -> dict[str, float]:
    """Return the metrics of `EVALUATION_METRICS` for `metrics.jsonl`; means over nothing are omitted."""
    score = result.overall
    found = {"version": result.version, "mean/valid": score.mean_valid, "mean/all": score.mean_all}
    found |= {"mixed": score.mixed, "invalid": sum(score.invalid.values())}
    found |= {f"pass@{k}/{name}": value for k, both in score.pass_at.items() for name, value in both.items()}
    return {f"eval/{name}": value for name, value in found.items() if value is not None}


def summarize(
    evaluations: Mapping[str, PromptEvaluation], prompts: Mapping[str, tuple[str, int]], missing_state: str = "dead"
) -> tuple[EvaluationStats, dict[str, EvaluationStats]]:
    """Summarize the evaluations of all prompts.

    Args:
        evaluations: by prompt id.
        prompts: environment and number of completions of every prompt, by id.
        missing_state: state counted for the completions of a prompt without an evaluation.

    Returns:
        The statistics over all prompts, and by environment.
    """
    by_environment: dict[str, list[tuple[PromptEvaluation, int]]] = defaultdict(list)
    for prompt, (environment, count) in sorted(prompts.items()):  # sums must not depend on the order of arrival
        missing = PromptEvaluation(environment=environment, invalid={missing_state: count})
        by_environment[environment].append((evaluations.get(prompt) or missing, count))
    everything = [each for found in by_environment.values() for each in found]
    return _stats(everything), {name: _stats(found) for name, found in sorted(by_environment.items()) if name}


def _stats(counted: Sequence[tuple[PromptEvaluation, int]]) -> EvaluationStats:
    """Summarize prompt evaluations, each with the number of completions requested."""
    evaluations = [evaluation for evaluation, _ in counted]
    invalid = sum((Counter(each.invalid) for each in evaluations), Counter[str]())
    valid, reward_sum = sum(each.valid for each in evaluations), math.fsum(each.reward_sum for each in evaluations)
    valid_or_invalid = valid + invalid.total()
    return EvaluationStats(
        prompts=len(counted),
        n=sum(count for _, count in counted),
        valid=valid,
        invalid=dict(sorted(invalid.items())),
        mixed=sum(each.mixed_versions for each in evaluations),
        mean_valid=reward_sum / valid if valid else None,
        mean_all=reward_sum / valid_or_invalid if valid_or_invalid else None,
        pass_at=_pass_at(evaluations, max((count for _, count in counted), default=0)),
    )


def _pass_at(evaluations: Sequence[PromptEvaluation], max_k: int) -> dict[str, dict[str, float]]:
    successes_G = torch.tensor([each.successes for each in evaluations], dtype=torch.int64)
    valid_G = torch.tensor([each.valid for each in evaluations], dtype=torch.int64)
    all_G = torch.tensor([each.valid + sum(each.invalid.values()) for each in evaluations], dtype=torch.int64)
    pass_at: dict[str, dict[str, float]] = {}
    k = 1
    while k <= max_k:
        means = {}
        for name, n_G in (("valid", valid_G), ("all", all_G)):
            passed = pass_at_k(n_G, successes_G, k)
            if passed.known.any():
                means[name] = float(passed.value[passed.known].mean())
        pass_at[str(k)] = means
        k *= 2
    return pass_at


class EvaluationLog:
    """`eval.jsonl` up to the step of a checkpoint.

    Args:
        folder: the run's folder.
        step: of the checkpoint. Lines of later steps are about weights that are lost: `cut` cuts them off.
        folder_lock: the trainer's lock on the folder, if other trainers may exist.
    """

    def __init__(self, folder: Path, step: int, folder_lock: RunFolderLock | None = None) -> None:
        results, length = [], 0
        for result, end_offset in read_lines(folder / FILE):
            if result.step > step:
                break
            results.append(result)
            length = end_offset
        self.results = results
        self._folder = folder
        self._file = MetricsLog(folder / FILE, length, folder_lock)

    @property
    def last(self) -> EvaluationResult | None:
        """The last result; None before the first."""
        return self.results[-1] if self.results else None

    def final_metrics(self, step: int) -> dict[str, float]:
        """Return the metrics of the evaluation of the run's last step, which no line of `metrics.jsonl` has."""
        last = self.last
        return (
            {"step": step, "time": last.time, **evaluation_metrics(last)}
            if last is not None and last.step == step
            else {}
        )

    def cut(self) -> None:
        """Cut off the results of later steps."""
        self._file.cut()

    def append(self, result: EvaluationResult, groups: Sequence[bytes] = ()) -> None:
        """Write the scored groups, and then one line."""
        if groups:
            persist(self._folder / GROUPS, lambda: write_groups(self._folder, result.step, groups))
        self._file.append(msgspec.to_builtins(result))
        self.results.append(result)


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
