"""The published weights: on disk under their version number, on the engines, then known to everybody."""

import time
from collections.abc import Callable
from pathlib import Path

import anyio
import structlog
from anyio.abc import TaskGroup

from stream.durable import remove_folder, remove_leftovers
from stream.errors import EngineRefusedError, RunFailedError
from stream.trainer.lease import TrainerLease
from workers.train.publishing.publisher import WeightPublisher

log = structlog.get_logger()

_KEPT_VERSIONS = 3
"""Versions kept on disk; an engine that restarts needs the last one, and may be reading the one before. Of an adapter
engines take requests until there are two newer ones."""
_CHECK_INTERVAL_S = 2.0
"""At the engines' versions, between pushes."""


class PolicyVersions:
    """The policy versions of a run.

    Args:
        folder: where they are written, one folder each.
        trainer_lease: the right to publish.
        publisher: the way to the engines.
        tasks: where engines that a publication did not wait for are given their weights.
        retention_s: how much longer than needed for new requests a version stays on the disk.
    """

    def __init__(
        self,
        folder: Path,
        trainer_lease: TrainerLease,
        publisher: WeightPublisher,
        tasks: TaskGroup,
        *,
        retention_s: float = 0.0,
    ) -> None:
        self.folder = folder
        self.retention_s = retention_s
        self.version = -1
        """The version that the engines have; -1 before the first."""
        self._trainer_lease = trainer_lease
        self._publisher = publisher
        self._tasks = tasks
        self._lock = anyio.Lock()

    async def publish(
        self, write: Callable[[Path], None], highest_known: int, step: int, metrics: dict[str, float]
    ) -> None:
        """Give the engines new weights, under a number that nobody has used: above `known`, too.

        Args:
            write: writes the weights to a new folder.
            highest_known: a version number that was used.
            step: after which they are what they are.
            metrics: told with them.

        Raises:
            RunFailedError: every engine refuses them, and would refuse a trainer that was started again.
        """
        on_engines = [v for v in (await self._publisher.engine_versions()).values() if v is not None]
        version = await self._trainer_lease.reserve_version(max([highest_known, *on_engines]))
        path = self.folder / f"v{version:06d}"
        await anyio.to_thread.run_sync(_write, write, path)
        async with self._lock:
            await self._trainer_lease.renew()  # writing took long; the engines know nothing of tokens
            try:
                await self._tasks.start(self._publisher.push, path, version)
            except EngineRefusedError as error:
                raise RunFailedError(str(error)) from error
            self.version = version
        await self._trainer_lease.publish(version, path, step, metrics)
        log.info("policy.published", version=version, step=step)
        await anyio.to_thread.run_sync(_prune, self.folder, self.retention_s)

    async def update_outdated_engines(self) -> None:
        """Give the current version to engines that come, restart or missed it, for ever."""
        while True:
            await anyio.sleep(_CHECK_INTERVAL_S)
            if self.version < 0 or not await self._publisher.outdated_engines(self.version):
                continue
            async with self._lock:  # a push may have been under way, and what was behind may be so no more
                if behind := await self._publisher.outdated_engines(self.version):
                    await self._trainer_lease.renew()
                    path = self.folder / f"v{self.version:06d}"
                    await self._tasks.start(self._publisher.refresh, behind, path, self.version)


def _write(write: Callable[[Path], None], path: Path) -> None:
    remove_folder(path)  # of a server that forgot which numbers it had given out
    remove_leftovers(path.parent)  # and of a trainer that ended as it wrote; one that was succeeded may write nothing
    write(path)


def _prune(folder: Path, retention_s: float) -> None:
    versions = sorted(folder.glob("v*"))
    for old, newer in zip(versions, versions[_KEPT_VERSIONS - 1 :], strict=False):
        if newer != versions[-1] and time.time() - newer.stat().st_mtime >= retention_s:
            remove_folder(old)
