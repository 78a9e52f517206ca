"""Seconds until sandboxes run, commands in them, their memory, and how long the event loop is held meanwhile.

    python -m benchmarks.sandboxes --provider docker --image IMAGE [--json] [--check]
    python -m benchmarks.sandboxes --provider process

Sandboxes are started one after another, then 8 and 32, as many at a time as there are cores. Commands run in all of
them at once. For `docker` each round also asks the bare engine: a container of the same image that only sleeps, and
`true` by the engine's own exec; quote these ratios. `--check` exits with 1 unless one starts within 1 s, 3 a second
start, 32 need at most 150 MB, and the loop is never held for more than 50 ms.
"""

import argparse
import json
import os
import secrets
import statistics
import sys
import time
from contextlib import asynccontextmanager, suppress

import anyio
import psutil
from anyio import to_thread

from envs.sandboxes.conformance_bench import load_provider
from envs.sandboxes.contract import BEGUN_LABEL, RUN_LABEL, ProviderOptions, SandboxSpec

RUN = f"benchmark-{secrets.token_hex(4)}"
NUMBERS = (1, 8, 32)
ROUNDS, COMMANDS = 5, 5
CORES = len(os.sched_getaffinity(0))
LIMITS = {"start_s": 1.0, "starts_per_s": 3.0, "memory_mb": 150.0, "held_ms": 50.0}


class Place:
    """A provider, or the bare engine behind it."""

    def __init__(self, provider, image):
        self.provider = provider
        self.spec = SandboxSpec(image=image, memory_mb=256, pids=64, max_life_s=600.0)
        self.starts = anyio.CapacityLimiter(CORES)

    async def start(self):
        async with self.starts:
            begun = time.perf_counter()
            labels = {RUN_LABEL: RUN, BEGUN_LABEL: f"{time.time():.3f}"}
            sandbox = await self.provider.create(f"penstock-{secrets.token_hex(8)}", self.spec, labels)
            return sandbox, time.perf_counter() - begun

    async def command(self, sandbox):
        begun = time.perf_counter()
        result = await sandbox.exec(["true"], timeout_s=60)
        assert result.code == 0, result
        return time.perf_counter() - begun

    async def remove(self, sandbox):
        await self.provider.remove(sandbox.name)


class BareEngine(Place):
    """The same container without a runner, asked by the same connection."""

    async def start(self):
        engine = self.provider._engine
        async with self.starts:
            name, begun = f"penstock-{secrets.token_hex(8)}", time.perf_counter()
            body = {
                "Image": self.spec.image,
                "Entrypoint": ["sleep", "600"],
                "Labels": {RUN_LABEL: RUN},
                "HostConfig": {"NetworkMode": "none", "LogConfig": {"Type": "none"}},
            }
            await engine.call("containers/create", "POST", body=body, name=name)
            await engine.call(f"containers/{name}/start", "POST")
            return name, time.perf_counter() - begun

    async def command(self, sandbox):
        begun = time.perf_counter()
        await self.provider._engine.run(sandbox, ["true"], 1000)
        return time.perf_counter() - begun

    async def remove(self, sandbox):
        await self.provider.remove(sandbox)


async def together(calls):
    results = []

    async def one(call):
        results.append(await call)

    async with anyio.create_task_group() as tasks:
        for call in calls:
            tasks.start_soon(one, call)
    return results


def own_processes():
    """Return all processes that descend from this one or from a container's shim."""
    found = set(psutil.Process().children(recursive=True))
    for process in psutil.process_iter(["name"]):
        if process.info["name"].startswith("containerd-shim"):
            with suppress(psutil.Error):
                found |= {process, *process.children(recursive=True)}
    return found


def memory_mb(processes):
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total / 1e6


async def measure(place, number):
    """Start sandboxes, run commands in them, and remove them."""
    before = await to_thread.run_sync(own_processes) if number == max(NUMBERS) else None
    begun = time.perf_counter()
    started = await together(place.start() for _ in range(number))
    took = time.perf_counter() - begun
    sandboxes = [sandbox for sandbox, _ in started]
    figures = {"start_s": statistics.median(seconds for _, seconds in started), "starts_per_s": number / took}
    if before is not None:
        figures["memory_mb"] = await to_thread.run_sync(lambda: memory_mb(own_processes() - before))
    seconds = []
    for _ in range(COMMANDS):
        seconds += await together(place.command(sandbox) for sandbox in sandboxes)
    figures["command_ms"] = statistics.median(seconds) * 1e3
    begun = time.perf_counter()
    await together(place.remove(sandbox) for sandbox in sandboxes)
    figures["removals_per_s"] = number / (time.perf_counter() - begun)
    return figures


@asynccontextmanager
async def watched(figures):
    """Note for how long the event loop was held at most, in CPU time: other processes' does not count."""
    longest = 0.0

    async def watch():
        nonlocal longest
        while True:
            begun = time.thread_time()
            await anyio.sleep(0.001)
            longest = max(longest, time.thread_time() - begun)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        yield
        tasks.cancel_scope.cancel()
    figures["held_ms"] = longest * 1e3


async def main(options):
    figures = {"provider": options.provider, "cores": CORES}
    async with load_provider(options.provider)(ProviderOptions(address=options.address)) as provider:
        places = {"": Place(provider, options.image)}
        if options.provider == "docker":
            places["bare_"] = BareEngine(provider, options.image)
        try:
            async with watched(figures):
                for number in NUMBERS:
                    for prefix, place in places.items():
                        rounds = [await measure(place, number) for _ in range(ROUNDS if number == 1 else 1)]
                        figures[f"{prefix}x{number}"] = {
                            key: round(statistics.median(one[key] for one in rounds), 3) for key in rounds[0]
                        }
        finally:
            with anyio.CancelScope(shield=True):
                for left in await provider.list(RUN):
                    await provider.remove(left.name)
    if options.provider == "docker":
        for number in NUMBERS:
            own, bare = figures[f"x{number}"], figures[f"bare_x{number}"]
            figures[f"ratio_x{number}"] = {key: round(own[key] / bare[key], 2) for key in ("start_s", "command_ms")}
    return figures


def failures(figures):
    largest = figures[f"x{max(NUMBERS)}"]
    held = {
        "start_s": figures["x1"]["start_s"] <= LIMITS["start_s"],
        "starts_per_s": largest["starts_per_s"] >= LIMITS["starts_per_s"],
        "memory_mb": largest["memory_mb"] <= LIMITS["memory_mb"],
        "held_ms": figures["held_ms"] <= LIMITS["held_ms"],
    }
    return [f"{key}: the limit is {LIMITS[key]}" for key, is_kept in held.items() if not is_kept]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure sandboxes.")
    parser.add_argument("--provider", default="docker")
    parser.add_argument("--image", default="")
    parser.add_argument("--address", default="")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    result = anyio.run(main, given, backend_options={"use_uvloop": True})
    print(json.dumps(result, indent=None if given.json else 2))
    missed = failures(result) if given.check else []
    sys.exit("\n".join(missed) if missed else 0)
