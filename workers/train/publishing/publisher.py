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
from workers.fleet.roster import Roster
from workers.settings import Settings
from workers.train.publishing.control import Control
from workers.train.publishing.way import Way, open_way

log = structlog.get_logger()

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 2.0
_PATIENT_TRIES = 5
"""Tries at an engine once another one has taken the weights; `refresh` will come back to it."""
_GRACE_S = 5.0
"""An engine is left behind when it takes this much longer than twice the time of the slowest that was done."""


class EnginePublisher:
    """The trainer's way to its engines.

    Args:
        roster: which there are; looked at anew each time.
        way: how they are given weights.
        patience_s: how long to try to reach one.
        update_timeout_s: for one call that moves weights.
    """

    def __init__(self, roster: Roster, way: Way, *, patience_s: float, update_timeout_s: float) -> None:
        self._roster = roster
        self._way = way
        self._patience_s = patience_s
        self._update_timeout_s = update_timeout_s
        self._known: dict[str, Control] = {}
        self._fit: set[str] = set()
        """Engines that were found able to take weights this way, since they last failed."""
        self._busy: set[str] = set()
        """Engines that are being given weights now, by whichever push or refresh."""
        self._silent: set[str] = set()
        """Engines that did not answer when they were last looked at."""
        self._newest = -1
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
        await self._way.prepare(absolute)
        self._newest = version
        failed: dict[str, EngineError] = {}
        taken = anyio.Event()
        engines = await self._awaited()
        left = {engine.url for engine in engines}
        done, outcomes = anyio.create_memory_object_stream[str](len(engines))

        async def push(engine: Control) -> None:
            try:
                with self._busy_with(engine):
                    await self._give(engine, absolute, version, taken)
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
                        log.warning("engine.left_behind", urls=sorted(left), version=version, after_s=round(grace_s, 1))
                        break
                if len(failed) < len(engines):
                    task_status.started()
        if len(failed) == len(engines):
            refused = all(isinstance(error, EngineRefusedError) for error in failed.values())
            whys = "; ".join(f"{url}: {why}".replace(f"{url}: {url}", url) for url, why in failed.items())
            if refused and failed.keys() >= {engine.url for engine in self._engines()}:  # none was left out
                raise EngineRefusedError(f"no engine took version {version}: {whys}")
            raise EngineUnavailableError(f"no engine took version {version} within {self._patience_s:g} s: {whys}")

    async def versions(self) -> dict[str, int | None]:
        """The version that each engine has; None where it has none, or does not answer.

        Those that others know to be silent or busy are not waited for.
        """
        found: dict[str, int | None] = {}

        async def ask(engine: Control) -> None:
            found[engine.url] = None
            if engine.url in self._silent | self._busy:
                return
            try:
                found[engine.url] = await engine.version()
            except EngineError as error:
                log.info("engine.silent", url=engine.url, why=str(error))
                self._silent.add(engine.url)

        async with anyio.create_task_group() as tasks:
            for engine in self._engines():
                tasks.start_soon(ask, engine)
        return found

    async def behind(self, version: int) -> list[Control]:
        """The engines that answer but do not work with this version: new, restarted, left out, or still frozen.

        Those that are being given weights are not among them; they will be, if those are not these.
        """
        found: list[Control] = []

        async def look(engine: Control) -> None:
            try:
                if await engine.version() != version or await engine.is_paused():
                    found.append(engine)
                self._silent.discard(engine.url)
            except EngineError as error:
                log.debug("engine.silent", url=engine.url, why=str(error))
                self._silent.add(engine.url)

        async with anyio.create_task_group() as tasks:
            for engine in self._free():
                tasks.start_soon(look, engine)
        return found

    async def refresh(
        self,
        engines: list[Control],
        path: Path,
        version: int,
        *,
        task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Give a version to these engines alone; `task_status` is told as soon as they count as busy with it."""
        absolute = Path(await anyio.Path(path).absolute())
        await self._way.prepare(absolute)
        hurry = anyio.Event()
        hurry.set()

        async def push(engine: Control, *, task_status: TaskStatus[None]) -> None:
            with self._busy_with(engine):
                task_status.started()
                try:
                    await self._give(engine, absolute, version, hurry)
                except EngineError as error:
                    log.warning("engine.push_failed", url=engine.url, version=version, why=str(error))
                else:
                    log.info("engine.refreshed", url=engine.url, version=version)

        async with anyio.create_task_group() as tasks:
            for engine in engines:
                await tasks.start(push, engine)
            task_status.started()

    async def answers(self) -> bool:
        """Whether any engine answers."""
        return any([await engine.answers() for engine in self._engines()])

    def _engines(self) -> list[Control]:
        """Those that there are now."""
        urls = self._roster.urls
        self._known = {url: self._known.get(url) or Control(url, self._update_timeout_s) for url in urls}
        self._fit &= set(urls)
        self._silent &= set(urls)
        return list(self._known.values())

    def _free(self) -> list[Control]:
        """Those that are not being given weights."""
        return [engine for engine in self._engines() if engine.url not in self._busy]

    async def _awaited(self) -> list[Control]:
        """Those that answered when last heard of, else all that are free; where there are none, whoever comes first."""
        deadline = anyio.current_time() + self._patience_s
        while not (engines := self._free()):
            if anyio.current_time() > deadline and self._busy:
                busy = ", ".join(sorted(self._busy))
                raise EngineUnavailableError(f"{busy} not done with older weights within {self._patience_s:g} s")
            if anyio.current_time() > deadline:
                raise EngineUnavailableError(f"{self._roster.why_empty}; waited {self._patience_s:g} s")
            await anyio.sleep(_FIRST_DELAY_S)
        return [engine for engine in engines if engine.url not in self._silent] or engines

    @contextmanager
    def _busy_with(self, engine: Control) -> Iterator[None]:
        self._busy.add(engine.url)
        try:
            yield
        finally:
            self._busy.discard(engine.url)

    async def _give(self, engine: Control, path: Path, version: int, hurry: anyio.Event) -> None:
        """One engine; tries again until the time is over, or a few times in a hurry, or there is a newer version."""
        deadline, delay, tries = anyio.current_time() + self._patience_s, _FIRST_DELAY_S, 0
        asked = False
        while True:
            try:
                # One that was fit is given weights at once, though it may be another by now: that vLLM takes seconds to
                # tell what it was started with. If it fails, it is asked.
                if engine.url not in self._fit:
                    await self._way.check(engine)
                    self._fit.add(engine.url)
                asked = True
                await self._way.give(engine, path, version)
            except EngineError as error:
                tries += 1
                self._fit.discard(engine.url)
                why = str(error)
                if tries == 1:
                    log.warning("engine.awaited", url=engine.url, version=version, why=why)
                refused = isinstance(error, EngineRefusedError)
                hurried = hurry.is_set() and (tries >= _PATIENT_TRIES or version < self._newest)
                if refused or hurried or anyio.current_time() + delay > deadline:
                    if asked:
                        await self._way.let_go(engine, error)
                    raise (EngineRefusedError if refused else EngineError)(why) from error
            else:
                if tries:
                    log.info("engine.returned", url=engine.url, version=version)
                return
            await anyio.sleep(random.uniform(delay / 2, delay))
            delay = min(2 * delay, _LONGEST_DELAY_S)


@asynccontextmanager
async def open_publisher(settings: Settings, roster: Roster) -> AsyncIterator[EnginePublisher]:
    """The publisher of a run, for as long as the context is open.

    Raises:
        SettingsError: the way that the settings name needs what this machine does not have.
    """
    patience_s, timeout_s = settings.engine_patience_s, settings.weights.timeout_s
    async with open_way(settings) as way:
        yield EnginePublisher(roster, way, patience_s=patience_s, update_timeout_s=timeout_s)
