"""What a turn costs a rollout worker: turns per CPU-second of a real `penstock rollout`, of its floor, and of TRL.

    python -m benchmarks.rollout [--url URL] [--concurrency 64] [--seconds 15] [--peer trl] [--before DIR] [--journal]

A server answers every turn after exactly 50 ms, from prepared bytes. Groups of 8, prompts of about 490 tokens, 64
tokens per turn, two turns with a tool call and one without; `--tool-turns 7 --gen-tokens 1024` is the long case. Each
contender is one process, and its CPU time is that of the process, threads included:

    penstock  `penstock rollout` with a Redis server, prompts fed to it, groups completed into the stream
    floor     the same requests by bare aiohttp and msgspec on uvloop, answers decoded, nothing else
    trl       with --peer trl: TRL's AsyncRolloutWorker, in a virtual environment made at its first use
    before    with --before: the worker of another checkout of Penstock

They take turns: while one runs, the others are suspended, in `--rounds` rounds, so that a busy machine slows all alike.
Figures are medians of the rounds; `spread` is the lowest and highest ratio of a round.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import aiohttp
import anyio
import psutil
import structlog
import tomli_w
from anyio.streams.text import TextReceiveStream

from benchmarks.rollout_case import GROUP, Case, conversations, make_case, make_prompt
from envs.factory import EnvironmentFactory
from stream.codec import decode
from stream.connection.run_connection import connect
from stream.private_server import private_server
from stream.queue.entry_scan import read_payload
from stream.queue.feed import Feed
from stream.records import Group, Message
from workers.rollout.chat.chat_tokenizer import ChatTokenizer

ROOT = Path(__file__).parents[1]
TRL = "trl==1.16.0"
TRL_ENVIRONMENT = ROOT / ".cache" / "benchmarks" / "trl"
CONVERSATIONS = 512
RUN = "penstock"
SETTLE_S = 1.0
"""After a contender is resumed, until it is measured."""
BACKLOG = 256
_ENVIRONMENTS = ("benchmarks.rollout_case:Adder", "benchmarks.rollout_case:ReplayableAdder")


class Contender:
    """One process under measurement, suspended except while `measure` runs.

    Args:
        name: key of its figures.
        pid: of the process that does the work.
    """

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self._process = psutil.Process(pid)
        self.rounds: list[tuple[float, float]] = []
        """Turns per CPU-second and per second of each round."""
        self.rss_mb = 0.0

    def suspend(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    async def measure(self, engine: str, seconds: float) -> None:
        """Run for so long, and add a round."""
        self.resume()
        await anyio.sleep(SETTLE_S)
        began, cpu, turns = anyio.current_time(), self._cpu_s(), await answered(engine)
        await anyio.sleep(seconds)
        wall, cpu, turns = anyio.current_time() - began, self._cpu_s() - cpu, await answered(engine) - turns
        self.rss_mb = self._process.memory_info().rss / 1e6
        self.suspend()
        if not turns or cpu <= 0:
            raise SystemExit(f"{self.name} asked for no turn within {seconds:g} s")
        self.rounds.append((turns / cpu, turns / wall))

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def figures(self) -> dict[str, float]:
        """Return the medians."""
        per_cpu, per_second = (statistics.median(column) for column in zip(*self.rounds, strict=True))
        return {
            "turns_per_cpu_s": round(per_cpu, 1),
            "turns_per_s": round(per_second, 1),
            "rss_mb": round(self.rss_mb, 1),
        }


async def answered(engine: str) -> int:
    """Return how many turns the engine has answered."""
    async with aiohttp.ClientSession() as session, session.get(f"{engine}/answered") as response:
        return int((await response.json())["answered"])


@asynccontextmanager
async def process(*command: str, cwd: Path = ROOT, log: TextIO | None = None) -> AsyncIterator[anyio.abc.Process]:
    """Run a command of this project, with its log in a file if there is one; it is killed at the end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["TRL_EXPERIMENTAL_SILENCE"] = "1"
    started = await anyio.open_process(list(command), cwd=cwd, env=environment, stderr=log)
    try:
        yield started
    finally:
        with suppress(psutil.NoSuchProcess):
            for each in [*psutil.Process(started.pid).children(recursive=True), psutil.Process(started.pid)]:
                each.kill()
        await started.wait()


