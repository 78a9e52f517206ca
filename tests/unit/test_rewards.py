"""Reward functions: TRL's signature, and no number for a reward that was not measured."""

import math
import threading
import time

import anyio
import msgspec
import numpy as np
import pytest
import torch

from envs.rewards import RewardBatch, RewardFunction, environment_reward
from envs.rewards.call_results import CallResult
from envs.rewards.loading import CallOptions
from envs.rewards.parts import merge_parts
from stream.errors import EnvironmentFailure
from stream.records import Completion, Group, Prompt, RewardPart, Row
from stream.validity import Measured, RewardReason, Unmeasured
from workers.score.worker import score_group


def batch(n=3, environments=None, **columns):
    return RewardBatch(
        prompts=["p"] * n,
        completions=[f"c{i}" for i in range(n)],
        completion_ids=[[i] for i in range(n)],
        environments=environments,
        columns=columns,
    )


async def rewards_of(function, given=None, timeout_s=5.0):
    return await RewardFunction(function, "test")(given or batch(), timeout_s)


def reasons(rewards):
    return [None if isinstance(reward, Measured) else reward.reason for reward in rewards]


async def test_a_function_gets_only_the_arguments_it_names():
    def everything(prompts, completions, completion_ids, environments, **columns):
        assert columns.keys() == {"answer", "other", "trainer_state", "log_extra", "log_metric"}  # as in TRL
        return [1, columns["answer"][1], completion_ids[2][0]]

    def little(answer):
        return [float(a) for a in answer]

    given = batch(environments=[None] * 3, answer=[1, 2, 3], other=["a"] * 3)
    assert await rewards_of(everything, given) == [Measured(1.0), Measured(2.0), Measured(2.0)]
    assert await rewards_of(little, given) == [Measured(1.0), Measured(2.0), Measured(3.0)]


async def test_environments_are_not_passed_if_there_are_none():
    def names(**kwargs):
        return [float("environments" in kwargs)] * 3

    assert await rewards_of(names) == [Measured(0.0)] * 3
    assert await rewards_of(names, batch(environments=[1, 2, 3])) == [Measured(1.0)] * 3


async def test_a_function_that_needs_environments_raises_if_there_are_none():
    def score(completions, environments):
        return [1.0] * len(completions)

    rewards = await rewards_of(score)
    assert reasons(rewards) == [RewardReason.RAISED] * 3
    assert "environments" in rewards[0].detail


async def test_a_column_cannot_replace_the_completions():
    def score(completions):
        return [float(c.startswith("c")) for c in completions]

    assert await rewards_of(score, batch(completions=["x", "y", "z"])) == [Measured(1.0)] * 3


async def test_a_synchronous_function_runs_in_a_thread_one_call_at_a_time():
    threads, inside, most = set(), [], []

    def score(completions):
        threads.add(threading.get_ident())
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()
        return [1.0] * len(completions)

    function = RewardFunction(score, "test")
    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(function, batch(), 5.0)
    assert threading.get_ident() not in threads
    assert most == [1, 1, 1, 1]


async def test_async_functions_and_callable_objects():
    async def score(completions):
        await anyio.sleep(0.001)
        return [2.0] * len(completions)

    class Judge:
        async def __call__(self, completions):
            return await score(completions)

    def handing_over(completions):
        return score(completions)

    for function in (score, Judge(), handing_over):
        assert await rewards_of(function) == [Measured(2.0)] * 3


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, RewardReason.MISSING),
        (math.nan, RewardReason.NOT_FINITE),
        (-math.inf, RewardReason.NOT_FINITE),
        (10**400, RewardReason.NOT_FINITE),
        ("1.0", RewardReason.NOT_NUMERIC),
        ({}, RewardReason.MISSING),
        (1j, RewardReason.NOT_NUMERIC),
        (Measured(math.nan), RewardReason.NOT_FINITE),
        (Unmeasured(RewardReason.UNAVAILABLE, "judge"), RewardReason.UNAVAILABLE),
    ],
)
async def test_one_bad_value_makes_its_own_row_invalid_and_no_other(value, reason):
    rewards = await rewards_of(lambda completions: [1.0, value, 0.0])
    assert reasons(rewards) == [None, reason, None]
    assert rewards[2] == Measured(0.0)


