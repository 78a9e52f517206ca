"""Says which user code a run waits for."""

import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import structlog

from envs.call.call_memory import RunningCall
from stream.queue.in_flight import Activity, GroupInFlight

log = structlog.get_logger()

_FIRST_S: Final = 10.0
_FACTOR: Final = 3.0
"""A wait is reported after 10, 30, 90, 270 seconds, ..."""
_MOST_TIMES: Final = 5
_MOST_CALLS: Final = 50
"""Different calls that are reported."""
_LONG_BY_DESIGN: Final = ".run_episode)"
"""An environment that runs its own loop has the deadline of an episode, not of a call."""
_PROMPT: Final = re.compile(r", prompt (\S+)")


class Wait(NamedTuple):
    """A call of user code that has not returned."""

    call: str
    """What was called, without the prompt: `environment slow (Slow.reset)`."""
    seconds: float
    where: str
    """Process or worker, and prompt."""

    @property
    def text(self) -> str:
        """The wait as a sentence."""
        return f"{self.call} has not returned for {self.seconds:.0f} s ({self.where})"


class WaitLines:
    """Reports a call that lasts, and calls like it, a few times at growing intervals."""

    def __init__(self) -> None:
        self._times: dict[str, int] = {}
        self._waits: list[Wait] = []

    def observe(self, calls: Iterable[tuple[str, RunningCall]], groups: Sequence[GroupInFlight] = ()) -> list[Wait]:
        """Return the waits that are due to be reported.

        Args:
            calls: that run now, each with the name of its process.
            groups: in flight. Of them the resets count that await, which no thread is in.
        """
        waits = [_of_call(process, call) for process, call in calls if not call.text.endswith(_LONG_BY_DESIGN)]
        seen = {wait.where.partition(", ")[2] for wait in waits}
        waits += [wait for group in groups for wait in _of_group(group) if wait.where.partition(", ")[2] not in seen]
        self._waits = sorted((wait for wait in waits if wait.seconds >= _FIRST_S), key=lambda wait: -wait.seconds)
        due = []
        for wait in self._waits:
            times = self._times.get(wait.call, 0)
            is_known = wait.call in self._times or len(self._times) < _MOST_CALLS
            if is_known and times < _MOST_TIMES and wait.seconds >= _FIRST_S * _FACTOR**times:
                self._times[wait.call] = times + 1
                due.append(wait)
        return due

    def tell(
        self, show: Callable[[str], None], calls: Iterable[tuple[str, RunningCall]], groups: Sequence[GroupInFlight]
    ) -> None:
        """Log and show the waits that are due; arguments as of `observe`."""
        for wait in self.observe(calls, groups):
            log.warning("user_code.waiting", call=wait.call, after_s=round(wait.seconds), where=wait.where)
            show(f"waiting: {wait.text}")

    @property
    def longest(self) -> str:
        """The longest wait at the last look, for the end of an alarm; empty if there is none."""
        return f"; {self._waits[0].text}" if self._waits else ""


def _of_call(process: str, call: RunningCall) -> Wait:
    prompt = _PROMPT.search(call.text)
    where = f"{process}, prompt {prompt[1]}" if prompt else process
    return Wait(_PROMPT.sub("", call.text).strip(), time.monotonic() - call.began, where)


def _of_group(group: GroupInFlight) -> list[Wait]:
    now, name = time.time(), f"environment {group.environment} (reset)"
    return [
        Wait(name, now - each.since, f"{group.worker}, prompt {group.prompt}")
        for each in group.completions
        if each.activity == Activity.RESET and each.since
    ]
