"""How a worker makes and removes sandboxes: noted on the server before they are created, and until they are removed.

::

    claim ─► begin: the record, owned by the lease ─► create ─► … ─► remove ─► end: the record goes, and is counted

Whatever is killed between two of these steps, the record remains, and the reaper of some worker removes the sandbox
(`sandbox_reaper`). Outside of a run there is no lease and no record: `penstock check` removes what it has opened.
"""

import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

import anyio
import msgspec
import structlog
from anyio.abc import TaskGroup
from anyio.from_thread import BlockingPortal

from envs.factory import EnvironmentFactory
from envs.sandboxes.contract import (
    BEGUN_LABEL,
    RUN_LABEL,
    FailureKind,
    Sandbox,
    SandboxFailure,
    SandboxProvider,
    SandboxSpec,
)
from stream.connection.run_connection import RunConnection
from stream.errors import PenstockError
from stream.queue.lease import Lease
from stream.queue.sandboxes import SandboxPlace, SandboxRecord, sandbox_run_id
from stream.queue.stage import Stage
from workers.role import prometheus
from workers.runs.sandboxes import load_provider
from workers.settings.sandboxes import SandboxSettings

log = structlog.get_logger()

NAME_PREFIX: Final = "penstock"
MAX_REMOVALS: Final = 6
"""Removals at the same time: they take an engine as long as creations."""
_NOTHING_MADE: Final = frozenset((FailureKind.IMAGE, FailureKind.FULL))
"""Failures of a creation after which nothing comes into being late."""
_LATE_S: Final = 5.0
"""How much later than its deadline a creation is given up, if its provider does not end it."""


class SandboxOwner(msgspec.Struct, frozen=True):
    """The lease that owns an episode's sandboxes."""

    stage: Stage
    lease: Lease


