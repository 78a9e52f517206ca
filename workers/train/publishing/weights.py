"""The published weights: on disk under their version number, on the engines, then known to everybody."""

import time
from collections.abc import Callable
from pathlib import Path

import anyio
import structlog
from anyio.abc import TaskGroup

from stream.errors import EngineRefusedError, RunFailedError
from stream.training import Tenure
from workers.train.keeping.durable import remove_folder, remove_leftovers
from workers.train.publishing.publisher import EnginePublisher

log = structlog.get_logger()

_KEPT = 3
"""Versions kept on disk; an engine that restarts needs the last one, and may be reading the one before. Of an adapter
engines take requests until there are two newer ones."""
_LOOK_EVERY_S = 2.0
"""At the engines' versions, between pushes."""


class Weights:
    """The policy versions of a run.

    Args:
        folder: where they are written, one folder each.
        tenure: the right to publish.
        publisher: the way to the engines.
        tasks: where engines that a publication did not wait for are given their weights.
        linger_s: how much longer than needed for new requests a version stays on the disk.
    """

    def __init__(
        self, folder: Path, tenure: Tenure, publisher: EnginePublisher, tasks: TaskGroup, *, linger_s: float = 0.0
    ) -> None:
        self.folder = folder
        self.linger_s = linger_s
        self.version = -1
        """The version that the engines have; -1 before the first."""
        self._tenure = tenure
        self._publisher = publisher
        self._tasks = tasks
        self._lock = anyio.Lock()

    async def publish(self, write: Callable[[Path], None], known: int, step: int, metrics: dict[str, float]) -> None:
        """Give the engines new weights, under a number that nobody has used: above `known`, too.

        Args:
            write: writes the weights to a new folder.
            known: a version number that was used.
            step: after which they are what they are.
            metrics: told with them.

        Raises:
            RunFailedError: every engine refuses them, and would refuse a trainer that was started again.
        """
        on_engines = [v for v in (await self._publisher.versions()).values() if v is not None]
        version = await self._tenure.reserve(max([known, *on_engines]))
        path = self.folder / f"v{version:06d}"
        await anyio.to_thread.run_sync(_write, write, path)
        async with self._lock:
            await self._tenure.renew()  # writing took long; the engines know nothing of tokens
            try:
                await self._tasks.start(self._publisher.push, path, version)
            except EngineRefusedError as error:
                raise RunFailedError(str(error)) from error
            self.version = version
        await self._tenure.publish(version, path, step, metrics)
        log.info("policy.published", version=version, step=step)
        await anyio.to_thread.run_sync(_prune, self.folder, self.linger_s)

    async def keep_engines_current(self) -> None:
        """Give the current version to engines that come, restart or missed it, for ever."""
        while True:
            await anyio.sleep(_LOOK_EVERY_S)
            if self.version < 0 or not await self._publisher.behind(self.version):
                continue
            async with self._lock:  # a push may have been under way, and what was behind may be so no more
                if behind := await self._publisher.behind(self.version):
                    await self._tenure.renew()
                    path = self.folder / f"v{self.version:06d}"
                    await self._tasks.start(self._publisher.refresh, behind, path, self.version)


def _write(write: Callable[[Path], None], path: Path) -> None:
    remove_folder(path)  # of a server that forgot which numbers it had given out
    remove_leftovers(path.parent)  # and of a trainer that ended as it wrote; one that was succeeded may write nothing
    write(path)


def _prune(folder: Path, linger_s: float) -> None:
    versions = sorted(folder.glob("v*"))
    for old, newer in zip(versions, versions[_KEPT - 1 :], strict=False):
        if newer != versions[-1] and time.time() - newer.stat().st_mtime >= linger_s:
            remove_folder(old)
