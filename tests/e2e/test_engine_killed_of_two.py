"""Two local engines in separate processes: one is killed during the run and restarted, and a third is added."""

import json
import subprocess
import time
import urllib.request

import pytest

from tests.e2e.harness import Project, balanced, environment, stop, wait_for_trained

pytestmark = [pytest.mark.timeout(280), pytest.mark.usefixtures("preloaded")]


class Engine:
    """A `penstock serve` process that listens on the same port after a restart."""

    def __init__(self, project: Project) -> None:
        self.project, self.port = project, 0
        self.start()

    def start(self) -> None:
        command = self.project.command("serve", self.project.table["model"]["path"], "--port", str(self.port))
        self.process = subprocess.Popen(
            [*command, "--set", "engine.max_model_len=256"],
            cwd=self.project.folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.url = self.process.stdout.readline().split()[-1]
        self.port = int(self.url.rpartition(":")[2].strip("/"))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def sampled(self) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("vllm:generation_tokens_total"))

    def used_within(self, seconds: float) -> bool:
        """Whether it samples, within `seconds`, more tokens than a probe would."""
        begun, deadline = self.sampled(), time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.sampled() - begun > 40:
                return True
            time.sleep(0.1)
        return False

    def version(self) -> int:
        with urllib.request.urlopen(f"{self.url}/weight_info", timeout=10) as answer:
            return int(json.loads(answer.read())["weight_version"])


@pytest.fixture
def engines(project):
    results = [Engine(project) for _ in range(3)]
    yield results
    for engine in results:
        engine.kill()


@pytest.mark.full
def test_killing_one_of_two_engines_and_adding_a_third_loses_no_group(project, engines):
    stays, dies, added = engines
    project.prompts(5000)
    file = project.folder / "engines.txt"
    file.write_text(f"{stays.url}\n{dies.url}\n")
    project.table["engine"]["urls"] = [f"file:{file}"]
    project.table["filter"] = {"zero_variance": False}
    process = project.start("run", str(project.write()), "--json")
    try:
        wait_for_trained(project, 8, process, 120)
        assert dies.used_within(30)
        dies.kill()
        wait_for_trained(project, len(project.ledger()) + 12, process, 60)
        published = len(project.ledger()) // 4 - 1
        dies.start()
        assert dies.used_within(10)
        assert dies.version() >= published
        assert added.sampled() == 0
        file.write_text(f"{stays.url}\n{dies.url}\n{added.url}\n")
        assert added.used_within(15)
        listed = json.loads(project.run("engines", str(project.run_folder), "--json").stdout)
        assert [(engine["source"], engine["healthy"]) for engine in listed] == [("file", True)] * 3
        file.write_text(f"{dies.url}\n{added.url}\n")
        time.sleep(5)
        assert not stays.used_within(2)
        assert project.run("stop", str(project.run_folder)).returncode == 0
        out, err = process.communicate(timeout=100)
    finally:
        stop(process)
    summary = json.loads(out)
    assert balanced(summary), err
    assert (summary["dead"], summary["groups_dropped"]) == (0, {})
    assert set(summary["completion_states"]) == {"valid"}
    ends = [line["prompt"] for line in project.ledger()]
    assert len(ends) == len(set(ends)) == summary["groups_trained"]
    events = [json.loads(line) for line in (project.run_folder / "logs" / "rollout-0.log").read_text().splitlines()]
    of_the_dead = [e["event"] for e in events if e.get("url") == dies.url.rstrip("/") and e.get("what") != "weights"]
    assert of_the_dead.count("engine.ejected") == of_the_dead.count("engine.recovered") == 1
