"""The loop of rollout workers and scorers: claim entries of one stage, work on many at the same time, end each lease.

What can happen to an entry:

==================================  =================================================================================
the work completes it               nothing more to do
its bytes are not a valid record    dead letter; a record of a newer schema is given back for workers that can read it
the record itself is at fault       given back, up to a limit (`DataError`)
no engine, no place of sandboxes    given back after a delay; counts towards no limit
the server has no memory for it     given back after a delay; counts towards no limit
anything else raises                given back as a failure of the infrastructure, up to a limit
the lease is lost                   the work is cancelled and its result discarded
newer policies make it stale        the work is cancelled and the entry given back; counts towards no limit
the worker is asked to stop         no new claims; work that is not finished within the shutdown timeout is given back
its workers died twice              it is worked on alone, so that nothing else dies with it again; each further death
                                    counts as a failure of the infrastructure
==================================  =================================================================================
"""

import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import anyio
import structlog
from anyio.abc import TaskGroup

from envs.sandboxes.contract import FailureKind, SandboxFailure
from stream.connection.keys import EVALUATION_STAGES
from stream.connection.run_connection import MAX_BLOCK_S
from stream.errors import (
    DataError,
    EngineUnavailableError,
    LeaseLostError,
    NewerSchemaError,
    RecordError,
    RunFailedError,
    ServerError,
)
from stream.queue.lease import Lease
from stream.queue.stage import Claim, ReleaseReason, Stage
from stream.waiting import cancel_on
from workers.role import prometheus
from workers.role.concurrency import ConcurrencyLimit, SharedExclusiveLock
from workers.role.context import WorkerContext, error_text

log = structlog.get_logger()

_DEAD, _LOST = "dead_lettered", "lost"

Work = Callable[[Lease, int], Awaitable[None]]
"""Works on a lease, given the published policy version, and completes it."""


async def work_loop(
    stage: Stage,
    work: Work,
    *,
    concurrency: int | ConcurrencyLimit,
    stopping: anyio.Event,
    lock: SharedExclusiveLock | None = None,
    describe: Callable[[Lease], str] = lambda _: "",
) -> None:
    """Work on entries of a stage until the run has ended or `stopping` is set.

    Args:
        stage: where to claim.
        work: called in a separate task for each lease.
        concurrency: how many entries at the same time.
        stopping: ends claiming; what is held may still be finished.
        lock: of the process, if several of its loops share one; an entry that may kill it is worked on alone.
        describe: says what user code the work on a lease runs.
    """
    lock = lock or SharedExclusiveLock()
    prometheus.watch_leases(stage.name, lambda: len(stage.leases), stage.oldest_lease_age_s)
    limit = concurrency if isinstance(concurrency, ConcurrencyLimit) else ConcurrencyLimit(concurrency)
    async with anyio.create_task_group() as background:
        background.start_soon(stage.renew_leases)
        async with anyio.create_task_group() as jobs:  # noqa: SIM117  (jobs outlive the claiming)
            async with cancel_on(stopping):
                await _claim_entries(stage, work, limit, lock, describe, jobs)
        background.cancel_scope.cancel()


async def _claim_entries(
    stage: Stage,
    work: Work,
    limit: ConcurrencyLimit,
    lock: SharedExclusiveLock,
    describe: Callable[[Lease], str],
    jobs: TaskGroup,
) -> None:
    """Claim entries and start their jobs until the run has ended."""
    idle = IdleLogger(stage.name)
    while True:
        await lock.wait_open()
        claim = await _claim(stage, await limit.wait_available())
        for lease in await _select(stage, claim.leases, lock):
            limit.acquire()
            run = partial(_run_alone, stage, lease, lock, describe) if lease.is_suspect else lock.run
            jobs.start_soon(_run_job, stage, lease, partial(run, partial(work, lease, claim.version)), limit)
        if claim.finish_reason:
            log.info("run.finished", stage=stage.name, why=claim.finish_reason)
            return
        if claim.leases:
            idle.end_wait()
            continue
        began = anyio.current_time()
        await stage.wait(claim)
        between_evaluations = stage.name in EVALUATION_STAGES and not claim.unfinished_prompts
        if not between_evaluations:
            idle.add_wait(anyio.current_time() - began, claim)


async def _claim(stage: Stage, count: int) -> Claim:
    """Claim in a shield: a claim cancelled half-way would leave entries leased to this worker without its knowledge."""
    with anyio.CancelScope(shield=True):
        claim = await stage.claim(count)
    return claim  # noqa: RET504  (a cancel scope may swallow what is in it, for all that mypy knows)


async def _select(stage: Stage, leases: list[Lease], lock: SharedExclusiveLock) -> list[Lease]:
    """Return the leases to work on now: all but at most one suspect, and this one last. Give the others back.

    A suspect that is given back may be run alone by another worker meanwhile.
    """
    suspects = [lease for lease in leases if lease.is_suspect]
    selected = [lease for lease in leases if lease not in suspects] + suspects[:1]
    if lock.is_closed:  # by a suspect of this process's other loop
        selected = []
    elif suspects:
        lock.close()
    with anyio.CancelScope(shield=True):
        for lease in leases:
            if lease not in selected:
                await _release(stage, lease, "none", "")
    return selected


