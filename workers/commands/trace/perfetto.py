"""Spans as a trace in the JSON format of Chrome's tracing, which https://ui.perfetto.dev and `chrome://tracing` open.

Each place is a process, and its threads are lanes: a span is in the first lane that is free when it begins. Arrows
connect the parts of one group.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from workers.commands.trace.spans import Span, Step

_TRAINER = "train"


class Lanes:
    """The lanes of one place.

    Args:
        place: its name.
        number: its number in the trace.
    """

    def __init__(self, place: str, number: int) -> None:
        self.place, self.number = place, number
        self._free_at: list[float] = []

    def __len__(self) -> int:
        return len(self._free_at)

    def lane(self, span: Span) -> int:
        """Return the lane of a span, from 1. Spans must come in the order in which they begin."""
        for lane, free_at in enumerate(self._free_at):
            if free_at <= span.began_at:
                self._free_at[lane] = span.ended_at
                return lane + 1
        self._free_at.append(span.ended_at)
        return len(self._free_at)


def perfetto_trace(groups: Iterable[Span], steps: Mapping[int, Step]) -> dict[str, Any]:
    """Return the trace of groups and of the steps that trained them."""
    found = list(groups)
    events: list[dict[str, Any]] = []
    places: dict[str, Lanes] = {}
    for span, flow in sorted(_rows(found, steps), key=lambda row: row[0].began_at):
        lanes = places.setdefault(span.place, Lanes(span.place, len(places) + 1))
        where = {"pid": lanes.number, "tid": lanes.lane(span)}
        events += _slices(span, where)
        if flow is not None:
            prompt, kind = flow
            number = zlib.crc32(prompt.encode())
            middle = _microseconds((span.began_at + span.ended_at) / 2)
            events.append({"ph": kind, "id": number, "name": "group", "cat": "group", "ts": middle, "bp": "e", **where})
    for lanes in places.values():
        events.append({"ph": "M", "name": "process_name", "pid": lanes.number, "args": {"name": lanes.place}})
        events += [
            {"ph": "M", "name": "thread_name", "pid": lanes.number, "tid": lane, "args": {"name": f"lane {lane}"}}
            for lane in range(1, len(lanes) + 1)
        ]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _rows(groups: list[Span], steps: Mapping[int, Step]) -> Iterator[tuple[Span, tuple[str, str] | None]]:
    """Yield the spans that have a lane of their own, each with the prompt and kind of an arrow that touches it."""
    trained = set()
    for group in groups:
        parts = [part for part in group.children if part.place != _TRAINER]
        trained |= {int(part.attributes["step"]) for part in group.children if "step" in part.attributes}
        prompt = str(group.attributes["prompt"])
        for i, part in enumerate(parts):
            kind = "s" if i == 0 else "f" if i == len(parts) - 1 else "t"
            yield _without_children(part), (prompt, kind) if len(parts) > 1 else None
            for child in part.children:
                yield child, None
    for number in sorted(trained & steps.keys()):
        step = steps[number]
        yield _step_span(f"train step {number}", step.began_at, step.ended_at), None
        if step.publish_ended_at:
            yield _step_span(f"publish after step {number}", step.publish_began_at, step.publish_ended_at), None


def _without_children(span: Span) -> Span:
    return Span(
        name=span.name,
        began_at=span.began_at,
        ended_at=span.ended_at,
        place=span.place,
        attributes=span.attributes,
    )


def _step_span(name: str, began_at: float, ended_at: float) -> Span:
    return Span(name=name, began_at=began_at, ended_at=ended_at, place=_TRAINER)


def _slices(span: Span, where: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Yield a span and, nested in the same lane, its children."""
    yield {
        "ph": "X",
        "name": span.name,
        "cat": "penstock",
        "ts": _microseconds(span.began_at),
        "dur": max(1, _microseconds(span.ended_at) - _microseconds(span.began_at)),
        "args": span.attributes,
        **where,
    }
    for child in span.children:
        yield from _slices(child, where)


def _microseconds(seconds: float) -> int:
    return round(1_000_000 * seconds)
