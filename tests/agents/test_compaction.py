"""Real programs shorten their history when the context is full, and go on: the episode is finished, not truncated.

Claude Code and opencode do so when the engine refuses a context, Codex when the numbers of tokens say so.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest

from stream.errors import EngineRefusedError
from stream.validity import Measured, TruncationReason
from tests.agents.played import CONTEXT_LENGTH, WRITE, ScriptedModel, call, play

pytestmark = [pytest.mark.agents, pytest.mark.timeout(90)]

COUNT = "seq 1 2000"
"""A command with 9 kB of output."""
SUMMARY = "A file answer.txt with 42 is wanted. Nothing is written yet."


class Compacting(NamedTuple):
    """How a program is brought to compact."""

    tool: str
    arguments: Callable[[str], Mapping[str, Any]]
    order: str
    """A part of what it orders its model to do, then."""
    limit: int
    """The longest context that the engine takes."""
    told: int
    """The context length that the program gets as its own."""
    refused: range
    """How many requests the engine refuses: newer versions of Claude Code send the same context three times."""


PROGRAMS = {
    "claude-code": Compacting(
        "Bash",
        lambda line: {"command": line, "description": "Run"},
        "Do NOT call any tools",
        100_000,
        CONTEXT_LENGTH,
        range(1, 4),
    ),
    "opencode": Compacting(
        "bash",
        lambda line: {"command": line, "description": "Run"},
        "that context was compacted",
        35_000,
        CONTEXT_LENGTH,
        range(1, 2),
    ),
    "codex": Compacting("exec_command", lambda line: {"cmd": line}, "remains to be done", 100_000, 60_000, range(1)),
}


def script(program: Compacting, compactions: list[str]) -> Callable[[int, str], Any]:
    """Fill the context; after the summary, do the task."""

    def say(_: int, context: str) -> Any:
        if len(context) > program.limit:
            why = f"the prompt has {len(context)} tokens and the maximum context length is {program.limit}"
            return EngineRefusedError(why)
        conversation = context.rpartition("</tools>")[2]
        if program.order in conversation.rpartition("<|im_start|>user")[2]:
            compactions.append(context)
            return f"<summary>{SUMMARY}</summary>"
        if SUMMARY not in conversation:
            return call(program.tool, dict(program.arguments(COUNT)))
        return "Done." if WRITE in conversation else call(program.tool, dict(program.arguments(WRITE)))

    return say


@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_program_compacts_its_history_and_finishes_its_task(name, measured):
    program, compactions = PROGRAMS[name], []
    say = script(program, compactions)
    played = await play(f"agent:{name}", say, model=ScriptedModel(say, program.told))
    measured(played)
    assert played.reward == Measured(1.0), played.program.output[-2000:]
    assert played.completion.truncated is None
    assert len(compactions) == 1
    assert len(played.seen.refused) in program.refused
    before, summary, after = played.completion.branches
    assert [branch.role for branch in (before, summary, after)] == ["main", "compact", "main"]
    assert (summary.parent, after.parent, after.after_turn) == (0, 1, None)
    assert [branch.discarded for branch in played.completion.branches] == [None] * 3
    assert [branch.rows for branch in played.completion.branches] == [(0,), (1,), (2,)]
    assert before.limited is (TruncationReason.CONTEXT if played.seen.refused else None)
    played.check_exact()