async def test_a_record_can_hold_every_reward_that_a_function_makes_itself():
    def judge(completions, log_extra, log_metric):
        log_extra("half \ud800", ["half \ud800"] * len(completions))
        log_metric("half \ud800", 1.0)
        half = "half \ud800"
        return [
            Unmeasured("the judge is down"),
            Unmeasured("timeout", half),
            Measured(-1.0, RewardReason.TIMEOUT, half),
        ]

    result = await RewardFunction(judge, "judge").measure(batch(), 5)
    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=CallResult)
    assert stored.rows == [
        Unmeasured(RewardReason.RAISED, "the judge is down"),
        Unmeasured(RewardReason.TIMEOUT, "half ?"),
        Measured(-1.0, RewardReason.TIMEOUT, "half ?"),
    ]
    assert (stored.metrics, stored.extra) == ({"half ?": [1.0]}, {"half ?": ["half ?"] * 3})


@pytest.mark.parametrize(
    "result",
    [
        [1.0, 1.0],
        [1.0] * 4,
        [],
        1.0,
        None,
        "abc",
        {"a": 1, "b": 2, "c": 3},
        [[1.0], [1.0], [1.0]],
        [1.0, [1.0], 1.0],
        [1.0, np.array([1.0]), 1.0],
        np.ones((3, 1)),
        np.ones(2),
        np.float64(2.0),
        {1.0, 2.0, 3.0},
        (x for x in [1.0, 1.0, 1.0]),
    ],
)
async def test_a_result_of_the_wrong_shape_is_never_truncated(result):
    assert reasons(await rewards_of(lambda completions: result)) == [RewardReason.SHAPE] * 3


@pytest.mark.parametrize("result", [(1, 2, 3), [True, 2, np.float32(3)], np.array([1, 2, 3]), [1, 2, np.array(3)]])
async def test_numbers_of_every_kind_count(result):
    assert await rewards_of(lambda completions: result) == [Measured(1.0), Measured(2.0), Measured(3.0)]


@pytest.mark.parametrize("granularity", ["", "group"])
async def test_a_call_that_raises_is_not_repeated_for_its_rows(granularity):
    """A function that compares completions would return a meaningless number for one alone."""
    calls = []

    def longest(completions, answer):
        calls.append(len(completions))
        lengths = [1 / a for a in answer]
        return [float(length == max(lengths)) for length in lengths]

    function = RewardFunction(longest, "longest", call_options=CallOptions(granularity=granularity))
    rewards = await function(batch(answer=[1, 0, 2]), 5.0)
    assert [(each.reason, each.detail) for each in rewards] == [("raised", "ZeroDivisionError: division by zero")] * 3
    assert rewards[0].cause.place.startswith(f"{__file__}:")
    assert calls == [3]


async def test_a_row_that_raises_is_invalid_alone_if_the_function_is_called_by_row():
    calls = []

    def score(completions, answer):
        calls.append(len(completions))
        return [1 / a for a in answer]

    function = RewardFunction(score, "score", call_options=CallOptions(granularity="row"))
    rewards = await function(batch(answer=[1, 0, 2]), 5.0)
    assert rewards[0] == Measured(1.0)
    assert rewards[2] == Measured(0.5)
    assert (rewards[1].reason, rewards[1].detail) == ("raised", "ZeroDivisionError: division by zero")
    assert calls == [1, 1, 1]


