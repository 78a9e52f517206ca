"""The deadlines of one episode: one for the time that its tools take, and one for all other time.

Who causes the time decides. Waiting for an engine measures our load, so that an episode which it ends is left out of
baseline and loss (`wall_clock`). The time in tools follows from the policy's own calls: counted in the same way, a
policy could call slow tools to have a bad completion left out. So it has a clock of its own, whose end is a truncation
like any other limit (`tool_time`), and no tool brings the end by `wall_clock` nearer.
"""

from types import TracebackType

import anyio
from anyio import CancelScope

from stream.validity import TruncationReason


class EpisodeClock:
    """Cancels its body when one of the two times is up. `tools` says when the second one runs.

    Example::

        with clock:
            turn = await sample()
            with clock.tools:
                await call_tools(turn)
        return clock.running  # the reason

    Args:
        limit_s: of each of the two.
    """

    def __init__(self, limit_s: float) -> None:
        self.running = TruncationReason.WALL_CLOCK
        """The time that is running, or that was up."""
        self.is_up = False
        """The body was cancelled because `running` was up."""
        self._left_s = {TruncationReason.WALL_CLOCK: limit_s, TruncationReason.TOOL_TIME: limit_s}
        self._scope: CancelScope | None = None
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = anyio.current_time()
        self._scope = CancelScope(deadline=self._since + self._left_s[self.running])
        self._scope.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        scope, self._scope = self._scope, None
        self.is_up = scope is not None and bool(scope.__exit__(kind, error, traceback))
        return self.is_up

    def shorten(self, limit_s: float) -> None:
        """Lower both limits; call it before the clock runs."""
        self._left_s = {reason: min(left_s, limit_s) for reason, left_s in self._left_s.items()}

    @property
    def tools(self) -> "_Charge":
        """A context in which the time of the tools runs."""
        return _Charge(self, TruncationReason.TOOL_TIME)

    @property
    def engine(self) -> "_Charge":
        """A context, within `tools`, in which the other time runs."""
        return _Charge(self, TruncationReason.WALL_CLOCK)

    def run(self, reason: TruncationReason) -> TruncationReason:
        """Let the other time run from now on; return the one that ran before."""
        before, scope = self.running, self._scope
        if scope is None or scope.cancel_called:
            return before
        now = anyio.current_time()
        self._left_s[before] -= now - self._since
        self._since = now
        if self._left_s[before] <= 0:
            scope.cancel()
        else:
            self.running = reason
            scope.deadline = now + self._left_s[reason]
        return before


class _Charge:
    """A context in which one of the times runs."""

    __slots__ = ("_before", "_clock", "_reason")

    def __init__(self, clock: EpisodeClock, reason: TruncationReason) -> None:
        self._clock, self._reason, self._before = clock, reason, reason

    def __enter__(self) -> None:
        self._before = self._clock.run(self._reason)

    def __exit__(self, *_: object) -> None:
        self._clock.run(self._before)
