"""The small files of the run's model, on the server: workers on machines without the model's folder tokenize with them.

The trainer uploads them when it starts. Each field of the hash `model_files` is one file: SHA-256 of its content, then
the content, compressed. A reader gets exactly the bytes that the trainer has, or an error.
"""

import hashlib
import zlib
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any, Final, cast

import anyio

from stream.connection.run_connection import RunConnection
from stream.errors import RecordError

MODEL_FILES: Final = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    *("config.json", "generation_config.json"),
)
"""What a rollout worker reads of a model in Hugging Face form."""
_KEY: Final = "model_files"
_DIGEST_BYTES: Final = hashlib.sha256().digest_size


async def upload_model_files(connection: RunConnection, folder: Path) -> None:
    """Replace the model's files on the server with the files of a folder, and wake all waiting workers."""
    packed = await anyio.to_thread.run_sync(_pack, folder)
    if not packed:
        return

    async def upload() -> None:
        pipeline = connection.redis.pipeline(
            transaction=False
        )  # MULTI is not allowed; a reader waits for an empty hash
        pipeline.unlink(connection.key(_KEY))
        pipeline.hset(connection.key(_KEY), mapping=cast("dict[Any, Any]", packed))
        pipeline.xadd(connection.key("wake"), {"e": ""}, maxlen=1, approximate=False)
        await pipeline.execute()

    await connection.with_retry(upload)


async def download_model_files(connection: RunConnection) -> Mapping[str, bytes]:
    """Return the model's files by name; empty if the trainer has not uploaded them yet.

    Raises:
        RecordError: a file is not what the trainer has uploaded.
    """
    name = connection.key(_KEY)
    found = await connection.with_retry(lambda: cast("Awaitable[Any]", connection.redis.hgetall(name)))
    return await anyio.to_thread.run_sync(_unpack, found, name)


def _pack(folder: Path) -> dict[str, bytes]:
    contents = {name: (folder / name).read_bytes() for name in MODEL_FILES if (folder / name).is_file()}
    return {name: hashlib.sha256(content).digest() + zlib.compress(content) for name, content in contents.items()}


def _unpack(found: Mapping[bytes, bytes], key: str) -> dict[str, bytes]:
    files = {}
    for name, packed in found.items():
        try:
            content = zlib.decompress(packed[_DIGEST_BYTES:])
        except zlib.error:
            content = b""
        if hashlib.sha256(content).digest() != packed[:_DIGEST_BYTES]:
            raise RecordError(
                f"{name.decode(errors='replace')} in the server's key {key} is damaged: restart the trainer, which "
                "uploads the model's files again"
            )
        if name.decode() in MODEL_FILES:
            files[name.decode()] = content
    return files