async def test_a_single_row_that_raises_is_not_called_again():
    calls = []

    def score(completions):
        calls.append(1)
        raise ValueError("no")

    assert reasons(await rewards_of(score, batch(1))) == [RewardReason.RAISED]
    assert calls == [1]


class Gone(BaseException):
    """Like math-verify's timeout, not an Exception."""


@pytest.mark.parametrize("error", [SystemExit(1), Gone("x"), TimeoutError("its own"), StopIteration(), GeneratorExit()])
async def test_no_exception_of_a_function_reaches_the_worker(error):
    def score(completions):
        raise error

    async def score_async(completions):
        raise error

    assert reasons(await rewards_of(score, batch(1))) == [RewardReason.RAISED]
    if not isinstance(error, StopIteration):  # Python turns it into a RuntimeError in a coroutine
        assert reasons(await rewards_of(score_async, batch(1))) == [RewardReason.RAISED]


async def test_past_its_deadline_all_rows_of_the_call_are_timeouts():
    release = threading.Event()

    def hangs(completions):
        release.wait(10)
        return [1.0] * len(completions)

    async def hangs_too(completions):
        await anyio.sleep(10)
        return [1.0] * len(completions)

    began = time.monotonic()
    try:
        for function in (hangs, hangs_too):
            rewards = await rewards_of(function, timeout_s=0.05)
            assert reasons(rewards) == [RewardReason.TIMEOUT] * 3
            assert "0.05 s" in rewards[0].detail
    finally:
        release.set()
    assert time.monotonic() - began < 5


async def test_cancellation_of_the_caller_is_not_swallowed():
    async def hangs(completions):
        await anyio.sleep(10)

    with anyio.move_on_after(0.05) as scope:
        await rewards_of(hangs)
        raise AssertionError("a cancelled call returned")
    assert scope.cancelled_caught


async def test_a_function_cannot_shorten_the_batch_of_the_next_one():
    def greedy(completions, answer):
        completions.clear()
        answer.pop()
        return [1.0] * 3

    given = batch(answer=[1, 2, 3])
    await rewards_of(greedy, given)
    assert given.size == 3
    assert given.columns == {"answer": [1, 2, 3]}


async def test_an_empty_batch_makes_no_call():
    def score(completions):
        raise AssertionError

    assert await RewardFunction(score, "test")(batch(0), 1.0) == []


# A group as a batch


def row_of(*tokens):
    ids = np.array(tokens, "<i4").tobytes()
    return Row(prompt_ids=b"", token_ids=ids, sampled_ranges=[(0, len(tokens))], logprobs=bytes(4 * len(tokens)))


def group_of(text):
    first = Completion(
        index=0,
        rows=[row_of(9), row_of(1, 2, 3)],
        prompt_messages=[{"role": "user", "content": "2 + 2?\nUse the tool."}],
        messages=[
            {"role": "assistant", "content": "I call.", "tool_calls": []},
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": [{"type": "text", "text": "Answer: "}, {"type": "text", "text": "4"}]},
        ],
    )
    second = Completion(index=1, messages=[{"role": "assistant", "content": None}])
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "2 + 2?"}]
    prompt = Prompt(id="p", messages=messages, is_plain_text=text, fields={"answer": 4})
    return Group(prompt=prompt, completions=[first, second])


def test_a_group_of_plain_text_is_a_batch_of_strings():
    built = RewardBatch.from_group(group_of(text=True), None)
    assert built.prompts == ["2 + 2?", "2 + 2?"]
    assert built.completions == ["I call.\nAnswer: 4", ""]
    assert built.completion_ids == [[9, 1, 2, 3], []]  # all rows of a fork
    assert built.columns == {"answer": [4, 4]}
    assert built.environments is None


def test_a_group_of_conversations_is_a_batch_of_messages_as_each_completion_saw_them():
    group = group_of(text=False)
    built = RewardBatch.from_group(group, ["e0", "e1"])
    assert built.prompts == [group.completions[0].prompt_messages, group.prompt.messages]
    assert built.completions == [group.completions[0].messages, group.completions[1].messages]
    assert built.row(1).environments == ["e1"]
    assert built.row(0).columns == {"answer": [4]}


