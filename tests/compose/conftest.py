"""A clean clone of this commit, its images, and the demo as containers; skipped where no Docker engine answers."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = "penstock-test"
PYTHON = "python:3.11.14-slim-bookworm"
REDIS = "redis:7.4.2-bookworm"
LOCAL_IMAGES = {
    PYTHON: ("PENSTOCK_PYTHON_IMAGE", "python:3.11-slim-bookworm"),
    REDIS: ("PENSTOCK_REDIS_IMAGE", "redis:7"),
}
"""What serves instead where no registry answers, if it is on the machine: (variable of compose.yaml, image)."""


class Stack:
    """The containers of compose.yaml in a clean clone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "COMPOSE_PROJECT_NAME": PROJECT, "COMPOSE_PROGRESS": "plain"}

    def compose(self, *words: str, timeout_s: float = 300, check: bool = True, stdin: str = "") -> str:
        """Return what `docker compose WORDS` printed."""
        return self.run("docker", "compose", *words, timeout_s=timeout_s, check=check, stdin=stdin)

    def run(self, *words: str, timeout_s: float = 300, check: bool = True, stdin: str = "") -> str:
        result = subprocess.run(
            words,
            cwd=self.folder,
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert not check or result.returncode == 0, f"{' '.join(words)}:\n{result.stdout}{result.stderr}"
        return result.stdout

    def penstock(self, *words: str, check: bool = True) -> str:
        """Return what a command prints in a new container beside the run's."""
        return self.compose("run", "--rm", "--no-deps", "-T", "score", "penstock", *words, timeout_s=120, check=check)

    def give_redis_its_folder(self) -> None:
        """Where Debian's Redis stands in for the official image: its data folder belongs to root."""
        if (image := self.environment.get(LOCAL_IMAGES[REDIS][0], REDIS)) != REDIS:
            self.compose("create")
            volume = f"{self.environment['COMPOSE_PROJECT_NAME']}_redis:/data"
            self.run("docker", "run", "--rm", "--user=root", "-v", volume, image, "chown", "redis:", "/data")

    def queues(self) -> dict:
        return json.loads(self.penstock("queues", "/runs/demo", "--json"))

    def containers(self, service: str = "") -> list[dict]:
        names = self.compose("ps", "-aq", *([service] if service else [])).split()
        return json.loads(self.run("docker", "inspect", *names)) if names else []

    def wait_until(self, condition, what: str, timeout_s: float = 240):
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            assert time.monotonic() < deadline, (
                f"{what}\n{self.compose('ps', '-a')}\n{self.compose('logs', '--tail=5')}"
            )
            time.sleep(2)
        return found


def docker(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *words], capture_output=True, text=True, check=False)


def has_image(image: str) -> bool:
    """Return whether an image is on this machine, or can be pulled."""
    return not docker("image", "inspect", image).returncode or not docker("pull", "-q", image).returncode


@pytest.fixture(scope="session")
def stack(tmp_path_factory) -> Iterator[Stack]:
    if shutil.which("docker") is None or docker("info").returncode:
        pytest.skip("no Docker engine answers: start one, or set DOCKER_HOST")
    if docker("compose", "version").returncode:
        pytest.skip("`docker compose` is missing: install Compose's plugin")
    stack = Stack(tmp_path_factory.mktemp("clone") / "penstock")
    subprocess.run(["git", "clone", "-q", str(ROOT), str(stack.folder)], check=True)
    if wheels := os.environ.get("PENSTOCK_WHEELS"):  # torch for the CPU, where pip's index has another one
        shutil.copytree(wheels, stack.folder / "wheels")
    for image, (variable, instead) in LOCAL_IMAGES.items():
        if not has_image(image):
            if docker("image", "inspect", instead).returncode:
                pytest.skip(f"{image} cannot be pulled, and {instead} is not on this machine either")
            print(f"{image} cannot be pulled; {instead} of this machine serves instead")
            stack.environment[variable] = instead
    stack.compose("--profile", "*", "down", "--volumes", "--remove-orphans")
    try:
        stack.compose("build", timeout_s=1800)
        yield stack
    finally:
        print(stack.compose("logs", "--tail=20", check=False)[-5000:])
        stack.compose("--profile", "*", "down", "--volumes", "--remove-orphans", check=False)
