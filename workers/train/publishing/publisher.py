"""Hands weights to the engines of a run while they work: to all at once, and to those that missed a version."""

import math
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import structlog
from anyio.abc import TaskStatus

from stream.errors import EngineError, EngineRefusedError, EngineUnavailableError
from workers.engine_api.discovery.discovery import EngineDiscovery
from workers.settings import Settings
from workers.train.publishing.engine_control import EngineControlClient
from workers.train.publishing.transport import WeightTransport, open_transport

log = structlog.get_logger()

UPDATE_TIMEOUT_S = 600.0
"""Deadline of one engine for taking a version."""
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 2.0
_TRIES_AFTER_SUCCESS = 5
"""Tries at an engine once another one has taken the weights; `refresh` will come back to it."""
_GRACE_S = 5.0
"""An engine is left behind when it takes this much longer than twice the time of the slowest that was done."""


class WeightPublisher:
    """The trainer's way to its engines.

    Args:
        discovery: which there are; looked at anew each time.
        transport: how they are given weights.
        retry_timeout_s: how long to try to reach one.
        update_timeout_s: for one call that moves weights.
    """

    def __init__(
        self, discovery: EngineDiscovery, transport: WeightTransport, *, retry_timeout_s: float, update_timeout_s: float
    ) -> None:
        self._discovery = discovery
        self._transport = transport
        self._retry_timeout_s = retry_timeout_s
        self._update_timeout_s = update_timeout_s
        self._clients: dict[str, EngineControlClient] = {}
        self._compatible: set[str] = set()
        """Engines that were found able to take weights this way, since they last failed."""
        self._busy: set[str] = set()
        """Engines that are being given weights now, by whichever push or refresh."""
        self._unreachable: set[str] = set()
        """Engines that did not answer when they were last looked at."""
        self._latest_version = -1
        """Version that was pushed last."""

    async def push(
        self, path: Path, version: int, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Give every engine these weights, all at once; requests under way freeze for the moment and go on with them.

        Engines that are busy with an older version, or silent, are left to `refresh`, if there are others.

        Args:
            path: a folder in Hugging Face form.
            version: its number.
            task_status: told when the version may be published: all engines were tried, or some have it and the others
                are left behind, to be done when they are.

        Raises:
            EngineRefusedError: every engine of the run refused them, since they are not the model's, or since it was
                not started to take any: another push would end the same way.
            EngineUnavailableError: no engine took them.
        """
        absolute = Path(await anyio.Path(path).absolute())
        await self._transport.prepare(absolute)
        self._latest_version = version
        failed: dict[str, EngineError] = {}
        taken = anyio.Event()
        engines = await self._wait_for_engines()
        left = {engine.url for engine in engines}
        done, outcomes = anyio.create_memory_object_stream[str](len(engines))

        async def push(engine: EngineControlClient) -> None:
            try:
                with self._mark_busy(engine):
                    await self._push_with_retry(engine, absolute, version, taken)
                taken.set()
            except EngineError as error:
                failed[engine.url] = error
                log.warning("engine.push_failed", url=engine.url, version=version, why=str(error))
            done.send_nowait(engine.url)

        with done, outcomes:
            async with anyio.create_task_group() as tasks:
                for engine in engines:
                    tasks.start_soon(push, engine)
                begun, grace_s = anyio.current_time(), math.inf
                while left:
                    with anyio.move_on_after(grace_s) as wait:
                        left.remove(url := await outcomes.receive())
                        if url not in failed:
                            grace_s = anyio.current_time() - begun + _GRACE_S
                    if wait.cancelled_caught:
                        log.warning(
                            "engine.push_timed_out", urls=sorted(left), version=version, after_s=round(grace_s, 1)
                        )
                        break
                if len(failed) < len(engines):
                    task_status.started()
        if len(failed) == len(engines):
            refused = all(isinstance(error, EngineRefusedError) for error in failed.values())
            whys = "; ".join(f"{url}: {why}".replace(f"{url}: {url}", url) for url, why in failed.items())
            if refused and failed.keys() >= {engine.url for engine in self._engines()}:  # none was left out
                raise EngineRefusedError(f"no engine took version {version}: {whys}")
            raise EngineUnavailableError(f"no engine took version {version} within {self._retry_timeout_s:g} s: {whys}")

    async def engine_versions(self) -> dict[str, int | None]:
        """The version that each engine has; None where it has none, or does not answer.

        Those that others know to be silent or busy are not waited for.
        """
        found: dict[str, int | None] = {}

        async def ask(engine: EngineControlClient) -> None:
            found[engine.url] = None
            if engine.url in self._unreachable | self._busy:
                return
            try:
                found[engine.url] = await engine.weight_version()
            except EngineError as error:
                log.info("engine.unreachable", url=engine.url, why=str(error))
                self._unreachable.add(engine.url)

        async with anyio.create_task_group() as tasks:
            for engine in self._engines():
                tasks.start_soon(ask, engine)
        return found

    async def outdated_engines(self, version: int) -> list[EngineControlClient]:
        """The engines that answer but do not work with this version: new, restarted, left out, or still frozen.

        Those that are being given weights are not among them; they will be, if those are not these.
        """
        found: list[EngineControlClient] = []

        async def look(engine: EngineControlClient) -> None:
            try:
                if await engine.weight_version() != version or await engine.is_paused():
                    found.append(engine)
                self._unreachable.discard(engine.url)
            except EngineError as error:
                log.debug("engine.unreachable", url=engine.url, why=str(error))
                self._unreachable.add(engine.url)

        async with anyio.create_task_group() as tasks:
            for engine in self._idle_engines():
                tasks.start_soon(look, engine)
        return found

    async def refresh(
        self,
        engines: list[EngineControlClient],
        path: Path,
        version: int,
        *,
        task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Give a version to these engines alone; `task_status` is told as soon as they count as busy with it."""
        absolute = Path(await anyio.Path(path).absolute())
        await self._transport.prepare(absolute)
        hurry = anyio.Event()
        hurry.set()

        async def push(engine: EngineControlClient, *, task_status: TaskStatus[None]) -> None:
            with self._mark_busy(engine):
                task_status.started()
                try:
                    await self._push_with_retry(engine, absolute, version, hurry)
                except EngineError as error:
                    log.warning("engine.push_failed", url=engine.url, version=version, why=str(error))
                else:
                    log.info("engine.refreshed", url=engine.url, version=version)

        async with anyio.create_task_group() as tasks:
            for engine in engines:
                await tasks.start(push, engine)
            task_status.started()

    async def any_healthy(self) -> bool:
        """Whether any engine answers."""
        return any([await engine.is_healthy() for engine in self._engines()])

    def _engines(self) -> list[EngineControlClient]:
        """Those that there are now."""
        urls = self._discovery.urls
        self._clients = {
            url: self._clients.get(url) or EngineControlClient(url, self._update_timeout_s) for url in urls
        }
        self._compatible &= set(urls)
        self._unreachable &= set(urls)
        return list(self._clients.values())

    def _idle_engines(self) -> list[EngineControlClient]:
        """Those that are not being given weights."""
        return [engine for engine in self._engines() if engine.url not in self._busy]

    async def _wait_for_engines(self) -> list[EngineControlClient]:
        """Those that answered when last heard of, else all that are free; where there are none, whoever comes first."""
        deadline = anyio.current_time() + self._retry_timeout_s
        while not (engines := self._idle_engines()):
            if anyio.current_time() > deadline and self._busy:
                busy = ", ".join(sorted(self._busy))
                raise EngineUnavailableError(f"{busy} not done with older weights within {self._retry_timeout_s:g} s")
            if anyio.current_time() > deadline:
                raise EngineUnavailableError(f"{self._discovery.empty_reason}; waited {self._retry_timeout_s:g} s")
            await anyio.sleep(_FIRST_DELAY_S)
        return [engine for engine in engines if engine.url not in self._unreachable] or engines

    @contextmanager
    def _mark_busy(self, engine: EngineControlClient) -> Iterator[None]:
        self._busy.add(engine.url)
        try:
            yield
        finally:
            self._busy.discard(engine.url)

    async def _push_with_retry(self, engine: EngineControlClient, path: Path, version: int, hurry: anyio.Event) -> None:
        """One engine; tries again until the time is over, or a few times in a hurry, or there is a newer version."""
        deadline, delay, tries = anyio.current_time() + self._retry_timeout_s, _FIRST_DELAY_S, 0
        asked = False
        while True:
            try:
                # One that was fit is given weights at once, though it may be another by now: that vLLM takes seconds to
                # tell what it was started with. If it fails, it is asked.
                if engine.url not in self._compatible:
                    await self._transport.check(engine)
                    self._compatible.add(engine.url)
                asked = True
                await self._transport.send(engine, path, version)
            except EngineError as error:
                tries += 1
                self._compatible.discard(engine.url)
                why = str(error)
                if tries == 1:
                    log.warning("engine.waiting", url=engine.url, version=version, why=why)
                refused = isinstance(error, EngineRefusedError)
                hurried = hurry.is_set() and (tries >= _TRIES_AFTER_SUCCESS or version < self._latest_version)
                if refused or hurried or anyio.current_time() + delay > deadline:
                    if asked:
                        await self._transport.abort(engine, error)
                    raise (EngineRefusedError if refused else EngineError)(why) from error
            else:
                if tries:
                    log.info("engine.recovered", url=engine.url, version=version)
                return
            await anyio.sleep(random.uniform(delay / 2, delay))
            delay = min(2 * delay, _LONGEST_DELAY_S)


@asynccontextmanager
async def open_publisher(settings: Settings, discovery: EngineDiscovery) -> AsyncIterator[WeightPublisher]:
    """The publisher of a run, for as long as the context is open.

    Raises:
        SettingsError: the way that the settings name needs what this machine does not have.
    """
    patience_s, timeout_s = settings.engine_wait_s, UPDATE_TIMEOUT_S
    async with open_transport(settings) as way:
        yield WeightPublisher(discovery, way, retry_timeout_s=patience_s, update_timeout_s=timeout_s)