# get_reward

TWO_TURNS = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "t"}, {"role": "assistant"}]


class Env:
    def __init__(self, result):
        self.result = result

    def reset(self): ...

    def get_reward(self):
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


async def test_an_environment_without_get_reward_measures_nothing():
    class Silent:
        def reset(self): ...

    assert await environment_reward(Silent(), 1.0) == []


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (None, RewardReason.MISSING),
        ("1", RewardReason.NOT_NUMERIC),
        (math.inf, RewardReason.NOT_FINITE),
        ({}, RewardReason.MISSING),
        ({"won": [1.0]}, RewardReason.NOT_NUMERIC),
        ({1.0}, RewardReason.NOT_NUMERIC),
        (np.ones((2, 2)), RewardReason.NOT_NUMERIC),
        (ValueError("x"), RewardReason.RAISED),
        (EnvironmentFailure("x"), RewardReason.RAISED),
        (SystemExit(1), RewardReason.RAISED),
    ],
)
async def test_an_unmeasured_environment_reward_has_a_reason(result, reason):
    (part,) = await environment_reward(Env(result), 5.0, messages=TWO_TURNS)
    assert part.name.startswith("env")
    assert part.turn is None
    assert part.reward.reason is reason


async def test_a_number_is_one_part_and_a_mapping_several():
    (part,) = await environment_reward(Env(0), 5.0)
    assert (part.name, part.reward) == ("env", Measured(0.0))
    parts = await environment_reward(Env({"won": True, "style": None}), 5.0)
    assert [part.name for part in parts] == ["env.won", "env.style"]
    assert parts[0].reward == Measured(1.0)
    assert parts[1].reward.reason is RewardReason.MISSING


@pytest.mark.parametrize(
    "result", [[0.5, 2], (0.5, 2), np.array([0.5, 2]), [np.float32(0.5), np.array(2)], torch.tensor([0.5, 2.0])]
)
async def test_a_list_is_a_part_for_each_turn(result):
    parts = await environment_reward(Env(result), 5.0, messages=TWO_TURNS)
    assert parts == [
        RewardPart(name="env", reward=Measured(0.5), turn=0),
        RewardPart(name="env", reward=Measured(2.0), turn=1),
    ]
    assert merge_parts(parts) == Measured(2.5)


@pytest.mark.parametrize("result", [[], [1.0], [1.0] * 3, (1.0,), np.ones(3), np.ones(1), [[1.0], [1.0]], [1.0, [1.0]]])
async def test_a_list_of_another_length_than_the_turns_is_never_truncated(result):
    (part,) = await environment_reward(Env(result), 5.0, messages=TWO_TURNS)
    assert (part.name, part.turn, part.reward.reason) == ("env", None, RewardReason.SHAPE)
    assert "a list of 2 numbers expected, one for each model turn" in part.reward.detail
    assert merge_parts([part]).reason is RewardReason.SHAPE


@pytest.mark.parametrize(
    ("value", "reason"),
    [(None, RewardReason.MISSING), (math.nan, RewardReason.NOT_FINITE), ("1", RewardReason.NOT_NUMERIC)],
)
async def test_one_turn_without_a_number_is_kept_apart_and_makes_the_completion_invalid(value, reason):
    parts = await environment_reward(Env([1.0, value]), 5.0, messages=TWO_TURNS)
    assert [(part.turn, getattr(part.reward, "reason", None)) for part in parts] == [(0, None), (1, reason)]
    assert merge_parts(parts).reason is RewardReason.COMPONENT


async def test_an_empty_list_after_no_turn_is_unmeasured():
    (part,) = await environment_reward(Env([]), 5.0)
    assert part.reward.reason is RewardReason.MISSING


