"""Brings the held-out prompts, once; the trainer says when they are sampled."""

import anyio
import structlog

from stream.errors import DataError
from stream.queue.evaluation import create_evaluation_streams, replace_evaluation_prompts
from stream.records import Prompt
from workers.feed.row_mapping import row_to_prompt
from workers.feed.source import open_source
from workers.runtime.context import WorkerContext
from workers.settings import Settings

log = structlog.get_logger()


async def upload_evaluation_prompts(context: WorkerContext) -> None:
    """Put the prompts of `eval.path` in the place of those that the server has, if it has others.

    Raises:
        DataError: a row of theirs is no prompt. A score over fewer than all of them would be another score.
    """
    prompts, data = await anyio.to_thread.run_sync(read_evaluation_prompts, context.settings)
    await create_evaluation_streams(context.connection)
    await replace_evaluation_prompts(
        context.connection, prompts, settings_digest=context.settings.evaluation_digest, data_fingerprint=data
    )
    log.info("evaluation.prompts_uploaded", prompts=len(prompts))


def read_evaluation_prompts(settings: Settings) -> tuple[list[Prompt], str]:
    """The held-out prompts in the order of their file, and its fingerprint.

    Raises:
        DataError: there are none, or a row is no prompt.
    """
    settings = settings.for_evaluation
    source = open_source(settings.data, "eval.path")
    prompts = []
    for number, row in source.read_rows(range(len(source))):
        if isinstance(row, DataError):
            raise row
        prompts.append(row_to_prompt(row, number, 0, settings=settings))
    if not prompts:
        raise DataError(f"{settings.data.path}: eval.path holds no prompts")
    return prompts, source.fingerprint()
