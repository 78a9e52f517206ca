"""What it costs a run to be looked at: CPU per group with and without a viewer and reports of what is in flight.

    python -m benchmarks.looking [--pairs 100] [--seconds 2] [--concurrency 32] [--json] [--check]

One run, in alternating windows. A viewer has a page of the dashboard open. In a window with looking its figures are
renewed every second, and workers report their leases; in one without, the dashboard is suspended and nothing is
reported. The run is real: a Redis server, feed, `penstock rollout` and `penstock score`, and a consumer as trainer that
claims, commits and checkpoints without training. The engine answers every turn after 50 ms with prepared tokens, so
every group is the same work: 8 completions of 3 turns and two tool calls.

`increase` is the change of CPU per group, by the paired windows: the mean, and its interval at 95 %. `pipeline` counts
feed, rollout, score, trainer and Redis; `with_dashboard` counts the dashboard's process, too. Neighbours in a pair swap
places from pair to pair, so that a drift of the machine cancels out. Windows are short because on a machine with other
work the CPU that a group takes changes by tens of per cent within a minute. `--check` exits with 1 if the increase of
`pipeline` may be above 2 %, by its interval.
"""

import argparse
import json
import math
import re
import signal
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import psutil
import structlog

from benchmarks.rollout import RUN, answered, first_line, process, write_case, write_settings
from benchmarks.rollout_case import GROUP, conversations, make_case
from stream.private_server import private_server

LIMIT = 0.02
TURNS = 3
PIPELINE = ("feed", "rollout", "score", "trainer", "redis")
WARM_S, SETTLE_S = 3.0, 0.1
"""Before the first window; and after looking was switched, until a window begins."""
PAGES = {"run": "", "in-flight": "/in-flight"}
STUDENT = 1.98
"""Two-sided 95 % of a t distribution with 99 degrees of freedom."""


class Pipeline:
    """The processes of a run.

    Args:
        processes: by name; `dashboard` is one of them.
        engine: URL of the engine, which counts turns.
        folder: of the run.
        page: of the dashboard, for the viewer.
    """

    def __init__(self, processes: dict[str, psutil.Process], engine: str, dashboard: str, page: str) -> None:
        self._processes, self._engine, self._dashboard, self._page = processes, engine, dashboard, page
        self.events = 0
        """Parts of pages that the viewer got."""

    async def measure(self, seconds: float) -> dict[str, float]:
        """Return the CPU milliseconds of each process per group, over a window."""
        before, turns = self._cpu_s(), await answered(self._engine)
        await anyio.sleep(seconds)
        after, turns = self._cpu_s(), await answered(self._engine) - turns
        groups = turns / (GROUP * TURNS)
        if not groups:
            raise SystemExit("the run stands still")
        return {name: 1000 * (after[name] - before[name]) / groups for name in before} | {
            "groups_per_s": groups / seconds
        }

    def _cpu_s(self) -> dict[str, float]:
        times = {name: each.cpu_times() for name, each in self._processes.items()}
        return {name: each.user + each.system for name, each in times.items()}

    def switch(self, *, looks: bool) -> None:
        """Let the dashboard run and workers report their leases, or not."""
        for name in ("rollout", "score"):
            self._processes[name].send_signal(signal.SIGRTMIN + looks)
        self._processes["dashboard"].send_signal(signal.SIGCONT if looks else signal.SIGSTOP)

    async def view(self) -> None:
        """Open a page, and read its stream of events forever, as a browser does."""
        async with aiohttp.ClientSession(self._dashboard) as session:
            async with session.get("/") as response:
                run = re.search(r'"(/runs/[^"/?]+)"', await response.text())
            assert run, "the dashboard shows no run"
            async with session.get(run[1] + self._page) as response:
                stream = re.search(r'sse-connect="([^"]+)"', await response.text())
            assert stream, f"{run[1]}{self._page} has no stream of events"
            timeout = aiohttp.ClientTimeout(total=None)
            async with session.get(stream[1].replace("&amp;", "&"), timeout=timeout) as response:
                async for line in response.content:
                    self.events += line.startswith(b"event:")
        raise SystemExit("the dashboard closed the viewer's stream")


