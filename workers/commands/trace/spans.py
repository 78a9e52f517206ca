"""Spans of a run's groups, from prompt to gradient, made of the times in its archive and `metrics.jsonl`.

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

A time that a record does not have leaves its span out.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from stream.records import Completion, Group, Interval
from workers.runs.transcript import call_names


class Step(Struct, frozen=True, kw_only=True):
    """The times of one optimizer step; 0 where unknown."""

    number: int
    began_at: float
    ended_at: float
    publish_began_at: float = 0.0
    publish_ended_at: float = 0.0
    """Of the first publication after the step."""


class Span(Struct, frozen=True, kw_only=True):
    """Something that went on from one moment to another, in Unix seconds."""

    name: str
    began_at: float
    ended_at: float
    place: str
    """Process, or queue: spans of one place are shown together."""
    attributes: dict[str, str | int | float] = {}
    children: tuple["Span", ...] = ()


def trace_id(run: str, prompt_id: str) -> str:
    """Return the id of a group's trace: 32 hexadecimal digits, the same wherever it is computed."""
    return hashlib.blake2b(f"{run}/{prompt_id}".encode(), digest_size=16).hexdigest()


def read_steps(lines: Iterable[Mapping[str, float]]) -> dict[int, Step]:
    """Return the steps of `metrics.jsonl` by number."""
    rows = [row for row in lines if "step" in row and "time" in row]
    found = {}
    for row, later in zip(rows, [*rows[1:], {}], strict=False):
        ended_at = row["time"] - row.get("publish/waiting_seconds", 0.0)
        publish_ended_at = later.get("publish/time", 0.0)
        if publish_ended_at < row["time"]:
            publish_ended_at = 0.0  # several steps share one publication
        found[int(row["step"])] = Step(
            number=int(row["step"]),
            began_at=ended_at - row.get("seconds", 0.0),
            ended_at=ended_at,
            publish_began_at=publish_ended_at - later.get("publish/seconds", 0.0) if publish_ended_at else 0.0,
            publish_ended_at=publish_ended_at,
        )
    return found


def group_span(group: Group, outcome: str, step: Step | None) -> Span | None:
    """Return the span of a group with all that is in it; None if the group has no times."""
    prompt = group.prompt.id
    parts = [
        _span("wait for a rollout worker", group.prompt.fed_at, group.claimed_at, "queue of prompts", prompt),
        _rollout(group),
        _span("wait for a scorer", group.rolled_out_at, group.score_claimed_at, "queue of groups", prompt),
        _span("score", group.score_claimed_at, group.scored_at, "score", prompt),
    ]
    if step is not None:
        parts += [
            _span("wait for the trainer", group.scored_at, step.began_at, "queue of scored groups", prompt),
            _span("train", step.began_at, step.ended_at, "train", prompt, step=step.number),
            _span("publish", step.publish_began_at, step.publish_ended_at, "train", prompt, step=step.number),
        ]
    children = tuple(part for part in parts if part is not None)
    if not children:
        return None
    attributes: dict[str, str | int | float] = {"prompt": prompt, "outcome": outcome, "attempt": group.attempt}
    ended_at = max(child.ended_at for child in children)
    return Span(
        name=f"group {prompt}",
        began_at=children[0].began_at,
        ended_at=ended_at,
        place="groups",
        attributes=attributes,
        children=children,
    )


def _rollout(group: Group) -> Span | None:
    place = group.worker or "rollout"
    span = _span("rollout", group.claimed_at, group.rolled_out_at, place, group.prompt.id)
    if span is None:
        return None
    completions = (_completion(each, place, group.prompt.id) for each in group.completions)
    return Span(
        name=f"rollout {group.prompt.id}",
        began_at=span.began_at,
        ended_at=span.ended_at,
        place=place,
        attributes=span.attributes,
        children=tuple(each for each in completions if each is not None),
    )


def _completion(completion: Completion, place: str, prompt: str) -> Span | None:
    total = next((each for each in completion.intervals if each.activity == "total"), None)
    if total is None:
        return None
    attributes: dict[str, str | int | float] = {"prompt": prompt, "completion": completion.index}
    attributes |= {"turns": completion.turns, "tool_errors": completion.tool_errors}
    return Span(
        name=f"completion {completion.index}",
        began_at=total.began_at,
        ended_at=total.began_at + total.seconds,
        place=place,
        attributes=attributes,
        children=tuple(_activities(completion, place)),
    )


def _activities(completion: Completion, place: str) -> Iterator[Span]:
    """Yield reset, turns, tools and reward of a completion."""
    tools = _tools_by_turn(completion)
    turn = 0
    for each in completion.intervals:
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
        yield _interval_span(name, each, place, attributes)


def _interval_span(name: str, each: Interval, place: str, attributes: dict[str, str | int | float]) -> Span:
    ended_at = each.began_at + each.seconds
    return Span(name=name, began_at=each.began_at, ended_at=ended_at, place=place, attributes=attributes)


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


def _span(name: str, began_at: float, ended_at: float, place: str, prompt: str, step: int | None = None) -> Span | None:
    """Return a span; None if one of its times is unknown, or the clocks of two machines contradict each other."""
    if not 0 < began_at <= ended_at:
        return None
    attributes: dict[str, str | int | float] = {"prompt": prompt} | ({} if step is None else {"step": step})
    return Span(name=name, began_at=began_at, ended_at=ended_at, place=place, attributes=attributes)
