"""Looks after the engines of a run: who is there, who is ejected, who has come back, and how much each can do.

One task to an engine. Until it is there, the task looks for it, with growing pauses; once it is, what the engine says
of itself at `/metrics` decides how many requests it is given, and that it says anything at all shows that it lives.
Requests never look: they wait for a place (`places.py`).

An engine is ejected where its connections break, where `FAILURES` requests fail in a row that others may answer, and
where two questions in a row remain without an answer; and where it lost a route, or its version: another server
answers there, perhaps of another kind. It comes back when it was looked at like one that is new.
"""

import random
from collections.abc import Sequence
from http import HTTPStatus
from typing import Final

import anyio
import structlog
from anyio.abc import TaskGroup

from stream.errors import EngineError
from workers.engine.connection import QUESTION_S, Connection, SilentError
from workers.engine.wire import WeightInfo
from workers.fleet.roster import Roster
from workers.rollout.engine.answer import NONE_YET, UnfitError, version_number
from workers.rollout.engine.known_engine import KnownEngine
from workers.rollout.engine.places import Places
from workers.rollout.engine.probe import Probe
from workers.rollout.engine.signals import read_signals

log = structlog.get_logger()

FAILURES: Final = 3
"""In a row, for which an engine that seems to live is ejected."""
_SILENCES: Final = 2
"""Questions in a row without an answer, for which it is ejected, and its requests are asked elsewhere."""
_FIRST_LOOK_S, _LONGEST_PAUSE_S = 0.05, 2.0
_LONGEST_REST_S: Final = 30.0
"""An engine that seems to live, and yet fails again and again, is left alone for so long."""
_UNFIT_PAUSE_S: Final = 10.0
_LOOKS_S: Final = (1.0, 2.0)
"""Between two looks at an engine's figures; at random, so that workers do not come together."""
_ASK_AGAIN_S: Final = 0.5
"""Between two questions for an engine's version, however many requests wait for it."""


