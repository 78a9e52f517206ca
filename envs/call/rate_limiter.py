"""Spaces calls evenly."""

import math

import anyio


class RateLimiter:
    """Spaces calls evenly.

    Args:
        per_second: calls that may start in one second; 0: no limit.
    """

    def __init__(self, per_second: float) -> None:
        self._interval_s = 1 / per_second if per_second else 0.0
        self._next_start = -math.inf

    async def acquire(self) -> None:
        """Wait until the next call may start."""
        if self._interval_s:
            start = max(anyio.current_time(), self._next_start)
            self._next_start = start + self._interval_s
            await anyio.sleep_until(start)
