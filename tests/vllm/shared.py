"""Servers shared by all test files: started ahead in the background, and stopped after their last test."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from examples.reward_model.make_models import make_reward_model
from tests.vllm.policies import LENGTH, bend, make_policy
from tests.vllm.served import Served
from tests.vllm.server import START_S, vllm_python, vllm_server
from workers.engine_api.wire import WEIGHT_TRANSFER_BACKEND

LONG = ("--max-model-len", str(LENGTH))
TAKES_WEIGHTS = (
    "--enable-scale-out",
    "--block-size",
    "32",
    "--weight-transfer-config",
    f'{{"backend": "{WEIGHT_TRANSFER_BACKEND}"}}',
)
FLAGS = {
    "pooling": ("--runner", "pooling", "--max-model-len", "512"),
    "lora": (
        *(*LONG, "--enable-scale-out", "--enable-lora", "--max-lora-rank", "8", "--max-loras", "3"),
        *("--max-logprobs", "2"),  # too few to find out what the log-probs refer to
    ),
    "tied": (*LONG, *TAKES_WEIGHTS, "--logprobs-mode", "processed_logprobs"),
    "untied": (*LONG, *TAKES_WEIGHTS),  # log-probs are raw, as is vLLM's default
}
"""Flags of each server, in the order in which servers start and tests run."""
_AT_ONCE = 2
"""Number of concurrent starts: each takes one core."""


class Started(NamedTuple):
    """A running server whose weights do not change."""

    url: str
    folders: list[Path]
    """Folder of its model, as a list of one."""


def needs(item: pytest.Item) -> set[str]:
    """Return the names of the servers that a test uses."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    named = {*getattr(item, "fixturenames", ()), *(each for each in parameters if isinstance(each, str))}
    return named & {*FLAGS}


def last_needed(item: pytest.Item) -> int:
    """Sort key of tests: the number of servers that must have started; tests that start their own servers come last."""
    return max((list(FLAGS).index(name) + 1 for name in needs(item)), default=len(FLAGS) + 1)


class SharedServers:
    """The servers that these tests need.

    Args:
        home: folder for models and logs.
        items: the tests, in order.
    """

    def __init__(self, home: Path, items: list[pytest.Item]) -> None:
        self._home = home
        self._last = {name: item.nodeid for item in items for name in needs(item)}
        self._running = {name: ExitStack() for name in FLAGS if name in self._last}
        folders = {name: _models(name, home / name) for name in self._running}  # here: torch's defaults are global
        vllm_python()  # here: two concurrent starts would both create the environment
        self._pool = ThreadPoolExecutor(_AT_ONCE)
        self._started: dict[str, Future[Started | Served]] = {
            name: self._pool.submit(self._start, name, made) for name, made in folders.items()
        }

    def _start(self, name: str, folders: list[Path]) -> Started | Served:
        server = vllm_server(folders[0], self._home / name / "vllm.log", *FLAGS[name])
        url = self._running[name].enter_context(server)
        return (Served if len(folders) > 1 else Started)(url, folders)

    def lend(self, name: str, to: str) -> Iterator[Started | Served]:
        """Yield a server once it is healthy, and stop it after its last test.

        Args:
            name: name of the server.
            to: node id of the test.
        """
        yield self._started[name].result(2 * START_S)
        if to == self._last[name]:
            self._running[name].close()

    def close(self) -> None:
        """Stop all running servers."""
        self._pool.shutdown(cancel_futures=True)
        for stack in self._running.values():
            stack.close()


def _models(name: str, home: Path) -> list[Path]:
    home.mkdir()
    if name == "pooling":
        make_reward_model(home / "reward", seed=2)
        return [home / "reward"]
    if name == "lora":
        return [make_policy(home / "base", 1, tied=True)]
    made = [make_policy(home / letter, seed, tied=name == "tied") for seed, letter in enumerate("ABC")]
    bend(made[0])
    return made
