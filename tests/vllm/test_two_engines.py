"""Two vLLM servers: what affinity does for their prefix caches; one killed in mid-run, and started again."""

import json
import os
import random
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import anyio
import msgspec
import pytest

from tests.e2e.harness import Project, stop, wait_for_trained
from tests.vllm.policies import LENGTH, Judge, make_policy
from tests.vllm.server import free_port, vllm_server
from workers.engine.wire import BACKEND, GenerateRequest, GenerateResponse, SamplingParams
from workers.rollout.engine.client import EngineClient
from workers.rollout.engine.sampling import Sampling

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

FLAGS = (
    *("--max-model-len", str(LENGTH), "--enable-scale-out", "--block-size", "32"),
    *("--weight-transfer-config", f'{{"backend": "{BACKEND}"}}'),
)
CLOSE = 1e-4
GROUPS, SIZE, TURNS = 16, 2, 4
PROMPT, OBSERVED, SAID = 620, 96, 16
"""Tokens: of a group's prompt, of what each later turn brings, of what the model says."""


class Pair:
    """Two servers of one model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = make_policy(folder / "policy", 0, tied=True)
        self.ports = [free_port(), free_port()]
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]

    def start(self, number: int) -> ExitStack:
        """Start one; closing the stack ends it."""
        stack = ExitStack()
        log = self.folder / f"vllm-{number}-{time.monotonic_ns()}.log"
        stack.enter_context(vllm_server(self.model, log, *FLAGS, port=self.ports[number]))
        return stack

    def kill(self, number: int) -> None:
        """SIGKILL to the server and all that it has started."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(self.ports[number]).encode() in words:
                os.killpg(os.getpgid(int(folder.name)), signal.SIGKILL)
                return
        raise AssertionError("it does not run")

    def ask(self, number: int, path: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(self.urls[number] + path, body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read()

    def count(self, metric: str, *numbers: int) -> float:
        lines = [line for number in numbers for line in self.ask(number, "/metrics").decode().splitlines()]
        return sum(float(line.split()[-1]) for line in lines if line.startswith(metric + "{"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Iterator[Pair]:
    found = Pair(tmp_path_factory.mktemp("pair"))
    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        for started in list(pool.map(found.start, (0, 1))):
            stack.push(started)
        yield found


# Affinity


async def hit_rate(pair: Pair, client: EngineClient, name: str, *, near: bool) -> float:
    """Play groups of several turns, and say which part of the tokens that were read was found in a cache."""
    names = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
    for number in (0, 1):
        await anyio.to_thread.run_sync(pair.ask, number, "/reset_prefix_cache", b"{}")
    before = [await anyio.to_thread.run_sync(pair.count, each, 0, 1) for each in names]
    anywhere = random.Random(name)

    async def play(group: int, completion: int) -> None:
        pick = random.Random(f"{name}-{group}")
        context = [pick.randrange(10, 300) for _ in range(PROMPT)]
        pick = random.Random(f"{name}-{group}-{completion}")
        for turn in range(TURNS):
            of = f"{name}-{group}" if near else f"{anywhere.random()}"
            sampling = Sampling(temperature=1.0, max_tokens=SAID, seed=turn, group=of, completion=completion)
            said = await client.sample(context, sampling, at_least=-1)
            context += [*said.token_ids, *(pick.randrange(10, 300) for _ in range(OBSERVED))]

    async with anyio.create_task_group() as tasks:
        for completion in range(SIZE):  # not both of a group in one batch, where neither finds the other in a cache
            for group in range(GROUPS):
                tasks.start_soon(play, group, completion)
    after = [await anyio.to_thread.run_sync(pair.count, each, 0, 1) for each in names]
    hits, queries = (b - a for a, b in zip(before, after, strict=True))
    return hits / queries


async def test_affinity_finds_more_of_each_context_in_the_servers_caches_than_random_spreading(pair):
    options = {"request_timeout_s": 60, "attempts": 3, "reconnect_s": 30}
    rates = {}
    async with EngineClient(pair.urls, **options) as client:
        await client.probe()
        for name in ("random", "near"):
            rates[name] = await hit_rate(pair, client, name, near=name == "near")
    print(f"prefix cache hits: {rates}")
    assert rates["near"] > rates["random"] + 0.06  # chance alone moves each by a hundredth or two


# One killed, and started again


def serves_the_version_it_claims(pair: Pair, number: int, weights: Path) -> bool:
    """Whether what a server says now is what transformers says on those weights."""
    params = SamplingParams(max_tokens=12, logprobs=1, ignore_eos=True, seed=1)
    prompt = list(range(20, 60))
    body = msgspec.json.encode(GenerateRequest(token_ids=prompt, sampling_params=params))
    answer = msgspec.json.decode(pair.ask(number, "/inference/v1/generate", body), type=GenerateResponse)
    (choice,) = answer.choices
    versions = {span.version for span in choice.weight_versions}
    if len(versions) > 1:
        return serves_the_version_it_claims(pair, number, weights)  # new weights came in between
    expected = Judge(weights / f"v{int(versions.pop()):06d}").logprobs(prompt, choice.token_ids)
    served = [entry.logprob for entry in choice.logprobs.content]
    return max(abs(a - b) for a, b in zip(expected, served, strict=True)) < CLOSE


@pytest.fixture
def project(pair, tmp_path) -> Project:
    project = Project(tmp_path, pair.model)
    project.table["engine"] = {"urls": pair.urls, "max_length": LENGTH}
    project.table["filter"] = {"zero_variance": False}
    project.table["rollout"] |= {"max_tokens": 32, "max_tokens_per_turn": 32, "groups_in_flight": 8}
    project.table["train"]["learning_rate"] = 1e-3
    project.prompts(100_000)
    return project


def test_one_of_two_is_killed_in_mid_run_and_started_again(pair, project):
    process = project.start("run", str(project.write()), "--json")
    try:
        wait_for_trained(project, 8, process, 120)
        assert min(pair.count("vllm:generation_tokens_total", number) for number in (0, 1)) > 0
        pair.kill(1)
        trained = len(project.ledger())
        wait_for_trained(project, trained + 12, process, 60)
        project.run("pause", str(project.run_folder))  # or the start, on as few cores, takes a minute longer
        with pair.start(1):
            began = time.monotonic()
            project.run("resume", str(project.run_folder))
            while not (used := pair.count("vllm:generation_tokens_total", 1) > 200) and time.monotonic() < began + 30:
                time.sleep(0.1)
            took = time.monotonic() - began
            assert used
            weights = project.run_folder / "weights"
            assert serves_the_version_it_claims(pair, 1, weights)
            print(f"used {took:.1f} s after it was healthy")
            assert took < 10
            project.run("stop", str(project.run_folder))
            out, err = process.communicate(timeout=100)
    finally:
        stop(process)
    summary = json.loads(out)
    assert summary["dead"] == 0, err
    assert summary["groups_dropped"] == {}
    assert set(summary["rows"]) == {"valid"}
    assert len({line["prompt"] for line in project.ledger()}) == len(project.ledger()) == summary["groups_trained"]
