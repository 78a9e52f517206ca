"""What a turn costs a rollout worker besides asking the engine, and how that grows in the course of a long episode.

    python -m benchmarks.episode [--turns 100] [--tokens 128000] [--json] [--check]

The worker's own code (groups, episodes, environments in threads, tokenizer) with an engine that answers from memory:

    short      64 episodes at a time of 3 turns, as in `rollout.py`; CPU time per turn of the whole process, the median
               and the least of ten rounds
    long       one episode with that many turns of 64 tokens, whose tool results fill the context; CPU time of the
               process from one answer to the next request, around the 10th and around the last turn, and beside it
               what the request's bytes cost
    rewriting  the same with a chat template that drops earlier reasoning, so that each turn starts with the whole
               conversation
    paired     early and late turns of two such episodes in turns, so that a busy machine slows both alike
    megabyte   an episode whose tool results have a megabyte each

`loop_ms` is the longest CPU time that the event loop's thread spent without returning to the loop. `--check` exits with
1 if the last turns of a long episode cost more than 1.5 times the 10th, or if the loop is held for more than 20 ms.
"""

import argparse
import asyncio
import gc
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import structlog
from tokenizers import Tokenizer

from benchmarks.rollout_case import (
    ANSWER,
    CALL,
    END,
    GROUP,
    TURNS,
    conversations,
    make_folder,
    make_prompt,
    padded,
)
from envs.factory import EnvironmentFactory
from stream.codec import encode
from stream.records import Group, Message, Prompt, Span
from workers.rollout.chat.chat_setup import ChatSetup
from workers.rollout.chat.chat_tokenizer import ChatTokenizer
from workers.rollout.engine_client.sampling import SampledTurn, SamplingOptions
from workers.rollout.engine_client.sampling_apis import GenerateApi, SamplingRequest
from workers.rollout.environment_pool import EnvironmentPool
from workers.rollout.group import GroupRunner
from workers.rollout.tool_formats import TOOL_FORMATS
from workers.settings import RolloutSettings

EPISODES, ENGINE_S, ROUND = 64, 0.05, 32
READ = '<tool_call>\n{"name": "read", "arguments": {"characters": %d}}\n</tool_call>'
TEMPLATES = Path(__file__).parents[1] / "tests" / "cases" / "templates"
THOUGHT = "<think>\nI need more of the text.\n</think>\n\n"
REWRITING = TEMPLATES / "Qwen-QwQ-32B.jinja"
PARTS = ("short", "long", "rewriting", "paired", "megabyte")
PAIRED_EPISODES, PAIRED_TURNS = 6, 8
MAX_GROWTH, MAX_LOOP_MS = 1.5, 20.0
_offsets = count()
TEXT = Path(__file__).read_text(encoding="utf-8")


