"""How long each page of the dashboard takes on a large run, and what ten viewers cost compared to one.

    python -m benchmarks.dashboard [--waiting 50000] [--dead 10000] [--steps 400] [--repeats 5] [--json] [--check]

The run: `--waiting` groups wait to be trained, `--dead` dead letters, `--steps` steps of 125 groups with 8 completions,
and one group whose 8 completions have 200 turns and 100,000 tokens each, with what its step did with them. A real
server, and a real `penstock dashboard` process.

- `pages`: milliseconds until a page is complete, at its first request and as the median of the later ones, and its KiB.
  A page without data of its own is measured together with what it loads.
- `viewers`: CPU milliseconds per second of the dashboard and the server, with one and with ten viewers of the page Run
  who get every change of a pipeline that moves (`--seconds` each, in turns).

`--check` exits with 1 if a page takes more than 1 s, or ten viewers cost more than 1.5 times one.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import anyio
import psutil
import structlog

from benchmarks.startup import (
    AT_ONCE,
    PENSTOCK,
    cpu_seconds,
    dead_letter,
    measure_command,
    move_to_trainer,
    waiting_prompts,
)
from stream.codec import encode
from stream.connection.run_connection import RunConnection
from stream.records import Completion, Group, Prompt, RewardPart, Row, Span, TrainedCompletion, TrainedRow
from stream.trainer.archive import Archive
from stream.trainer.ledger import Ledger
from stream.trainer.ledger_records import LedgerRecord, Trained, content_hash
from stream.trainer.trained_tokens import FOLDER, TrainedTokenFiles
from stream.validity import Measured
from workers.runs.live_run import LiveRun, write_live

GROUPS, GROUP = 125, 8
"""A step has 1,000 completions."""
TURNS, TURN_TOKENS = 200, 500
LIMIT_MS, VIEWERS_LIMIT = 1000.0, 1.5
LONG = "long"
PAGES = {
    "runs": ("/",),
    "run": ("/runs/d", "/runs/d/charts.json"),
    "in flight": ("/runs/d/in-flight",),
    "groups": ("/runs/d/groups",),
    "groups by reward": ("/runs/d/groups?reward=0.4..0.5",),
    "groups by a reason that none has": ("/runs/d/groups?end=reward:timeout",),
    "groups that wait": ("/runs/d/groups?at=trainer",),
    "group": ("/runs/d/group?id=g1-7",),
    "group of 100,000 tokens": (f"/runs/d/group?id={LONG}",),
    "its tokens": (f"/runs/d/group/tokens?id={LONG}&completion=3&color=advantage&from=50000",),
    "its messages": (f"/runs/d/group/messages?id={LONG}&completion=3&from=100",),
    "timeline": ("/runs/d/timeline",),
    "workers": ("/runs/d/workers", "/runs/d/engines"),
    "dead letters": ("/runs/d/dead",),
}


def ended_group(name: str, step: int, turns: int = 1, tokens: int = 32) -> Group:
    """Make a group whose completions have that many turns of that many tokens."""
    ids = array("i", [100 + at % 50 for at in range(turns * tokens)])
    row = Row(
        prompt_ids=array("i", range(100, 140)).tobytes(),
        token_ids=ids.tobytes(),
        sampled_ranges=[(0, len(ids))],
        logprobs=array("f", [-0.5]).tobytes() * len(ids),
        spans=[Span(step - 1, 0, len(ids))],
    )
    messages = []
    for turn in range(turns):
        messages.append({"role": "assistant", "content": f"In turn {turn} I look further. " + "word " * (tokens // 2)})
        messages.append({"role": "user", "content": f"You see the result of turn {turn}."})
    completions = [
        Completion(
            index=index,
            rows=[row],
            prompt_messages=[{"role": "user", "content": f"What is {step} and {index}?"}],
            messages=messages,
            reward=Measured(index / GROUP),
            parts=[RewardPart(name="exact", reward=Measured(index / GROUP))],
            turns=turns,
        )
        for index in range(GROUP)
    ]
    return Group(prompt=Prompt(id=name, messages=[], fed_at=1.0), completions=completions, claimed_at=2.0)


def write_steps(folder: Path, steps: int) -> None:
    """Write the ledger, archive and metrics of that many steps; the last one has the long group, too."""
    archive = Archive(folder / "groups", trained_tokens=TrainedTokenFiles(folder / FOLDER, 10**9))
    ledger = Ledger(folder / "ledger.jsonl")
    with (folder / "metrics.jsonl").open("w") as metrics:
        for step in range(1, steps + 1):
            groups = [ended_group(f"g{step}-{number}", step) for number in range(GROUPS)]
            if step == steps:
                groups.append(ended_group(LONG, step, TURNS, TURN_TOKENS))
            records = [
                LedgerRecord(group.prompt.id, Trained(), step, step - 1, content_hash(group)) for group in groups
            ]
            archive.write(
                ((record, encode(group)) for record, group in zip(records, groups, strict=True)),
                {group.prompt.id: list(trained_tokens(group)) for group in groups},
            )
            ledger.append(records)
            metrics.write(json.dumps({"step": step, "time": float(step), "reward/mean": step / steps}) + "\n")
    archive.sync()
    ledger.sync()
    archive.close()
    ledger.close()


def trained_tokens(group: Group) -> Iterator[TrainedCompletion]:
    """Make what a step did with each completion."""
    for completion in group.completions:
        tokens = len(completion.rows[0].token_ids) // 4
        noise = array("f", [0.01 * (at % 7) for at in range(tokens)]).tobytes()
        rows = (TrainedRow(advantages=noise, logprob_differences=noise),)
        yield TrainedCompletion("valid", 0.5, tokens, rows)


@contextmanager
def dashboard(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Start `penstock dashboard`; yields its URL and process."""
    command = [*PENSTOCK, "dashboard", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1].removesuffix("/"), psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(20)