async def test_get_reward_gets_a_copy_of_the_conversation_if_it_has_the_parameter():
    class Reading(Env):
        def get_reward(self, messages):
            turns = [m for m in messages if m["role"] == "assistant"]
            messages[0]["content"] = "changed"
            return [float(len(turns))] * len(turns)

    class Wrapped(Env):
        def get_reward(self, *args, **kwargs):
            return float(bool(args or kwargs))

    texts = [dict(message) for message in TWO_TURNS]
    assert merge_parts(await environment_reward(Reading(0), 5.0, messages=texts)) == Measured(4.0)
    assert texts == TWO_TURNS
    assert merge_parts(await environment_reward(Wrapped(0), 5.0, messages=texts)) == Measured(0.0)


async def test_get_reward_may_be_async_and_has_a_deadline():
    class Slow(Env):
        async def get_reward(self):
            await anyio.sleep(self.result)
            return 1.0

    (part,) = await environment_reward(Slow(0), 5.0)
    assert part.reward == Measured(1.0)
    (part,) = await environment_reward(Slow(10), 0.05)
    assert part.reward.reason is RewardReason.TIMEOUT


@pytest.mark.parametrize("weight", [1.0, 0.0])
@pytest.mark.parametrize("huge", [1e19, 1e30, -1e39])
async def test_a_huge_finite_reward_makes_its_own_completion_invalid_where_it_is_measured(huge, weight):
    said = [[{"role": "assistant", "content": str(i)}] for i in range(3)]
    group = Group(
        prompt=Prompt(id="p", messages=[]), completions=[Completion(index=i, messages=m) for i, m in enumerate(said)]
    )
    functions = [
        RewardFunction(lambda completions: [1.0, huge, 0.0], "huge", weight),
        RewardFunction(lambda completions: [0.5] * 3, "other"),
    ]
    await score_group(group, functions, {}, 5.0)
    first, bad, last = (completion.reward for completion in group.completions)
    assert (first, last) == (Measured(weight + 0.5), Measured(0.5))
    assert bad.reason is RewardReason.COMPONENT
    assert bad.detail == f"huge: too_large returned {huge:g}; the limit is 1e+18"


@pytest.mark.parametrize("granularity", ["row", "group"])
async def test_a_function_that_edits_its_arguments_changes_nothing_for_others(granularity):
    """Messages, columns and ids belong to one function and to one completion; the archive keeps what was sampled."""
    seen = []

    def vandal(prompts, completions, completion_ids, answer):
        for prompt, completion, ids, gold in zip(prompts, completions, completion_ids, answer, strict=True):
            prompt[0]["content"] += "!"
            completion[0]["content"] = "changed"
            completion.append({"role": "assistant", "content": "mine"})
            ids.clear()
            gold["steps"].append(1)
        return [float(len(gold["steps"])) for gold in answer]

    def reader(prompts, completions, completion_ids, answer):
        seen.append((prompts, completions, completion_ids, answer))
        return [float(len(gold["steps"])) for gold in answer]

    group = group_of(text=False)
    group.prompt.fields = {"answer": {"steps": []}}
    before = msgspec.msgpack.encode(group)
    options = CallOptions(granularity=granularity)
    functions = [RewardFunction(f, f.__name__, call_options=options) for f in (vandal, reader)]
    await score_group(group, functions, {}, 5.0)
    for completion in group.completions:
        assert [part.reward for part in completion.parts] == [Measured(1.0), Measured(0.0)]  # one edit, its own
        completion.parts, completion.reward = [], None
    assert msgspec.msgpack.encode(group) == before
    unedited = RewardBatch.from_group(group, None).to_kwargs()
    for name, of_calls in zip(
        ("prompts", "completions", "completion_ids", "answer"), zip(*seen, strict=True), strict=True
    ):
        assert [row for rows in of_calls for row in rows] == unedited[name]
