"""Starts the containers of the chart as processes of this machine: commands, variables, mounts, addresses, probes.

Each pod has an address of its own in 127.0.0.0/8. A ConfigMap is laid out as the kubelet does it, and a Secret has only
the key that the pod mounts. Paths and Service names, which need a cluster, are replaced in commands and settings.
"""

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio

GRACE_S = 120.0
"""Longest wait for a pod to become ready, or to end."""


class Pod:
    """One pod of a workload, with one container.

    Args:
        manifest: of its workload.
        folder: of this pod; created.
        address: its IP address.
        replaced: text in commands and settings -> text that stands for it here.
        config: content of the ConfigMap.
        secret: content of the Redis server's Secret.
    """

    def __init__(
        self,
        manifest: Mapping[str, Any],
        folder: Path,
        address: str,
        replaced: Mapping[str, str],
        config: Mapping[str, str],
        secret: Mapping[str, str],
    ) -> None:
        self.spec = manifest["spec"]["template"]["spec"]
        (self.container,) = self.spec["containers"]
        self.folder, self.address = folder, address
        self._replaced = {**replaced, "0.0.0.0": address}
        self._write_config(config)
        variables = {each["name"]: each.get("value", address) for each in self.container["env"]}
        if "PENSTOCK_REDIS_FILE" in variables:
            (item,) = next(each["secret"]["items"] for each in self.spec["volumes"] if each["name"] == "redis")
            (folder / "redis-url").write_text(secret[item["key"]])
            variables["PENSTOCK_REDIS_FILE"] = str(folder / "redis-url")
        self._environment = {**os.environ, **variables, "HOME": str(folder), "OMP_NUM_THREADS": "1"}
        self.process = self.start(self.container["command"])

    def start(self, command: list[str]) -> subprocess.Popen[bytes]:
        """Start a command in this pod."""
        assert command[0] == "penstock"
        words = [self._here(word) for word in command[1:]]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "penstock", *words],
                cwd=self.folder / "penstock",
                env=self._environment,
                stdout=log,
                stderr=log,
            )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the container."""
        os.kill(self.process.pid, number)

    async def ended(self) -> int:
        """Wait until the container ends; returns its exit code."""
        with anyio.fail_after(GRACE_S):
            while (code := self.process.poll()) is None:
                await anyio.sleep(0.05)
        return code

    async def ready(self) -> None:
        """Wait until the container's probes succeed."""
        for name in ("livenessProbe", "readinessProbe"):
            probe = self.container[name]["httpGet"]
            (port,) = (each["containerPort"] for each in self.container["ports"] if each["name"] == probe["port"])
            url, deadline = f"http://{self.address}:{port}{probe['path']}", anyio.current_time() + GRACE_S
            while problem := await anyio.to_thread.run_sync(_problem, url):
                assert self.process.poll() is None, self.log()
                assert anyio.current_time() < deadline, f"{url}: {problem}\n{self.log()}"
                await anyio.sleep(0.1)

    def log(self) -> str:
        """Return the end of the container's output."""
        return (self.folder / "log").read_text()[-4000:]

    def _here(self, text: str) -> str:
        for there, here in self._replaced.items():
            text = text.replace(there, here)
        return text.replace("$(POD_IP)", self.address)

    def _write_config(self, config: Mapping[str, str]) -> None:
        """Write files as the kubelet mounts a ConfigMap: links to a folder whose name changes with the content."""
        content = self.folder / "penstock" / "..2026_01_01"
        content.mkdir(parents=True)
        (self.folder / "penstock" / "..data").symlink_to(content.name)
        for name, text in config.items():
            (content / name).write_text(self._here(text))
            (self.folder / "penstock" / name).symlink_to(f"..data/{name}")


def _problem(url: str) -> str:
    """Return why a probe fails; empty if it succeeds."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return ""
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode()}"
    except OSError as error:
        return str(error)
