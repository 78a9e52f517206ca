"""The demo on two hosts that share no file system: network and mount namespaces, joined by a cable that is pulled out.

Host `a` has Redis, the trainer with the run's folder, the feeder, a rollout worker and a scorer; host `b` has the
engine, a rollout worker and a scorer. Weights go over HTTP. Needs root, to make namespaces; skipped elsewhere.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean

import pytest

from stream.private_server import find_server
from tests.e2e.harness import environment
from workers.demo.prepare import prepare_run

STEPS = 20
A, B = "10.77.0.1", "10.77.0.2"
REDIS = f"redis://{A}:6379"


def _can_make_hosts() -> bool:
    tools = all(map(shutil.which, ("ip", "unshare", "nsenter", "mount")))
    return (
        tools
        and os.geteuid() == 0
        and subprocess.run(["unshare", "-nm", "true"], capture_output=True, check=False).returncode == 0
    )


pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not _can_make_hosts(), reason="needs root and namespaces: ip, unshare, nsenter, mount"),
]


class Host:
    """A network and mount namespace with a folder of its own, and the processes in it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        folder.mkdir()
        self.processes: dict[str, subprocess.Popen] = {}
        command = ["unshare", "-nm", "--propagation", "private", "sleep", "infinity"]
        self._init = subprocess.Popen(command)

    def inside(self, *command: str) -> list[str]:
        return ["nsenter", "-t", str(self._init.pid), "-n", "-m", f"--wdns={self.folder}", "--", *command]

    def sh(self, text: str) -> None:
        subprocess.run(self.inside("sh", "-ec", text), check=True, timeout=30)

    def penstock(self, *arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        command = self.inside(sys.executable, "-P", "-m", "penstock", *arguments)
        return subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def start(self, name: str, *command: str) -> None:
        with self.log(name).open("a") as log:
            self.processes[name] = subprocess.Popen(
                self.inside(*command), env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def start_role(self, name: str, *arguments: str) -> None:
        self.start(name, sys.executable, "-P", "-m", "penstock", name, *arguments)

    def log(self, name: str) -> Path:
        return self.folder.parent / f"{self.name}-{name}.log"

    def kill(self) -> None:
        """End every process of the host at once."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
        for process in self.processes.values():
            process.wait()

    def close(self) -> None:
        self.kill()
        self._init.kill()
        self._init.wait()


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Make two hosts with a cable between them, on each of which the other's folder is empty."""
    with ExitStack() as stack:
        hosts = []
        for name in ("a", "b"):
            hosts.append(Host(name, folder / name))
            stack.callback(hosts[-1].close)
        a, b = hosts
        time.sleep(0.5)  # until `unshare` has made the namespaces
        b.sh("ip link set lo up")
        a.sh("ip link set lo up")
        a.sh(f"ip link add cable type veth peer name cable netns {b._init.pid}")
        for host, address, other in ((a, A, b), (b, B, a)):
            host.sh(f"ip addr add {address}/24 dev cable && ip link set cable up")
            host.sh(f"mount -t tmpfs -o ro none {other.folder}")
        yield a, b


def metrics(a: Host) -> list[dict]:
    file = a.folder / "runs/demo/metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_for_step(a: Host, step: int, within_s: float, *hosts: Host) -> None:
    deadline = time.monotonic() + within_s
    while len(metrics(a)) < step:
        for host in hosts:
            for name, process in host.processes.items():
                assert process.poll() is None, host.log(name).read_text()[-3000:]
        assert time.monotonic() < deadline, f"step {len(metrics(a))}"
        time.sleep(0.5)


def start_b(b: Host) -> None:
    """Start host b: an engine with its own copy of the model, workers with neither the run's folder nor the model."""
    b.start_role("serve", "run.toml", "--host", B, "--port", "8000", "--set", "model.path=engine/model")
    b.start_role("rollout", "run.toml", "--redis", REDIS)
    b.start_role("score", "run.toml", "--redis", REDIS)


@pytest.mark.full
def test_the_demo_learns_on_two_hosts_of_which_one_vanishes_and_returns(tmp_path):
    with two_hosts(tmp_path) as (a, b):
        prepare_run(a.folder / "runs/demo", 1, STEPS)
        run = a.folder / "runs/demo/run.toml"
        text = run.read_text().replace(f"{a.folder}/", "")
        text = text.replace('address = "127.0.0.1"', f'address = "{A}:7070"').replace(
            'transport = "files"', 'transport = "http"'
        )
        text = text.replace("urls = []", f'urls = ["http://{B}:8000"]').replace("lease_s = 15.0", "lease_s = 5.0")
        assert text.count(B) == 1
        assert text.count("7070") == 1
        assert text.count('"http"') == 1
        run.write_text(text)
        (b.folder / "run.toml").write_text(text)
        shutil.copytree(a.folder / "runs/demo/model", b.folder / "engine/model")

        data = a.folder / "redis"
        data.mkdir()
        options = ["--bind", A, "--protected-mode", "no", "--appendonly", "yes", "--maxmemory-policy", "noeviction"]
        a.start("redis", str(find_server()), *options, "--dir", str(data))
        for role in ("train", "feed", "rollout", "score"):
            a.start_role(role, "runs/demo/run.toml", "--redis", REDIS)
        start_b(b)
        wait_for_step(a, 4, 300, a, b)
        assert not (b.folder / "runs").exists()
        assert "model.downloaded" in b.log("rollout").read_text()

        b.sh("ip link set cable down")  # the cable is pulled out for longer than a lease, and plugged in again
        time.sleep(12)
        b.sh("ip link set cable up")
        wait_for_step(a, len(metrics(a)) + 3, 300, a, b)

        b.sh("ip link set cable down")  # the host loses power; it starts again
        b.kill()
        time.sleep(8)
        b.sh("ip link set cable up")
        start_b(b)
        deadline = time.monotonic() + 600
        for host, names in ((a, ("train", "feed", "rollout", "score")), (b, ("rollout", "score"))):
            for name in names:
                code = host.processes[name].wait(max(1.0, deadline - time.monotonic()))
                assert code == 0, host.log(name).read_text()[-3000:]

        audited = a.penstock("audit", "runs/demo/run.toml", "--redis", REDIS, "--json")
        assert audited.returncode == 0, audited.stdout + audited.stderr
        report = json.loads(audited.stdout)
        assert report["fed"] == STEPS * 16
        assert not report["lost"]
        assert not report["twice"]
        rewards = [line["reward/mean"] for line in metrics(a)]
        print(rewards)
        assert mean(rewards[-4:]) - mean(rewards[:4]) >= 0.15
        assert sorted(each.name for each in b.folder.iterdir()) == ["engine", "run.toml"]
