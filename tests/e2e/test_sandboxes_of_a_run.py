"""A whole run whose episodes open sandboxes, while workers are killed and sandboxes removed by hand."""

import json
import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from tests.cases import sandbox_place
from tests.cases.sandbox_place import reached, serve_place
from tests.e2e.harness import assert_all_trained_once, children, finish, running, wait_for_trained
from workers.runs.find import open_run

pytestmark = [pytest.mark.timeout(280), pytest.mark.usefixtures("preloaded")]

ENVIRONMENT = """
from envs.sandboxes.contract import SandboxSpec

class Boxed:
    async def reset(self, sandboxes, completion_index, **row):
        self.sandbox = await sandboxes.open(SandboxSpec(memory_mb=64, disk_mb=64, max_life_s=600), purpose="agent")
        await self.sandbox.write({"n": str(completion_index).encode()})

    async def get_reward(self):
        await self.sandbox.exec(["sleep", "0.05"], timeout_s=5)
        return 1.0 + int(await self.sandbox.read("n", 10)) % 2
"""


@contextmanager
def place_of(project, workers):
    """Give the run a place; yields the path of its socket."""
    (project.folder / "boxed.py").write_text(ENVIRONMENT)
    with serve_place(project.folder) as path:
        project.table["environments"] = {"box": f"{project.folder}/boxed.py:Boxed"}
        project.table["sandboxes"] = {
            "provider": f"{Path(sandbox_place.__file__).resolve()}:PlaceProvider",
            "address": str(path),
            "create_timeout_s": 4.0,
            "grace_s": 1.0,
        }
        project.table["rollout"]["workers"] = workers
        project.table["filter"] = {"zero_variance": False, "min_valid_rows": 1}
        del project.table["rewards"]
        yield path


def ask(path, **request):
    async def asked():
        async with reached(path) as place:
            return await place.ask(**request)

    return anyio.run(asked)


def test_a_run_under_kills_leaves_no_sandbox_and_accounts_for_all(project):
    prompts = 40
    project.prompts(prompts)
    with place_of(project, workers=2) as path, running(project) as process:
        for trained in (4, 16):
            wait_for_trained(project, trained, process, 120)
            os.kill(children(process.pid)["rollout"], signal.SIGKILL)
        summary = finish(process, project)
        assert_all_trained_once(project, summary, prompts)
        assert ask(path, do="list")["sandboxes"] == {}
        report = open_run(project.run_folder).audit()
        assert report.clean, report
        account = report.sandboxes
        assert (account.live, account.begun) == (0, account.stopped + account.reaped + account.stray)
        assert account.begun >= 4 * prompts


def test_sandboxes_that_are_removed_by_hand_are_never_a_reward_of_0(project):
    """Each is an invalid completion with its reason; the others of its group are trained."""
    project.prompts(24)
    with place_of(project, workers=1) as path, running(project) as process:
        wait_for_trained(project, 1, process, 120)
        removed = 0
        while removed < 12 and process.poll() is None:
            for name in list(ask(path, do="list")["sandboxes"])[:2]:
                removed += bool(ask(path, do="remove", name=name)["found"])
            time.sleep(0.2)
        summary = finish(process, project)
    states = summary["completion_states"]
    assert states.get("failed:sandbox", 0) > 0, states
    lines = [json.loads(line) for line in (project.run_folder / "metrics.jsonl").read_text().splitlines()]
    assert min(line["reward/min"] for line in lines if "reward/min" in line) >= 1.0
    assert open_run(project.run_folder).audit().clean
