"""The examples of agent programs: the task can be done, and is not done already."""

from pathlib import Path

import anyio
import pytest

from stream.validity import Measured
from tests.agents.played import call, play
from workers.settings.toml_file import load_settings

pytestmark = [pytest.mark.agents, pytest.mark.timeout(90)]

EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
FIX = "sed -i 's/argv.0./argv[1]/' greet.py && python3 greet.py Ada"
CALLS = {
    "claude_code": call("Bash", {"command": FIX, "description": "Mend"}),
    "codex": call("exec_command", {"cmd": FIX}),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("says", "reward"), [((), 0.0), (("call",), 1.0)], ids=["idle", "mended"])
async def test_the_reward_is_1_for_the_mended_program_alone(name, says, reward, monkeypatch, measured):
    monkeypatch.chdir(EXAMPLES / name)
    given = (await anyio.to_thread.run_sync(load_settings, Path("run.toml"))).environments["fix"]
    turns = [*(CALLS[name] for _ in says), "Done."]
    played = await play(given.ref, lambda turn, _: turns[turn], **given.args)
    measured(played)
    assert played.reward == Measured(reward), played.program.output[-2000:]
    played.check_exact()


@pytest.mark.parametrize(
    ("says", "reward"),
    [
        ("```bash\necho 7 > answer.txt\n```", 1.0),
        ("```bash\necho 4 > answer.txt\n```", 0.0),
        ("The larger one is 7.", 0.0),
    ],
    ids=["right", "smaller", "text"],
)
async def test_mini_swe_agent_runs_the_one_command_of_a_small_model(says, reward, monkeypatch, measured):
    monkeypatch.chdir(EXAMPLES / "mini_swe_agent")
    given = (await anyio.to_thread.run_sync(load_settings, Path("run.toml"))).environments["mini"]
    task = "Write the larger of 4 and 7 to answer.txt."
    played = await play(given.ref, lambda *_: says, fields={"answer": 7}, task=task, **given.args)
    measured(played)
    assert played.reward == Measured(reward), played.program.output[-2000:]
    assert played.completion.turns == 1
    assert played.completion.prompt_messages[-1]["content"].endswith(f"```\n\n{task}")
    played.check_exact()
