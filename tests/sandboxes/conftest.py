"""The engine on which these tests run, and its image. Without one they are skipped; a set DOCKER_HOST must answer."""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import anyio
import pytest

from envs.sandboxes.contract import BEGUN_LABEL, RUN_LABEL, ProviderOptions, SandboxFailure, SandboxSpec
from envs.sandboxes.docker import DockerProvider
from tests.cases.docker_engine import IMAGE, busybox, import_image, problem

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def engine_address() -> str:
    """Return the address of an engine that has the image."""
    if missing := problem():
        pytest.skip(missing)
    try:
        return anyio.run(import_image, busybox())
    except SandboxFailure as failure:
        if os.environ.get("DOCKER_HOST"):
            raise
        pytest.skip(str(failure))


class Place:
    """A provider on the engine, and a run whose sandboxes are removed at the end."""

    def __init__(self, provider: DockerProvider) -> None:
        self.provider = provider
        self.run_id = f"test-{secrets.token_hex(4)}"

    def name(self) -> str:
        return f"penstock-{self.run_id}-{secrets.token_hex(4)}"

    def labels(self) -> dict[str, str]:
        return {RUN_LABEL: self.run_id, BEGUN_LABEL: f"{time.time():.3f}"}

    def spec(self, **more) -> SandboxSpec:
        return SandboxSpec(**({"image": IMAGE, "memory_mb": 256, "pids": 64, "max_life_s": 300.0} | more))

    async def create(self, name: str = "", **more):
        return await self.provider.create(name or self.name(), self.spec(**more), self.labels())


@pytest.fixture
async def place(engine_address) -> AsyncIterator[Place]:
    async with DockerProvider(ProviderOptions(address=engine_address)) as provider:
        place = Place(provider)
        yield place
        for sandbox in await provider.list(place.run_id):  # the newest first: an image in use cannot be removed
            await provider.remove(sandbox.name)


@pytest.fixture
def sh() -> Callable:
    """Run a shell script in a sandbox."""

    async def run(sandbox, script, **options):
        return await sandbox.exec(["sh", "-c", script], **({"timeout_s": 20.0} | options))

    return run


@pytest.fixture(scope="session")
def tasks_images(engine_address) -> None:
    """Make the images of examples/harbor."""
    script = ROOT / "examples" / "harbor" / "make_images.py"
    environment = os.environ | {"DOCKER_HOST": engine_address}
    subprocess.run([sys.executable, str(script)], check=True, env=environment, stdout=subprocess.DEVNULL)