class Lookout:
    """Looks after engines.

    Args:
        roster: which engines there are.
        places: where requests wait for them.
        connection: the way to them.
        probe: what makes one fit.
        tasks: where its tasks run.
        bounds: least and most requests of ours at one engine.
        health_s: for an answer to the question whether one lives.
    """

    def __init__(
        self,
        roster: Roster,
        places: Places,
        connection: Connection,
        probe: Probe,
        tasks: TaskGroup,
        bounds: tuple[int, int],
        health_s: float,
    ) -> None:
        self._roster, self._places, self._connection, self._probe = roster, places, connection, probe
        self._tasks = tasks
        self._least, self._most = bounds
        self._health_s = min(QUESTION_S, health_s)

    async def follow_roster(self) -> None:
        """Begin with engines that are added, let go of those that are removed; for ever."""
        while True:
            changed = self._roster.changed
            self.sync(self._roster.urls)
            await changed.wait()

    def sync(self, urls: Sequence[str]) -> None:
        """Know these engines and no others. What one that is removed works on, it may finish."""
        known = self._places.engines
        for url in [url for url in known if url not in urls]:
            removed = known.pop(url)
            removed.facts = None
            removed.watch.cancel()
        for url in urls:
            if url not in known:
                known[url] = KnownEngine(url, self._most)
                self._tasks.start_soon(self._look_after, known[url])

    def eject(self, engine: KnownEngine, why: EngineError) -> None:
        """Let nobody ask it until it was looked at."""
        if engine.facts is not None:
            engine.ejected(why)
            engine.attendance.cancel()

    def request_failed(self, engine: KnownEngine, at_least: int, error: EngineError) -> None:
        """Take note that it answered with an error, or not in time."""
        engine.failures += 1
        if engine.failures >= FAILURES and self._places.elsewhere(engine, at_least):
            self.eject(engine, EngineError(f"{engine.failures} requests failed in a row; the last: {error}"))
        elif not engine.checked:
            engine.checked = True
            self._tasks.start_soon(self.check, engine)

    async def check(self, engine: KnownEngine) -> bool:
        """Whether it says that it is well; if not, it is ejected."""
        try:
            await self._health(engine)
        except EngineError as error:
            self.eject(engine, error)
            return False
        finally:
            engine.checked = False
        return True

    def lacks_weights(self, engine: KnownEngine, why: EngineError) -> None:
        """Let nobody ask it who needs weights newer than it has, until it has others."""
        engine.awaited("weights", why)
        if not engine.lacks_weights:
            engine.lacks_weights = True
            self._tasks.start_soon(self._await_weights, engine)

    async def version(self, engine: KnownEngine) -> int:
        """Ask it which policy version it has."""
        info = await self._connection.ask(f"{engine.url}/weight_info", WeightInfo)
        self.heard(engine, version_number(info.weight_version))
        return engine.version

    def heard(self, engine: KnownEngine, version: int) -> None:
        """It told its version. One that has none any more was started anew, and perhaps otherwise.

        An older one tells nothing: of two answers round an update, the first may be read last.
        """
        before = engine.version
        engine.spoke(version)
        if version == NONE_YET < before:
            why = f"{engine.url} has no policy version after {before}, so it was started anew"
            self.eject(engine, EngineError(why))

    async def _await_weights(self, engine: KnownEngine) -> None:
        before, silences = engine.version, 0
        while engine.lacks_weights and engine.facts is not None:
            await anyio.sleep(_ASK_AGAIN_S)
            try:
                if await self.version(engine) != before:
                    engine.lacks_weights = False
                silences = 0
            except EngineError as error:
                silences += 1
                if isinstance(error, SilentError) or silences >= _SILENCES:
                    self.eject(engine, error)
        self._places.hand_out()

    async def _look_after(self, engine: KnownEngine) -> None:
        with engine.watch:
            while True:
                await self._find(engine)
                self._places.hand_out()
                with anyio.CancelScope() as engine.attendance:
                    await self._attend(engine)
                seems_well = engine.failures >= FAILURES
                if seems_well:
                    await anyio.sleep(min(_LONGEST_REST_S, 2.0 ** min(engine.ejections, 10) / 4))

    async def _find(self, engine: KnownEngine) -> None:
        """Look until it is there, and is what it should be."""
        pause = _FIRST_LOOK_S
        while True:
            try:
                await self._health(engine)
                engine.found(await self._probe.look(engine.url))
            except EngineError as error:
                engine.missed(error)
                await anyio.sleep(random.uniform(pause / 2, pause))
                pause = _UNFIT_PAUSE_S if isinstance(error, UnfitError) else min(2 * pause, _LONGEST_PAUSE_S)
            else:
                return

    async def _attend(self, engine: KnownEngine) -> None:
        """While it works, look how busy it is."""
        path, silences = "/metrics", 0
        while True:
            await engine.works.wait()
            await anyio.sleep(random.uniform(*_LOOKS_S))
            asked_at = anyio.current_time()
            try:
                status, payload = await self._connection.send("GET", engine.url + path, QUESTION_S)
            except SilentError as error:
                return self.eject(engine, error)
            except EngineError as error:
                silences = silences + 1 if engine.answered_at < asked_at else 0
                if silences >= _SILENCES:
                    return self._give_up(engine, error)
                continue
            silences = 0
            signals = read_signals(payload.decode(errors="replace")) if status == 200 else None
            if signals is not None:
                engine.concurrency = engine.concurrency.after(
                    signals,
                    ours=engine.load,
                    queueing=self._places.queueing(engine),
                    least=self._least,
                    most=self._most,
                )
                self._places.hand_out()
            elif path == "/metrics" and status < HTTPStatus.INTERNAL_SERVER_ERROR:
                path = "/health"
                log.info("engine.unmetered", url=engine.url, limit=engine.concurrency.limit)

    def _give_up(self, engine: KnownEngine, why: EngineError) -> None:
        """It is silent: what it works on is asked elsewhere, where there is an elsewhere."""
        self.eject(engine, why)
        if self._places.there:
            for request in engine.requests:
                request.cancel()

    async def _health(self, engine: KnownEngine) -> None:
        status, _ = await self._connection.send("GET", engine.url + "/health", self._health_s)
        if status != 200:
            raise EngineError(f"{engine.url}/health answers {status}")