class Library:
    """An environment whose tool returns as much text as it is asked for."""

    def reset(self, **row: object) -> None:  # noqa: ARG002
        self.calls = 0

    def read(self, characters: int) -> str:
        """Read a part of a long text.

        Args:
            characters: how many.
        """
        self.calls += 1
        return (f"Part {self.calls}: " + TEXT * (characters // len(TEXT) + 1))[:characters]

    def get_reward(self) -> float:
        return 1.0


class CannedEngine:
    """Answers each turn of an episode from memory, after a fixed time."""

    def __init__(self, turns: Sequence[Sequence[int]], delay_s: float = 0.0) -> None:
        self._turns = [SampledTurn(list(ids), [-0.5] * len(ids), "stop", [Span(1, 0, len(ids))]) for ids in turns]
        self._delay_s = delay_s
        self._positions: dict[tuple[str, int], int] = {}
        self._answered_at: float | None = None
        self.count = 0
        self.between: list[tuple[float, float]] = []
        """CPU seconds from each answer to the next request of a single episode, and of encoding that request."""

    async def sample(
        self,
        prompt_ids: Sequence[int],
        options: SamplingOptions,
        *,
        min_policy_version: int = 0,  # noqa: ARG002
    ) -> SampledTurn:
        key = (options.group, options.completion)
        position = self._positions[key] = self._positions.get(key, -1) + 1
        self.count += 1
        if self._delay_s:
            loop = asyncio.get_running_loop()
            loop.call_later(self._delay_s, (answered := loop.create_future()).set_result, None)
            await answered
        else:
            self._measure(prompt_ids, options)
            await anyio.lowlevel.checkpoint()
            self._answered_at = time.process_time()
        return self._turns[position]

    def _measure(self, prompt_ids: Sequence[int], options: SamplingOptions) -> None:
        asked_at = time.process_time()
        GenerateApi().encode(SamplingRequest(prompt_ids, options, model="policy"))
        if self._answered_at is not None:
            self.between.append((asked_at - self._answered_at, time.process_time() - asked_at))


class PairedEngine(CannedEngine):
    """An engine of one of two episodes that work in turns, from a given turn on.

    Args:
        turns: as for `CannedEngine`.
        first: the first turn, from 0, whose answer waits for the other episode.
    """

    def __init__(self, turns: Sequence[Sequence[int]], first: int) -> None:
        super().__init__(turns)
        self._first = first
        self.may_answer = anyio.Semaphore(0)
        self.is_waiting = anyio.Event()
        self.other: PairedEngine | None = None

    async def sample(
        self, prompt_ids: Sequence[int], options: SamplingOptions, *, min_policy_version: int = 0
    ) -> SampledTurn:
        if self.count >= self._first:
            self._measure(prompt_ids, options)
            self._answered_at = None
            if self.is_waiting.is_set() and self.other is not None:
                self.other.may_answer.release()
            self.is_waiting.set()
            await self.may_answer.acquire()
        return await super().sample(prompt_ids, options, min_policy_version=min_policy_version)


class LoopTimer:
    """Finds the longest CPU time of this thread between two iterations of the event loop."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._last = time.thread_time()
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        now = time.thread_time()
        self.longest_s = max(self.longest_s, now - self._last)
        self._last = now
        self._loop.call_later(0.001, self._tick)


@asynccontextmanager
async def runner_of(
    folder: Path, name: str, engine: CannedEngine, limits: RolloutSettings
) -> AsyncIterator[GroupRunner]:
    """Make a group runner for one of the environments `benchmarks.rollout_case:Adder` and `Library`."""
    factory = EnvironmentFactory.load(name)
    chat = ChatTokenizer.load(folder, {}, [tool.schema for tool in factory.tools])
    chat.check_history()
    async with EnvironmentPool({"it": factory}, size=EPISODES) as pool:
        setup = ChatSetup(chat, TOOL_FORMATS["hermes"])
        yield GroupRunner(chats={"it": setup}, sampler=engine, pool=pool, limits=limits)


async def short(folder: Path, tokenizer: Tokenizer, groups: int) -> dict[str, Any]:
    """Roll out groups as a worker does, and encode them; return CPU microseconds per turn."""
    turns = [padded(tokenizer, CALL)] * (TURNS - 1) + [padded(tokenizer, ANSWER)]
    engine = CannedEngine(turns, ENGINE_S)
    messages = conversations(tokenizer, groups + EPISODES // GROUP)
    async with runner_of(folder, "benchmarks.rollout_case:Adder", engine, RolloutSettings()) as runner:
        await _roll_out(runner, messages[groups:], "warm")
        gc.freeze()
        rounds = []
        for start in range(0, groups, ROUND):
            before, cpu = engine.count, time.process_time()
            await _roll_out(runner, messages[start : start + ROUND], f"bench{start}")
            rounds.append(1e6 * (time.process_time() - cpu) / (engine.count - before))
        return {"us_per_turn": round(statistics.median(rounds), 1), "least": round(min(rounds), 1)}


async def _roll_out(runner: GroupRunner, messages: list[list[Message]], name: str) -> None:
    prompts = [make_prompt(f"{name}:0:{i}", each, "it", offset=next(_offsets)) for i, each in enumerate(messages)]

    async def work() -> None:
        while prompts:
            group = await runner.run(prompts.pop())
            encode(group)
            _check(group, TURNS)

    async with anyio.create_task_group() as tasks:
        for _ in range(EPISODES // GROUP):
            tasks.start_soon(work)


def _check(group: Group, turns: int) -> None:
    seen = {(c.failure, c.truncated, c.turns, c.tool_errors) for c in group.completions}
    if seen != {(None, None, turns, 0)}:
        raise SystemExit(f"the episodes are not what they should be: {seen}")


def _call(tokenizer: Tokenizer, text: str, tokens: int) -> list[int]:
    """Return a turn that starts with `text` and calls a tool; turn and result have about `tokens` tokens together."""
    sample = tokenizer.encode(TEXT)
    characters = int((tokens - 90) * len(tokenizer.decode(sample.ids)) / len(sample.ids))
    return [*tokenizer.encode(text + READ % characters).ids, tokenizer.token_to_id(END)]


async def paired(folder: Path, tokenizer: Tokenizer, text: str, turns: int, tokens: int) -> dict[str, Any]:
    """Run an early and a late part of episodes in turns; return how much more CPU time the late turns take."""
    call, answer = _call(tokenizer, text, tokens // turns), padded(tokenizer, ANSWER)
    (messages,) = conversations(tokenizer, 1)
    limits = RolloutSettings(max_tokens=2 * tokens, max_turns=turns, max_tool_calls=turns, episode_timeout_s=3600)
    growth: list[float] = []

    async def run(engine: PairedEngine, other: PairedEngine) -> None:
        async with runner_of(folder, "benchmarks.episode:Library", engine, limits) as runner:
            await runner.run(Prompt(id="paired:0:0", messages=messages, environment="it"))
        other.may_answer.release()

    for _ in range(PAIRED_EPISODES):
        early = PairedEngine([call] * (6 + PAIRED_TURNS) + [answer], 6)
        late = PairedEngine([call] * (turns - 1) + [answer], turns - 1 - PAIRED_TURNS)
        early.other, late.other = late, early
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, early, late)
            tasks.start_soon(run, late, early)
            await early.is_waiting.wait()
            await late.is_waiting.wait()
            early.may_answer.release()
        pairs = zip(early.between[-PAIRED_TURNS:], late.between[-PAIRED_TURNS:], strict=True)
        growth += [after / before for (before, _), (after, _) in pairs]
    low, middle, high = statistics.quantiles(growth, n=4)
    return {"growth": round(middle, 3), "quartiles": [round(low, 3), round(high, 3)]}


async def long(folder: Path, tokenizer: Tokenizer, text: str, turns: int, tokens: int) -> dict[str, Any]:
    """Run one episode; return the milliseconds of CPU that turns take, and how long the loop was held."""
    call = _call(tokenizer, text, tokens // turns)
    engine = CannedEngine([call] * (turns - 1) + [padded(tokenizer, ANSWER)])
    limits = RolloutSettings(max_tokens=2 * tokens, max_turns=turns, max_tool_calls=turns, episode_timeout_s=3600)
    async with runner_of(folder, "benchmarks.episode:Library", engine, limits) as runner:
        (messages,) = conversations(tokenizer, 1)
        timer = LoopTimer()
        group = await runner.run(Prompt(id="long:0:0", messages=messages, environment="it"))
        await anyio.to_thread.run_sync(encode, group)  # as `Stage.complete` does
        await anyio.sleep(0.01)
    _check(group, turns)
    length = sum(len(row.tokens) for row in group.completions[0].rows)
    early, late = _median(engine.between[6:12]), _median(engine.between[-6:])
    return {
        "tokens": length,
        "turn_10_ms": early[0],
        "last_turn_ms": late[0],
        "request_10_ms": early[1],
        "last_request_ms": late[1],
        "growth": round(late[0] / early[0], 2),
        "loop_ms": round(1e3 * timer.longest_s, 2),
    }


def _median(turns: list[tuple[float, float]]) -> tuple[float, float]:
    worked, encoded = zip(*turns, strict=True)
    return round(1e3 * statistics.median(worked), 3), round(1e3 * statistics.median(encoded), 3)


async def bench(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Measure everything that was asked for."""
    with tempfile.TemporaryDirectory(prefix="penstock-episode-") as name:
        folder, rewriting = Path(name) / "plain", Path(name) / "rewriting"
        folder.mkdir()
        tokenizer = make_folder(folder)
        shutil.copytree(folder, rewriting)
        shutil.copy(REWRITING, rewriting / "chat_template.jinja")
        size = (arguments.turns, arguments.tokens)
        measures = {
            "short": partial(short, folder, tokenizer, arguments.groups),
            "long": partial(long, folder, tokenizer, "", *size),
            "rewriting": partial(long, rewriting, tokenizer, THOUGHT, *size),
            "paired": partial(paired, rewriting, tokenizer, THOUGHT, *size),
            "megabyte": partial(long, folder, tokenizer, "", 12, 12 * 300_000),
        }
        return {part: await measures[part]() for part in arguments.only or measures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=320, help="of the short episodes")
    parser.add_argument("--turns", type=int, default=100, help="of the long episode")
    parser.add_argument("--tokens", type=int, default=128_000, help="of the long episode")
    parser.add_argument("--only", action="append", choices=PARTS, default=[])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    result = anyio.run(bench, arguments, backend_options={"use_uvloop": True})
    print(json.dumps(result) if arguments.json else "\n".join(f"{name:10} {part}" for name, part in result.items()))
    held = max((part.get("loop_ms", 0.0) for part in result.values()), default=0.0)
    growth = max((part.get("growth", 0.0) for part in result.values()), default=0.0)
    if arguments.check and (held > MAX_LOOP_MS or growth > MAX_GROWTH):
        print(f"the loop was held for {held} ms, the last turns cost {growth} times the 10th", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
