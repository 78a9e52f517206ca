"""Become a run's trainer: take its lease and its folder, then open a consumer at a checkpoint's resume point.

`consume` is made of two context managers. A trainer that loads its checkpoint after it has locked the run's folder, as
Penstock's own does, opens them itself::

    async with open_trainer_lease(connection, folder) as (trainer_lease, folder_lock):
        checkpoint = load(folder)                      # no other trainer can write there now
        resume = checkpoint.resume_point
        async with open_consumer(trainer_lease, folder_lock, stage, ledger_path, resume, check) as consumer:
            ...

`write_unrecorded_outcomes` records in the ledger what an operator did with dead letters while no trainer runs; a
trainer does that itself, at each step. If nobody did, and the server were then lost, dropped prompts would be trained.
"""

import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import msgspec
import structlog

from stream.connection.run_connection import RunConnection
from stream.connection.run_identity import identify_run, read_identity, record_identity
from stream.disk_space import DiskProblem, allow_waits, end_waits, waiting
from stream.errors import RunMismatchError, ServerError
from stream.queue.stage import RetryPolicy, Stage
from stream.records import Group
from stream.trainer.archive import Archive
from stream.trainer.consumer import Consumer
from stream.trainer.folder_lock import RunFolderLock, last_token
from stream.trainer.leased_group import Checked, DroppedGroup, ResumePoint
from stream.trainer.ledger import Ledger
from stream.trainer.ledger_rebuild import rebuild_ledger
from stream.trainer.ledger_records import Dropped, LedgerEntry, LedgerEvent, read_events
from stream.trainer.trainer_lease import TrainerLease

log = structlog.get_logger()

_CHANGE = "setting_changed"
_REPORT_INTERVAL_S, _REPORT_TIMEOUT_S = 1.0, 5.0


@asynccontextmanager
async def open_trainer_lease(
    connection: RunConnection, folder: Path, lease_s: float = 15.0, settings: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[TrainerLease, RunFolderLock]]:
    """Become the run's only trainer, on the server and in the run's folder, for as long as the context is open.

    The lease is renewed in the background, and released when the context ends without an error.

    Args:
        connection: the run's connection.
        folder: the run's folder.
        lease_s: a trainer that does not renew its lease for this long is succeeded, and its groups go to the next.
        settings: of this start, by name; what differs from the trainer's last start is logged, and written to the
            ledger by `open_consumer`.

    Raises:
        FencedError: another trainer that is alive holds the run, or, later, has taken it over.
        RunMismatchError: the folder is another run's than the server.
    """
    allow_waits()
    identity = await identify_run(connection, folder)
    async with anyio.create_task_group() as tasks:
        min_token = await anyio.to_thread.run_sync(last_token, folder)
        trainer_lease = await TrainerLease.acquire(connection, lease_s, min_token)
        tasks.start_soon(trainer_lease.renew_forever)
        folder_lock = await anyio.to_thread.run_sync(RunFolderLock.acquire, folder, trainer_lease.token)
        if settings is not None:
            known = len(identity.changes)
            identity = identity.restart(settings)
            for change in identity.changes[known:]:
                log.info("setting.changed", name=change.name, before=change.before, after=change.after)
        await record_identity(connection, folder, identity)
        tasks.start_soon(_end_waits_at_stop, connection)
        tasks.start_soon(_report_disk, connection)
        yield trainer_lease, folder_lock
        await trainer_lease.release()
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def open_consumer(
    trainer_lease: TrainerLease,
    folder_lock: RunFolderLock,
    stage: Stage,
    ledger_path: Path,
    resume: ResumePoint,
    check: Callable[[Group, int], Checked | Dropped | DroppedGroup],
    *,
    archive: Archive | None = None,
    stall_timeout_s: float = 600.0,
) -> AsyncIterator[Consumer[Checked]]:
    """Open the ledger at a checkpoint's resume point and lease scored groups for as long as the context is open.

    Groups that the ledger holds are acknowledged, all others come again, whatever an earlier trainer had leased. The
    ledger is cut to the resume point once it agrees with the server. A damaged ledger is rebuilt from archive and
    server if they have all of it.

    Args:
        trainer_lease: from `open_trainer_lease`.
        folder_lock: from `open_trainer_lease`.
        stage: `scored`, under this process's consumer name. Its leases are renewed here.
        ledger_path: `ledger.jsonl` in the run's folder, where the feeder and `penstock audit` look for it.
        resume: from the checkpoint.
        check: see `Consumer`.
        archive: see `Consumer`.
        stall_timeout_s: see `Consumer`.

    Raises:
        RunMismatchError: ledger, checkpoint and server belong to different runs; no file was changed.
    """
    ledger = await _open_ledger(trainer_lease, folder_lock, ledger_path, resume)
    try:
        requeued = await trainer_lease.recover(
            ledger,
            keep_cut=not resume.is_newest,
            has_checkpoint=resume != ResumePoint(),
            is_restored=resume.is_restored,
        )
        await anyio.to_thread.run_sync(_record_changes, ledger, ledger_path.parent, resume.step)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stage.renew_leases)
            yield Consumer(
                *(trainer_lease, stage, ledger, resume, check),
                archive=archive,
                stall_timeout_s=stall_timeout_s,
                requeued_groups=requeued,
            )
            tasks.cancel_scope.cancel()
    finally:
        ledger.close()


