"""Uploads the evaluation prompts, once; the trainer decides when they are sampled."""

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
    """Upload the prompts of `eval.path`, unless the server has them already.

    Raises:
        DataError: a row is not a prompt. Results over fewer prompts could not be compared.
    """
    prompts, data_fingerprint = await anyio.to_thread.run_sync(read_evaluation_prompts, context.settings)
    await create_evaluation_streams(context.connection)
    await replace_evaluation_prompts(
        context.connection,
        prompts,
        settings_digest=context.settings.evaluation_digest,
        data_fingerprint=data_fingerprint,
    )
    log.info("evaluation.prompts_uploaded", prompts=len(prompts))


def read_evaluation_prompts(settings: Settings) -> tuple[list[Prompt], str]:
    """Return the evaluation prompts in the order of their file, and the file's fingerprint.

    Raises:
        DataError: there are no rows, or a row is not a prompt.
    """
    settings = settings.for_evaluation
    source = open_source(settings.data, "eval.path")
    prompts = []
    for number, row in source.read_rows(range(len(source))):
        if isinstance(row, DataError):
            raise row
        prompts.append(row_to_prompt(row, number, 0, settings=settings))
    if not prompts:
        raise DataError(f"{settings.data.path}: eval.path has no prompts")
    return prompts, source.fingerprint()
