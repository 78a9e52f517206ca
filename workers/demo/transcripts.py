"""Scripted transcripts: what the demo's model imitates before reinforcement learning begins.

Clean ones solve the problem; the others show the habit that reinforcement learning has to break. Both are rendered
by the model's own chat template, so what follows an end of turn is exactly what a rollout will put there.
"""

import enum
import random
from collections.abc import Iterator
from typing import Any

from workers.demo.task import Problem, Step, training_problems

Message = dict[str, Any]


class Script(enum.Enum):
    """How a scripted episode goes."""

    CLEAN = "clean"
    """Both calls, then the right answer."""
    HASTY = "hasty"
    """The habit proper: the first call's result is given as the answer."""
    NO_TOOL = "no_tool"
    """A guess, without any call."""
    WRONG_TOOL = "wrong_tool"
    """One of the two calls goes to another tool."""
    WRONG_ARGUMENT = "wrong_argument"
    """One of the two calls has a digit wrong."""


HABIT = {
    Script.HASTY: 0.48,
    Script.NO_TOOL: 0.10,
    Script.WRONG_TOOL: 0.08,
    Script.WRONG_ARGUMENT: 0.08,
    Script.CLEAN: 0.26,
}
"""Shares of the scripts in the second half of the warm start."""


def transcripts(seed: int, *, habit: bool) -> Iterator[list[Message]]:
    """An endless stream of conversations on training problems, clean ones or with the habit's shares."""
    rng = random.Random(f"{seed}/{habit}")
    scripts, shares = (list(HABIT), list(HABIT.values())) if habit else ([Script.CLEAN], [1.0])
    for problem in training_problems(rng.getrandbits(32)):
        [script] = rng.choices(scripts, shares)
        yield play(problem, script, rng)


def play(problem: Problem, script: Script, rng: random.Random) -> list[Message]:
    """The conversation of one episode that follows a script: user, then calls and results, then the answer."""
    first, second = problem.steps
    broken = rng.randrange(2)
    calls: list[Step] = []
    if script is not Script.NO_TOOL:
        calls.append(_spoil(first, script, rng) if broken == 0 else first)
    if script not in (Script.NO_TOOL, Script.HASTY):
        follow = Step(second.tool, calls[0].result, second.b)
        calls.append(_spoil(follow, script, rng) if broken == 1 else follow)
    messages: list[Message] = [{"role": "user", "content": problem.text}]
    for call in calls:
        messages += [_call(call), {"role": "tool", "name": call.tool, "content": str(call.result)}]
    answer = calls[-1].result if calls else first.a + rng.randint(-40, 400)
    return [*messages, {"role": "assistant", "content": f"Answer: {answer}"}]


def _call(step: Step) -> Message:
    function = {"name": step.tool, "arguments": {"a": step.a, "b": step.b}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def _spoil(step: Step, script: Script, rng: random.Random) -> Step:
    """The same call, wrong in the way that the script asks for; unchanged by any other script."""
    if script is Script.WRONG_TOOL:
        return Step(rng.choice(sorted({"add", "subtract", "multiply"} - {step.tool})), step.a, step.b)
    if script is Script.WRONG_ARGUMENT and rng.random() < 0.5:
        return Step(step.tool, _slip(step.a, rng), step.b)
    if script is Script.WRONG_ARGUMENT:
        return Step(step.tool, step.a, _slip(step.b, rng))
    return step


def _slip(number: int, rng: random.Random) -> int:
    """The number with one digit changed to another."""
    digits = list(str(number))
    place = rng.randrange(len(digits))
    digits[place] = rng.choice(sorted(set("123456789") - {digits[place]}))
    return int("".join(digits))
