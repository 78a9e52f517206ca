"""The servers that all files of tests share: started ahead in the background, and ended behind their last test."""

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
        *("--max-logprobs", "2"),  # too few to find out what they are of
    ),
    "tied": (*LONG, *TAKES_WEIGHTS, "--logprobs-mode", "processed_logprobs"),
    "untied": (*LONG, *TAKES_WEIGHTS),  # log-probs are raw, as vLLM gives them unless it is told otherwise
}
"""In the order in which they are started, and tests run."""
_AT_ONCE = 2
"""Starts: each takes one core."""


class Started(NamedTuple):
    """One that runs, and keeps its weights."""

    url: str
    folders: list[Path]
    """Of its model; one."""


def needs(item: pytest.Item) -> set[str]:
    """The servers that a test uses."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    named = {*getattr(item, "fixturenames", ()), *(each for each in parameters if isinstance(each, str))}
    return named & {*FLAGS}


def last_needed(item: pytest.Item) -> int:
    """By what tests are sorted: how many servers must have been started; those that start their own come last."""
    return max((list(FLAGS).index(name) + 1 for name in needs(item)), default=len(FLAGS) + 1)


class SharedServers:
    """Those that these tests need, and no others.

    Args:
        home: a folder for models and logs.
        items: the tests, in their order.
    """

    def __init__(self, home: Path, items: list[pytest.Item]) -> None:
        self._home = home
        self._last = {name: item.nodeid for item in items for name in needs(item)}
        self._running = {name: ExitStack() for name in FLAGS if name in self._last}
        folders = {name: _models(name, home / name) for name in self._running}  # here: torch's defaults are everybody's
        vllm_python()  # here: two starts at a time would both make its environment
        self._pool = ThreadPoolExecutor(_AT_ONCE)
        self._started: dict[str, Future[Started | Served]] = {
            name: self._pool.submit(self._start, name, made) for name, made in folders.items()
        }

    def _start(self, name: str, folders: list[Path]) -> Started | Served:
        server = vllm_server(folders[0], self._home / name / "vllm.log", *FLAGS[name])
        url = self._running[name].enter_context(server)
        return (Served if len(folders) > 1 else Started)(url, folders)

    def lend(self, name: str, to: str) -> Iterator[Started | Served]:
        """Yield a server once it is there, and end it when nobody needs it any more.

        Args:
            name: of the server.
            to: node id of a test.
        """
        yield self._started[name].result(2 * START_S)
        if to == self._last[name]:
            self._running[name].close()

    def close(self) -> None:
        """End what runs."""
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
