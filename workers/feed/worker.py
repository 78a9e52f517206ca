"""The feeder process: feeds all prompts, epoch after epoch, and resumes at its last position.

The cursor is the number of rows consumed, over all epochs. It is stored in Redis and moves in the same atomic step as
the prompts that it passes.
"""

from collections.abc import Mapping

import anyio
import structlog

from stream.connection.run_connection import MAX_BLOCK_S
from stream.errors import DataError
from stream.queue.evaluation import create_evaluation_streams, replace_evaluation_prompts
from stream.queue.feed import CursorMovedError, Feed
from stream.trainer.ledger_ends import download_ends
from stream.trainer.ledger_records import read_contents
from stream.waiting import cancel_on
from workers.datasets.environment_rows import write_evaluation_rows
from workers.datasets.mix import DatasetMix, open_dataset_mix
from workers.datasets.prompts import read_evaluation_prompts
from workers.role.context import WorkerContext
from workers.role.work_loop import wait_for_trainer

log = structlog.get_logger()

_BATCH = 32
_MAX_LOGGED_ROWS = 20
_IDLE_POLL_S = 1.0
"""Seconds between reads of the run's state once all prompts are fed."""


async def feed(context: WorkerContext) -> None:
    """Feed all prompts, then wait until the run has ended or a stop is requested."""
    settings, connection = context.settings, context.connection
    dataset_mix = await anyio.to_thread.run_sync(open_dataset_mix, settings)
    fingerprint = await anyio.to_thread.run_sync(dataset_mix.fingerprint)
    facts = {"data": fingerprint, "capacity": str(settings.capacity), "batch_size": str(settings.train.batch_size)}
    await connection.write_hash("meta", facts)
    total = await anyio.to_thread.run_sync(lambda: dataset_mix.total_prompts)
    await connection.write_hash("feed", {"total": str(total)})
    context.readiness.mark_ready()
    async with cancel_on(context.stopping):
        while True:
            if settings.eval.source:
                await upload_evaluation_prompts(context)
            await _feed_all(context, dataset_mix, total)
            await Feed(connection, settings.data.max_queued_prompts).finish()
            log.info("feed.finished", rows=total)
            if await _run_has_ended(context):
                break


async def upload_evaluation_prompts(context: WorkerContext) -> None:
    """Upload the held-out prompts, unless the server has them already.

    Raises:
        DataError: a row is not a prompt. Results over fewer prompts could not be compared.
    """
    await anyio.to_thread.run_sync(write_evaluation_rows, context.settings, abandon_on_cancel=True)
    prompts, data_fingerprint = await anyio.to_thread.run_sync(read_evaluation_prompts, context.settings)
    await create_evaluation_streams(context.connection)
    await replace_evaluation_prompts(
        context.connection,
        prompts,
        settings_digest=context.settings.evaluation_digest,
        data_fingerprint=data_fingerprint,
    )
    log.info("evaluation.prompts_uploaded", prompts=len(prompts))


async def _run_has_ended(context: WorkerContext) -> bool:
    """Wait until the run has ended. Returns False if the server lost writes, so that prompts must be fed again."""
    after = "0-0"
    while True:
        after = await context.connection.wait_for_change(after, MAX_BLOCK_S)
        if (await context.connection.read_hash("meta")).get("finished"):
            return True
        if (await context.connection.read_hash("feed")).get("done") != "1":
            log.warning("feed.state_lost", why="the server lost its last writes")
            return False
        await context.connection.poll_stop()
        await anyio.sleep(_IDLE_POLL_S)  # a busy run wakes its waiters many times per second


async def _feed_all(context: WorkerContext, dataset_mix: DatasetMix, total: int) -> None:
    feed = Feed(context.connection, context.settings.data.max_queued_prompts)
    cursor = await feed.cursor()
    rejected = int((await context.connection.read_hash("feed")).get("rejected_rows", 0)) if cursor else 0
    ended = await _ended_prompts(context, cursor)
    while int(cursor or 0) < total:
        start = int(cursor or 0)
        stop = min(total, start + _BATCH)
        prompts, errors = await anyio.to_thread.run_sync(dataset_mix.read_prompts, start, stop)
        for error in errors:
            rejected += 1
            if rejected <= _MAX_LOGGED_ROWS:
                log.warning("row.rejected", error=str(error))
        try:
            await feed.put(prompts, cursor, str(stop), ended=ended)
        except CursorMovedError as moved:
            log.warning("feed.cursor_moved", cursor=moved.cursor, expected=cursor)
            cursor = moved.cursor
            ended = await _ended_prompts(context, cursor)
        else:
            cursor = str(stop)
            if errors:
                await context.connection.write_hash("feed", {"rejected_rows": str(rejected)})
    if rejected == total and total:
        raise DataError(f"{dataset_mix.paths}: none of {total} rows is a prompt; the first errors are above")


async def _ended_prompts(context: WorkerContext, cursor: str) -> Mapping[str, str]:
    """Return the ends of prompts not to feed again, if the server was emptied and feeding begins anew.

    Only the part of the ledger that the trainer's checkpoint contains counts, so this waits for the trainer to start.
    """
    if cursor:
        return {}
    path, connection = context.settings.folder / "ledger.jsonl", context.connection
    if context.has_folder and not (await anyio.Path(path).exists() and (await anyio.Path(path).stat()).st_size):
        return {}

    async def read_ends() -> Mapping[str, str] | None:
        if not (length := (await connection.read_hash("policy")).get("ledger")):
            return None
        if length == "0" or not context.has_folder:
            return await download_ends(connection, int(length)) if length != "0" else {}
        return (await anyio.to_thread.run_sync(read_contents, path, int(length))).ends()

    return await wait_for_trainer(
        context, read_ends, "feeding begins at the first prompt, and the run may have a ledger with prompts that ended"
    )
