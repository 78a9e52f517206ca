"""Phases of groups as bars on a common axis of time, for the pages *Group* and *Timeline*."""

import math
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from workers.runs.phases import PHASES, Phase

_MIN_WIDTH: Final = 0.15
"""Percent; a shorter bar would not be seen."""


class Bar(Struct, frozen=True, kw_only=True):
    """One phase on an axis; left end and width are in percent."""

    phase: Phase
    number: int
    """Position in `PHASES`; chooses the color."""
    left: float
    width: float


class Axis(Struct, frozen=True, kw_only=True):
    """An axis, as Unix times in seconds."""

    start: float
    end: float

    @classmethod
    def of_phases(cls, phases: Sequence[Phase]) -> "Axis":
        """Return the axis on which all these phases are; there is one or more."""
        return cls(start=phases[0].began_at, end=max(phase.ended_at for phase in phases))

    @property
    def ticks(self) -> list[tuple[float, float]]:
        """Round times after the start, in seconds, at most six of them, each with its position in percent."""
        length = max(self.end - self.start, 1e-9)
        rough = length / 6
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * times for times in (1, 2, 5, 10) if unit * times >= rough)
        return [(step * n, round(100 * step * n / length, 3)) for n in range(int(length / step) + 1)]

    def bars(self, phases: Sequence[Phase]) -> list[Bar]:
        """Return phases as bars; what lies before the axis is cut off."""
        bars = []
        for phase in phases:
            if phase.ended_at > self.start or phase.began_at >= self.start:
                left, right = self._at(max(phase.began_at, self.start)), self._at(phase.ended_at)
                width = max(_MIN_WIDTH, round(right - left, 3))
                bars.append(Bar(phase=phase, number=PHASES.index(phase.name), left=left, width=width))
        return bars

    def _at(self, time: float) -> float:
        """Return the position of a time in percent."""
        return round(100 * (time - self.start) / max(self.end - self.start, 1e-9), 3)
