"""How runs end whose user code fails late, or that cannot learn: cause and verdict are on the terminal."""

import json

from workers.runtime.exit_codes import ExitCode

MAZE = """
class Maze:
    def reset(self, **row) -> str:
        self.steps = []
        return "Find the way out."

    def go(self, direction: str) -> str:
        "Go one step.\\n\\nArgs:\\n    direction: left or right."
        self.steps.append(direction)
        return "a wall"

    def get_reward(self) -> float:
        return float(self.steps == ["left", "right"])
"""


def test_a_maze_whose_tools_are_never_called_ends_with_a_verdict(project):
    (project.folder / "world.py").write_text(MAZE)
    project.table |= {"environments": {"maze": f"{project.folder}/world.py:Maze"}, "rewards": []}
    project.table["train"]["batch_size"] = 2
    result = project.run("run", str(project.write()))
    assert result.returncode == ExitCode.UNTRAINED, f"{result.stderr}\n{project.logs()}"
    for words in (
        "10 of 10 groups had equal rewards (0.0); nothing was trained",
        "mean reward 0.000 over 40 completions",
        "no tool was called",
        "of completions were truncated",
        "Find the way out.",
    ):
        assert words in result.stdout, result.stdout
    warning = "the last 8 groups each had equal rewards (0.0), so they teach nothing"
    assert result.stderr.count(warning) == 1, result.stderr
    assert warning in (project.run_folder / "warnings.jsonl").read_text()
    summary = json.loads((project.run_folder / "summary.json").read_text())
    assert summary["verdict"].startswith("10 of 10 groups had equal rewards")
    assert summary["totals"]["tool_calls"] == 0


LATE = """
calls = 0


def exact(completions, number, **columns):
    global calls
    calls += 1
    if calls > 3:  # the preflight calls it twice
        lookup(number)
    return [float(i) for i in range(len(completions))]


def lookup(number):
    return {}[number[0]]
"""


def test_a_reward_that_raises_later_ends_the_run_with_its_place(project):
    (project.folder / "rewards.py").write_text(LATE)
    project.prompts(40)
    project.table |= {"rewards": [{"ref": f"{project.folder}/rewards.py:exact"}]}
    result = project.run("run", str(project.write()), "--json")
    assert result.returncode == ExitCode.FAILURE
    line = LATE.splitlines().index("    return {}[number[0]]") + 1
    for words in (
        "reward:raised (reward function exact: KeyError:",
        f"(rewards.py, line {line})",
        f'  File "{project.folder}/rewards.py", line {line}, in lookup\n    return {{}}[number[0]]',
    ):
        assert words in result.stderr, result.stderr
    assert "/envs/rewards/" not in result.stderr
    failure = json.loads(result.stdout)["failure"]
    assert failure["cause"]["source"] == "reward function exact"
    assert (failure["cause"]["file"], failure["cause"]["line"]) == (f"{project.folder}/rewards.py", line)
    assert "Traceback" in failure["cause"]["traceback"]
