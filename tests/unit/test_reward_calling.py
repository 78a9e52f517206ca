"""How reward functions are called: in processes, by row or by group, with limits of concurrency, rate and time."""

import threading
import tomllib
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from envs.factory import EnvironmentFactory
from envs.rewards import RewardBatch, RewardFunction
from envs.rewards.call_results import NamedRewards
from envs.rewards.loading import CallOptions
from stream.errors import PenstockError, ReferenceNotFoundError
from stream.records import Completion, Group, Prompt, Row
from stream.validity import Measured, RewardReason, Unmeasured
from workers.role.rewards import load_reward_functions
from workers.score.worker import score_group
from workers.settings.toml_file import parse_settings

FILE = """
import os
from envs.rewards.loading import CallOptions

def pid(completions): return [os.getpid()] * len(completions)
def sizes(completions): return [len(completions)] * len(completions)
def columns(answer, scale=1): return [scale * a for a in answer]
def with_environments(environments): return [1.0]
async def asynchronous(completions): return [1.0]

def strange(completions):
    import numpy as np
    return [np.float32(1), None, "1", float("nan"), {"a": 1, "b": None}, True]

def shape(completions): return 1.0

def hangs_on_row(completions):
    for c in completions:
        if c == "hang":
            while True: pass
        if c == "die": os._exit(1)
        if c == "raise": raise SystemExit("me")
    print("x" * 1_000_000)
    return [float(len(completions))] * len(completions)

def rank(completions):  # compares completions; of a row alone it would say 0
    if "raise" in completions: raise ValueError("one is missing")
    order = sorted(completions)
    return [order.index(c) / max(1, len(order) - 1) for c in completions]

class Counting:
    call_options = CallOptions(processes=1, granularity="row")
    def __init__(self, start=0): self.calls, self.prepared = start, 0
    def prepare(self): self.prepared += 100
    def __call__(self, completions):
        self.calls += 1
        return [self.calls + self.prepared + 1000 * (len(completions) - 1)] * len(completions)
"""


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)


@asynccontextmanager
async def opened(name, args=None, **calling):
    function = await anyio.to_thread.run_sync(
        partial(RewardFunction.load, f"mine.py:{name}", args=args or {}, call_options=CallOptions(**calling))
    )
    async with function.open():
        yield function


def batch(*completions, **columns):
    return RewardBatch(["p"] * len(completions), list(completions), [[]] * len(completions), None, columns)


def facts(entries):
    return [entry.value if isinstance(entry, Measured) else getattr(entry, "reason", entry) for entry in entries]


async def test_a_function_in_processes_gets_the_same_arguments_and_what_it_returns_is_classified_the_same():
    async with opened("columns", {"scale": 3}, processes=1) as function:
        assert facts(await function(batch("a", "b", answer=[1, 2]), 30)) == [3.0, 6.0]
    async with opened("strange", processes=1) as function:
        given = batch(*"abcdef")
        expected = [1.0, RewardReason.MISSING, RewardReason.NOT_NUMERIC, RewardReason.NOT_FINITE]
        parts = NamedRewards({"a": Measured(1.0), "b": Unmeasured(RewardReason.MISSING, "returned None")})
        result = facts(await function(given, 30))
        assert result == [*expected, parts, 1.0]
    async with opened("strange") as function:  # in a thread
        assert facts(await function(given, 30)) == result
    async with opened("shape", processes=1) as function:
        assert facts(await function(batch("a", "b"), 30)) == [RewardReason.SHAPE] * 2


async def test_granularity_decides_the_size_of_a_call():
    given = batch("a", "b", "c")
    for processes in (0, 1):
        for each, expected in (("", 3.0), ("group", 3.0), ("row", 1.0)):
            async with opened("sizes", processes=processes, granularity=each) as function:
                assert facts(await function(given, 30)) == [expected] * 3, (processes, each)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("hang", RewardReason.TIMEOUT),
        pytest.param("die", RewardReason.RAISED, marks=pytest.mark.full),
        ("raise", RewardReason.RAISED),
    ],
)
async def test_one_bad_row_of_a_call_in_processes_costs_only_itself(bad, reason):
    async with opened("hangs_on_row", processes=2, timeout_s=0.5, granularity="row") as function:
        assert facts(await function(batch("a", bad, "b"), 30)) == [1.0, reason, 1.0]
        assert facts(await function(batch("a", "b"), 30)) == [1.0, 1.0]  # the pool still works


@pytest.mark.parametrize("processes", [0, 1])
async def test_a_function_that_compares_completions_sees_the_whole_group_or_nothing(processes):
    """Called by row, it would return numbers that compare nothing."""
    async with opened("rank", processes=processes) as function:
        assert facts(await function(batch("c", "a", "b"), 30)) == [1.0, 0.0, 0.5]
        assert facts(await function(batch("c", "raise", "b"), 30)) == [RewardReason.RAISED] * 3


async def test_in_the_scoring_stage_one_call_has_all_completions_of_one_prompt_and_of_no_other():
    seen = []

    def look(prompts, completions, answer):
        seen.append((prompts, completions, answer))
        return [0.0] * len(completions)

    def group_of(name, size):
        conversations = [[{"role": "assistant", "content": f"{name}{i}"}] for i in range(size)]
        prompt = Prompt(
            id=name, messages=[{"role": "user", "content": name}], is_plain_text=True, fields={"answer": name}
        )
        return Group(prompt=prompt, completions=[Completion(index=i, messages=m) for i, m in enumerate(conversations)])

    function = RewardFunction(look, "look")
    async with anyio.create_task_group() as tasks:
        for name, size in (("a", 3), ("b", 2)):
            tasks.start_soon(score_group, group_of(name, size), [function], {}, 30)
    assert sorted(seen) == [(["a"] * 3, ["a0", "a1", "a2"], ["a"] * 3), (["b"] * 2, ["b0", "b1"], ["b"] * 2)]


