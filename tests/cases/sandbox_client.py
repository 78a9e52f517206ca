"""A worker's part in a sandbox, as a process to kill: `python -m tests.cases.sandbox_client NAME RUN ID SCRIPT`.

It creates the sandbox, runs the script once by the id, removes the sandbox, and prints a line before each.
"""

import sys
import time

import anyio

from envs.sandboxes.contract import BEGUN_LABEL, RUN_LABEL, ProviderOptions, SandboxSpec
from envs.sandboxes.docker import DockerProvider
from tests.cases.docker_engine import IMAGE


async def main(name: str, run_id: str, call_id: str, script: str) -> None:
    async with DockerProvider(ProviderOptions()) as provider:
        print("creating", flush=True)
        spec = SandboxSpec(image=IMAGE, memory_mb=256, pids=64, max_life_s=300.0)
        labels = {RUN_LABEL: run_id, BEGUN_LABEL: f"{time.time():.3f}"}
        sandbox = await provider.create(name, spec, labels)
        print("running", flush=True)
        await sandbox.exec(["sh", "-c", script], id=call_id, timeout_s=30)
        print("removing", flush=True)
        await provider.remove(name)
        print("removed", flush=True)


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