async def first_line(started: anyio.abc.Process, timeout_s: float = 120.0) -> str:
    """Return the first line that a process prints."""
    assert started.stdout is not None
    text = ""
    with anyio.fail_after(timeout_s):
        async for part in TextReceiveStream(started.stdout):
            text += part
            if "\n" in text:
                return text.split("\n")[0]
    raise SystemExit("a process ended before it was ready")


def write_case(case: Case, messages: list[list[Message]]) -> Path:
    """Write everything that the processes need to know of the case."""
    factory = EnvironmentFactory.load("benchmarks.rollout_case:Adder")
    chat = ChatTokenizer.load(case.folder, {}, [tool.schema for tool in factory.tools])
    result = {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "3"}
    file = case.folder / "case.json"
    contents = {
        "folder": str(case.folder),
        "group_size": GROUP,
        "turns": case.turns,
        "start_id": case.start_id,
        "conversations": messages,
        "prompt": chat.prompt_ids(messages[0]),
        "continuation": chat.continuation_ids([result], ended_with_eos=True),
    }
    file.write_text(json.dumps(contents))
    return file


def write_settings(case: Case, concurrency: int, environment: str = _ENVIRONMENTS[0]) -> Path:
    """Write the worker's settings."""
    tokens = sum(map(len, case.turns)) + 100 * len(case.turns)
    table: dict[str, Any] = {
        "run": {"name": RUN, "folder": str(case.folder / "run"), "dashboard": "off"},
        "model": {"path": str(case.folder), "tool_format": "hermes"},
        "data": {"path": str(case.folder / "prompts.jsonl")},
        "environments": {"adder": environment},
        "rollout": {
            "group_size": GROUP,
            "groups_in_flight": -(-concurrency // GROUP),
            "max_tokens_per_turn": len(case.turns[0]),
            "max_tokens": tokens,
            "max_turns": len(case.turns) + 1,
        },
        "train": {"batch_size": 1_000_000},
    }
    (case.folder / "prompts.jsonl").write_text('{"prompt": "unused"}\n')
    file = case.folder / "run.toml"
    file.write_text(tomli_w.dumps(table))
    return file


async def feed(url: str, run: str, messages: Sequence[list[Message]]) -> None:
    """Keep a backlog of prompts, forever."""
    async with connect(url, run) as connection:
        feeder, count = Feed(connection, BACKLOG), 0
        while True:
            batch = [
                make_prompt(f"bench:0:{i}", messages[i % len(messages)], "adder", offset=i)
                for i in range(count, count + 64)
            ]
            await feeder.put(batch, str(count) if count else "", str(count + 64))
            count += 64


def make_trl_environment() -> Path:
    """Return the interpreter of TRL's virtual environment; it shares the packages that Penstock has installed."""
    python = TRL_ENVIRONMENT / "bin" / "python"
    if not (TRL_ENVIRONMENT / "ready").exists():
        venv.create(TRL_ENVIRONMENT, with_pip=True, clear=True)
        (packages,) = TRL_ENVIRONMENT.glob("lib/python*/site-packages")
        (packages / "shared.pth").write_text(f"{Path(aiohttp.__file__).parents[1]}\n")
        subprocess.run([python, "-m", "pip", "install", "-q", TRL], check=True, stdout=sys.stderr)
        (TRL_ENVIRONMENT / "ready").touch()
    return python


async def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start the contenders and measure them in turns."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-rollout-"))
        case, tokenizer = make_case(Path(folder), arguments.tool_turns, arguments.gen_tokens)
        messages = conversations(tokenizer, CONVERSATIONS)
        file = write_case(case, messages)
        module = (sys.executable, "-m")
        server = await stack.enter_async_context(
            process(*module, "benchmarks.rollout_server", str(file), "--api", arguments.api)
        )
        engine = await first_line(server)
        url = arguments.url or await stack.enter_async_context(private_server(case.folder))
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        for run in (RUN, *(["before"] if arguments.before else [])):
            tasks.start_soon(feed, url, run, messages)
        contenders = await start_contenders(stack, arguments, file, engine, worker_command(case, arguments, url))
        seconds = arguments.seconds / arguments.rounds
        for _ in range(arguments.rounds):
            for contender in contenders:
                await contender.measure(engine, seconds)
        await check_groups(url, len(case.turns))
        return summarize(contenders)


