"""Feeds the backlog, epoch after epoch, and resumes where it stopped.

The cursor is the number of rows passed since the beginning, epochs counted through; it lives in Redis and moves in the
same atomic step as the prompts that it passes.
"""

from collections.abc import Collection

import anyio
import structlog

from stream.connection.run_connection import MAX_BLOCK_S
from stream.errors import DataError, RunFailedError
from stream.queue.feed import CursorMovedError, Feed
from stream.trainer.ledger import Ledger
from workers.feed.dataset_mix import DatasetMix, open_dataset_mix
from workers.feed.evaluation_prompts import upload_evaluation_prompts
from workers.runtime.context import WorkerContext

log = structlog.get_logger()

_BATCH = 32
_MAX_LOGGED_ROWS = 20
_IDLE_POLL_S = 1.0
"""Between two looks at a run that has all its prompts."""


async def feed(context: WorkerContext) -> None:
    """Feed everything, then stay until the run has ended."""
    settings = context.settings
    dataset_mix = await anyio.to_thread.run_sync(open_dataset_mix, settings)
    await context.connection.write_hash(
        "meta",
        {"data": await anyio.to_thread.run_sync(dataset_mix.fingerprint), "capacity": str(settings.capacity)},
    )
    total = await anyio.to_thread.run_sync(lambda: dataset_mix.total_prompts)
    await context.connection.write_hash("feed", {"total": str(total)})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_stop_when, context.stopping, tasks.cancel_scope)
        while True:
            if settings.eval.path:
                await upload_evaluation_prompts(context)
            await _feed_all(context, dataset_mix, total)
            await Feed(context.connection, settings.data.max_queued_prompts).finish()
            log.info("feed.finished", rows=total)
            if await _run_has_ended(context):
                break
        tasks.cancel_scope.cancel()


async def _run_has_ended(context: WorkerContext) -> bool:
    """Stay until the run has ended. False where something is to be fed again: the server lost its last writes."""
    after = "0-0"
    while True:
        after = await context.connection.wait_for_change(after, MAX_BLOCK_S)
        if (await context.connection.read_hash("meta")).get("finished"):
            return True
        if (await context.connection.read_hash("feed")).get("done") != "1":
            log.warning("feed.state_lost", why="the server lost its last writes")
            return False
        await context.connection.poll_stop()
        await anyio.sleep(_IDLE_POLL_S)  # a run that goes on wakes many times a second


async def _stop_when(stopping: anyio.Event, scope: anyio.CancelScope) -> None:
    await stopping.wait()
    scope.cancel()


async def _feed_all(context: WorkerContext, dataset_mix: DatasetMix, total: int) -> None:
    feed = Feed(context.connection, context.settings.data.max_queued_prompts)
    cursor, bad = await feed.cursor(), 0
    known = await _ended_prompts(context, cursor)
    while int(cursor or 0) < total:
        start = int(cursor or 0)
        stop = min(total, start + _BATCH)
        prompts, errors = await anyio.to_thread.run_sync(dataset_mix.read_prompts, start, stop)
        for error in errors:
            bad += 1
            if bad <= _MAX_LOGGED_ROWS:
                log.warning("row.rejected", error=str(error))
        fresh = [prompt for prompt in prompts if prompt.id not in known]
        try:
            await feed.put(fresh, cursor, str(stop), already_ended=len(prompts) - len(fresh))
        except CursorMovedError as moved:
            log.warning("feed.cursor_moved", cursor=moved.cursor, expected=cursor)
            cursor = moved.cursor
            known = await _ended_prompts(context, cursor)
        else:
            cursor = str(stop)
            if errors:
                await context.connection.write_hash("feed", {"bad_rows": str(bad)})
    if bad == total and total:
        raise DataError(f"{dataset_mix.paths}: none of {total} rows could be fed; the first errors are above")


async def _ended_prompts(context: WorkerContext, cursor: str) -> Collection[str]:
    """Prompts to pass by: a run whose ledger outlived its server is fed from the start, without what has ended.

    Only as much of the ledger counts as the trainer's checkpoint knows of, so the trainer has to have spoken first.
    """
    path = context.settings.folder / "ledger.jsonl"
    if cursor or not await anyio.Path(path).exists() or not (await anyio.Path(path).stat()).st_size:
        return {}
    deadline, told = anyio.current_time() + context.settings.abort.stall_timeout_s, False
    while not (policy := await context.connection.read_hash("policy")).get("ledger"):
        if anyio.current_time() > deadline:
            raise RunFailedError(
                f"{path} tells of an earlier life of this run, but no trainer has taken it up for abort.stall_timeout_s = "
                f"{context.settings.abort.stall_timeout_s:g} s; start one"
            )
        if not told:
            log.info("trainer.waiting", why="the run has a ledger, but its server knows nothing of it")
            told = True
        await context.connection.wait_for_change("$", MAX_BLOCK_S)
        await context.connection.poll_stop()
    return await anyio.to_thread.run_sync(Ledger.read_outcomes, path, int(policy["ledger"]))
