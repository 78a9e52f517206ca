"""The trace of a run's groups as a file for https://ui.perfetto.dev, and for an OpenTelemetry collector.

The file is in the JSON format of Chrome's tracing, which `chrome://tracing` opens, too. Each place is a process, and
its threads are lanes: a phase is in the first lane that is free when it begins. Arrows connect the parts of one group.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct

from stream.durable import write_file_atomically
from stream.errors import PenstockError
from workers.runs.groups import ArchivedRunGroups
from workers.runs.metrics_file import read_metrics
from workers.runs.phases import TRAINER, Phase, StepTimes, group_phase, read_steps
from workers.runs.selection import NumberRange


class Trace(Struct, frozen=True, kw_only=True):
    """The newest groups of a run, each as one phase."""

    groups: list[Phase]
    steps: dict[int, StepTimes]
    """The times of all steps, by number."""
    notes: list[str] = []
    """About groups that could not be read."""


def read_trace(folder: Path, steps: NumberRange | None, count: int) -> Trace:
    """Return where the newest archived groups of a run spent their time. Reads its folder only.

    Args:
        folder: of the run.
        steps: only groups that these steps ended; None: of all steps.
        count: largest number of groups.

    Raises:
        PenstockError: the run has no archived group of these steps.
    """
    times, archived = read_steps(read_metrics(folder / "metrics.jsonl")), ArchivedRunGroups(folder)
    groups = list(islice(_group_phases(archived, times, steps), count))
    if not groups:
        raise PenstockError(f"the run in {folder} has no archived group" + (f" of steps {steps}" if steps else " yet"))
    return Trace(groups=groups, steps=times, notes=archived.damaged)


def _group_phases(
    archived: ArchivedRunGroups, times: Mapping[int, StepTimes], steps: NumberRange | None
) -> Iterator[Phase]:
    for group in archived.groups(steps):
        first = group.completions[0]
        phase = group_phase(first.group, first.outcome, times.get(first.step or 0))
        if phase is not None:
            yield phase


def write_perfetto(trace: Trace, file: Path) -> None:
    """Write a trace for Perfetto.

    Raises:
        PenstockError: the file cannot be written.
    """
    try:
        write_file_atomically(file, msgspec.json.encode(perfetto_trace(trace.groups, trace.steps)))
    except OSError as error:
        raise PenstockError(f"{file} could not be written: {error.strerror}") from error


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

    def lane(self, phase: Phase) -> int:
        """Return the lane of a phase, from 1. Phases must come in the order in which they begin."""
        for lane, free_at in enumerate(self._free_at):
            if free_at <= phase.began_at:
                self._free_at[lane] = phase.ended_at
                return lane + 1
        self._free_at.append(phase.ended_at)
        return len(self._free_at)


def perfetto_trace(groups: Sequence[Phase], steps: Mapping[int, StepTimes]) -> dict[str, Any]:
    """Return the trace of groups and of the steps that trained them."""
    events: list[dict[str, Any]] = []
    places: dict[str, Lanes] = {}
    numbers: dict[str, int] = {}
    for phase, arrows in sorted(_rows(groups, steps), key=lambda row: row[0].began_at):
        lanes = places.setdefault(phase.place, Lanes(phase.place, len(places) + 1))
        where = {"pid": lanes.number, "tid": lanes.lane(phase)}
        events += _slices(phase, where)
        middle = _microseconds((phase.began_at + phase.ended_at) / 2)
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


def _rows(groups: Sequence[Phase], steps: Mapping[int, StepTimes]) -> Iterator[tuple[Phase, list[_Arrow]]]:
    """Yield the phases that have a lane of their own, each with the arrows that touch it."""
    trained: dict[int, list[_Arrow]] = {}
    for group in groups:
        parts = [part for part in group.children if part.place != TRAINER]
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
        yield _step_phase(f"train step {number}", step_times.began_at, step_times.ended_at), arrows
        if step_times.publish_ended_at:
            name = f"publish after step {number}"
            yield _step_phase(name, step_times.publish_began_at, step_times.publish_ended_at), []


def _without_children(phase: Phase) -> Phase:
    return Phase(
        name=phase.name,
        began_at=phase.began_at,
        ended_at=phase.ended_at,
        place=phase.place,
        attributes=phase.attributes,
    )


def _step_phase(name: str, began_at: float, ended_at: float) -> Phase:
    return Phase(name=name, began_at=began_at, ended_at=ended_at, place=TRAINER)


def _slices(phase: Phase, where: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Yield a phase and, nested in the same lane, its children."""
    yield {
        "ph": "X",
        "name": phase.name,
        "cat": "penstock",
        "ts": _microseconds(phase.began_at),
        "dur": max(1, _microseconds(phase.ended_at) - _microseconds(phase.began_at)),
        "args": phase.attributes,
        **where,
    }
    for child in phase.children:
        yield from _slices(child, where)


def _microseconds(seconds: float) -> int:
    return round(1_000_000 * seconds)
