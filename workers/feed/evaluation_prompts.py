"""Uploads the evaluation prompts, once; the trainer decides when they are sampled."""

import anyio
import structlog

from stream.errors import DataError
from stream.queue.evaluation import create_evaluation_streams, replace_evaluation_prompts
from stream.records import Prompt
from workers.datasets.environment_rows import write_evaluation_rows
from workers.datasets.mix import open_dataset_mix
from workers.runtime.context import WorkerContext
from workers.settings import Settings

log = structlog.get_logger()


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


def read_evaluation_prompts(settings: Settings) -> tuple[list[Prompt], str]:
    """Return the evaluation prompts in the order of their file, and the file's fingerprint.

    Raises:
        DataError: there are no rows, or a row is not a prompt.
    """
    mix = open_dataset_mix(settings.for_evaluation, setting="eval.path")
    prompts, errors = mix.read_prompts(0, mix.total_prompts)
    if errors:
        raise errors[0]
    if not prompts:
        raise DataError(f"{settings.eval.path}: eval.path has no prompts")
    return prompts, mix.fingerprint()