class SandboxHost:
    """What a worker's episodes need to open sandboxes: the provider, and the records of its place. Made by `open`.

    Args:
        provider: entered.
        settings: limits and deadlines.
        run_id: id of the run, for labels; of a check: `check`.
        place: records; None: there is no run.
        tasks: remove what episodes leave.
        portal: to the event loop, for synchronous tools.
    """

    def __init__(
        self,
        provider: SandboxProvider,
        settings: SandboxSettings,
        run_id: str,
        place: SandboxPlace | None,
        tasks: TaskGroup,
        portal: BlockingPortal,
    ) -> None:
        self.provider = provider
        self.settings = settings
        self.run_id = run_id
        self.place = place
        self.portal = portal
        self.removals = anyio.CapacityLimiter(MAX_REMOVALS)
        """Shared with the reaper."""
        self.starts = anyio.CapacityLimiter(settings.starts)
        self._tasks = tasks

    @classmethod
    @asynccontextmanager
    async def open(
        cls, settings: SandboxSettings, connection: RunConnection | None = None
    ) -> AsyncIterator["SandboxHost"]:
        """Connect to the provider's place. On exit, what episodes have left is removed.

        Args:
            settings: which provider, and where.
            connection: to the run whose sandboxes these are; None: of no run.

        Raises:
            SandboxFailure: the place cannot be reached.
            SettingsError: the provider is not one.
        """
        made = await anyio.to_thread.run_sync(load_provider, settings)
        async with made as provider, BlockingPortal() as portal:
            run_id, place = "check", None
            if connection is not None:
                run_id = await sandbox_run_id(connection)
                place = SandboxPlace(connection, await provider.place(), settings.provider)
            failure: BaseException | None = None
            async with anyio.create_task_group() as tasks:
                try:
                    yield cls(provider, settings, run_id, place, tasks, portal)
                except BaseException as error:  # noqa: BLE001  (raised below, not in an exception group)
                    failure = error
            if failure is not None:
                raise failure

    async def create(self, owner: SandboxOwner | None, index: int, spec: SandboxSpec, purpose: str) -> Sandbox:
        """Note a sandbox, and create it. What fails is removed in the background, as often as it takes.

        Raises:
            SandboxFailure: it could not be made.
            LeaseLostError: the lease is lost.
        """
        if refusal := self.settings.refusal(spec):
            raise SandboxFailure(FailureKind.CREATE, refusal)
        name = self._new_name(owner, index)
        begun = await self._begin(owner, index, spec, purpose, name)
        labels, started = {RUN_LABEL: self.run_id, BEGUN_LABEL: f"{begun:.3f}"}, anyio.current_time()
        limit_s = self.settings.create_timeout_s
        try:
            with prometheus.sandboxes.labels("starting").track_inprogress(), anyio.fail_after(limit_s + _LATE_S):
                sandbox = await self.provider.create(name, spec, labels)
        except BaseException as error:
            is_known = isinstance(error, SandboxFailure) and error.kind in _NOTHING_MADE
            self._tasks.start_soon(self.remove, name, self.provider.survives_worker and not is_known)
            if isinstance(error, TimeoutError):
                problem = f"sandbox {name} did not start within sandboxes.create_timeout_s = {limit_s:g} s"
                raise SandboxFailure(FailureKind.CREATE, problem) from error
            raise
        prometheus.sandbox_start.observe(anyio.current_time() - started)
        return sandbox

    async def remove(self, name: str, is_late: bool = False) -> None:
        """Remove a sandbox, and delete its record. What fails is left to the reaper.

        Args:
            name: of the sandbox.
            is_late: its creation did not end well and may still succeed, so the reaper has to look again later.
        """
        with anyio.CancelScope(shield=True):  # bounded by the provider's deadlines
            try:
                async with self.removals:
                    with prometheus.sandboxes.labels("removing").track_inprogress():
                        await self.provider.remove(name)
                if self.place is not None:
                    await (self.place.leave_to_reaper(name) if is_late else self._end(self.place, name))
            except PenstockError as error:
                if isinstance(error, SandboxFailure):
                    prometheus.sandbox_failures.labels(error.kind).inc()
                log.warning("sandbox.removal_failed", sandbox=name, why=str(error))
                await self._leave(name)

    def remove_soon(self, name: str) -> None:
        """Remove a sandbox in the background."""
        self._tasks.start_soon(self.remove, name)

    async def _begin(self, owner: SandboxOwner | None, index: int, spec: SandboxSpec, purpose: str, name: str) -> float:
        """Note a sandbox; return the Unix time in seconds at which that was."""
        if owner is None or self.place is None:
            return time.time()
        record = SandboxRecord(
            stage=owner.stage.name,
            entry=owner.lease.id,
            prompt=owner.lease.prompt_id,
            index=index,
            purpose=purpose,
            spec=msgspec.json.encode(spec).decode(),
        )
        return await self.place.begin(owner.stage, owner.lease, name, record, spec.max_life_s)

    def _new_name(self, owner: SandboxOwner | None, index: int) -> str:
        entry = owner.lease.id if owner is not None else "none"
        return f"{NAME_PREFIX}-{self.run_id[:8].lower()}-{entry}-{index}-{secrets.token_hex(4)}"

    @staticmethod
    async def _end(place: SandboxPlace, name: str) -> None:
        if await place.end(name, "stopped"):
            prometheus.sandboxes_ended.labels("stopped").inc()

    async def _leave(self, name: str) -> None:
        """Let the reaper remove a sandbox; it finds out itself, later, if the server does not answer now."""
        try:
            if self.place is not None:
                await self.place.leave_to_reaper(name)
        except PenstockError as error:
            log.warning("sandbox.removal_failed", sandbox=name, why=str(error))


@asynccontextmanager
async def open_host_if_needed(
    factories: Mapping[str, EnvironmentFactory], settings: SandboxSettings, connection: RunConnection | None = None
) -> AsyncIterator[SandboxHost | None]:
    """Open what sandboxes need; None if no environment asks for any, which then costs nothing.

    Args:
        factories: the run's environments.
        settings: which provider, and where.
        connection: to the run whose sandboxes these are; None: of no run.

    Raises:
        SandboxFailure: the place cannot be reached.
        SettingsError: the provider is not one.
    """
    if not any(factory.uses_sandboxes for factory in factories.values()):
        yield None
        return
    async with SandboxHost.open(settings, connection) as host:
        yield host
