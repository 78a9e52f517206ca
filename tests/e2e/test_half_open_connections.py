"""A run goes on while clients that never send a request connect to every one of its servers."""

import json
import re
import resource
import statistics
import threading
import time
from collections import defaultdict
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest

from tests.cases.half_open import HalfOpen
from tests.e2e.harness import Project, balanced, running
from tests.e2e.test_metrics import free_ports, get, wait_until
from tests.preload.fixtures import pid_of

CLIENTS = 2000
"""Half-open connections to each server."""
PROMPTS = 40
SERVERS = ("engine", "agent endpoint", "weights", "dashboard", "metrics")
MAX_CONNECTIONS = {"serve": CLIENTS, "rollout": 1024, "train": 1024, "dashboard": 1024}
"""Of the processes; of the supervisor, which serves metrics, 256."""
MORE_FILES = 150
"""Files that a process has open besides connections."""
MAX_GROWTH_MB = 200
AGENT = """
import aiohttp

from envs.contract import AgentEnvironment


class World(AgentEnvironment):
    def reset(self, number, **row):
        self.number = number

    async def run_episode(self, endpoint, sampling):
        body = {"messages": [{"role": "user", "content": f"Say {self.number}."}]}
        async with aiohttp.ClientSession() as session:
            for _ in range(2):
                async with session.post(f"{endpoint}/chat/completions", json=body) as response:
                    assert response.status == 200, await response.text()
"""
EVENTS = {"engine": "engine.listening", "agent endpoint": "endpoint.listening", "weights": "weights.served"}


class Attack(threading.Thread):
    """Keeps half-open connections to a server until it is stopped."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.stopping = threading.Event()
        self.most = self.opened = 0
        self._clients = HalfOpen(url)

    def run(self) -> None:
        with closing(self._clients):
            while not self.stopping.wait(1):
                left = self._clients.drop_closed()
                self.most = max(self.most, left)
                self.opened += CLIENTS - left
                self._clients.open(CLIENTS - left)


class Watch(threading.Thread):
    """Notes the largest number of files and the memory of a run's processes, and how long a request takes."""

    def __init__(self, process: int, asked: dict[str, tuple[str, str]]) -> None:
        super().__init__(daemon=True)
        self.stopping = threading.Event()
        self.files: defaultdict[str, int] = defaultdict(int)
        self.memory: defaultdict[str, list[int]] = defaultdict(list)
        self.waited_s: defaultdict[str, list[float]] = defaultdict(list)
        self.statuses: defaultdict[str, list[int]] = defaultdict(list)
        self._process = psutil.Process(pid_of(process))
        self._asked = asked

    def run(self) -> None:
        while not self.stopping.wait(0.5):
            for child in (self._process, *self._process.children(recursive=True)):
                with suppress(psutil.Error):
                    name = _role_of(child)
                    self.files[name] = max(self.files[name], child.num_fds())
                    self.memory[f"{name} {child.pid}"].append(child.memory_info().rss >> 20)
            for name, (address, page) in self._asked.items():
                began = time.monotonic()
                self.statuses[name].append(get(address, page)[0])
                self.waited_s[name].append(time.monotonic() - began)


def _role_of(process: psutil.Process) -> str:
    command = process.cmdline()
    return command[command.index("penstock") + 1] if "penstock" in command else Path((command or ["ended"])[0]).name


def addresses(project: Project, metrics: str) -> dict[str, str] | None:
    """Return the address of each server; None while one of them does not listen."""
    logs = [path.read_text() for path in (project.run_folder / "logs").glob("*.log")]
    found = {"metrics": metrics}
    for name, event in EVENTS.items():
        for text in logs:
            for line in text.splitlines():
                if event in line and (url := re.search(r"127\.0\.0\.1:\d+", line)):
                    found[name] = url[0]
    dashboard = next((project.run_folder / "logs").glob("dashboard*"), None)
    if dashboard is not None and (url := re.search(r"127\.0\.0\.1:\d+", dashboard.read_text())):
        found["dashboard"] = url[0]
    return found if found.keys() == set(SERVERS) else None


@pytest.fixture
def many_files():
    """This process may open as many files as there are connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(SERVERS) * CLIENTS + 1000
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"needs {needed} open files, and the limit is {hard}: ulimit -Hn")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("preloaded", "many_files")
def test_a_run_goes_on_beside_thousands_of_half_open_connections_to_each_of_its_servers(project):
    (project.folder / "world.py").write_text(AGENT)
    first = free_ports(6)
    project.table["run"] |= {"metrics_address": f"127.0.0.1:{first}", "dashboard": "on"}
    project.table["weights"] = {"transport": "http"}
    project.table["environments"] = {"world": {"ref": str(project.folder / "world.py") + ":World"}}
    project.prompts(PROMPTS)
    with running(project) as process:
        found = wait_until(lambda: addresses(project, f"127.0.0.1:{first}"), "a server does not listen")
        asked = {"engine": "/health", "dashboard": "/health", "metrics": "/metrics"}
        watch = Watch(process.pid, {name: (found[name], page) for name, page in asked.items()})
        attacks = {name: Attack(f"http://{address}") for name, address in found.items()}
        for thread in (watch, *attacks.values()):
            thread.start()
        try:
            out, err = process.communicate(timeout=400)
            assert process.returncode == 0, f"{err[-2000:]}\n{project.logs()}"
            summary = json.loads(out)
        finally:
            for thread in (watch, *attacks.values()):
                thread.stopping.set()
            for thread in (watch, *attacks.values()):
                thread.join(30)
    growth = {name: max(memory) - memory[0] for name, memory in watch.memory.items()}
    report = {
        "seconds": summary["seconds"],
        "most open": {name: attack.most for name, attack in attacks.items()},
        "opened": {name: attack.opened for name, attack in attacks.items()},
        "files": watch.files,
        "growth in MB": growth,
        "median seconds of a request": {name: statistics.median(waited) for name, waited in watch.waited_s.items()},
        "longest": {name: max(waited) for name, waited in watch.waited_s.items()},
        "answered": {name: f"{asked.count(200)} of {len(asked)}" for name, asked in watch.statuses.items()},
    }
    print(json.dumps(report, indent=1))
    assert balanced(summary)
    assert (summary["fed"], summary["outstanding"], summary["dead"]) == (PROMPTS, 0, 0)
    assert len({line["prompt"] for line in project.ledger()}) == len(project.ledger()) == PROMPTS
    assert summary["completion_states"].keys() == {"valid"}
    for name, attack in attacks.items():
        assert attack.opened >= CLIENTS, name
    for name, files in watch.files.items():
        assert files <= MAX_CONNECTIONS.get(name, 256) + MORE_FILES, (name, report)
    assert max(growth.values()) <= MAX_GROWTH_MB, report
    for name, statuses in watch.statuses.items():
        assert 200 in statuses, (name, report)
        until_it_ended = statuses[: len(statuses) - statuses[::-1].index(200)]
        assert until_it_ended.count(200) >= 0.9 * len(until_it_ended), (name, report)
