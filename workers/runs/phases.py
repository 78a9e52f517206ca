"""Where groups spent their time, from prompt to gradient: the one computation, for traces and for pages.

::

    group            from the feeder to the publication of the weights that it changed; its id is made of the prompt's
    ├── wait for a rollout worker
    ├── rollout
    │   └── completion N ── reset, turn N, tools (NAME), reward
    ├── wait for a scorer
    ├── score
    ├── wait for the trainer
    ├── train            the optimizer step that had the group
    └── publish          the next publication

The times are those of the archive and of `metrics.jsonl`. What is not known leaves its phase out.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from msgspec import Struct, structs

from stream.records import ActivityTime, Completion, Group
from workers.runs.transcript import call_names

PHASES: Final = (
    *("wait for a rollout worker", "rollout", "wait for a scorer", "score", "wait for the trainer", "train", "publish"),
)
"""The phases of a group, in their order."""
TRAINER: Final = "train"
"""Where steps and publications take place."""
_PLACES: Final = (
    *("queue of prompts", "rollout", "queue of groups", "score", "queue of scored groups", TRAINER, TRAINER),
)


class Phase(Struct, frozen=True, kw_only=True):
    """Something that went on from one moment to another, in Unix seconds."""

    name: str
    began_at: float
    ended_at: float
    place: str
    """Process, or queue: phases of one place are shown together."""
    attributes: dict[str, str | int | float] = {}
    children: tuple["Phase", ...] = ()

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended_at - self.began_at


class GroupTimes(Struct, frozen=True, gc=False):
    """When a group was where, in Unix seconds; 0 where unknown."""

    fed_at: float = 0.0
    claimed_at: float = 0.0
    rolled_out_at: float = 0.0
    score_claimed_at: float = 0.0
    scored_at: float = 0.0

    @classmethod
    def of_group(cls, group: Group) -> "GroupTimes":
        """Return the times of a group."""
        return cls(group.prompt.fed_at, group.claimed_at, group.rolled_out_at, group.score_claimed_at, group.scored_at)


class StepTimes(Struct, frozen=True, kw_only=True):
    """The times of one optimizer step; 0 where unknown."""

    number: int
    began_at: float
    ended_at: float
    publish_began_at: float = 0.0
    publish_ended_at: float = 0.0
    """When the first publication after the step began and ended."""


def trace_id(run: str, prompt_id: str) -> str:
    """Return the id of a group's trace: 32 hexadecimal digits, the same wherever it is computed."""
    return hashlib.blake2b(f"{run}/{prompt_id}".encode(), digest_size=16).hexdigest()


def read_steps(metrics: Iterable[Mapping[str, float]]) -> dict[int, StepTimes]:
    """Return the times of the steps of `metrics.jsonl`, by number."""
    rows = [row for row in metrics if "step" in row and "time" in row]
    times = {}
    for row, later in zip(rows, [*rows[1:], {}], strict=False):
        ended_at = row["time"] - row.get("publish/waiting_seconds", 0.0)
        publish_ended_at = later.get("publish/time", 0.0)
        if publish_ended_at < row["time"]:
            publish_ended_at = 0.0  # several steps share one publication
        times[int(row["step"])] = StepTimes(
            number=int(row["step"]),
            began_at=ended_at - row.get("seconds", 0.0),
            ended_at=ended_at,
            publish_began_at=publish_ended_at - later.get("publish/seconds", 0.0) if publish_ended_at else 0.0,
            publish_ended_at=publish_ended_at,
        )
    return times


