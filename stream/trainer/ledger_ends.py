"""The ends of prompts that the ledger has, on the server: a feeder without the run's folder passes these prompts by.

Only a feeder that begins anew needs them, because the server was emptied or rebuilt. So the trainer uploads them if
feeding has not begun when it starts, and deletes them otherwise.
"""

import zlib
from collections.abc import Awaitable
from typing import Any, Final, cast

import anyio
import msgspec
from msgspec import Struct

from stream.connection.run_connection import RunConnection
from stream.errors import RecordError
from stream.trainer.ledger import Ledger
from stream.trainer.ledger_records import read_contents

_KEY: Final = "ledger_ends"


class LedgerEnds(Struct, frozen=True):
    """The end of each prompt in the first bytes of the ledger, in text form."""

    ledger_bytes: int
    ends: dict[str, str]


async def upload_ends(connection: RunConnection, ledger: Ledger) -> None:
    """Upload the ends that the ledger had when the trainer resumed, if a feeder may need them; else delete the key."""
    name, length = connection.key(_KEY), ledger.resumed_bytes
    if not length or (await connection.read_hash("feed")).get("cursor"):
        await connection.with_retry(lambda: cast("Awaitable[Any]", connection.redis.unlink(name)))
        return

    def pack() -> bytes:
        return zlib.compress(msgspec.msgpack.encode(LedgerEnds(length, read_contents(ledger.path, length).ends())))

    packed = await anyio.to_thread.run_sync(pack)
    await connection.with_retry(lambda: cast("Awaitable[Any]", connection.redis.set(name, packed)))


async def download_ends(connection: RunConnection, ledger_bytes: int) -> dict[str, str] | None:
    """Return the end of each prompt in the first `ledger_bytes` of the ledger; None if the server does not have them.

    Raises:
        RecordError: the key does not hold what a trainer has uploaded.
    """
    name = connection.key(_KEY)
    packed = await connection.with_retry(lambda: cast("Awaitable[Any]", connection.redis.get(name)))
    if packed is None:
        return None
    try:
        content = await anyio.to_thread.run_sync(zlib.decompress, packed)
        found = msgspec.msgpack.decode(content, type=LedgerEnds)
    except (zlib.error, ValueError) as error:
        raise RecordError(f"the server's key {name} is damaged: restart the trainer, which writes it anew") from error
    return found.ends if found.ledger_bytes == ledger_bytes else None
