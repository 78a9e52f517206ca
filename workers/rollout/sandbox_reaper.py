"""The reaper: removes the sandboxes that no lease owns any more. Each rollout worker has one; one is active in a place.

=================================  ==========================================================================
what it finds                      what it does
=================================  ==========================================================================
a record that nobody owns          after the grace it removes the sandbox, and deletes the record
nothing of that name               a creation may still be on its way: again, until that must have ended
a sandbox without a record         a *stray*: the server lost its last writes, or a suspended worker woke up
a record in a place of the same    its sandboxes ended with their worker (`survives_worker`), so only the record
provider that ends with workers    is deleted
=================================  ==========================================================================

While its place has no record, it sleeps until something changes in the run.
"""

import time
from collections.abc import Mapping
from typing import Final

import anyio
import structlog

from envs.sandboxes.contract import SandboxFailure
from stream.connection.run_connection import RunConnection
from stream.errors import PenstockError
from stream.queue.sandboxes import DueSandboxes, SandboxEnd, SandboxPlace, SandboxRecord, read_sandbox_places
from workers.role import prometheus
from workers.rollout.sandbox_host import SandboxHost
from workers.settings import Settings

log = structlog.get_logger()

_INTERVAL_S: Final = 5.0
"""Time between two rounds while there are records; a third of the lease time, if that is shorter."""
_SWEEP_S: Final = 60.0
"""Time between two listings of the place."""
_MAX_FINISH_S: Final = 60.0
"""How long the end of a run waits for the last sandboxes, besides a creation's deadline."""


class SandboxReaper:
    """Looks after the place of a worker's sandboxes.

    Args:
        host: with the provider, and the records of its place.
        place: those records.
        worker: name of this worker.
        lease_s: lease time of the run's workers.
    """

    def __init__(self, host: SandboxHost, place: SandboxPlace, worker: str, lease_s: float) -> None:
        self._host, self._place, self._worker = host, place, worker
        self._provider, self._settings = host.provider, host.settings
        self._lease_s = lease_s
        self._interval_s = min(_INTERVAL_S, lease_s / 3)
        self._swept_at = time.monotonic()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            found = await self._try_round()
            if found is not None and not found.total:
                await self._sleep(found.wake_id)
            await anyio.sleep(self._interval_s)

    async def finish(self) -> None:
        """Look until the place of a run that has finished has no record; at most until creations must have ended."""
        limit_s = self._settings.created_within_s + _MAX_FINISH_S
        with anyio.move_on_after(limit_s) as scope:
            while True:
                found = await self._try_round()
                if found is not None and not found.total:
                    break
                await anyio.sleep(min(1.0, self._interval_s))
            if found.is_active:
                await self._try_sweep(found.now_ms)
        if scope.cancelled_caught:
            log.warning("sandboxes.left", place=self._place.place, waited_s=limit_s)

    async def round(self) -> DueSandboxes:
        """Remove what is due, and from time to time what is stray, unless another worker does. Returns what was found.

        Raises:
            PenstockError: the server or the place does not answer.
        """
        found = await self._find_due(self._place)
        async with anyio.create_task_group() as tasks:
            for name, record in found.due.items():
                tasks.start_soon(self._remove, name, record, found.now_ms)
        if found.is_active and time.monotonic() - self._swept_at >= _SWEEP_S:
            await self.sweep(found.now_ms)
        return found

    async def sweep(self, now_ms: int) -> int:
        """Remove the run's sandboxes that have no record. Returns their number.

        Args:
            now_ms: Unix time in ms, by the server's clock.

        Raises:
            PenstockError: the server or the place does not answer.
        """
        self._swept_at = time.monotonic()
        listed = await self._provider.list(self._host.run_id)
        records: Mapping[str, SandboxRecord] = await self._place.records() if listed else {}
        strays = [
            each.name
            for each in listed
            if each.name not in records and now_ms / 1000 > each.begun + self._settings.created_within_s
        ]
        removed = 0
        for name in dict.fromkeys(strays):  # a snapshot has the name of its sandbox
            if await self._provider.remove(name) and await self._end(self._place, name, "stray"):
                removed += 1
                log.warning("sandbox.stray", sandbox=name, place=self._place.place)
        if not self._provider.survives_worker:
            await self._forget_elsewhere()
        return removed

    async def _try_round(self) -> DueSandboxes | None:
        try:
            return await self.round()
        except PenstockError as error:
            log.warning("sandboxes.unreachable", place=self._place.place, why=str(error))
            return None

    async def _try_sweep(self, now_ms: int) -> None:
        try:
            await self.sweep(now_ms)
        except PenstockError as error:
            log.warning("sandboxes.unreachable", place=self._place.place, why=str(error))

    async def _sleep(self, wake_id: str) -> None:
        """Sleep until something has changed in the run, or it is time to list the place."""
        with anyio.move_on_after(max(0.0, self._swept_at + _SWEEP_S - time.monotonic())):
            while await self._place.connection.wait_for_change(wake_id, _SWEEP_S) == wake_id:
                pass

    async def _find_due(self, place: SandboxPlace) -> DueSandboxes:
        return await place.find_due(self._worker, self._settings.grace_s, self._lease_s, 3 * self._interval_s)

    async def _remove(self, name: str, record: SandboxRecord, now_ms: int) -> None:
        """Remove a sandbox that is due. What fails, or may still come, is tried again in the next round."""
        try:
            async with self._host.removals:
                was_there = await self._provider.remove(name)
            created_by_ms = record.begun_ms + 1000 * self._settings.created_within_s
            if was_there or not self._provider.survives_worker or now_ms >= created_by_ms:
                await self._end(self._place, name, "reaped")
                log.info("sandbox.reaped", sandbox=name, owner=record.owner, was_there=was_there)
        except SandboxFailure as failure:
            prometheus.sandbox_failures.labels(failure.kind).inc()
            log.warning("sandbox.removal_failed", sandbox=name, why=str(failure))
        except PenstockError as error:
            log.warning("sandbox.removal_failed", sandbox=name, why=str(error))

    async def _forget_elsewhere(self) -> None:
        """Delete records of lost sandboxes in places that have perhaps no worker any more; they ended with theirs."""
        connection = self._place.connection
        for name, provider in (await read_sandbox_places(connection)).items():
            if provider == self._place.provider and name != self._place.place:
                place = SandboxPlace(connection, name, provider)
                for sandbox in (await self._find_due(place)).due:
                    await self._end(place, sandbox, "reaped")

    @staticmethod
    async def _end(place: SandboxPlace, name: str, how: SandboxEnd) -> bool:
        is_counted = await place.end(name, how)
        if is_counted:
            prometheus.sandboxes_ended.labels(how).inc()
        return is_counted


async def reap_once(settings: Settings, connection: RunConnection, worker: str) -> int:
    """Remove now what no lease owns in the place of a run's settings. Returns the number of records left there.

    Args:
        settings: of the run.
        connection: to it.
        worker: name of the caller.

    Raises:
        PenstockError: the place cannot be reached, or a worker of the run looks after it.
    """
    async with SandboxHost.open(settings.sandboxes, connection) as host:
        if host.place is None:
            raise AssertionError("a host of a run has records")
        reaper = SandboxReaper(host, host.place, worker, settings.queue.lease_s)
        found = await reaper.round()
        if not found.is_active:
            raise PenstockError(
                f"a rollout worker of the run looks after {host.place.place}: it removes what is lost "
                f"{settings.sandboxes.grace_s:g} s after its lease; nothing was changed"
            )
        await reaper.sweep(found.now_ms)
        return len(await host.place.records())
