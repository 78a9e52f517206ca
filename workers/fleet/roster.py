"""Which engines a run has, now: those of the settings, those behind a DNS name, and an operator's list in Redis."""

from collections.abc import Sequence

import anyio
import structlog

from stream.engines import EngineWord, engine_words, engines_now, follow_engine_words
from stream.link import Link
from workers.fleet.addresses import engine_url, engines_at, still_known
from workers.settings.engine import Engine

log = structlog.get_logger()

_ASK_AGAIN_S = 3.0
"""Between two questions to the name server."""


class Roster:
    """The engines of a run; whoever holds it sees every change, once it is watched.

    Args:
        urls: the engines that the settings name.
        dns: a URL whose host name stands for engines, each address one; empty: none.
        link: to the server with the operator's list; None: there is none.

    Raises:
        SettingsError: one of them is no engine's URL.
    """

    def __init__(self, urls: Sequence[str], *, dns: str = "", link: Link | None = None) -> None:
        self._named = tuple(engine_url(url, "engine.urls") for url in urls)
        self._dns = engine_url(dns, "engine.dns") if dns else ""
        self._at_name: dict[str, int] = {}
        self._unresolved = False
        self._link = link
        self._words: list[EngineWord] = []
        self.changed = anyio.Event()
        """Set at the next change, which also puts another one in its place."""
        self.urls = engines_now(self._named, ())
        """Base URLs without a slash at their end, each once."""

    @property
    def why_empty(self) -> str:
        """Where engines could have been named, and what came of it, for people."""
        name = f"{self._dns} (engine.dns) resolves to no address" if self._dns else "engine.dns names none"
        if self._at_name:
            name = f"those of {self._dns} (engine.dns) were removed"
        named = "those of engine.urls were removed" if self._named else "engine.urls names none"
        return f"the run has no engine: {named}, {name}; `penstock engines add` adds one"

    @classmethod
    async def of(cls, engine: Engine, link: Link) -> "Roster":
        """The engines of a run, as they are at this moment.

        Raises:
            SettingsError: the settings name something that is no engine's URL.
        """
        roster = cls(engine.urls, dns=engine.dns, link=link)
        if roster._dns:
            await roster._resolve()
        roster._hear(await engine_words(link))
        return roster

    async def watch(self) -> None:
        """Keep it current, for ever; run it beside the work."""
        async with anyio.create_task_group() as tasks:
            if self._dns:
                tasks.start_soon(self._keep_resolving)
            if self._link is not None:
                tasks.start_soon(self._listen, self._link)

    async def _listen(self, link: Link) -> None:
        async for words in follow_engine_words(link):
            self._hear(words)

    def _hear(self, words: list[EngineWord]) -> None:
        self._words = words
        self._tell()

    async def _keep_resolving(self) -> None:
        while True:
            await anyio.sleep(_ASK_AGAIN_S)
            await self._resolve()

    async def _resolve(self) -> None:
        """Ask the name server; while it does not know the name, what it said before holds."""
        try:
            found = await engines_at(self._dns)
        except (OSError, UnicodeError) as error:  # the latter: a label of the name is empty or too long
            if not self._unresolved:
                self._unresolved = True
                why = str(error) or "no answer in time"
                log.warning("engines.unresolved", name=self._dns, why=why, known=len(self._at_name))
            return
        if self._unresolved:
            self._unresolved = False
            log.info("engines.resolved", name=self._dns, engines=len(found))
        self._at_name = still_known(self._at_name, found)
        self._tell()

    def _tell(self) -> None:
        urls = engines_now((*self._named, *self._at_name), self._words)
        added, removed = sorted(set(urls) - set(self.urls)), sorted(set(self.urls) - set(urls))
        self.urls = urls
        if added or removed:
            log.info("engines.changed", added=added, removed=removed)
            changed, self.changed = self.changed, anyio.Event()
            changed.set()
