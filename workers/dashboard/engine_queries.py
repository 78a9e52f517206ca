"""Ask the engines of a run whether they answer, and with which weights; once for all viewers."""

import time
from typing import Final

import anyio
import anyio.to_thread

from stream.errors import PenstockError
from workers.dashboard.run_source import RunSource
from workers.runs.engines import EngineReport, read_engine_reports

_ENGINES_S: Final = 5.0
"""Engines are asked at most this often, however many viewers there are."""
_QUERY_S: Final = 6.0
"""Deadline of asking all engines."""


class EngineQueries:
    """The last answers of the engines of each run, shared by all viewers."""

    def __init__(self) -> None:
        self._lock = anyio.Lock()
        self._known: dict[str, tuple[float, list[EngineReport], str]] = {}

    async def read(self, source: RunSource) -> tuple[list[EngineReport], str]:
        """Return the engines, asked a moment ago, and why they could not be asked."""
        async with self._lock:
            read_at, reports, problem = self._known.get(source.key, (float("-inf"), [], ""))
            if time.monotonic() - read_at > _ENGINES_S:
                reports, problem = await _ask_engines(source)
                self._known[source.key] = time.monotonic(), reports, problem
            return reports, problem


async def _ask_engines(source: RunSource) -> tuple[list[EngineReport], str]:
    try:
        with anyio.fail_after(_QUERY_S):
            location = await anyio.to_thread.run_sync(source.locate)
            return await read_engine_reports(location), ""
    except TimeoutError:
        return [], f"they did not answer within {_QUERY_S:g} s"
    except PenstockError as error:
        return [], str(error)