@asynccontextmanager
async def running(concurrency: int, page: str) -> AsyncIterator[Pipeline]:
    """Start a run, and wait until it samples."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-looking-"))
        case, tokenizer = make_case(Path(folder), TURNS - 1, 64)
        file, settings = write_case(case, conversations(tokenizer, 256)), write_settings(case, concurrency)
        (case.folder / "run").mkdir()
        module = (sys.executable, "-m")
        server = await stack.enter_async_context(process(*module, "benchmarks.rollout_server", str(file)))
        engine = await first_line(server)
        url = await stack.enter_async_context(private_server(case.folder))
        redis = next(each for each in psutil.Process().children() if "server" in each.name())
        role, addresses = (*module, "benchmarks.looking_roles"), (str(settings), "--redis", url)
        commands = {
            "feed": (*role, "feed", str(file), url, RUN),
            "rollout": (*role, "rollout", *addresses, "--engine", engine),
            "score": (*role, "score", *addresses),
            "trainer": (*role, "trainer", str(case.folder / "run"), url, RUN),
            "dashboard": (*module, "penstock", "dashboard", *addresses, "--port", "0"),
        }
        log = stack.enter_context((case.folder / "log").open("w"))
        started = {n: await stack.enter_async_context(process(*command, log=log)) for n, command in commands.items()}
        dashboard = (await first_line(started["dashboard"])).removeprefix("listening on ")
        with anyio.fail_after(60):
            while await answered(engine) < 10 * concurrency:  # noqa: ASYNC110  (another process)
                await anyio.sleep(0.1)
        processes = {name: psutil.Process(each.pid) for name, each in started.items()}
        yield Pipeline(processes | {"redis": redis}, engine, dashboard, page)


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure pairs of windows, and return the figures."""
    windows: dict[bool, list[dict[str, float]]] = {True: [], False: []}

    async with running(arguments.concurrency, PAGES[arguments.page]) as pipeline, anyio.create_task_group() as tasks:
        tasks.start_soon(pipeline.view)
        await anyio.sleep(WARM_S)
        for pair in range(arguments.pairs):
            for looks in (pair % 2 == 0, pair % 2 == 1):
                pipeline.switch(looks=looks)
                await anyio.sleep(SETTLE_S)
                windows[looks].append(await pipeline.measure(arguments.seconds))
            if pair % 10 == 9:
                found = increase(windows, PIPELINE)
                print(f"{pair + 1} of {arguments.pairs}: {found}", file=sys.stderr, flush=True)
        pipeline.switch(looks=True)  # a suspended process does not end
        tasks.cancel_scope.cancel()
    if pipeline.events < arguments.pairs:
        raise SystemExit(f"the viewer got {pipeline.events} parts only")
    return {
        "pairs": arguments.pairs,
        "window_s": arguments.seconds,
        "groups_per_s": round(statistics.mean(each["groups_per_s"] for each in windows[False]), 2),
        "cpu_ms_per_group": {
            name: {
                "alone": round(statistics.mean(each[name] for each in windows[False]), 2),
                "looked_at": round(statistics.mean(each[name] for each in windows[True]), 2),
            }
            for name in (*PIPELINE, "dashboard")
        },
        "increase": {
            "pipeline": increase(windows, PIPELINE),
            "redis": increase(windows, ("redis",)),
            "rollout": increase(windows, ("rollout",)),
            "with_dashboard": increase(windows, (*PIPELINE, "dashboard")),
        },
    }


def increase(windows: dict[bool, list[dict[str, float]]], names: tuple[str, ...]) -> dict[str, float]:
    """Return by what share CPU per group is higher with looking: mean of the pairs, and the bounds of its interval."""
    sums = {looks: [sum(each[name] for name in names) for each in found] for looks, found in windows.items()}
    ratios = [math.log(on / off) for on, off in zip(sums[True], sums[False], strict=True)]
    mean = statistics.mean(ratios)
    half = STUDENT * statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.inf
    return {
        "mean": round(math.expm1(mean), 4),
        "low": round(math.expm1(mean - half), 4),
        "high": round(math.expm1(min(half + mean, 10)), 4),
    }


def main() -> None:
    """Measure, print, and check the limit with `--check`."""
    parser = argparse.ArgumentParser(description="What it costs a run to be looked at")
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--page", choices=tuple(PAGES), default="run")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("error"))
    result = anyio.run(measure, arguments)
    if arguments.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:18} {value}")
    if arguments.check and result["increase"]["pipeline"]["high"] > LIMIT:
        print(f"looking may cost more than {LIMIT:.0%} of CPU per group", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
