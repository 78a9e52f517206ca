"""Real agent programs do a task in their sandbox, and what is recorded is what was sampled.

A script takes the place of the model: it calls the program's own shell once, and is done. Run by `make test-agents`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from stream.validity import Measured
from tests.agents.played import FOLDER, WRITE, Played, call, play
from workers.rollout.agent_endpoint.fields import FieldUse

pytestmark = [pytest.mark.agents, pytest.mark.timeout(90)]

LOOPS = Path(__file__).parent / "loops"
REASONING = "<think>\nA file is wanted.\n</think>\n\n"


class Program(NamedTuple):
    """How a program is started, and what its model says."""

    ref: str
    route: str
    says: tuple[str, ...]
    args: Mapping[str, Any] = {}


def loop(script: str, kind: str, route: str) -> Program:
    """A loop of an SDK: a script that runs in the virtual environment of the SDKs."""
    env = {"OPENAI_BASE_URL": "{endpoint}", "OPENAI_API_KEY": "{key}", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    env |= {"ANTHROPIC_BASE_URL": "{base_url}", "ANTHROPIC_API_KEY": "{key}", "LANGSMITH_TRACING": "false"}
    python = str(FOLDER / "venv" / "bin" / "python")
    args = {"command": [python, "-I", str(LOOPS / script), kind, "{prompt}"], "env": env}
    says = (REASONING + "I write it." + call("bash", {"command": WRITE}), "Done.")
    return Program("agent:command", route, says, args | {"readable": [str(FOLDER / "venv"), str(LOOPS)]})


def shell(ref: str, route: str, name: str, arguments: Mapping[str, str], last: str = "Done.") -> Program:
    """A program with a profile, and its shell."""
    return Program(ref, route, (REASONING + "I write it." + call(name, dict(arguments)), last))


DESCRIBED = {"command": WRITE, "description": "Write the file"}
SUBMIT = "Done." + call("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})
PROGRAMS = {
    "claude-code": shell("agent:claude-code", "/v1/messages", "Bash", DESCRIBED),
    "codex": shell("agent:codex", "/v1/responses", "exec_command", {"cmd": WRITE}),
    "opencode": shell("agent:opencode", "/v1/chat/completions", "bash", DESCRIBED),
    "mini-swe-agent": shell("agent:mini-swe-agent", "/v1/chat/completions", "bash", {"command": WRITE}, SUBMIT),
    "agents-sdk-chat": loop("openai_agents.py", "chat", "/v1/chat/completions"),
    "agents-sdk-responses": loop("openai_agents.py", "responses", "/v1/responses"),
    "langgraph-openai": loop("langgraph_loop.py", "openai", "/v1/chat/completions"),
    "langgraph-anthropic": loop("langgraph_loop.py", "anthropic", "/v1/messages"),
}


def says(program: Program) -> Callable[[int, str], str]:
    """Return the turns of the script; a program that asks for more is answered with nothing."""
    return lambda turn, _: program.says[turn] if turn < len(program.says) else ""


@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_program_does_its_task_and_its_rows_are_exact(name, measured):
    program = PROGRAMS[name]
    played: Played = await play(program.ref, says(program), **program.args)
    measured(played)
    completion = played.completion
    assert played.reward == Measured(1.0), played.program.output[-2000:]
    assert (played.program.exit_code, played.program.timed_out) == (0, False)
    assert (completion.truncated, completion.turns, completion.tool_calls) == (None, 2, 1 + (name == "mini-swe-agent"))
    assert len(completion.rows) == 1
    played.check_exact()
    assert set(played.seen.routes) == {f"POST {program.route}"}
    assert played.seen.refused == []
    assert played.seen.fields(FieldUse.HONOURED)
    assert played.seen.fields(None) == []
