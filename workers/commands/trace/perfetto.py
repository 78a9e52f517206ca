"""Spans as a trace in the JSON format of Chrome's tracing, which https://ui.perfetto.dev and `chrome://tracing` open.

Each place is a process, and its threads are lanes: a span is in the first lane that is free when it begins. Arrows
connect the parts of one group.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

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
    numbers: dict[str, int] = {}
    for span, arrows in sorted(_rows(found, steps), key=lambda row: row[0].began_at):
        lanes = places.setdefault(span.place, Lanes(span.place, len(places) + 1))
        where = {"pid": lanes.number, "tid": lanes.lane(span)}
        events += _slices(span, where)
        middle = _microseconds((span.began_at + span.ended_at) / 2)
        for arrow in arrows:
            number = numbers.setdefault(arrow.prompt, len(numbers) + 1)
            events.append(
                {"ph": arrow.kind, "id": number, "name": "group", "cat": "group", "ts": middle, "bp": "e", **where}
            )
    for lanes in places.values():
        events.append({"ph": "M", "name": "process_name", "pid": lanes.number, "args": {"name": lanes.place}})
        events += [
            {"ph": "M", "name": "thread_name", "pid": lanes.number, "tid": lane, "args": {"name": f"lane {lane}"}}
            for lane in range(1, len(lanes) + 1)
        ]
    return {"displayTimeUnit": "ms", "traceEvents": events}


class _Arrow(NamedTuple):
    """The arrow of a group begins (`s`), goes on (`t`) or ends (`f`) here."""

    prompt: str
    kind: Literal["s", "t", "f"]


def _rows(groups: list[Span], steps: Mapping[int, Step]) -> Iterator[tuple[Span, list[_Arrow]]]:
    """Yield the spans that have a lane of their own, each with the arrows that touch it."""
    trained: dict[int, list[_Arrow]] = {}
    for group in groups:
        parts = [part for part in group.children if part.place != _TRAINER]
        prompt = str(group.attributes["prompt"])
        step = next((int(part.attributes["step"]) for part in group.children if part.name == "train"), None)
        if step is not None and step in steps:
            trained.setdefault(step, []).append(_Arrow(prompt, "f"))
        for i, part in enumerate(parts):
            is_last = i == len(parts) - 1 and step not in steps
            yield _without_children(part), [_Arrow(prompt, "s" if i == 0 else "f" if is_last else "t")]
            for child in part.children:
                yield child, []
    for number, arrows in sorted(trained.items()):
        step_times = steps[number]
        yield _step_span(f"train step {number}", step_times.began_at, step_times.ended_at), arrows
        if step_times.publish_ended_at:
            name = f"publish after step {number}"
            yield _step_span(name, step_times.publish_began_at, step_times.publish_ended_at), []


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
