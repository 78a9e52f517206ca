"""Hands weights to the engines of a run while they work: to all at once, and to those that missed a version."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import structlog

from stream.errors import EngineError, EngineRefusedError, EngineUnavailableError
from workers.fleet.roster import Roster
from workers.settings import Settings
from workers.train.publishing.control import TROUBLE, Control
from workers.train.publishing.way import Way, open_way

log = structlog.get_logger()

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 2.0
_PATIENT_TRIES = 5
"""Tries at an engine once another one has taken the weights; `refresh` will come back to it."""


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

    async def push(self, path: Path, version: int) -> None:
        """Give every engine these weights, all at once; requests under way freeze for the moment and go on with them.

        Args:
            path: a folder in Hugging Face form.
            version: its number.

        Raises:
            EngineRefusedError: no engine took them, since they are not the model's, or since none can take any.
            EngineUnavailableError: no engine took them.
        """
        absolute = Path(await anyio.Path(path).absolute())
        await self._way.prepare(absolute)
        failed: dict[str, EngineError] = {}
        taken = anyio.Event()

        async def push(engine: Control) -> None:
            try:
                await self._give(engine, absolute, version, taken)
                taken.set()
            except EngineError as error:
                failed[engine.url] = error
                log.warning("engine.push_failed", url=engine.url, version=version, why=str(error))

        engines = await self._awaited()
        async with anyio.create_task_group() as tasks:
            for engine in engines:
                tasks.start_soon(push, engine)
        if len(failed) == len(engines):
            refused = any(isinstance(error, EngineRefusedError) for error in failed.values())
            raise (EngineRefusedError if refused else EngineUnavailableError)(
                f"no engine took version {version} within {self._patience_s:g} s: "
                + "; ".join(f"{url}: {why}" for url, why in failed.items())
            )

    async def versions(self) -> dict[str, int | None]:
        """The version that each engine has; None where it has none, or does not answer."""
        found: dict[str, int | None] = {}

        async def ask(engine: Control) -> None:
            try:
                found[engine.url] = await engine.version()
            except TROUBLE as error:
                log.info("engine.silent", url=engine.url, why=str(error) or type(error).__name__)
                found[engine.url] = None

        async with anyio.create_task_group() as tasks:
            for engine in self._engines():
                tasks.start_soon(ask, engine)
        return found

    async def behind(self, version: int) -> list[Control]:
        """The engines that answer but do not work with this version: new, restarted, left out, or still frozen."""
        found: list[Control] = []

        async def look(engine: Control) -> None:
            try:
                if await engine.version() != version or await engine.is_paused():
                    found.append(engine)
            except TROUBLE as error:
                log.debug("engine.silent", url=engine.url, why=str(error) or type(error).__name__)

        async with anyio.create_task_group() as tasks:
            for engine in self._engines():
                tasks.start_soon(look, engine)
        return found

    async def refresh(self, engines: list[Control], path: Path, version: int) -> None:
        """Give a version to these engines alone."""
        absolute = Path(await anyio.Path(path).absolute())
        await self._way.prepare(absolute)
        hurry = anyio.Event()
        hurry.set()

        async def push(engine: Control) -> None:
            try:
                await self._give(engine, absolute, version, hurry)
            except EngineError as error:
                log.warning("engine.push_failed", url=engine.url, version=version, why=str(error))
            else:
                log.info("engine.refreshed", url=engine.url, version=version)

        async with anyio.create_task_group() as tasks:
            for engine in engines:
                tasks.start_soon(push, engine)

    async def answers(self) -> bool:
        """Whether any engine answers."""
        return any([await engine.answers() for engine in self._engines()])

    def _engines(self) -> list[Control]:
        """Those that there are now."""
        urls = self._roster.urls
        self._known = {url: self._known.get(url) or Control(url, self._update_timeout_s) for url in urls}
        self._fit &= set(urls)
        return list(self._known.values())

    async def _awaited(self) -> list[Control]:
        """Those that there are; where there are none yet, whoever comes first."""
        deadline = anyio.current_time() + self._patience_s
        while not (engines := self._engines()):
            if anyio.current_time() > deadline:
                raise EngineUnavailableError(
                    f"the run has no engines, for {self._patience_s:g} s; name them in engine.urls or engine.dns, or "
                    "add one with `penstock engines add`"
                )
            await anyio.sleep(_FIRST_DELAY_S)
        return engines

    async def _give(self, engine: Control, path: Path, version: int, hurry: anyio.Event) -> None:
        """One engine; tries again until the time is over, or a few times in a hurry."""
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
            except TROUBLE as error:
                tries += 1
                self._fit.discard(engine.url)
                why = str(error) or type(error).__name__
                if tries == 1:
                    log.warning("engine.awaited", url=engine.url, version=version, why=why)
                refused = isinstance(error, EngineRefusedError)
                hurried = hurry.is_set() and tries >= _PATIENT_TRIES
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
