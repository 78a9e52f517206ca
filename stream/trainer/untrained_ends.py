"""Record in the ledger what an operator did with dead letters while no trainer runs.

A trainer records such ends itself, at each step. Between two starts of a run nobody would, and a server that is lost
then would forget them: dropped prompts would be trained.
"""

import os
import secrets
from pathlib import Path

import anyio

from stream.connection.run_connection import RunConnection
from stream.trainer.folder_lock import RunFolderLock, last_token
from stream.trainer.lease import TrainerLease
from stream.trainer.ledger import Ledger
from stream.trainer.outcomes import LedgerEntry

_LEASE_S = 30.0


async def record_untrained_ends(connection: RunConnection, ledger_path: Path) -> None:
    """Write ends that were decided without a trainer to the ledger, unless a trainer is running and will do it.

    Args:
        connection: to the run.
        ledger_path: `ledger.jsonl` in the run's folder.
    """
    min_token = await anyio.to_thread.run_sync(last_token, ledger_path.parent)
    lease = await TrainerLease.acquire_if_free(
        connection, _LEASE_S, min_token, f"operator/{os.getpid()}/{secrets.token_hex(4)}"
    )
    if lease is None:
        return
    try:
        found = await lease.read_unrecorded()
        await anyio.to_thread.run_sync(_append, ledger_path, lease.token, [(prompt, end) for _, prompt, end in found])
        await lease.forget_unrecorded([entry for entry, _, _ in found])
    finally:
        with anyio.CancelScope(shield=True):
            await lease.release()


def _append(path: Path, token: int, ends: list[tuple[str, LedgerEntry]]) -> None:
    length = path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0
    ledger = Ledger(path, length, RunFolderLock.acquire(path.parent, token))
    try:
        for prompt, end in ends:
            ledger.append_end(prompt, end, 0, -1)
        ledger.sync()
    finally:
        ledger.close()
