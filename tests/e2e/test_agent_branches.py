"""A whole run of an agent whose conversation branches, from its requests to the step and to what is shown of it."""

import json

import pytest

import penstock

pytestmark = [pytest.mark.usefixtures("preloaded"), pytest.mark.timeout(180)]

TEAM = '''
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from envs.contract import AgentEnvironment


class Team(AgentEnvironment):
    """Asks for a title, asks two others, goes on with what they said, and asks once more for what nobody reads."""

    def reset(self, number, completion_index, **row):
        self.task, self.index = f"Say {number}.", completion_index

    def run_episode(self, endpoint, sampling):
        self.endpoint = endpoint
        self.ask([], "A title.", Role="side", Branch="title")
        main = self.ask([], self.task, Role="main", Branch="task")
        with ThreadPoolExecutor(2) as pool:
            said = list(pool.map(self.ask_other, "12"))
        self.ask(main, f"They said {said}.", Role="main", Branch="task")
        self.ask([], self.task, Role="main", Branch="task")

    def ask_other(self, part):
        found = self.ask([], f"Part {part}: {self.task}", Role="sub", Branch=f"part-{part}", Parent="task")
        return found[-1]["content"]

    def ask(self, before, text, **headers):
        messages = [*before, {"role": "user", "content": text}]
        named = {f"X-Penstock-{name}": value for name, value in headers.items()}
        body = json.dumps({"messages": messages}).encode()
        url = f"{self.endpoint}/chat/completions"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"} | named)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return [*messages, json.load(answer)["choices"][0]["message"]]

    def get_reward(self):
        return float(self.index % 2)
'''


def test_branches_reach_the_step_and_the_screen(project):
    (project.folder / "team.py").write_text(TEAM)
    project.table |= {"environments": {"team": f"{project.folder}/team.py:Team"}, "rewards": []}
    project.table["rollout"] |= {"max_tokens": 60, "max_turns": 8}
    project.table["train"]["max_steps"] = 2
    file = project.write()
    result = project.run("run", str(file))
    assert result.returncode == 0, result.stderr
    run = penstock.open_run(str(project.run_folder))
    for step in run.metrics():
        lost = step["tokens/branch_role"] + step["tokens/branch_superseded"]
        assert step["tokens/sampled"] == step["tokens/loss"] + lost
        assert (step["branches/role/main"], step["branches/role/sub"], step["branches/role/side"]) == (2, 2, 1)
        assert step["branches/compactions"] == 0
    shown = project.run("show", str(project.run_folder), "--json").stdout.splitlines()
    completion = json.loads(shown[0])
    roles = [(branch["role"], branch["name"], branch["discarded"]) for branch in completion["branches"]]
    assert sorted(roles, key=str) == [
        ("main", "task", "superseded"),
        ("main", "task", None),
        ("side", "title", "role"),
        ("sub", "part-1", None),
        ("sub", "part-2", None),
    ]
    assert project.run("audit", str(project.run_folder)).returncode == 0