async def check_groups(url: str, turns: int) -> None:
    """Require that the worker completed groups whose episodes have all their turns and calls."""
    async with connect(url, RUN) as connection:
        entries = await connection.redis.xrevrange(connection.key("groups"), count=1)
        payload = await read_payload(connection, "groups", entries[0][0].decode())
    group = decode(payload or b"", Group)
    seen = {(c.failure, c.truncated, c.turns, c.tool_calls, c.tool_errors) for c in group.completions}
    if seen != {(None, None, turns, turns - 1, 0)}:
        raise SystemExit(f"the worker's episodes differ from the case: {seen}")


def worker_command(case: Case, arguments: argparse.Namespace, url: str) -> tuple[str, ...]:
    """Return the command of the rollout worker, without its engine."""
    settings = write_settings(case, arguments.concurrency, _ENVIRONMENTS[arguments.journal])
    return (sys.executable, "-m", "penstock", "rollout", str(settings), "--redis", url)


async def start_contenders(
    stack: AsyncExitStack, arguments: argparse.Namespace, file: Path, engine: str, worker: tuple[str, ...]
) -> list[Contender]:
    """Start every contender, wait until it samples, and suspend it."""
    load = ("--engine", engine, "--concurrency", str(arguments.concurrency))
    floor = (sys.executable, "-m", "benchmarks.rollout_floor", str(file), *load, "--api", arguments.api)
    commands = [("penstock", (*worker, "--engine", engine)), ("floor", floor)]
    if arguments.before:
        own = (
            "--set",
            f"environments.adder={_ENVIRONMENTS[False]}",
            "--set",
            "run.name=before",
            "--set",
            f"run.folder={file.parent / 'before'}",
        )
        commands.append(("before", (*worker, "--engine", engine, *own)))
    if "trl" in arguments.peer:
        python = await anyio.to_thread.run_sync(make_trl_environment)
        commands.append(("trl", (str(python), "benchmarks/rollout_trl.py", str(file), *load)))
    contenders = []
    for name, command in commands:
        before = await answered(engine)
        started = await stack.enter_async_context(process(*command, cwd=arguments.before if name == "before" else ROOT))
        pid = int(await first_line(started)) if name == "trl" else started.pid
        with anyio.fail_after(120):
            while await answered(engine) < before + 2 * arguments.concurrency:  # noqa: ASYNC110  (another process)
                await anyio.sleep(0.1)
        contenders.append(Contender(name, pid))
        contenders[-1].suspend()
    return contenders


def summarize(contenders: list[Contender]) -> dict[str, Any]:
    """Return every contender's figures, and the ratios of Penstock to the others."""
    result: dict[str, Any] = {contender.name: contender.figures() for contender in contenders}
    ours = contenders[0]
    for other in contenders[1:]:
        ratios = [mine[0] / theirs[0] for mine, theirs in zip(ours.rounds, other.rounds, strict=True)]
        result[f"penstock_by_{other.name}"] = {
            "ratio": round(statistics.median(ratios), 3),
            "spread": [round(min(ratios), 3), round(max(ratios), 3)],
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="", help="of a Redis server; default: a private one")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=15.0, help="measured for each contender, all rounds together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tool-turns", type=int, default=2)
    parser.add_argument("--gen-tokens", type=int, default=64)
    parser.add_argument("--api", choices=("generate", "completions"), default="generate")
    parser.add_argument("--peer", action="append", choices=("trl",), default=[])
    parser.add_argument("--before", type=Path, help="another checkout of Penstock")
    parser.add_argument("--journal", action="store_true", help="turns are saved with their tokens, for a replay")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    result = anyio.run(bench, arguments, backend_options={"use_uvloop": True})
    if arguments.json:
        print(json.dumps(result))
        return
    for name, figures in result.items():
        print(f"{name:18} {figures}")


if __name__ == "__main__":
    main()
