"""The loop that rollout workers and scorers share: claim entries of one stage, work on many at once, end each lease.

What can happen to an entry, and what the work loop does about it:

==============================  ==========================================================================
the work settles it             nothing more to do
its bytes are no record         dead letter at once; a newer schema is given back for those who can read it
the record itself is at fault   given back, a few times (`DataError`)
no engine answers               given back for nobody's fault, after a back-off
anything else raises            given back as a failure of the infrastructure, within its budget
the lease is lost               the work is cancelled, its result thrown away
newer policies overtook it      the work is cancelled, and given back for nobody's fault (`Stage.cancel_stale`)
the worker is asked to stop     no new claims; what is not done within the grace time is given back
==============================  ==========================================================================
"""

import traceback
from collections.abc import Awaitable, Callable

import anyio
import structlog

from stream.connection.keys import EVALUATION_STAGES
from stream.errors import DataError, EngineUnavailableError, LeaseLostError, NewerSchemaError, RecordError
from stream.queue.stage import Claim, Lease, ReleaseReason, Stage
from workers.runtime.concurrency import ConcurrencyLimit
from workers.runtime.idle_log import IdleLogger

log = structlog.get_logger()

Work = Callable[[Lease, int], Awaitable[None]]
"""Works on a lease, at a published policy version, and settles it."""


async def work_loop(stage: Stage, work: Work, *, concurrency: int | ConcurrencyLimit, stopping: anyio.Event) -> None:
    """Work until the run has ended, or `stopping` is set; on as many entries at once as there is room for."""
    room, lull = (
        concurrency if isinstance(concurrency, ConcurrencyLimit) else ConcurrencyLimit(concurrency),
        IdleLogger(stage.name),
    )
    async with anyio.create_task_group() as background:
        background.start_soon(stage.renew_leases)
        # Jobs outlive the claiming: what is held when it stops may still be finished.
        async with anyio.create_task_group() as jobs:  # noqa: SIM117
            async with anyio.create_task_group() as claiming:
                claiming.start_soon(_cancel_when, stopping, claiming.cancel_scope)
                while True:
                    claim = await _claim(stage, await room.wait_available())
                    for lease in claim.leases:
                        room.acquire()
                        jobs.start_soon(_run_job, stage, lease, claim.version, work, room)
                    if claim.finish_reason:
                        log.info("run.finished", stage=stage.name, why=claim.finish_reason)
                        break
                    if claim.leases:
                        lull.end_wait()
                    else:
                        began = anyio.current_time()
                        await stage.wait(claim)
                        if (
                            claim.unfinished_prompts or stage.name not in EVALUATION_STAGES
                        ):  # else there is none to wait for
                            lull.add_wait(anyio.current_time() - began, claim)
                claiming.cancel_scope.cancel()
        background.cancel_scope.cancel()


async def _claim(stage: Stage, count: int) -> Claim:
    """A claim that a stop cannot tear in two: entries claimed unknowingly would wait for their lease."""
    with anyio.CancelScope(shield=True):
        claim = await stage.claim(count)
    return claim  # noqa: RET504  (a cancel scope may swallow what is in it, for all that mypy knows)


async def _cancel_when(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


async def _run_job(stage: Stage, lease: Lease, version: int, work: Work, room: ConcurrencyLimit) -> None:
    try:
        with anyio.CancelScope() as lease.scope:
            await work(lease, version)
        if lease.stale and lease.scope.cancelled_caught and not lease.lost:
            await _release(stage, lease, "stale", "")
    except NewerSchemaError as error:
        await _release(stage, lease, "none", str(error))
    except RecordError as error:
        await _ignore_lost_lease(stage.dead_letter(lease, "unreadable", str(error)))
    except DataError as error:
        await _release(stage, lease, "data", str(error))
    except EngineUnavailableError as error:
        await _release(stage, lease, "none", str(error))
    except LeaseLostError as error:
        log.warning("result.discarded", stage=stage.name, why=str(error))
    except anyio.get_cancelled_exc_class():
        with anyio.CancelScope(shield=True):
            await _release(stage, lease, "none", "")
        raise
    except Exception as error:  # noqa: BLE001  (one entry's trouble must not end the worker; it is counted and shown)
        trace = await anyio.to_thread.run_sync(_format_traceback, error)  # it reads source files
        log.warning("work.failed", stage=stage.name, prompt=lease.prompt_id, trace=trace)
        await _release(stage, lease, "infra", f"{type(error).__name__}: {error}")
    finally:
        room.release()


def _format_traceback(error: Exception) -> str:
    return "".join(traceback.format_exception(error))


async def _release(stage: Stage, lease: Lease, kind: ReleaseReason, error: str) -> None:
    await _ignore_lost_lease(stage.release(lease, kind, error))


async def _ignore_lost_lease(ending: Awaitable[object]) -> None:
    """End a lease that may be lost already, which then needs no ending."""
    try:
        await ending
    except LeaseLostError as error:
        log.warning("lease.lost", why=str(error))
