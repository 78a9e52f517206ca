"""Completions per second with slow resets, compared to what the slots allow.

    python -m benchmarks.slots [--repeats 3] [--json] [--check]

The environment's `reset` blocks its thread for 100 ms, tools are instant; 64 slots, groups of 8, 3 turns of an engine
that only waits. If every slot were always busy, they would finish 64 / (reset + turns x engine time) completions per
second; the engine time is the mean of its calls in the same run, wake-ups included. For comparison, the same with one
thread for all resets, like a loop over the slots. The result is the fastest repeat. `--check` exits with 1 below 80 %.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import anyio

from benchmarks.rollout_case import ANSWER, CALL, GROUP, TURNS, Adder, conversations, make_folder, padded
from envs.factory import EnvironmentFactory
from stream.records import Prompt, Span
from workers.rollout.chat.chat_setup import ChatSetup
from workers.rollout.chat.chat_tokenizer import ChatTokenizer
from workers.rollout.engine_client.sampling import SampledTurn, SamplingOptions
from workers.rollout.environment_pool import EnvironmentPool
from workers.rollout.group import GroupRunner
from workers.rollout.tool_formats import TOOL_FORMATS
from workers.settings import RolloutSettings

SLOTS, RESET_S, ENGINE_S, LIMIT = 64, 0.1, 0.03, 0.8


class SlowReset(Adder):
    """Resets as slowly as a container or a browser, and blocks its thread."""

    def reset(self, **row: object) -> None:
        time.sleep(RESET_S)
        super().reset(**row)


class DelayedEngine:
    """Waits, and returns the same turns for every conversation."""

    def __init__(self, turns: list[list[int]], prompt_tokens: int) -> None:
        self._turns = turns
        self._prompt_tokens = prompt_tokens
        self.count = 0
        self.seconds = 0.0

    async def sample(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingOptions,  # noqa: ARG002
        *,
        min_policy_version: int = 0,  # noqa: ARG002
    ) -> SampledTurn:
        began = time.perf_counter()
        await anyio.sleep(ENGINE_S)
        self.count += 1
        self.seconds += time.perf_counter() - began
        turn = (len(prompt_ids) - self._prompt_tokens) // len(self._turns[0])  # continuations are shorter than a turn
        ids = self._turns[min(turn, TURNS - 1)]
        return SampledTurn(list(ids), [-0.5] * len(ids), "stop", [Span(1, 0, len(ids))])


async def measure(groups: int, threads: int) -> dict[str, float]:
    """Roll out groups and return the figures."""
    factory = EnvironmentFactory.load("benchmarks.slots:SlowReset")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_folder(Path(folder))
        chat = ChatTokenizer.load(Path(folder), {}, [tool.schema for tool in factory.tools])
    turns = [padded(tokenizer, CALL)] * (TURNS - 1) + [padded(tokenizer, ANSWER)]
    todo = [
        Prompt(id=f"bench:0:{i}", messages=messages, environment="slow", group_size=GROUP)
        for i, messages in enumerate(conversations(tokenizer, groups))
    ]
    engine = DelayedEngine(turns, len(chat.prompt_ids(todo[0].messages)))
    limiter = anyio.CapacityLimiter(threads)
    async with EnvironmentPool({"slow": factory}, size=SLOTS, limiter=limiter) as pool:

        async def work() -> None:
            while todo:
                group = await GroupRunner(
                    chats={"slow": ChatSetup(chat, TOOL_FORMATS["hermes"])},
                    sampler=engine,
                    pool=pool,
                    limits=RolloutSettings(),
                ).run(todo.pop())
                for completion in group.completions:
                    assert (completion.failure, completion.turns, completion.tool_errors) == (None, TURNS, 0)

        began = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for _ in range(SLOTS // GROUP):
                tasks.start_soon(work)
        wall = time.perf_counter() - began
    engine_s = engine.seconds / engine.count
    possible = SLOTS / (RESET_S + TURNS * engine_s)
    result = groups * GROUP / wall
    return {
        "completions_per_s": round(result, 1),
        "possible_per_s": round(possible, 1),
        "share": round(result / possible, 3),
        "engine_ms": round(engine_s * 1000, 1),
    }


async def both(groups: int, repeats: int) -> dict[str, object]:
    """Measure with a thread per slot, then with one thread."""
    runs = [await measure(groups, SLOTS) for _ in range(repeats)]
    pooled = max(runs, key=lambda run: run["share"])
    return {
        "slots": SLOTS,
        "reset_s": RESET_S,
        "turns": TURNS,
        "limit": LIMIT,
        "pooled": pooled,
        "one_by_one": await measure(SLOTS // GROUP, 1),
    }


def main() -> None:
    """Run, print, and check the limit with `--check`."""
    parser = argparse.ArgumentParser(description="Whether slow resets queue up behind each other")
    parser.add_argument("--groups", type=int, default=240)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    result = anyio.run(
        both, arguments.groups, arguments.repeats, backend_options={"use_uvloop": sys.platform != "win32"}
    )
    if arguments.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:16} {value}")
    pooled = result["pooled"]
    if arguments.check and isinstance(pooled, dict) and pooled["share"] < LIMIT:
        print(f"{pooled['share']:.0%} of what {SLOTS} slots allow; at least {LIMIT:.0%} expected", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
