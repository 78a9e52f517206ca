"""A rollout worker is killed in the middle of long episodes: seconds until as many turns are reached again.

    python -m benchmarks.resume [--episodes 64] [--turns 20] [--turn-s 0.5] [--json]

An engine answers every turn after the same time. A real `penstock rollout` runs that many episodes at once, each with
that many turns in one conversation; when they have half of their turns, on average, the worker is killed with SIGKILL,
its prompts are given back as its supervisor does at once, and another worker starts. The figure is the time from the
kill until the episodes together have as many turns as they had: with `rollout.resume`, and without. Most of it with
`rollout.resume` is the start of a worker, which is given beside it.
"""

import argparse
import json
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import structlog
import tomli_w

from benchmarks.rollout import process
from benchmarks.rollout_case import GROUP, make_folder
from stream.connection.run_connection import connect
from stream.operator.control import release_worker
from stream.private_server import private_server
from stream.queue.feed import Feed
from stream.records import Prompt
from tests.scripted_engine.engine import ScriptedEngine

TURN_TOKENS = 32
_STARTS_OF_PROMPT = 3
"""Messages that Qwen's template begins in a prompt: the system's, the user's, and the model's first turn."""


class Interview:
    """Answers each turn with the next question, until it has no more."""

    replayable = True

    def reset(self, completion_index: int, questions: int, **row: Any) -> str:  # noqa: ARG002
        self._left = questions
        return f" You are candidate {completion_index}."

    def respond(self, message: str) -> str | None:
        self._left -= 1
        return f"And after {len(message)} characters?" if self._left else None

    def get_reward(self) -> float:
        return 1.0


class Reached:
    """The turns that each episode has reached.

    Args:
        start_id: token that begins a message.
    """

    def __init__(self, start_id: int) -> None:
        self._start_id = start_id
        self.turns: dict[tuple[int, ...], int] = {}
        """By the episode's prompt."""
        self.requests = 0

    def note(self, ids: Sequence[int]) -> None:
        """Note a request for a turn: those before it are reached."""
        starts = [position for position, token in enumerate(ids) if token == self._start_id]
        episode = tuple(ids[: starts[_STARTS_OF_PROMPT - 1]])
        self.turns[episode] = max(self.turns.get(episode, 0), (len(starts) - _STARTS_OF_PROMPT) // 2)
        self.requests += 1

    @property
    def total(self) -> int:
        """Turns of all episodes together."""
        return sum(self.turns.values())


async def measure(arguments: argparse.Namespace, *, resume: bool) -> dict[str, float]:
    """Kill a worker, and return how long it takes until its turns are reached again."""
    with tempfile.TemporaryDirectory(prefix="penstock-resume-") as name:
        folder = Path(name)
        tokenizer = make_folder(folder)
        answer: list[int] = [
            *tokenizer.encode(" it" * TURN_TOKENS).ids[: TURN_TOKENS - 1],
            tokenizer.token_to_id("<|im_end|>"),
        ]
        reached = Reached(tokenizer.token_to_id("<|im_start|>"))

        def reply(ids: Sequence[int], _: object) -> Sequence[int]:
            reached.note(ids)
            return answer

        async with (
            private_server(folder / "redis") as url,
            connect(url, "resume") as connection,
            ScriptedEngine(reply, version="0", delay_s=arguments.turn_s, max_length=100_000) as engine,
        ):
            groups = arguments.episodes // GROUP
            fields = {"questions": arguments.turns}
            prompts = [
                Prompt(
                    id=f"{number}",
                    messages=[{"role": "user", "content": f"Interview {number}."}],
                    environment="it",
                    group_size=GROUP,
                    fields=fields,
                )
                for number in range(groups)
            ]
            await Feed(connection, groups).put(prompts, "", str(groups))
            command = worker_command(folder, url, engine.url, arguments, resume=resume)
            async with process(*command) as worker:
                await until(lambda: reached.total >= arguments.episodes * arguments.turns / 2)
                worker.send_signal(signal.SIGKILL)
                killed_at, before = time.monotonic(), reached.total
            await release_worker(connection, platform.node(), worker.pid, 5, "was killed")
            reached.turns.clear()
            reached.requests = 0
            async with process(*command) as worker:
                await until(lambda: reached.requests > 0)
                started_s = time.monotonic() - killed_at
                await until(lambda: reached.total >= before)
                seconds = time.monotonic() - killed_at
        return {"seconds": round(seconds, 2), "of_which_start": round(started_s, 2), "turns": before}


async def until(holds: Any) -> None:
    """Wait until a condition of this process holds."""
    with anyio.fail_after(600):
        while not holds():  # noqa: ASYNC110  (an engine's requests, a few hundred a second)
            await anyio.sleep(0.005)


def worker_command(
    folder: Path, redis: str, engine: str, arguments: argparse.Namespace, *, resume: bool
) -> tuple[str, ...]:
    """Return the command of the rollout worker."""
    table: dict[str, Any] = {
        "run": {"name": "resume", "folder": str(folder / "run"), "dashboard": "off"},
        "model": {"path": str(folder)},
        "data": {"path": str(folder / "prompts.jsonl")},
        "environments": {"it": "benchmarks.resume:Interview"},
        "rollout": {
            "group_size": GROUP,
            "groups_in_flight": arguments.episodes // GROUP,
            "max_turns": arguments.turns,
            "max_tokens": 100 * arguments.turns,
            "resume": resume,
        },
        "train": {"batch_size": 1_000_000},
    }
    (folder / "prompts.jsonl").write_text('{"prompt": "unused"}\n')
    (folder / "run.toml").write_text(tomli_w.dumps(table))
    command = (sys.executable, "-m", "penstock", "rollout", str(folder / "run.toml"))
    return (*command, "--redis", redis, "--engine", engine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--turn-s", type=float, default=0.5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    result = {
        name: anyio.run(lambda resume=resume: measure(arguments, resume=resume))
        for name, resume in (("resume", True), ("without", False))
    }
    print(json.dumps(result) if arguments.json else "\n".join(f"{name:8} {each}" for name, each in result.items()))


if __name__ == "__main__":
    main()
