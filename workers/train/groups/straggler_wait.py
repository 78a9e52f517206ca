"""How long a step waits for stragglers, with `pacing.stale_policy = "wait"`."""

import time
from collections.abc import Mapping, Sequence

import structlog

from stream.connection.run_connection import MAX_BLOCK_S

log = structlog.get_logger()

_MAX_LOGGED_PROMPTS = 20


class StragglerWait:
    """Waits for groups until none has arrived for `timeout_s`; then it abandons all that are missing.

    Args:
        timeout_s: longest time without an arrival.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._waiting_for: frozenset[str] = frozenset()
        self._last_arrival = 0.0
        """When the last straggler arrived, or the wait started."""
        self._wait_started = 0.0
        self._waited_s = 0.0
        self._abandoned_count = 0
        self._abandoned: dict[str, int] = {}
        """Start version by prompt: a group that starts again, at another version, is waited for like any other."""
        self._start_versions: Mapping[str, int] = {}

    def abandoned(self, start_versions: Mapping[str, int]) -> set[str]:
        """Return the outstanding prompts that are no longer waited for.

        Args:
            start_versions: of all outstanding groups, by prompt.
        """
        self._start_versions = start_versions
        self._abandoned = {
            prompt: version for prompt, version in self._abandoned.items() if start_versions.get(prompt) == version
        }
        return set(self._abandoned)

    def should_wait(self, stragglers: Sequence[str], *, halted: bool) -> bool:
        """Whether the step waits for these groups; False if there are none, or the timeout is over.

        Args:
            stragglers: prompts that the step lacks, the longest in flight first.
            halted: the run is paused, or its engines get new weights; this time does not count. Prompts of a dead
                worker are claimed again only after a pause.
        """
        now = time.monotonic()
        if not self._waiting_for and stragglers:
            log.info("stragglers.waiting", count=len(stragglers), prompts=list(stragglers[:_MAX_LOGGED_PROMPTS]))
            self._wait_started = self._last_arrival = now
        elif halted or not self._waiting_for <= set(stragglers):  # one arrived, or started again
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
        """Seconds until `should_wait` may answer differently."""
        if not self._waiting_for:
            return MAX_BLOCK_S
        return max(0.0, self._last_arrival + self._timeout_s - time.monotonic()) + 0.001

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics since the previous call."""
        metrics = {"stragglers/seconds": self._waited_s, "stragglers/abandoned": self._abandoned_count}
        self._waited_s, self._abandoned_count = 0.0, 0
        return metrics