async def fetch(session: aiohttp.ClientSession, paths: Iterable[str]) -> tuple[float, int]:
    """Get a page and what it loads; return milliseconds and bytes."""
    began, size = time.perf_counter(), 0
    for path in paths:
        async with session.get(path) as answer:
            assert answer.status == 200, (path, answer.status, (await answer.text())[:500])
            size += len(await answer.read())
    return 1000 * (time.perf_counter() - began), size


async def measure_pages(url: str, repeats: int) -> dict[str, dict[str, float]]:
    """Time each page at its first request and later."""
    found = {}
    async with aiohttp.ClientSession(url) as session:
        for name, paths in PAGES.items():
            first, size = await fetch(session, paths)
            later = [(await fetch(session, paths))[0] for _ in range(repeats)]
            found[name] = {
                "first_ms": round(first, 1),
                "ms": round(statistics.median(later), 1),
                "kib": round(size / 1024, 1),
            }
    return found


@asynccontextmanager
async def viewers(url: str, count: int) -> AsyncIterator[None]:
    """Have that many viewers of the page Run."""
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def view() -> None:
            async with session.get("/runs/d/events?parts=state,pipeline,steps") as stream:
                async for _ in stream.content.iter_any():
                    pass

        async with anyio.create_task_group() as tasks:
            for _ in range(count):
                tasks.start_soon(view)
            yield
            tasks.cancel_scope.cancel()


async def measure_viewers(
    url: str, process: psutil.Process, connection: RunConnection, seconds: float, repeats: int
) -> dict[str, float]:
    """Compare the CPU time of ten viewers with that of one."""

    async def spent() -> float:
        cpu = await connection.redis.info("cpu")
        return cpu_seconds(process) + cpu["used_cpu_user"] + cpu["used_cpu_sys"]

    async def work(count: int) -> float:
        async with viewers(url, count):
            await anyio.sleep(2)
            began, before = time.perf_counter(), await spent()
            while time.perf_counter() - began < seconds:
                await move_to_trainer(connection, AT_ONCE // 50)  # something changes in every second
                await anyio.sleep(0.5)
            return 1000 * (await spent() - before) / (time.perf_counter() - began)

    rounds = [(await work(1), await work(10)) for _ in range(repeats)]
    return {
        "one_ms_per_s": round(statistics.median(one for one, _ in rounds), 2),
        "ten_ms_per_s": round(statistics.median(ten for _, ten in rounds), 2),
        "ratio": round(statistics.median(ten / one for one, ten in rounds), 2),
    }


async def measure(arguments: argparse.Namespace) -> dict[str, dict[str, object]]:
    """Make the run and measure."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "runs/d"
        prepare = (*PENSTOCK, "demo", "--prepare", "--folder", str(folder))
        await anyio.to_thread.run_sync(measure_command, *prepare)
        await anyio.to_thread.run_sync(write_steps, folder, arguments.steps)
        moving = 5000
        async with waiting_prompts(Path(name), arguments.waiting + arguments.dead + moving) as (connection, url):
            await dead_letter(connection, arguments.dead)
            await move_to_trainer(connection, arguments.waiting)
            write_live(folder, LiveRun.of_this_process("d", url))
            with dashboard(folder) as (address, process):
                return {
                    "pages": await measure_pages(address, arguments.repeats),
                    "viewers": await measure_viewers(address, process, connection, arguments.seconds, 3),
                }


def main() -> None:
    """Measure, print, and check the limits with `--check`."""
    parser = argparse.ArgumentParser(description="Pages of the dashboard on a large run, and the cost of viewers")
    parser.add_argument("--waiting", type=int, default=50_000)
    parser.add_argument("--dead", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("error"))
    arguments = parser.parse_args()
    found = anyio.run(measure, arguments)
    if arguments.json:
        print(json.dumps(found))
    else:
        for name, page in found["pages"].items():
            print(f"{name:36} first {page['first_ms']:7.1f} ms   later {page['ms']:7.1f} ms   {page['kib']:8.1f} KiB")
        print(found["viewers"])
    slow = [name for name, page in found["pages"].items() if max(page["first_ms"], page["ms"]) > LIMIT_MS]
    if arguments.check and (slow or found["viewers"]["ratio"] > VIEWERS_LIMIT):
        print(f"beyond the limits: {', '.join(slow) or 'ten viewers'}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
