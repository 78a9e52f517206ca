"""Publishing a policy version: number, folder, push to the engines, announcement to all workers."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio
import structlog
from anyio.abc import TaskGroup
from safetensors import SafetensorError

from stream.disk_space import persist
from stream.durable import remove_folder, remove_leftovers
from stream.errors import EngineRefusedError, RunFailedError
from stream.trainer.consumer import Consumer
from workers.train.publishing.publisher import WeightPublisher

log = structlog.get_logger()

_KEPT_VERSIONS = 3
"""Versions kept on disk. An engine that restarts needs the last one and may be reading the one before; an adapter is
named by requests until there are two newer ones."""
_CHECK_INTERVAL_S = 2.0
"""Between two checks for engines that do not serve the current version."""


class PolicyVersions:
    """The policy versions of a run.

    Args:
        folder: where versions are written, one folder each.
        consumer: the trainer's access to the run.
        publisher: pushes versions to engines.
        tasks: runs pushes that a publication does not wait for.
        retention_s: how long a version stays on disk after new requests can no longer name it.
    """

    def __init__(
        self,
        folder: Path,
        consumer: Consumer[Any],
        publisher: WeightPublisher,
        tasks: TaskGroup,
        *,
        retention_s: float = 0.0,
    ) -> None:
        self.folder = folder
        self.retention_s = retention_s
        self._consumer = consumer
        self._publisher = publisher
        self._tasks = tasks
        self._push_lock = anyio.Lock()
        self._pushed: int | None = None
        """The version that the engines have from this trainer; None before the first."""

    async def reserve(self) -> int:
        """Reserve a version number that was never used, not even by an engine in an earlier life of the run."""
        used = [version for version in (await self._publisher.engine_versions()).values() if version is not None]
        return await self._consumer.reserve_version(max(used, default=-1))

    async def publish(
        self, version: int, write: Callable[[Path], None], step: int, metrics: Mapping[str, float]
    ) -> None:
        """Write weights, push them to the engines and announce them. The next step may train meanwhile.

        Args:
            version: from `reserve`.
            write: writes the weights into a new folder; called in a thread.
            step: the number of steps trained.
            metrics: of that step, announced with the version.

        Raises:
            RunFailedError: every engine refuses the weights, and would refuse them from a restarted trainer too.
        """
        path = self._path(version)
        await anyio.to_thread.run_sync(_write, write, path)
        async with self._push_lock:
            # Writing took long, and engines do not check fencing tokens.
            await self._consumer.trainer_lease.renew()
            try:
                await self._tasks.start(self._publisher.push, path, version)
            except EngineRefusedError as error:
                raise RunFailedError(str(error)) from error
            self._pushed = version
        await self._consumer.announce(version, path, step, metrics)
        log.info("policy.published", version=version, step=step)
        await anyio.to_thread.run_sync(_prune, self.folder, self.retention_s)

    async def update_outdated_engines(self) -> None:
        """Push the current version to engines that are new, restarted or missed it; runs forever."""
        while True:
            await anyio.sleep(_CHECK_INTERVAL_S)
            if self._pushed is None or not await self._publisher.outdated_engines(self._pushed):
                continue
            async with self._push_lock:
                # A publication may have held the lock and brought some of these engines up to date.
                if outdated := await self._publisher.outdated_engines(self._pushed):
                    await self._consumer.trainer_lease.renew()
                    path = self._path(self._pushed)
                    await self._tasks.start(self._publisher.refresh, outdated, path, self._pushed)

    def _path(self, version: int) -> Path:
        return self.folder / f"v{version:06d}"


def _write(write: Callable[[Path], None], path: Path) -> None:
    """Write weights into a new folder. While the disk is full, this waits for room.

    Raises:
        RunFailedError: the disk fails, or stays full.
    """
    remove_folder(path)  # left by a run whose server forgot that this number was reserved
    remove_leftovers(path.parent)  # left by a trainer that was killed while it wrote
    try:
        persist(path, lambda: write(path), (OSError, SafetensorError))
    except (OSError, SafetensorError) as error:
        raise RunFailedError(
            f"the weights could not be written to {path}: {error}. Make room on that disk and run again: the run "
            "resumes from its last checkpoint"
        ) from error


def _prune(folder: Path, retention_s: float) -> None:
    versions = sorted(folder.glob("v*"))
    for old, newer in zip(versions, versions[_KEPT_VERSIONS - 1 :], strict=False):
        if newer != versions[-1] and time.time() - newer.stat().st_mtime >= retention_s:
            remove_folder(old)
