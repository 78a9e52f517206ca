"""Ask the engines of a run whether they answer, and with which weights; once for all viewers."""

import time
from typing import Final

import anyio
import anyio.to_thread

from stream.errors import PenstockError
from workers.runs.engines import EngineReport, read_engine_reports
from workers.runs.run import Run

_ENGINES_S: Final = 5.0
"""Engines are asked at most this often, however many viewers there are."""
_QUERY_S: Final = 6.0
"""Deadline of asking all engines."""


class EngineQueries:
    """The last answers of the engines of each run, shared by all viewers."""

    def __init__(self) -> None:
        self._lock = anyio.Lock()
        self._known: dict[str, tuple[float, list[EngineReport], str]] = {}

    async def read(self, run: Run) -> tuple[list[EngineReport], str]:
        """Return the engines, asked a moment ago, and why they could not be asked."""
        async with self._lock:
            read_at, reports, problem = self._known.get(run.key, (float("-inf"), [], ""))
            if time.monotonic() - read_at > _ENGINES_S:
                reports, problem = await _ask_engines(run)
                self._known[run.key] = time.monotonic(), reports, problem
            return reports, problem


async def _ask_engines(run: Run) -> tuple[list[EngineReport], str]:
    try:
        with anyio.fail_after(_QUERY_S):
            settings = await anyio.to_thread.run_sync(lambda: run.settings)
            return await read_engine_reports(settings, run.folder), ""
    except TimeoutError:
        return [], f"they did not answer within {_QUERY_S:g} s"
    except PenstockError as error:
        return [], str(error)
