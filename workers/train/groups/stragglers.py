"""Those for whom a step waits, and how long (`pacing.late = "wait"`)."""

import time
from collections.abc import Mapping, Sequence

import structlog

from stream.link import LONGEST_WAIT_S

log = structlog.get_logger()

_NAMED = 20
"""Prompts that one line of the log names."""


class Stragglers:
    """Waits for groups until none of them has come for so long; then they are given up, all at once.

    Args:
        timeout_s: how long none may come.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._awaited: frozenset[str] = frozenset()
        self._since = 0.0
        """When the last of them came, or the waiting began."""
        self._began = 0.0
        self._waited_s = 0.0
        self._timed_out = 0
        self._given_up: dict[str, int] = {}
        """With the version at which each was begun: begun anew it is awaited like any other."""
        self._starts: Mapping[str, int] = {}

    def given_up(self, starts: Mapping[str, int]) -> set[str]:
        """Those waited for no more, of the groups that are outstanding now, each with the version it was begun at."""
        self._starts = starts
        self._given_up = {prompt: start for prompt, start in self._given_up.items() if starts.get(prompt) == start}
        return set(self._given_up)

    def keep_waiting(self, awaited: Sequence[str], *, paused: bool) -> bool:
        """Whether to wait for these; False where there are none, or where that has been long enough.

        Args:
            awaited: groups that the step lacks, the longest under way first.
            paused: the run is paused: what a dead worker held comes only after it, so this time does not count.
        """
        now = time.monotonic()
        if not self._awaited and awaited:
            log.info("stragglers.awaited", count=len(awaited), prompts=list(awaited[:_NAMED]))
            self._began = self._since = now
        elif paused or not self._awaited <= set(awaited):  # one has come, or was begun anew
            self._since = now
        if awaited and now - self._since < self._timeout_s:
            self._awaited = frozenset(awaited)
            return True
        if self._awaited:
            self._waited_s += now - self._began
        if awaited:
            log.warning(
                "stragglers.given_up", after_s=self._timeout_s, count=len(awaited), prompts=list(awaited[:_NAMED])
            )
            self._timed_out += len(awaited)
            self._given_up |= {prompt: self._starts[prompt] for prompt in awaited}
        self._awaited = frozenset()
        return False

    @property
    def left_s(self) -> float:
        """How long to wait before it is worth asking again."""
        if not self._awaited:
            return LONGEST_WAIT_S
        return max(0.0, self._since + self._timeout_s - time.monotonic()) + 0.001

    def told(self) -> dict[str, float]:
        """The metrics of the step that was waited for."""
        told = {"stragglers/seconds": self._waited_s, "stragglers/given_up": self._timed_out}
        self._waited_s, self._timed_out = 0.0, 0
        return told
