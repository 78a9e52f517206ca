"""What a turn costs a rollout worker through each dialect of the agent endpoint, beside the built-in conversation.

    python -m benchmarks.agent_endpoint [--seconds 24] [--rounds 4] [--json]
    python -m benchmarks.agent_endpoint --long [--json]
    python -m benchmarks.agent_endpoint --sub-agents MODEL [--json]

The case is that of `benchmarks.rollout`: an engine that answers after 50 ms, groups of 8, two turns with a tool call
and one without. The agents are loops in a process of their own, which send plain JSON; only the worker's CPU time
counts. Contenders take turns, and the others are suspended. `--long`: CPU milliseconds and memory of the worker's own
part of a turn in one episode of 100 turns that ends with a context of 30,000 tokens. `--sub-agents`: seconds in which
a local engine with the model in this folder answers eight sub-agents with 200 tokens each, at once and one at a time.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import tracemalloc
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import structlog
import tomli_w

from benchmarks.rollout import ROOT, Contender, answered, feed, first_line, process, write_case, write_settings
from benchmarks.rollout_case import END, Case, conversations, make_case
from stream.private_server import private_server
from stream.records import Completion, Prompt, Span
from workers.rollout.agent_endpoint.dialects import DIALECTS
from workers.rollout.agent_endpoint.neutral import ModelRequest
from workers.rollout.agent_endpoint.recorder import Recorder
from workers.rollout.chat.chat_tokenizer import ChatTokenizer
from workers.rollout.engine_client.client import EngineClient
from workers.rollout.engine_client.sampling import SampledTurn
from workers.rollout.episode import EpisodeContext
from workers.rollout.episode_clock import EpisodeClock
from workers.rollout.tool_formats import TOOL_FORMATS
from workers.settings import AgentSettings, RolloutSettings, Settings
from workers.settings.toml_file import parse_settings

NAMES = ("chat", "responses", "messages")
CONCURRENCY = 64
LONG_TURNS, LONG_TOKENS = 100, 30_000
SUB_AGENTS, SUB_TOKENS, SUB_ROUNDS = 8, 200, 1


def agent_settings(case: Case, built_in: Path, name: str, port: int) -> Path:
    """Write the settings of a worker whose episodes are loops in the process at this port."""
    table = {
        **json.loads(json.dumps(msgspec.toml.decode(built_in.read_bytes()))),
        "run": {"name": name, "folder": str(case.folder / name), "dashboard": "off"},
        "environments": {
            "adder": {"ref": "benchmarks.agent_endpoint_loops:Program", "args": {"port": port, "dialect": name}}
        },
    }
    file = case.folder / f"{name}.toml"
    file.write_text(tomli_w.dumps(table))
    return file


async def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure a worker for each dialect, and the built-in conversation."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-agents-"))
        case, tokenizer = make_case(Path(folder), 2, 64)
        messages = conversations(tokenizer, 512)
        file = write_case(case, messages)
        module = (sys.executable, "-m")
        engine = await first_line(
            await stack.enter_async_context(process(*module, "benchmarks.rollout_server", str(file)))
        )
        loops = await stack.enter_async_context(process(*module, "benchmarks.agent_endpoint_loops"))
        port = int(await first_line(loops))
        url = await stack.enter_async_context(private_server(case.folder))
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        built_in = write_settings(case, CONCURRENCY)
        files = {"penstock": built_in} | {name: agent_settings(case, built_in, name, port) for name in NAMES}
        contenders = []
        for name, settings in files.items():
            tasks.start_soon(feed, url, name, messages)
            before = await answered(engine)
            command = (*module, "penstock", "rollout", str(settings), "--redis", url, "--engine", engine)
            started = await stack.enter_async_context(process(*command, cwd=ROOT))
            with anyio.fail_after(120):
                while await answered(engine) < before + 2 * CONCURRENCY:  # noqa: ASYNC110  (another process)
                    await anyio.sleep(0.1)
            contenders.append(Contender(name, started.pid))
            contenders[-1].suspend()
        for _ in range(arguments.rounds):
            for contender in contenders:
                await contender.measure(engine, arguments.seconds / arguments.rounds)
        result: dict[str, Any] = {contender.name: contender.figures() for contender in contenders}
        for contender in contenders[1:]:
            ratios = [mine[0] / other[0] for mine, other in zip(contender.rounds, contenders[0].rounds, strict=True)]
            result[f"{contender.name}_by_built_in"] = {
                "ratio": round(statistics.median(ratios), 3),
                "spread": [round(min(ratios), 3), round(max(ratios), 3)],
            }
        return result


class Instant:
    """Samples the same turn at once."""

    def __init__(self, ids: list[int]) -> None:
        self._turn = SampledTurn(ids, [-0.5] * len(ids), "stop", [Span(0, 0, len(ids))])

    async def sample(self, _ids: Any, _options: Any, *, min_policy_version: int = 0) -> SampledTurn:  # noqa: ARG002
        return self._turn


async def long_episode(name: str, turns: int, *, with_memory: bool) -> dict[str, float]:
    """Return what the worker's part of a turn takes in a long episode through one dialect."""
    from benchmarks.agent_endpoint_loops import LOOPS

    dialect, loop = DIALECTS[NAMES.index(name)], LOOPS[name]
    with tempfile.TemporaryDirectory() as folder:
        case, tokenizer = make_case(Path(folder), 2, 64)
        chat = ChatTokenizer.load(case.folder, {}, None)
    source = await anyio.Path(__file__).read_text()
    text = tokenizer.decode(tokenizer.encode(source).ids[: LONG_TOKENS // LONG_TURNS - 20])
    sampler = Instant([*tokenizer.encode("I look at the next part.").ids, tokenizer.token_to_id(END)])
    completion = Completion(index=0, seconds={"engine": 0.0})
    context = EpisodeContext(
        prompt=Prompt(id="p", messages=[{"role": "user", "content": "a"}]),
        index=0,
        chat=chat,
        tool_format=TOOL_FORMATS["hermes"],
        sampler=sampler,
        slot=None,
        limits=RolloutSettings(max_turns=turns + 1, max_tokens=10_000_000),
    )
    recorder = Recorder(context, completion, EpisodeClock(3600.0))
    messages, spent = [{"role": "user", "content": text}], []
    if with_memory:
        tracemalloc.start()
    for _ in range(turns):
        body = json.dumps(loop.request(messages, tools=False)).encode()
        began = time.process_time()
        request = dialect.parse(msgspec.json.decode(body), {})
        reply = await recorder.complete(request)
        answer = msgspec.json.encode(dialect.body(reply, request))
        spent.append(1000 * (time.process_time() - began))
        messages += [*loop.answer(json.loads(answer)), {"role": "user", "content": text}]
    rows, _ = recorder.record()
    tokens = sum(len(row.prompt) + len(row.tokens) for row in rows)
    result: dict[str, float] = {"rows": len(rows), "tokens": tokens}
    if with_memory:  # which slows the rest down
        result["bytes_by_token"] = round(tracemalloc.get_traced_memory()[0] / tokens, 1)
        tracemalloc.stop()
        return result
    return result | {
        "ms_median": round(statistics.median(spent), 2),
        "ms_last_ten": round(statistics.median(spent[-10:]), 2),
    }


async def sub_agents(model: str) -> dict[str, Any]:
    """Return the seconds of eight sub-agents, at once and one after another, on an engine of their own."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-agents-")))
        table = {
            "run": {"name": "sub-agents", "folder": str(folder / "run")},
            "model": {"path": model},
            "data": {"rows": 1},
            "environments": {"adder": "benchmarks.rollout_case:Adder"},
            "rollout": {
                "max_tokens": SUB_TOKENS,
                "max_tokens_per_turn": SUB_TOKENS,
                "sampling": {"min_tokens": SUB_TOKENS},
            },
            "engine": {"max_model_len": 1024},
        }
        file = folder / "run.toml"
        file.write_text(tomli_w.dumps(table))
        settings = parse_settings(table)
        engine = await stack.enter_async_context(
            process(sys.executable, "-m", "penstock", "serve", str(file), "--port", "0")
        )
        url = (await first_line(engine)).rpartition(" ")[2]
        client = await stack.enter_async_context(EngineClient.from_settings(settings, [url]))
        await client.wait_until_ready()
        chat = ChatTokenizer.load(Path(model), {}, None)
        result: dict[str, Any] = {"at_once_s": [], "one_at_a_time_s": [], "rows": [], "branches": []}
        for number in range(2 * SUB_ROUNDS):
            is_at_once = number % 2 == 0
            recorder, spent = await _ask_sub_agents(settings, client, chat, number, is_at_once=is_at_once)
            result["at_once_s" if is_at_once else "one_at_a_time_s"].append(round(spent, 2))
            rows, branches = recorder.record()
            result["rows"].append(len(rows))
            result["branches"].append(len(branches))
        ratios = [mine / other for mine, other in zip(result["at_once_s"], result["one_at_a_time_s"], strict=True)]
        return result | {"ratio": round(statistics.median(ratios), 3)}


async def _ask_sub_agents(
    settings: Settings, client: EngineClient, chat: ChatTokenizer, number: int, *, is_at_once: bool
) -> tuple[Recorder, float]:
    context = EpisodeContext(
        prompt=Prompt(id=f"p{number}", messages=[{"role": "user", "content": "a"}], seed=number),
        index=0,
        chat=chat,
        tool_format=TOOL_FORMATS["hermes"],
        sampler=client,
        slot=None,
        limits=settings.rollout,
        min_policy_version=-1,
        agents=AgentSettings(max_rollout_tokens=2 * SUB_AGENTS * SUB_TOKENS),
    )
    recorder = Recorder(context, Completion(index=0, seconds={"engine": 0.0}), EpisodeClock(3600.0))

    async def ask(text: str) -> None:
        await recorder.complete(ModelRequest(messages=[{"role": "user", "content": text}]))

    await ask("Tell me a story, and ask others for its parts.")
    began = time.perf_counter()
    limit = anyio.CapacityLimiter(SUB_AGENTS if is_at_once else 1)

    async def sub_agent(part: int) -> None:
        async with limit:
            await ask(f"Tell part {part} of the story.")

    async with anyio.create_task_group() as tasks:
        for part in range(SUB_AGENTS):
            tasks.start_soon(sub_agent, part)
    return recorder, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=24.0, help="measured for each contender, all rounds together")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--long", action="store_true", help="a long episode instead")
    parser.add_argument("--sub-agents", type=Path, metavar="MODEL", help="sub-agents on a local engine instead")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    if arguments.long:
        result: dict[str, Any] = {
            f"{name}, {turns} turns": anyio.run(partial(long_episode, name, turns, with_memory=True))
            | anyio.run(partial(long_episode, name, turns, with_memory=False))
            for name in NAMES
            for turns in (LONG_TURNS // 2, LONG_TURNS)
        }
    elif arguments.sub_agents:
        result = anyio.run(sub_agents, str(arguments.sub_agents.resolve()))
    else:
        result = anyio.run(compare, arguments, backend_options={"use_uvloop": True})
    if arguments.json:
        print(json.dumps(result))
        return
    for name, figures in result.items():
        print(f"{name:24} {figures}")


if __name__ == "__main__":
    main()
