"""The folder with the model's tokenizer and chat template: `model.path`, or a copy of what the trainer has."""

import os
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import structlog

from stream.connection.model_files import download_model_files
from workers.role.context import WorkerContext
from workers.role.work_loop import wait_for_trainer

log = structlog.get_logger()


@asynccontextmanager
async def open_model_folder(context: WorkerContext) -> AsyncIterator[Path]:
    """Yield `model.path`; if this machine has no such folder, a temporary one with the files that the trainer uploaded.

    Raises:
        RunFailedError: no trainer has started within `abort.stall_timeout_s`.
        RecordError: a file on the server is not the one that the trainer uploaded.
    """
    path = Path(context.settings.model.path)
    if await anyio.to_thread.run_sync(os.path.isdir, path):
        yield path
        return

    async def download() -> Mapping[str, bytes] | None:
        return await download_model_files(context.connection) or None

    files = await wait_for_trainer(
        context, download, f"model.path = {str(path)!r} is not on this machine, so its tokenizer comes from the trainer"
    )
    with tempfile.TemporaryDirectory(prefix="penstock-model-") as temporary:
        folder = Path(temporary, path.name)  # messages about the chat template name the folder
        await anyio.to_thread.run_sync(_write, folder, files)
        log.info("model.downloaded", files=sorted(files), bytes=sum(map(len, files.values())))
        yield folder


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