def main_phases(times: GroupTimes, step: StepTimes | None = None) -> list[Phase]:
    """Return the phases of a group whose times are known, in their order.

    A phase whose end is before its beginning is left out: the clocks of two machines contradict each other.

    Args:
        times: of the group.
        step: the one that trained it; None: none did, or its times are not known.
    """
    spans = [
        (times.fed_at, times.claimed_at),
        (times.claimed_at, times.rolled_out_at),
        (times.rolled_out_at, times.score_claimed_at),
        (times.score_claimed_at or times.rolled_out_at, times.scored_at),
    ]
    if step is not None:
        spans += [
            (times.scored_at, step.began_at),
            (step.began_at, step.ended_at),
            (step.publish_began_at, step.publish_ended_at),
        ]
    return [
        Phase(name=name, began_at=began_at, ended_at=ended_at, place=place)
        for name, place, (began_at, ended_at) in zip(PHASES, _PLACES, spans, strict=False)
        if 0 < began_at <= ended_at
    ]


def group_phase(group: Group, outcome: str, step: StepTimes | None) -> Phase | None:
    """Return a group as one phase with all that is in it; None if the group has no times."""
    prompt = group.prompt.id
    parts = []
    for part in main_phases(GroupTimes.of_group(group), step):
        attributes: dict[str, str | int | float] = {"prompt": prompt}
        if part.place == TRAINER and step is not None:
            attributes["step"] = step.number
        named = structs.replace(part, attributes=attributes)
        parts.append(_with_completions(named, group) if part.name == "rollout" else named)
    if not parts:
        return None
    return Phase(
        name=f"group {prompt}",
        began_at=parts[0].began_at,
        ended_at=max(part.ended_at for part in parts),
        place="groups",
        attributes={"prompt": prompt, "outcome": outcome, "attempt": group.attempt},
        children=tuple(parts),
    )


def _with_completions(rollout: Phase, group: Group) -> Phase:
    """Return the rollout of a group with what each completion did, at the place of its worker."""
    place, prompt = group.worker or rollout.place, group.prompt.id
    phases = (_completion(completion, place, prompt) for completion in group.completions)
    children = tuple(phase for phase in phases if phase is not None)
    return structs.replace(rollout, name=f"rollout {prompt}", place=place, children=children)


def _completion(completion: Completion, place: str, prompt: str) -> Phase | None:
    total = next((each for each in completion.activity_times if each.activity == "total"), None)
    if total is None:
        return None
    attributes: dict[str, str | int | float] = {"prompt": prompt, "completion": completion.index}
    attributes |= {"turns": completion.turns, "tool_errors": completion.tool_errors}
    return Phase(
        name=f"completion {completion.index}",
        began_at=total.began_at,
        ended_at=total.began_at + total.seconds,
        place=place,
        attributes=attributes,
        children=tuple(_activities(completion, place)),
    )


def _activities(completion: Completion, place: str) -> Iterator[Phase]:
    """Yield reset, turns, tools and reward of a completion."""
    tools = _tools_by_turn(completion)
    turn = 0
    for each in completion.activity_times:
        attributes: dict[str, str | int | float] = {}
        match each.activity:
            case "total":
                continue
            case "engine":
                name, attributes = f"turn {turn + 1}", {"turn": turn + 1}
                turn += 1
            case "tools":
                called = tools[turn - 1] if 0 < turn <= len(tools) else ()
                name = f"tools: {', '.join(called)}" if called else "reply of the environment"
                attributes = {"turn": turn}
            case name:
                pass
        yield _activity(name, each, place, attributes)


def _activity(name: str, each: ActivityTime, place: str, attributes: dict[str, str | int | float]) -> Phase:
    ended_at = each.began_at + each.seconds
    return Phase(name=name, began_at=each.began_at, ended_at=ended_at, place=place, attributes=attributes)


def _tools_by_turn(completion: Completion) -> Sequence[Sequence[str]]:
    """Return the names of the tools that each turn called, with the seconds of each call."""
    names, runs = call_names(completion.messages), iter(completion.tool_runs)
    turns: list[list[str]] = []
    for message in completion.messages:
        if message.get("role") == "assistant":
            turns.append([])
        elif message.get("role") == "tool" and turns:
            name = str(message.get("name") or names.get(str(message.get("tool_call_id")), "?"))
            run = next(runs, None)
            turns[-1].append(f"{name} {run.seconds:.3g} s" if run is not None and run.seconds else name)
    return turns
