"""Scripted transcripts that the demo's model imitates before reinforcement learning begins.

Clean transcripts solve the problem; the others show the habit that reinforcement learning has to break. The model's
chat template renders both, so the tokens after an end of turn are the same as in a rollout.
"""

import enum
import random
from collections.abc import Iterator
from typing import Any

from workers.demo.task import Operation, Problem, training_problems

Message = dict[str, Any]


class Behavior(enum.Enum):
    """Behavior of the model in a scripted episode."""

    CLEAN = "clean"
    """Both calls, then the right answer."""
    HASTY = "hasty"
    """The habit: answers with the result of the first call."""
    NO_TOOL = "no_tool"
    """Guesses without a call."""
    WRONG_TOOL = "wrong_tool"
    """One of the two calls uses the wrong tool."""
    WRONG_ARGUMENT = "wrong_argument"
    """One of the two calls has a wrong digit."""


HABIT_SHARES = {
    Behavior.HASTY: 0.48,
    Behavior.NO_TOOL: 0.10,
    Behavior.WRONG_TOOL: 0.08,
    Behavior.WRONG_ARGUMENT: 0.08,
    Behavior.CLEAN: 0.26,
}
"""Share of each behavior in the second part of the warm start."""


def transcripts(seed: int, *, habit: bool) -> Iterator[list[Message]]:
    """Yield conversations on training problems forever: clean ones, or a mix according to `HABIT_SHARES`."""
    rng = random.Random(f"{seed}/{habit}")
    scripts, shares = (list(HABIT_SHARES), list(HABIT_SHARES.values())) if habit else ([Behavior.CLEAN], [1.0])
    for problem in training_problems(rng.getrandbits(32)):
        [script] = rng.choices(scripts, shares)
        yield build_transcript(problem, script, rng)


def build_transcript(problem: Problem, behavior: Behavior, rng: random.Random) -> list[Message]:
    """Return the conversation of one scripted episode: user, calls with their results, answer."""
    first, second = problem.steps
    broken = rng.randrange(2)
    calls: list[Operation] = []
    if behavior is not Behavior.NO_TOOL:
        calls.append(_spoil(first, behavior, rng) if broken == 0 else first)
    if behavior not in (Behavior.NO_TOOL, Behavior.HASTY):
        follow = Operation(second.tool, calls[0].result, second.b)
        calls.append(_spoil(follow, behavior, rng) if broken == 1 else follow)
    messages: list[Message] = [{"role": "user", "content": problem.text}]
    for call in calls:
        messages += [_call(call), {"role": "tool", "name": call.tool, "content": str(call.result)}]
    answer = calls[-1].result if calls else first.a + rng.randint(-40, 400)
    return [*messages, {"role": "assistant", "content": f"Answer: {answer}"}]


def _call(step: Operation) -> Message:
    function = {"name": step.tool, "arguments": {"a": step.a, "b": step.b}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def _spoil(step: Operation, behavior: Behavior, rng: random.Random) -> Operation:
    """Return the call with the error that the behavior demands; unchanged for other behaviors."""
    if behavior is Behavior.WRONG_TOOL:
        return Operation(rng.choice(sorted({"add", "subtract", "multiply"} - {step.tool})), step.a, step.b)
    if behavior is Behavior.WRONG_ARGUMENT and rng.random() < 0.5:
        return Operation(step.tool, _change_digit(step.a, rng), step.b)
    if behavior is Behavior.WRONG_ARGUMENT:
        return Operation(step.tool, step.a, _change_digit(step.b, rng))
    return step


def _change_digit(number: int, rng: random.Random) -> int:
    """Return the number with one digit replaced by another."""
    digits = list(str(number))
    place = rng.randrange(len(digits))
    digits[place] = rng.choice(sorted(set("123456789") - {digits[place]}))
    return int("".join(digits))
