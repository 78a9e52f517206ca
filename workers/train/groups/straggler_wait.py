"""Those for whom a step waits, and how long (`pacing.stale_policy = "wait"`)."""

import time
from collections.abc import Mapping, Sequence

import structlog

from stream.connection.run_connection import MAX_BLOCK_S

log = structlog.get_logger()

_MAX_LOGGED_PROMPTS = 20
"""Prompts that one line of the log names."""


class StragglerWait:
    """Waits for groups until none of them has come for so long; then they are given up, all at once.

    Args:
        timeout_s: how long none may come.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._waiting_for: frozenset[str] = frozenset()
        self._last_arrival = 0.0
        """When the last of them came, or the waiting began."""
        self._wait_started = 0.0
        self._waited_s = 0.0
        self._abandoned_count = 0
        self._abandoned: dict[str, int] = {}
        """With the version at which each was begun: begun anew it is awaited like any other."""
        self._start_versions: Mapping[str, int] = {}

    def abandoned(self, start_versions: Mapping[str, int]) -> set[str]:
        """Those waited for no more, of the groups that are outstanding now, each with the version it was begun at."""
        self._start_versions = start_versions
        self._abandoned = {
            prompt: start for prompt, start in self._abandoned.items() if start_versions.get(prompt) == start
        }
        return set(self._abandoned)

    def should_wait(self, stragglers: Sequence[str], *, paused: bool) -> bool:
        """Whether to wait for these; False where there are none, or where that has been long enough.

        Args:
            stragglers: groups that the step lacks, the longest under way first.
            paused: the run is paused: what a dead worker held comes only after it, so this time does not count.
        """
        now = time.monotonic()
        if not self._waiting_for and stragglers:
            log.info("stragglers.waiting", count=len(stragglers), prompts=list(stragglers[:_MAX_LOGGED_PROMPTS]))
            self._wait_started = self._last_arrival = now
        elif paused or not self._waiting_for <= set(stragglers):  # one has come, or was begun anew
            self._last_arrival = now
        if stragglers and now - self._last_arrival < self._timeout_s:
            self._waiting_for = frozenset(stragglers)
            return True
        if self._waiting_for:
            self._waited_s += now - self._wait_started
        if stragglers:
            log.warning(
                "stragglers.abandoned",
                after_s=self._timeout_s,
                count=len(stragglers),
                prompts=list(stragglers[:_MAX_LOGGED_PROMPTS]),
            )
            self._abandoned_count += len(stragglers)
            self._abandoned |= {prompt: self._start_versions[prompt] for prompt in stragglers}
        self._waiting_for = frozenset()
        return False

    @property
    def remaining_s(self) -> float:
        """How long to wait before it is worth asking again."""
        if not self._waiting_for:
            return MAX_BLOCK_S
        return max(0.0, self._last_arrival + self._timeout_s - time.monotonic()) + 0.001

    def pop_metrics(self) -> dict[str, float]:
        """The metrics of the step that was waited for."""
        told = {"stragglers/seconds": self._waited_s, "stragglers/abandoned": self._abandoned_count}
        self._waited_s, self._abandoned_count = 0.0, 0
        return told
