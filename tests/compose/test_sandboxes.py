"""A run whose episodes have containers of their own, by deploy/sandboxes.yaml on a real engine."""

import json
import os
import tarfile
from pathlib import Path

import pytest

from tests.cases.docker_engine import busybox
from tests.compose.conftest import docker

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1200)]

IMAGE = "penstock-compose:busybox"
PROMPTS, GROUP = 7, 2
ENVIRONMENT = """
from envs.builtin.calculator import Calculator
from envs.sandboxes.contract import SandboxSpec

LOOK = "cat /proc/1/environ; mount; find / -xdev -name '*.sock'; cat /proc/net/dev; sleep 1"


class Boxed(Calculator):
    async def reset(self, sandboxes, **row):
        spec = SandboxSpec(image="penstock-compose:busybox", memory_mb=64, disk_mb=64)
        self.box = await sandboxes.open(spec, purpose="agent")
        seen = await self.box.exec(["sh", "-c", LOOK], timeout_s=30)
        if seen.code or b"sock" in seen.stdout or b"eth0" in seen.stdout or b"PENSTOCK" in seen.stdout:
            raise RuntimeError(f"a sandbox reaches more than it should: {seen}")
        super().reset(**row)
"""
PREPARE = f"""
import pathlib, sys, tomllib, tomli_w

folder = pathlib.Path("/runs/boxes")
(folder / "boxed.py").write_text(sys.stdin.read())
settings = tomllib.loads((folder / "run.toml").read_text())
settings["environments"] = {{"calculator": "/runs/boxes/boxed.py:Boxed"}}
settings["rollout"] |= {{"groups_in_flight": 4, "group_size": {GROUP}}}
settings["train"]["batch_size"] = {PROMPTS}
settings["sandboxes"] = {{"provider": "docker", "max_memory_mb": 128}}
(folder / "run.toml").write_text(tomli_w.dumps(settings))
rows = (folder / "prompts.jsonl").read_text().splitlines()[:{PROMPTS}]
(folder / "prompts.jsonl").write_text("".join(row + chr(10) for row in rows))
"""


@pytest.fixture
def boxes(stack, tmp_path):
    """The stack with the engine's socket, and a small run whose environment opens sandboxes."""
    program = busybox()
    if program is None:
        pytest.skip("busybox-static is not installed")
    with tarfile.open(tmp_path / "image.tar", "w") as image:
        image.add(program, "bin/busybox")
        for name in (
            "sh",
            "cat",
            "find",
            "mount",
            *["setsid", "dd", "head", "mkdir", "mv", "rmdir", "sleep", "tail", "wc"],
        ):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            image.addfile(link)
    stack.run("docker", "import", str(tmp_path / "image.tar"), IMAGE)
    socket = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")
    before = dict(stack.environment)
    stack.compose("down", timeout_s=120)
    stack.environment |= {
        "COMPOSE_FILE": "compose.yaml:deploy/sandboxes.yaml",
        "PENSTOCK_ENGINE_SOCKET": socket,
        "PENSTOCK_ENGINE_GROUP": str(Path(socket).stat().st_gid),
        "PENSTOCK_RUN": "/runs/boxes/run.toml",
    }
    stack.compose("build", timeout_s=1800)
    stack.compose(
        "run", "--rm", "--no-deps", "-T", "prepare", "penstock", "demo", "--prepare", "--folder", "/runs/boxes"
    )
    stack.compose("run", "--rm", "--no-deps", "-T", "prepare", "python", "-c", PREPARE, stdin=ENVIRONMENT)
    yield stack
    stack.compose("down", timeout_s=120, check=False)
    stack.environment = before
    docker("image", "rm", IMAGE)


def sandboxes():
    """Return what the engine says of the living sandboxes of this test."""
    names = docker("ps", "-aq", "--filter", f"ancestor={IMAGE}").stdout.split()
    return [one for name in names for one in json.loads(docker("inspect", name).stdout or "[]")]


def test_a_run_in_containers_leaves_none_and_only_rollout_has_the_socket(boxes):
    boxes.give_redis_its_folder()
    boxes.compose("up", "-d", timeout_s=600)
    seen = {}

    def has_ended():
        seen.update({one["Name"]: one for one in sandboxes()})
        return not any(one["State"]["Running"] for one in boxes.containers("train"))

    boxes.wait_until(has_ended, "the run does not end", 600)
    for one in boxes.containers():
        sockets = [mount["Destination"] for mount in one["Mounts"] if mount["Destination"].endswith(".sock")]
        service = one["Config"]["Labels"]["com.docker.compose.service"]
        assert sockets == (["/run/docker.sock"] if service == "rollout" else []), service
        assert one["Config"]["User"] != "root", service
    audit = boxes.compose(
        "run", "--rm", "--no-deps", "-T", "rollout", "penstock", "audit", "/runs/boxes", timeout_s=120
    )
    print(audit)
    count = PROMPTS * GROUP
    assert f"begun {count} = stopped {count}" in audit
    for one in seen.values():
        assert not one["Mounts"]
        assert one["HostConfig"]["NetworkMode"] == "none"
        assert not one["HostConfig"]["Privileged"]
    assert seen
    print(f"{len(seen)} of {count} sandboxes were looked at while they lived")
