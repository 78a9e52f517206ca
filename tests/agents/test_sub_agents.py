"""Real programs start three sub-agents: each has a branch, and all are sampled at once."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import anyio
import pytest

from stream.records import BranchRole
from stream.validity import Measured
from tests.agents.played import TASK, WRITE, ScriptedModel, call, play

pytestmark = [pytest.mark.agents, pytest.mark.timeout(90)]

COUNT = 3
LOOK = "echo *.none"
"""A command that no prompt names."""


class Spawning(NamedTuple):
    """How a program starts sub-agents."""

    tool: str
    arguments: Callable[[int], Mapping[str, Any]]
    shell: str
    write: Mapping[str, Any]
    wait: str = ""
    """The tool that waits for them; empty: the calls return their results."""


def described(number: int) -> dict[str, Any]:
    return {"description": f"s{number}", "prompt": f"SUBTASK {number}: look around"}


WRITTEN = {"command": WRITE, "description": "Write the file"}
PROGRAMS = {
    "claude-code": Spawning("Agent", lambda n: described(n) | {"subagent_type": "general-purpose"}, "Bash", WRITTEN),
    "opencode": Spawning("task", lambda n: described(n) | {"subagent_type": "general"}, "bash", WRITTEN),
    "codex": Spawning(
        "multi_agent_v1__spawn_agent",
        lambda n: {"message": f"SUBTASK {n}: look around"},
        "exec_command",
        {"cmd": WRITE},
        "multi_agent_v1__wait_agent",
    ),
}


def script(program: Spawning) -> Callable[[int, str], str]:
    """Start the sub-agents, wait for them, do the task; a sub-agent looks around."""

    def say(_: int, context: str) -> str:
        conversation = context.rpartition("</tools>")[2]
        if TASK not in conversation:
            look = {name: LOOK if value == WRITE else value for name, value in program.write.items()}
            return "The folder is empty." if LOOK in conversation else call(program.shell, look)
        if "SUBTASK" not in conversation:
            return "".join(call(program.tool, dict(program.arguments(number))) for number in range(COUNT))
        if program.wait and program.wait not in conversation:
            agents = re.findall(r'agent_id\\*"\s*:\s*\\*"([^"\\]+)', conversation)
            return call(program.wait, {"targets": agents, "timeout_ms": 20_000})
        return "Done." if WRITE in conversation else call(program.shell, dict(program.write))

    return say


class SlowModel(ScriptedModel):
    """Takes half a second for each turn; notes how many it samples at once.

    Attributes:
        most: the most turns at once.
    """

    def __init__(self, say: Callable[[int, str], str]) -> None:
        super().__init__(say)
        self.most = self._now = 0

    async def sample(self, *args: Any, **options: Any) -> Any:
        self._now += 1
        self.most = max(self.most, self._now)
        await anyio.sleep(0.5)
        self._now -= 1
        return await super().sample(*args, **options)


@pytest.mark.parametrize("name", PROGRAMS)
async def test_three_sub_agents_work_at_once_and_each_has_its_branch(name, measured):
    model = SlowModel(script(PROGRAMS[name]))
    played = await play(f"agent:{name}", None, model=model)
    measured(played)
    assert played.reward == Measured(1.0), played.program.output[-2000:]
    branches = played.completion.branches
    main, *subs = sorted(branches, key=lambda branch: branch.role)
    assert [branch.role for branch in (main, *subs)] == [BranchRole.MAIN, *[BranchRole.SUB] * COUNT]
    assert [branch.parent for branch in subs] == [branches.index(main)] * COUNT
    assert [branch.turns for branch in subs] == [2] * COUNT
    assert len({branch.name for branch in branches}) == 1 + COUNT
    assert not any(branch.discarded for branch in branches)
    assert sorted(row for branch in branches for row in branch.rows) == [*range(len(played.completion.rows))]
    assert len(played.completion.rows) == 1 + COUNT
    assert model.most >= COUNT
    played.check_exact()