async def _run_alone(
    stage: Stage,
    lease: Lease,
    lock: SharedExclusiveLock,
    describe: Callable[[Lease], str],
    work: Callable[[], Awaitable[None]],
) -> None:
    """Work on an entry when nothing else is worked on, so that a death of this process is its own."""
    log.info("entry.isolated", stage=stage.name, prompt=lease.prompt_id, deaths=lease.deaths)
    async with lock.exclusive():
        await stage.begin_alone(lease, describe(lease))
        await work()


async def _run_job(stage: Stage, lease: Lease, work: Callable[[], Awaitable[None]], limit: ConcurrencyLimit) -> None:
    structlog.contextvars.bind_contextvars(prompt=lease.prompt_id)  # in this task and those that it starts
    started = anyio.current_time()
    try:
        with lease.cancel_on_loss() as scope:
            await work()
        if lease.lost:
            prometheus.entries.labels(stage.name, _LOST).inc()
        elif lease.stale and scope.cancelled_caught:
            await _release(stage, lease, "stale", "")
        else:
            prometheus.entries.labels(stage.name, "completed").inc()
    except NewerSchemaError as error:
        await _release(stage, lease, "none", str(error))
    except RecordError as error:
        await _dead_letter(stage, lease, str(error))
    except DataError as error:
        await _release(stage, lease, "data", await anyio.to_thread.run_sync(error_text, error))
    except (EngineUnavailableError, ServerError) as error:  # a server that is down refuses the release, too
        await _release(stage, lease, "none", str(error))
    except SandboxFailure as error:  # a place that cannot be reached is waited for, as an engine is
        await _release(stage, lease, "none" if error.kind is FailureKind.UNREACHABLE else "infra", str(error))
    except LeaseLostError as error:
        log.warning("result.discarded", stage=stage.name, why=str(error))
        prometheus.entries.labels(stage.name, _LOST).inc()
    except anyio.get_cancelled_exc_class():
        with anyio.CancelScope(shield=True):
            await _release(stage, lease, "none", "")
        raise
    except Exception as error:  # noqa: BLE001  (an error in one entry must not end the worker; it is counted and logged)
        trace = await anyio.to_thread.run_sync(_format_traceback, error)  # reads source files
        log.warning("work.failed", stage=stage.name, prompt=lease.prompt_id, trace=trace)
        await _release(stage, lease, "infra", await anyio.to_thread.run_sync(error_text, error))
    finally:
        limit.release()
        prometheus.entry_duration.labels(stage.name).observe(anyio.current_time() - started)


def _format_traceback(error: Exception) -> str:
    return "".join(traceback.format_exception(error))


async def _release(stage: Stage, lease: Lease, reason: ReleaseReason, error: str) -> None:
    """Give an entry back; a lease that is lost already needs no ending."""
    try:
        outcome = _DEAD if await stage.release(lease, reason, error) else f"released:{reason}"
    except LeaseLostError as lost:
        log.warning("lease.lost", why=str(lost))
        outcome = _LOST
    prometheus.entries.labels(stage.name, outcome).inc()


async def _dead_letter(stage: Stage, lease: Lease, error: str) -> None:
    """Move an entry that is no record to the dead letters."""
    outcome = _DEAD
    try:
        await stage.dead_letter(lease, "unreadable", error)
    except LeaseLostError as lost:
        log.warning("lease.lost", why=str(lost))
        outcome = _LOST
    prometheus.entries.labels(stage.name, outcome).inc()


class IdleLogger:
    """Logs one line when a worker has waited long for entries of a stage, and one when it has work again.

    Short waits are normal in a healthy run and are not logged.
    """

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._waited_s = 0.0
        self._logged = False

    def add_wait(self, seconds: float, claim: Claim) -> None:
        """Add to the waiting time; `claim` is the claim that returned nothing."""
        self._waited_s += seconds
        if self._logged or self._waited_s < MAX_BLOCK_S:
            return
        self._logged = True
        log.info(
            "work.waiting",
            stage=self._stage,
            unfinished_prompts=claim.unfinished_prompts,
            feed_done=claim.feed_done,
            paused=claim.paused,
        )

    def end_wait(self) -> None:
        """Note that there is work."""
        if self._logged:
            log.info("work.available", stage=self._stage)
        self._waited_s, self._logged = 0.0, False


T = TypeVar("T")


async def wait_for_trainer(context: WorkerContext, read: Callable[[], Awaitable[T | None]], why: str) -> T:
    """Return what `read` returns as soon as it is not None; tries again after every change of the run.

    Args:
        context: of this worker.
        read: reads from the server; None: the trainer has not written it yet.
        why: what this worker lacks, for the log and the error.

    Raises:
        RunFailedError: no trainer has written it within `abort.stall_timeout_s`.
    """
    timeout_s = context.settings.abort.stall_timeout_s
    deadline, logged = anyio.current_time() + timeout_s, False
    while (found := await read()) is None:
        if anyio.current_time() > deadline:
            raise RunFailedError(
                f"{why}, and no trainer has written it to the server within abort.stall_timeout_s = {timeout_s:g} s; "
                "start a trainer"
            )
        if not logged:
            log.info("trainer.waiting", why=why)
            logged = True
        await context.connection.wait_for_change("$", MAX_BLOCK_S)
        await context.connection.poll_stop()
    return found