@asynccontextmanager
async def consume(
    connection: RunConnection,
    ledger_path: Path,
    resume: ResumePoint | None = None,
    *,
    lease_s: float = 15.0,
    stall_timeout_s: float = 600.0,
) -> AsyncIterator[Consumer[Group]]:
    """Become the run's trainer, from a checkpoint, for as long as the context is open.

    Args:
        connection: the run's connection.
        ledger_path: `ledger.jsonl` in the run's folder.
        resume: what the checkpoint holds; None begins a new run.
        lease_s: how long leases last, on the run and on groups.
        stall_timeout_s: how long `Consumer.claim` waits for a group.

    Raises:
        FencedError: another trainer that is alive holds the run, or, later, has taken it over.
        RunMismatchError: ledger, checkpoint and server belong to different runs.
    """
    name = f"consumer-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    stage = Stage(connection, "scored", name, RetryPolicy(lease_s=lease_s))
    async with (
        open_trainer_lease(connection, ledger_path.parent, lease_s) as (trainer_lease, folder_lock),
        open_consumer(
            *(trainer_lease, folder_lock, stage, ledger_path, resume or ResumePoint(), _keep_group),
            stall_timeout_s=stall_timeout_s,
        ) as consumer,
    ):
        log.info("consumer.started", consumer=name, groups_again=consumer.requeued_groups)
        yield consumer


async def _open_ledger(
    trainer_lease: TrainerLease, folder_lock: RunFolderLock, path: Path, resume: ResumePoint
) -> Ledger:
    """Open the ledger, or what can be rebuilt of it; its file stays as it is.

    Raises:
        RunMismatchError: it is not the ledger of the resume point, and cannot be rebuilt.
    """

    def open_(rebuilt: bytes | None) -> Ledger:
        digest = resume.ledger_digest
        return Ledger(path, resume.ledger_bytes, folder_lock, digest=digest, cut=False, rebuilt=rebuilt)

    try:
        return await anyio.to_thread.run_sync(open_, None)
    except RunMismatchError as damage:
        archive = path.parent / "groups"
        rebuilt = await rebuild_ledger(trainer_lease.connection, path, resume, archive, damage)
        log.warning("ledger.rebuilt", path=str(path), groups=rebuilt.groups, ends=rebuilt.ends, why=str(damage))
        ledger = await anyio.to_thread.run_sync(open_, rebuilt.content)
        ledger.rebuilt_text = str(rebuilt)
        return ledger


async def _end_waits_at_stop(connection: RunConnection) -> None:
    """Let writes that wait for room fail when the trainer is to stop, or is cancelled: their threads cannot be."""
    try:
        await connection.stopping.wait()
    finally:
        end_waits()


async def _report_disk(connection: RunConnection) -> None:
    """Tell the server what this trainer's writes wait for, so that everybody who looks at the run can see it.

    Nothing depends on it. A server on the same disk takes no report; then it says itself that it cannot write.
    """
    reported: list[DiskProblem] | None = None
    while True:
        found = waiting()
        if found != reported:
            values = {"disk": msgspec.json.encode(found).decode()}
            with suppress(ServerError), anyio.move_on_after(_REPORT_TIMEOUT_S):
                await connection.write_hash("policy", values)
                reported = found
        await anyio.sleep(_REPORT_INTERVAL_S)


def _record_changes(ledger: Ledger, folder: Path, step: int) -> None:
    """Append an event for each change of a setting that the ledger does not have yet."""
    identity = read_identity(folder)
    if identity is None or not identity.changes:
        return
    recorded = sum(event.event == _CHANGE for event in read_events(ledger.path))
    for change in identity.changes[recorded:]:
        details = {"name": change.name, "before": change.before, "after": change.after, "at": change.at}
        ledger.append_event(LedgerEvent(_CHANGE, step, details))


def _keep_group(group: Group, _: int) -> Group:
    return group


_LEASE_S = 30.0


async def write_unrecorded_outcomes(connection: RunConnection, ledger_path: Path) -> None:
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
        found = await lease.read_unrecorded_outcomes()
        await anyio.to_thread.run_sync(_append, ledger_path, lease.token, [(prompt, end) for _, prompt, end in found])
        await lease.forget_unrecorded_outcomes([entry for entry, _, _ in found])
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
