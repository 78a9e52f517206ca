"""Cost of the engine client: requests per second, and CPU time per request, with engines that answer immediately.

    python benchmarks/engine_client.py [--engines 2] [--at-once 256] [--requests 4000] [--json]

The engines are scripted, each in its own process. A request has 490 tokens, a response 64 with log-probs; groups of 8
completions, 3 turns each. Engines and client share the machine's cores, so requests per second depend mostly on the
engines; the client's CPU time does not.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence

import anyio
import structlog

from workers.rollout.engine_client.client import EngineClient
from workers.rollout.engine_client.sampling import SamplingOptions

ENGINE = """
import anyio
from workers.testing.scripted_engine import ScriptedEngine
async def main():
    async with ScriptedEngine(lambda *_: list(range(64)), version="0") as engine:
        print(engine.url, flush=True)
        await anyio.sleep_forever()
anyio.run(main, backend_options={"use_uvloop": True})
"""
PROMPT = list(range(1000, 1490))


async def measure(urls: Sequence[str], at_once: int, requests: int) -> dict[str, float]:
    left = requests // 3

    async def play() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            group, completion = f"d:0:{left // 8}", left % 8
            for turn in range(3):
                sampling = SamplingOptions(
                    temperature=1.0, max_tokens=64, seed=turn, group=group, completion=completion
                )
                await client.sample(PROMPT, sampling)

    async with EngineClient(urls, request_timeout_s=60, max_attempts=3, unavailable_timeout_s=10) as client:
        await client.wait_until_ready()
        cpu, wall = time.process_time(), time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for _ in range(at_once):
                tasks.start_soon(play)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    count = requests // 3 * 3
    return {"requests_per_s": round(count / wall, 1), "client_cpu_ms_per_request": round(1000 * cpu / count, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--at-once", type=int, default=256)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    engines = [
        subprocess.Popen([sys.executable, "-c", ENGINE], stdout=subprocess.PIPE, text=True)
        for _ in range(arguments.engines)
    ]
    try:
        urls = [engine.stdout.readline().strip() for engine in engines]
        runs = [
            anyio.run(measure, urls, arguments.at_once, arguments.requests, backend_options={"use_uvloop": True})
            for _ in range(arguments.repeats)
        ]
    finally:
        for engine in engines:
            engine.kill()
    result = min(runs, key=lambda run: run["client_cpu_ms_per_request"])
    if arguments.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:28} {value}")


if __name__ == "__main__":
    main()