async def test_settings_override_the_call_options_of_a_class():
    async with opened("Counting", {"start": 10}) as function:
        result = facts(await function(batch("a", "b"), 30))
        assert sorted(result) == [111.0, 112.0]  # one process, prepared once, one row per call
    async with opened("Counting", granularity="group") as function:
        assert facts(await function(batch("a", "b"), 30)) == [1101.0, 1101.0]


async def test_a_functions_own_deadline_overrides_the_general_one():
    async def slow(completions):
        await anyio.sleep(10)

    reward = RewardFunction(slow, "slow", call_options=CallOptions(timeout_s=0.05))
    (result,) = await reward(batch("a"), 30)
    assert result.reason is RewardReason.TIMEOUT
    assert "0.05 s" in result.detail


async def test_max_concurrency_limits_asynchronous_calls():
    inside, most = 0, 0

    async def judge(completions):
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        inside -= 1
        return [1.0]

    for concurrency, expected in ((2, 2), (0, 6)):
        most = 0
        reward = RewardFunction(
            judge, "judge", call_options=CallOptions(granularity="row", max_concurrency=concurrency)
        )
        assert facts(await reward(batch(*"abcdef"), 30)) == [1.0] * 6
        assert most == expected


@pytest.mark.parametrize("processes", [0, 1])
async def test_calls_begin_no_faster_than_the_rate(processes):
    async with opened("sizes", granularity="row", calls_per_second=50, processes=processes) as function:
        began = anyio.current_time()
        assert facts(await function(batch(*"abcdef"), 30)) == [1.0] * 6
        assert anyio.current_time() - began >= 5 / 50 - 0.001  # six calls, five gaps; slow machines take longer


async def test_waiting_for_the_rate_limit_does_not_count_towards_the_deadline():
    async def brief(completions):
        return [1.0]

    reward = RewardFunction(
        brief, "brief", call_options=CallOptions(granularity="row", calls_per_second=20, timeout_s=0.04)
    )
    assert facts(await reward(batch("a", "b", "c"), 30)) == [1.0] * 3


@pytest.mark.parametrize(
    ("name", "words"), [("asynchronous", "is asynchronous"), ("with_environments", "environments")]
)
def test_functions_that_cannot_run_in_processes_are_refused_at_the_start(name, words):
    with pytest.raises(ReferenceNotFoundError, match=words):
        RewardFunction.load(f"mine.py:{name}", call_options=CallOptions(processes=1))


async def test_a_function_that_cannot_be_made_in_a_process_ends_the_worker_at_its_start(tmp_path):
    function = await anyio.to_thread.run_sync(
        partial(RewardFunction.load, "mine.py:pid", call_options=CallOptions(processes=1))
    )
    (tmp_path / "mine.py").write_text("raise ImportError('moved away')")
    with pytest.raises(PenstockError, match="moved away"):
        async with function.open():
            raise AssertionError


def test_every_built_in_reward_is_found_by_name():
    """Read the project's file, because the installed metadata may be older."""
    points = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["entry-points"]
    assert {"math", "code_jaccard", "vlm"} <= set(points["penstock.rewards"])
    args = {"judge": {"url": "http://localhost:1", "model": "m"}, "reward_model": {"urls": ["http://localhost:1"]}}
    for name, ref in points["penstock.rewards"].items():
        assert RewardFunction.load(ref, args=args.get(name, {})).name
    assert EnvironmentFactory.load(points["penstock.environments"]["python"]).tools


def test_the_settings_reach_the_function():
    table = {
        "model": {"path": "m"},
        "data": {"path": "d"},
        "rewards": [
            {"ref": "mine.py:pid", "processes": 3, "granularity": "row", "timeout_s": 2.5},
            {"ref": "mine.py:asynchronous", "max_concurrency": 4, "calls_per_second": 0.5},
            {"ref": "mine.py:Counting"},
        ],
    }
    results = [function.call_options for function in load_reward_functions(parse_settings(table), "score")]
    assert results == [
        CallOptions(processes=3, granularity="row", timeout_s=2.5),
        CallOptions(max_concurrency=4, calls_per_second=0.5),
        CallOptions(processes=1, granularity="row"),
    ]


async def test_arguments_of_a_long_group_are_built_in_a_thread_so_that_leases_are_renewed_meanwhile(monkeypatch):
    threads = []
    whole = RewardBatch.from_group

    def noted(*args):
        threads.append(threading.get_ident())
        return whole(*args)

    monkeypatch.setattr(RewardBatch, "from_group", noted)
    function = RewardFunction(lambda completion_ids: [float(len(ids)) for ids in completion_ids], "length")
    for tokens in (10, 60_000):
        row = Row(prompt_ids=b"", token_ids=bytes(4 * tokens), sampled_ranges=[], logprobs=b"", spans=[])
        completions = [Completion(index=i, rows=[row]) for i in range(2)]
        group = Group(prompt=Prompt(id="p", messages=[{"role": "user", "content": "?"}]), completions=completions)
        await score_group(group, [function], {}, 5)
        assert [completion.reward for completion in completions] == [Measured(tokens)] * 2
    assert threads[0] == threading.get_ident() != threads[1]
