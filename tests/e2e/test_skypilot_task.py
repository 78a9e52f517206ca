"""SkyPilot's task, run as by SkyPilot's shells: on three addresses of this machine, preempted and replaced."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.base_models.demo_model import make_model
from tests.e2e.harness import Project, environment

pytestmark = [pytest.mark.full, pytest.mark.timeout(290)]

TASK = yaml.safe_load((Path(__file__).parents[2] / "examples" / "skypilot" / "penstock.yaml").read_text())
NET = f"127.{1 + os.getpid() % 250}.{os.getpid() // 250 % 250}"
IPS = [f"{NET}.{number}" for number in (2, 3, 4)]
PROMPTS = 120


class Machine:
    """One rented machine: a home, the project's files, and the shell of the task's block `run`."""

    def __init__(self, rank: int, home: Path, project: Project) -> None:
        self.folder = home / "sky_workdir"
        self.folder.mkdir(parents=True)
        (home / "penstock-venv").symlink_to(sys.prefix)
        for name in ("run_me.toml", "prompts.jsonl", "rewards.py"):
            (self.folder / name).write_bytes((project.folder / name).read_bytes())
        self.log = home.with_suffix(".log")
        variables = {
            **environment(),
            "HOME": str(home),
            "SETTINGS": "run_me.toml",
            "REDIS_PASSWORD": "secret",
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NODE_IPS": "\n".join(IPS),
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                ["bash", "-c", TASK["run"]],
                cwd=self.folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def preempt(self) -> None:
        """Kill every process of the machine."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def machines():
    started: list[Machine] = []
    yield started
    for machine in started:
        if machine.process.poll() is None:
            machine.preempt()


def rent(folder: Path, project: Project, machines: list[Machine]) -> list[Machine]:
    new = [Machine(rank, folder / f"machine-{rank}", project) for rank in range(len(IPS))]
    machines += new
    return new


def ledger(machine: Machine) -> list[dict]:
    file = machine.folder / "runs/test/ledger.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_run_whose_machines_are_preempted_is_restored_and_loses_no_prompt(tmp_path, machines):
    make_model(tmp_path / "model", seed=0)
    project = Project(tmp_path, tmp_path / "model")
    project.prompts(PROMPTS)
    project.table["run"] = {"name": "test"}
    project.table["data"]["path"] = "prompts.jsonl"
    project.table["rewards"] = [{"ref": "rewards.py:by_chance"}]
    project.table["weights"] = {"transport": "http"}
    project.table["storage"] = {"url": f"file://{tmp_path}/bucket"}
    project.write()

    first = rent(tmp_path / "first", project, machines)
    deadline = time.monotonic() + 120
    while len(ledger(first[0])) < PROMPTS // 4 or not list(tmp_path.glob("bucket/test/latest.json")):
        assert all(machine.process.poll() is None for machine in first), [each.log.read_text() for each in first]
        assert time.monotonic() < deadline, first[0].log.read_text()
        time.sleep(0.1)
    for machine in first:
        machine.preempt()

    second = rent(tmp_path / "second", project, machines)
    for machine in second:
        assert machine.process.wait(timeout=200) == 0, machine.log.read_text()[-5000:]
    assert "run.restored" in second[0].log.read_text()
    ends = [line["prompt"] for line in ledger(second[0]) if "prompt" in line]
    assert len(ends) == len(set(ends)) == PROMPTS
    assert not (second[1].folder / "runs").exists()
