import gc
import random
import re
import sys
import threading
import time
from array import array
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FunctionType

import anyio
import anyio.lowlevel
import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from envs.factory import EnvironmentFactory
from envs.references import Reference
from envs.rewards import RewardFunction
from envs.rewards.parts import merge_parts
from envs.snapshot import thaw
from stream.codec import decode, encode
from stream.errors import (
    DataError,
    EngineError,
    EngineRefusedError,
    EngineUnavailableError,
    EnvironmentFailure,
)
from stream.records import Completion, Failure, Group, Prompt, Span
from stream.validity import Measured, RewardReason, RolloutReason, TruncationReason
from tests.cases.progress import SavedGroup
from tests.scripted_engine.engine import ScriptedEngine
from workers.role.in_flight_reporter import GroupProgress
from workers.rollout.chat.chat_setup import ChatSetup
from workers.rollout.chat.chat_tokenizer import ChatTokenizer
from workers.rollout.chat.template import ChatTemplate
from workers.rollout.conversation import run_episode
from workers.rollout.engine_client.client import EngineClient
from workers.rollout.engine_client.sampling import SampledTurn
from workers.rollout.environment_pool import EnvironmentPool
from workers.rollout.episode import EpisodeContext
from workers.rollout.group import GroupRunner
from workers.rollout.tool_formats import TOOL_FORMATS
from workers.settings import RolloutSettings
from workers.train.step.batch import collate

TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>tool\\n' + message.content + '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}{%- for part in message.content %}{{- '[' + part.text + ']' }}{%- endfor %}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
END = "<|im_end|>"


def make_tokenizer():
    """A tokenizer with one token per byte, and a few special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in (END, "<|im_start|>", "<|eos|>")]
    )
    return tokenizer


TOKENIZER = make_tokenizer()
EOS = TOKENIZER.token_to_id("<|eos|>")


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def text_of(tokens):
    return TOKENIZER.decode(list(tokens), skip_special_tokens=False)


def make_chat(template=None):
    return ChatTokenizer(TOKENIZER, template or ChatTemplate(TEMPLATE, {}, Path("model")), None, {EOS})


def call(name, arguments="{}"):
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


class Scripted:
    """Samples from a script: `script(turn, text)` returns a turn's text, a `SampledTurn`, or an exception to raise."""

    context_length = 0

    def __init__(self, script):
        self.script = script if callable(script) else lambda turn, _text: script[turn]
        self.asked = []

    async def sample(self, prompt_ids, sampling, *, min_policy_version=0):
        await anyio.lowlevel.checkpoint()
        self.asked.append((list(prompt_ids), sampling, min_policy_version))
        text = text_of(prompt_ids)
        answer = self.script(text.count("<|im_start|>assistant\n") - 1, text)
        if hasattr(answer, "__await__"):
            answer = await answer
        if isinstance(answer, Exception):
            raise answer
        return sampled(answer, sampling.max_tokens) if isinstance(answer, str) else answer


def sampled(text, max_tokens=10_000, finish=None, version=7):
    tokens = (ids(text) if "<|eos|>" in text or finish == "length" else ids(text + END))[:max_tokens]
    ended = tokens and tokens[-1] in (EOS, ids(END)[0])
    spans = [Span(version, 0, len(tokens))] if tokens else []
    return SampledTurn(tokens, [-0.5] * len(tokens), finish or ("stop" if ended else "length"), spans)


class Box:
    """An environment with tools and state."""

    def reset(self, greeting=None, **row):
        self.row = row
        self.seen = []
        return greeting

    def put(self, thing: str = "it") -> str:
        self.seen.append(thing)
        return f"has {len(self.seen)}"

    def give(self, what: str = "none") -> object:
        if what == "world":
            raise EnvironmentFailure("the box is gone")
        raise ValueError("nothing to give")

    def nap(self, seconds: float) -> str:
        time.sleep(seconds)
        self.seen.append("nap")
        return "rested"

    def get_reward(self):
        return float(len(self.seen))


def factory_of(cls):
    return EnvironmentFactory(Reference("test", "module", cls, sys.modules[cls.__module__]), cls, cls())


def make_prompt(**changes):
    fields = {"messages": [{"role": "user", "content": "Fill it."}], "environment": "box", "group_size": 1}
    return Prompt(**({"id": "train:0:0", "seed": 100} | fields | changes))


async def group_of(
    script,
    *,
    env=Box,
    chat=None,
    prompt=None,
    rewards=(),
    size=8,
    min_policy_version=0,
    with_greedy=False,
    progress=None,
    journal=None,
    **limits,
):
    """Roll out a group of one completion by default."""
    factories = {"box": factory_of(env)} if env else {}
    sampler = script if hasattr(script, "sample") else Scripted(script)
    prompt = prompt or make_prompt(environment="box" if env else None)
    async with EnvironmentPool(factories, size=size) as pool:
        group = await GroupRunner(
            chats={prompt.environment: ChatSetup(chat or make_chat(), TOOL_FORMATS["hermes"])},
            sampler=sampler,
            pool=pool,
            limits=RolloutSettings(**limits),
            rewards=rewards,
            factories=factories,
        ).run(
            prompt,
            min_policy_version=min_policy_version,
            with_greedy=with_greedy,
            progress=progress,
            journal=journal,
        )
    return decode(encode(group), Group)  # a group must survive encoding


async def completion_of(script, **options):
    return (await group_of(script, **options)).completions[0]


# Bookkeeping


async def test_an_episode_notes_what_it_is_doing():
    progress, seen = GroupProgress(), []

    def note() -> None:
        now = progress.completions[0].describe(0, 1.0)
        seen.append((now.activity, now.detail, now.turn, now.versions))

    class Noting(Box):
        def reset(self, **row):
            note()
            return super().reset(**row)

        def put(self, thing: str = "it") -> str:
            note()
            return super().put(thing)

        def get_reward(self):
            note()
            return super().get_reward()

    def script(turn, _text):
        note()
        return "Done." if turn else call("put")

    await group_of(script, env=Noting, progress=progress, prompt=make_prompt(group_size=1))
    versions = seen[2][3]
    assert len(versions) == 1
    assert seen == [
        ("reset", "", 0, []),
        ("sampling", "", 0, []),
        ("tool", "put", 1, versions),
        ("sampling", "", 1, versions),
        ("reward", "", 2, versions),
    ]
    assert (progress.total, progress.ended, progress.completions) == (1, 1, {})


async def test_three_turns_are_recorded_token_by_token():
    chat = make_chat()
    first, second, third = call("put", '{"thing": "a"}'), call("put") + " " + call("put"), "Done."
    turns = [
        SampledTurn(
            t := ids(first + END), [-0.125 * i for i in range(len(t))], "stop", [Span(3, 0, 4), Span(4, 4, len(t))]
        ),
        SampledTurn(u := ids(second + END), [-1.0] * len(u), "stop", [Span(4, 0, len(u))]),
        SampledTurn(v := ids(third + END), [-2.0] * len(v), "stop", [Span(5, 0, len(v))]),
    ]
    sampler = Scripted(turns)
    completion = await completion_of(sampler, chat=chat, min_policy_version=3)
    (row,) = completion.rows

    seen = [ids("\n<|im_start|>tool\nhas 1<|im_end|>\n<|im_start|>assistant\n")]
    seen.append(ids("\n<|im_start|>tool\nhas 2<|im_end|>\n<|im_start|>tool\nhas 3<|im_end|>\n<|im_start|>assistant\n"))
    starts = [0, len(t) + len(seen[0])]
    starts.append(starts[1] + len(u) + len(seen[1]))
    assert text_of(row.prompt) == "<|im_start|>user\nFill it.<|im_end|>\n<|im_start|>assistant\n"
    assert row.tokens.tolist() == t + seen[0] + u + seen[1] + v
    assert row.sampled_ranges == [(start, start + len(tokens)) for start, tokens in zip(starts, (t, u, v), strict=True)]
    assert row.sampled_logprobs.tolist() == turns[0].logprobs + turns[1].logprobs + turns[2].logprobs
    assert row.spans == [
        Span(3, 0, 4),
        Span(4, 4, len(t)),
        Span(4, starts[1], starts[1] + len(u)),
        Span(5, starts[2], starts[2] + len(v)),
    ]
    assert [asked for asked, _, _ in sampler.asked] == [
        row.prompt.tolist() + row.tokens.tolist()[:start] for start in starts
    ]
    assert {at_least for _, _, at_least in sampler.asked} == {3}
    assert (completion.turns, completion.tool_calls, completion.tool_errors) == (3, 3, 0)
    assert (completion.failure, completion.truncated, completion.reward) == (None, None, None)
    assert [(p.name, p.reward) for p in completion.parts] == [("env", Measured(3.0))]


async def test_messages_show_the_whole_conversation():
    completion = await completion_of([f"Hm. {call('put')}", call("give") + "<tool_call>oops</tool_call>", "Done."])
    assert completion.prompt_messages == [{"role": "user", "content": "Fill it."}]
    called = {"id": "call00001", "type": "function", "function": {"name": "put", "arguments": {}}}
    assert completion.messages[:2] == [
        {"role": "assistant", "content": "Hm.", "tool_calls": [called]},
        {"role": "tool", "name": "put", "tool_call_id": "call00001", "content": "has 1"},
    ]
    assert completion.messages[2]["content"] == "<tool_call>oops</tool_call>"
    error = "Error: ValueError: nothing to give"
    assert completion.messages[3] == {"role": "tool", "name": "give", "tool_call_id": "call00002", "content": error}
    assert completion.messages[4]["content"].startswith("Error: this tool call could not be read")
    assert completion.messages[5] == {"role": "assistant", "content": "Done."}
    assert (completion.turns, completion.tool_calls, completion.tool_errors) == (3, 2, 2)
    assert [run.is_error for run in completion.tool_runs] == [False, True, True]
    assert [run.seconds > 0 for run in completion.tool_runs] == [True, True, False]


async def test_the_row_equals_the_whole_conversation_rendered():
    chat = make_chat()
    texts = [call("put"), call("put") + call("give"), call("nowhere"), "Done."]
    completion = await completion_of(texts, chat=chat)
    (row,) = completion.rows
    tools = [m for m in completion.messages if m["role"] == "tool"]
    messages = [{"role": "assistant", "content": text} for text in texts]
    whole = [*completion.prompt_messages, messages[0], tools[0], messages[1], *tools[1:3], messages[2], tools[3]]
    assert text_of(row.prompt) + text_of(row.tokens) == text_of(chat.prompt_ids(whole)) + "Done." + END


async def test_a_turn_with_another_stop_token_is_ended_by_tokens_without_loss():
    completion = await completion_of([call("put") + "<|eos|>", "Done."])
    (row,) = completion.rows
    (_, end), (again, _) = row.sampled_ranges
    assert row.tokens[end - 1] == EOS
    assert text_of(row.tokens[end:again]) == f"{END}\n<|im_start|>tool\nhas 1{END}\n<|im_start|>assistant\n"
    assert completion.messages[0]["content"] == ""


async def test_every_turn_is_sampled_within_its_budget_and_stops_where_the_chat_says():
    chat = make_chat()
    sampler = Scripted([call("put"), "Done."])
    await completion_of(sampler, chat=chat, max_tokens=200, max_tokens_per_turn=150, temperature=0.7)
    (_, first, _), (prompt, second, _) = sampler.asked
    assert (first.max_tokens, first.temperature, first.stop_token_ids) == (150, 0.7, chat.stop_token_ids)
    assert second.max_tokens == 200 - (len(prompt) - len(sampler.asked[0][0]))


class CountingTemplate(ChatTemplate):
    rendered = 0

    def render(self, *args, **kwargs):
        text = super().render(*args, **kwargs)
        self.rendered += len(text)
        return text


async def test_every_turn_of_every_completion_has_a_seed_of_its_own():
    sampler = Scripted([call("put"), "Done."])
    await group_of(sampler, prompt=make_prompt(group_size=3))
    seeds = [options.seed for _, options, _ in sampler.asked]
    assert len(set(seeds)) == len(seeds) == 6


async def test_the_cost_of_a_turn_does_not_grow_with_the_conversation():
    template = CountingTemplate(TEMPLATE, {}, Path("model"))
    counts = []

    def script(turn, _text):
        counts.append(template.rendered)
        return call("put") if turn < 59 else "Done."

    completion = await completion_of(
        script, chat=make_chat(template), max_turns=60, max_tokens=100_000, max_tool_calls=99
    )
    assert completion.turns == 60
    costs = [later - earlier for earlier, later in pairwise(counts[1:])]
    compared = [costs.pop(turn - 2) for turn in (32, 16, 8, 4)]  # with the whole, after these turns
    assert max(costs) <= min(costs) + 1 < min(compared)  # "has 9", "has 10"


async def test_an_episode_forks_where_the_template_treats_its_prompt_unlike_the_samples():
    opening = "{{- '<|im_start|>assistant\\n' }}"
    source = TEMPLATE.replace(opening, f"{opening}{{{{- '(short) ' if '/no_think' in messages[0].content else '' }}}}")
    template = ChatTemplate(source, {}, Path("model"))
    chat = make_chat(template)
    assert not chat.check_history().rewrites_history
    sampler = Scripted([call("put"), "Done."])
    messages = [{"role": "user", "content": "Go. /no_think"}]
    await completion_of(sampler, chat=chat, prompt=make_prompt(environment="box", messages=messages))
    history = [*messages, {"role": "assistant", "content": call("put")}]
    history += [{"role": "tool", "name": "put", "tool_call_id": "call00001", "content": "has 1"}]
    assert text_of(sampler.asked[1][0]) == template.render(history, None, add_generation_prompt=True)


async def test_seconds_are_recorded_by_activity():
    completion = await completion_of([call("nap", '{"seconds": 0.05}'), "Done."])
    assert set(completion.seconds) == {"reset", "engine", "tools", "reward", "total"}
    assert completion.seconds["tools"] >= 0.05
    assert completion.seconds["total"] >= sum(v for k, v in completion.seconds.items() if k != "total")


async def test_any_arguments_survive_encoding():
    big, deep = call("put", '{"thing": ' + "9" * 40 + "}"), call("put", '{"thing": ' + "[" * 900 + "]" * 900 + "}")
    half = call("put", '{"thing": "\\ud800"}')
    completion = await completion_of([big, deep, half, "Done."], max_tokens_per_turn=4000)
    stored = [m["tool_calls"][0]["function"]["arguments"] for m in completion.messages if "tool_calls" in m]
    assert stored == [text.removeprefix("<tool_call>").removesuffix("</tool_call>") for text in (big, deep)]
    assert completion.tool_errors == 3


# Reset and prompt


@pytest.mark.parametrize(
    ("greeting", "content"),
    [
        (None, "Fill it."),
        (" Now.", "Fill it. Now."),
        ([{"type": "text", "text": "Now."}], [{"type": "text", "text": "Fill it."}, {"type": "text", "text": "Now."}]),
    ],
)
async def test_the_observation_ends_the_prompt_of_this_completion_alone(greeting, content):
    prompt = make_prompt(fields={"greeting": greeting}, group_size=2)
    group = await group_of(["Done."], prompt=prompt)
    for completion in group.completions:
        assert completion.prompt_messages == [{"role": "user", "content": content}]
    assert prompt.messages == group.prompt.messages == [{"role": "user", "content": "Fill it."}]


SYSTEM, ASK, SHOW = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where is it?"},
    {"role": "user", "content": [{"type": "text", "text": "On the left."}]},
)
CALL = {"id": "call00001", "type": "function", "function": {"name": "put", "arguments": {}}}
SHOT = [{"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "has 1"}]


@pytest.mark.parametrize(
    ("prompt", "greeting", "whole"),
    [
        ([{"role": "user", "content": ""}], [SYSTEM, ASK], [SYSTEM, ASK]),
        ([{"role": "system", "content": "Rant."}, {"role": "user", "content": ""}], [SYSTEM, ASK], [SYSTEM, ASK]),
        ([SYSTEM, {"role": "user", "content": ""}], [ASK], [SYSTEM, ASK]),
        ([{"role": "user", "content": "Fill it."}], [SHOW], [{"role": "user", "content": "Fill it."}, SHOW]),
        ([ASK], [SYSTEM, SHOW], [SYSTEM, ASK, SHOW]),
        ([ASK], [*SHOT, ASK], [ASK, *SHOT, ASK]),
    ],
    ids=["alone", "its system message wins", "the data's system message", "after the prompt", "system first", "calls"],
)
async def test_messages_that_reset_returns_continue_the_prompt(prompt, greeting, whole):
    """The data's empty prompt (`data.prompt = ""`) gives way to them, so they are then the whole conversation."""
    row = make_prompt(messages=prompt, fields={"greeting": greeting}, group_size=2)
    group = await group_of(lambda *_: "Done.", prompt=row)
    for completion in group.completions:
        assert completion.failure is None
        assert completion.prompt_messages == whole
        template = ChatTemplate(TEMPLATE, {}, Path("model"))
        assert text_of(completion.rows[0].prompt) == template.render(whole, None, add_generation_prompt=True)
    assert row.messages == prompt


async def test_a_prompt_that_stays_empty_fails_the_reset():
    row = make_prompt(messages=[SYSTEM, {"role": "user", "content": ""}], fields={"greeting": None})
    (completion,) = (await group_of(["Done."], prompt=row)).completions
    assert completion.failure.reason is RolloutReason.ENV_RESET
    assert "data.prompt" in completion.failure.detail
    assert completion.rows == []


async def test_text_is_appended_to_a_prompt_of_parts_as_one_more():
    parts = [{"type": "text", "text": "Fill it."}]
    prompt = make_prompt(messages=[{"role": "user", "content": parts}], fields={"greeting": "Now."})
    (completion,) = (await group_of(["Done."], prompt=prompt)).completions
    assert completion.prompt_messages[0]["content"] == [*parts, {"type": "text", "text": "Now."}]
    assert "[Fill it.][Now.]" in text_of(completion.rows[0].prompt)


async def test_reset_gets_fields_prompt_seed_and_index():
    group = await group_of(["Done."], prompt=make_prompt(fields={"answer": "4"}, group_size=2, is_plain_text=True))
    seen = [thaw(c.snapshot, factory_of(Box)).row for c in group.completions]
    given = {"prompt": "Fill it.", "answer": "4", "seed": 100}
    assert seen == [given | {"completion_seed": 100 + i, "completion_index": i} for i in range(2)]


async def test_an_environment_that_makes_its_problem_from_the_seed_poses_one_problem_to_the_whole_group():
    class Drawn(Box):
        def reset(self, seed, completion_seed):
            super().reset()
            self.noise = random.Random(completion_seed).random()
            return f" What is 1 + {random.Random(seed).randint(1, 10**9)}?"

    group = await group_of(["Done."], env=Drawn, prompt=make_prompt(group_size=4))
    assert len({completion.prompt_messages[0]["content"] for completion in group.completions}) == 1
    assert len({thaw(c.snapshot, factory_of(Drawn)).noise for c in group.completions}) == 4


async def test_an_environment_that_changes_its_fields_does_not_change_others():
    class Greedy(Box):
        def reset(self, things, prompt):
            super().reset()
            self.found = len(things)
            things.clear()
            prompt.clear()

    prompt = make_prompt(fields={"things": ["a", "b"]}, group_size=3)
    group = await group_of(["Done."], env=Greedy, prompt=prompt, size=1)
    assert [thaw(c.snapshot, factory_of(Greedy)).found for c in group.completions] == [2, 2, 2]
    assert group.prompt == prompt


# Limits


async def test_a_turn_that_uses_its_budget_is_truncated_by_length_and_its_calls_do_not_run():
    completion = await completion_of([call("put") + "x" * 500], max_tokens_per_turn=60)
    assert (completion.truncated, completion.turns, completion.tool_calls) == (TruncationReason.LENGTH, 1, 0)
    assert completion.rows[0].sampled_ranges == [(0, 60)]
    assert [p.reward for p in completion.parts] == [Measured(0.0)]
    assert completion.snapshot is not None


async def test_a_turn_cut_before_its_budget_is_truncated_by_the_context():
    completion = await completion_of([sampled("abc", finish="length")], max_tokens_per_turn=60)
    assert completion.truncated is TruncationReason.CONTEXT
    assert completion.rows[0].sampled_ranges == [(0, 3)]


async def test_the_token_budget_counts_tool_results():
    one = len(ids(call("put") + END))
    answer = len(ids("\n<|im_start|>tool\nhas 1<|im_end|>\n<|im_start|>assistant\n"))
    exactly = one + answer
    script = [call("put"), "x" * 99]
    cut = await completion_of(script, max_tokens=exactly + 5, max_tokens_per_turn=80)
    assert (cut.truncated, cut.turns) == (TruncationReason.LENGTH, 2)
    assert len(cut.rows[0].tokens) == exactly + 5
    none_left = await completion_of(script, max_tokens=exactly, max_tokens_per_turn=80)
    assert (none_left.truncated, none_left.turns) == (TruncationReason.LENGTH, 1)
    assert len(none_left.rows[0].tokens) == one  # tokens that the model never received are not part of its row
    assert [p.reward for p in none_left.parts] == [Measured(1.0)]


async def test_the_last_allowed_turns_calls_run_before_the_episode_is_truncated():
    completion = await completion_of(lambda *_: call("put"), max_turns=3)
    assert (completion.truncated, completion.turns, completion.tool_calls) == (TruncationReason.MAX_TURNS, 3, 3)
    assert [p.reward for p in completion.parts] == [Measured(3.0)]
    assert completion.rows[0].sampled_ranges[-1][1] == len(completion.rows[0].tokens)


async def test_an_answer_in_the_last_allowed_turn_is_not_truncated():
    assert (await completion_of([call("put"), "Done."], max_turns=2)).truncated is None


async def test_calls_above_the_limit_do_not_run_and_end_the_episode():
    completion = await completion_of([call("put") * 2, call("put") * 2, "Done."], max_tool_calls=3)
    assert (completion.truncated, completion.turns, completion.tool_calls) == (TruncationReason.TOOL_CALLS, 2, 3)
    assert [p.reward for p in completion.parts] == [Measured(3.0)]
    assert (await completion_of([call("put") * 2, call("put"), "Done."], max_tool_calls=3)).truncated is None


@pytest.mark.parametrize("wrong", [call("nowhere"), call("give"), call("put", "[]"), "<tool_call>oops"])
async def test_errors_above_the_limit_end_the_episode(wrong):
    completion = await completion_of(lambda *_: wrong, max_tool_calls=5)
    assert (completion.truncated, completion.turns, completion.tool_errors) == (TruncationReason.TOOL_ERRORS, 3, 3)
    assert (await completion_of([wrong, wrong, "Done."], max_tool_calls=5)).truncated is None


async def test_a_policy_that_only_ends_its_turn_is_scored():
    group = await group_of([""], prompt=make_prompt(group_size=2))
    for completion in group.completions:
        assert (completion.failure, completion.truncated, completion.turns) == (None, None, 1)
        assert completion.rows[0].tokens.tolist() == ids(END)
        assert [p.reward for p in completion.parts] == [Measured(0.0)]


@pytest.mark.parametrize("spam", [call("put") * 50, call("nowhere") * 50, "<tool_call>" * 50])
async def test_a_policy_that_only_spams_tools_is_scored(spam):
    completion = await completion_of(lambda *_: spam, max_tokens_per_turn=4000, max_tokens=8000)
    assert completion.failure is None
    assert completion.truncated in {TruncationReason.TOOL_CALLS, TruncationReason.TOOL_ERRORS}
    assert [p.reward for p in completion.parts] == [Measured(32.0 if "put" in spam else 0.0)]
    assert completion.rows[0].sampled_count > 0


@given(
    words=st.text("ab {<>", max_size=20),
    end=st.sampled_from(["", END, "<|eos|>", "<|im_start|>"]),
    finish=st.sampled_from(["stop", "length"]),
    calls=st.integers(0, 3),
    limit=st.integers(1, 3),
)
@hypothesis_settings(max_examples=40)
async def test_p11_truncation_depends_only_on_finish_reason_and_limits(words, end, finish, calls, limit):
    """Neither the tokens nor the last of them matter."""
    tokens = ids("x" + words + end)
    last = SampledTurn(tokens, [-0.5] * len(tokens), finish, [Span(7, 0, len(tokens))])
    completion = await completion_of(
        lambda turn, _text: call("put") if turn < calls else last, max_turns=limit, max_tokens_per_turn=70
    )
    if calls >= limit:
        assert (completion.truncated, completion.turns) == (TruncationReason.MAX_TURNS, limit)
    else:
        assert completion.truncated is (TruncationReason.CONTEXT if finish == "length" else None)


async def test_a_timeout_while_sampling_keeps_the_earlier_turns():
    def script(turn, _text):
        return anyio.sleep(60) if turn else call("put")

    completion = await completion_of(script, episode_timeout_s=0.5)
    assert (completion.truncated, completion.failure, completion.turns) == (TruncationReason.WALL_CLOCK, None, 1)
    assert len(completion.rows[0].sampled_ranges) == 1
    assert [p.reward for p in completion.parts] == [Measured(1.0)]
    assert completion.snapshot is not None


async def test_a_timeout_in_a_tool_is_the_policys_and_one_before_the_first_token_is_not():
    completion = await completion_of([call("nap", '{"seconds": 1.5}')], episode_timeout_s=0.5)
    assert (completion.truncated, completion.turns) == (TruncationReason.TOOL_TIME, 1)
    assert [p.reward for p in completion.parts] == [Measured(0.0)]
    completion = await completion_of(lambda *_: anyio.sleep(60), episode_timeout_s=0.1)
    assert (completion.truncated, completion.rows) == (TruncationReason.WALL_CLOCK, [])


async def test_slow_tools_do_not_bring_the_end_by_the_wall_clock_nearer():
    """Each time stays below the limit, their sum does not; then sampling alone is above it."""
    nap, sampled = call("nap", '{"seconds": 0.6}'), 0.6

    async def script(turn, _text):
        await anyio.sleep(sampled)
        return nap if turn == 0 else "Done."

    assert (await completion_of(script, episode_timeout_s=1.5)).truncated is None
    assert (await completion_of(script, episode_timeout_s=1.0)).truncated is TruncationReason.WALL_CLOCK
    nap, sampled = call("nap", '{"seconds": 0.6}') * 2, 0.1
    assert (await completion_of(script, episode_timeout_s=1.0)).truncated is TruncationReason.TOOL_TIME


async def test_a_tool_timeout_is_text_for_the_model():
    completion = await completion_of([call("nap", '{"seconds": 1.0}'), "Done."], call_timeout_s=0.3)
    assert completion.messages[1]["content"] == "Error: nap did not answer within 0.3 s"
    assert (completion.failure, completion.truncated, completion.tool_errors) == (None, None, 1)
    assert 0.3 <= completion.tool_runs[0].seconds < 1.0
    assert "did not answer within" in text_of(completion.rows[0].tokens)


async def test_calls_of_a_turn_run_concurrently_and_answer_in_order():
    class Meeting(Box):
        """Its calls wait for each other, and the last one returns first."""

        def reset(self):
            self.turns = [anyio.Event() for _ in range(3)]
            self.arrived = 0

        async def meet(self, number: int) -> str:
            self.arrived += 1
            if self.arrived == 3:
                self.turns[2].set()
            await self.turns[number].wait()
            if number:
                self.turns[number - 1].set()
            return f"met {number}"

    calls = "".join(call("meet", f'{{"number": {number}}}') for number in range(3))
    completion = await completion_of([calls, "Done."], env=Meeting)
    assert [m["content"] for m in completion.messages[1:4]] == ["met 0", "met 1", "met 2"]


# Failures


async def test_a_first_context_that_is_too_long_fails_and_a_later_one_truncates():
    refusal = EngineRefusedError("This model's maximum context length is 64 tokens, and the prompt has 70.")
    failed = await completion_of([refusal])
    assert failed.failure.reason is RolloutReason.PROMPT_TOO_LONG
    assert (failed.rows, failed.parts, failed.snapshot, failed.truncated) == ([], [], None, None)
    cut = await completion_of([call("put"), refusal])
    assert (cut.failure, cut.truncated, cut.turns) == (None, TruncationReason.CONTEXT, 1)
    assert len(cut.rows[0].tokens) == cut.rows[0].sampled_ranges[-1][1]  # nothing was sampled after the tool result
    assert [p.reward for p in cut.parts] == [Measured(1.0)]


@pytest.mark.parametrize(
    "answer",
    [
        EngineRefusedError("temperature must not be negative"),
        EngineError("three times 500"),
        partial(SampledTurn, [1, 2], [-0.5], "stop", [Span(1, 0, 2)]),
        partial(SampledTurn, [1], [float("nan")], "stop", [Span(1, 0, 1)]),
        partial(SampledTurn, [1], [float("-inf")], "stop", [Span(1, 0, 1)]),
        partial(SampledTurn, [1, 2], [-0.5, -0.5], "stop", []),
        partial(SampledTurn, [1, 2], [-0.5, -0.5], "stop", [Span(1, 0, 1)]),
        partial(SampledTurn, [1, 2], [-0.5, -0.5], "stop", [Span(1, 0, 2), Span(2, 1, 2)]),
    ],
)
async def test_a_failed_request_or_an_inconsistent_sample_fails_the_completion(answer):
    def script(turn, _text):
        if turn == 0:
            return call("put")
        return answer() if callable(answer) else answer

    completion = await completion_of(script)
    assert completion.failure.reason is RolloutReason.ENGINE
    assert completion.failure.detail
    assert (completion.parts, completion.snapshot, completion.truncated) == ([], None, None)


async def test_a_turn_without_tokens_ends_the_episode():
    completion = await completion_of([SampledTurn([], [], "stop", [])])
    assert (completion.rows, completion.failure, completion.truncated) == ([], None, None)


async def test_a_failed_completion_does_not_affect_the_others():
    class Fragile(Box):
        def reset(self, completion_index):
            if completion_index == 1:
                raise RuntimeError("no server")
            if completion_index == 2:
                time.sleep(1.5)
            super().reset(str(completion_index))

    def script(turn, text):
        if turn:
            return "Done."
        return (
            EngineError("500")
            if "it.3" in text
            else call("give", '{"what": "world"}')
            if "it.4" in text
            else call("put")
        )

    class Told(Fragile):
        def reset(self, completion_index):
            super().reset(completion_index)
            return str(completion_index)

    group = await group_of(script, env=Told, prompt=make_prompt(group_size=6), call_timeout_s=0.5)
    reasons = [c.failure and c.failure.reason for c in group.completions]
    expected = [RolloutReason.ENV_RESET] * 2 + [RolloutReason.ENGINE, RolloutReason.ENV_STEP]
    assert reasons == [None, *expected, None]
    assert [c.index for c in group.completions] == list(range(6))
    for completion in (group.completions[0], group.completions[5]):
        assert [p.reward for p in completion.parts] == [Measured(1.0)]
        assert completion.turns == 2
        assert completion.snapshot


async def test_an_unavailable_engine_is_raised_unwrapped_and_cancels_the_group():
    asked = []

    def script(turn, text):
        asked.append(turn)
        return anyio.sleep(60) if len(asked) < 4 else EngineUnavailableError("all down")

    with anyio.fail_after(5), pytest.raises(EngineUnavailableError, match="all down"):
        await group_of(script, prompt=make_prompt(group_size=4))
    with pytest.raises(EngineUnavailableError):
        await group_of([call("put"), EngineUnavailableError("all down")], prompt=make_prompt(group_size=4))


async def test_a_prompt_that_the_template_refuses_is_a_data_error():
    refusing = ChatTemplate("{{ raise_exception('no') }}", {}, Path("model"))
    with pytest.raises(DataError, match="no"):
        await group_of(["Done."], chat=make_chat(refusing))


async def test_a_reward_that_times_out_is_unmeasured_and_the_tokens_stay():
    class Slow(Box):
        def get_reward(self):
            time.sleep(1.0)

    completion = await completion_of(["Done."], env=Slow, call_timeout_s=0.3)
    assert [p.reward.reason for p in completion.parts] == [RewardReason.TIMEOUT]
    assert (completion.failure, len(completion.rows)) == (None, 1)


# Groups


async def test_resets_of_a_group_run_concurrently():
    together = threading.Barrier(4)

    class Meeting(Box):
        def reset(self):
            super().reset()
            together.wait(timeout=5)

    group = await group_of(["Done."], env=Meeting, prompt=make_prompt(group_size=4))
    assert [c.failure for c in group.completions] == [None] * 4


async def test_snapshots_are_taken_before_the_slot_is_reused():
    def script(turn, text):
        return call("put", f'{{"thing": "{text.count("<|im_start|>")}"}}') if turn < 2 else "Done."

    group = await group_of(script, prompt=make_prompt(group_size=3), size=1)  # one environment for all three
    seen = [thaw(c.snapshot, factory_of(Box)) for c in group.completions]
    assert [env.row["completion_index"] for env in seen] == [0, 1, 2]
    assert [len(env.seen) for env in seen] == [2, 2, 2]


async def test_p20_reusing_an_environment_changes_no_stored_reward_or_snapshot():
    """One environment serves every completion of two groups; the stored first group does not change."""
    script = Scripted([call("put"), call("put"), "Done."])
    factories = {"box": factory_of(Box)}
    chats = {"box": ChatSetup(make_chat(), TOOL_FORMATS["hermes"])}
    async with EnvironmentPool(factories, size=1) as pool:
        runner = GroupRunner(chats=chats, sampler=script, pool=pool, limits=RolloutSettings(), factories=factories)
        first = await runner.run(make_prompt(group_size=2))
        stored = encode(first)
        script.script = lambda turn, _text: call("put") if turn < 5 else "Done."
        second = await runner.run(make_prompt(id="train:1:0", group_size=2))
    assert encode(first) == stored
    rewards = [[[part.reward for part in c.parts] for c in group.completions] for group in (first, second)]
    assert rewards == [[[Measured(2.0)]] * 2, [[Measured(5.0)]] * 2]
    seen = [[len(thaw(c.snapshot, factories["box"]).seen) for c in group.completions] for group in (first, second)]
    assert seen == [[2, 2], [5, 5]]


def place_of(garbage):
    """Return the file or the module that an object comes from; threads of earlier tests leave garbage, too."""
    code = next((getattr(garbage, name) for name in ("f_code", "cr_code", "gi_code") if hasattr(garbage, name)), None)
    named = garbage if isinstance(garbage, type | FunctionType) else type(garbage)
    return str(code.co_filename if code else named.__module__)


async def test_an_ended_group_leaves_nothing_to_the_garbage_collector():
    """Its tokens would stay in memory until the collector runs, which a busy worker lets it do rarely."""
    factories, chats = {"box": factory_of(Box)}, {"box": ChatSetup(make_chat(), TOOL_FORMATS["hermes"])}
    async with EnvironmentPool(factories, size=2) as pool:
        script = Scripted([call("put"), call("put"), "Done."])
        runner = GroupRunner(chats=chats, sampler=script, pool=pool, limits=RolloutSettings(), factories=factories)
        await runner.run(make_prompt(group_size=2))  # what is made once may be cyclic
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            await runner.run(make_prompt(id="train:1:0", group_size=2))
            await anyio.lowlevel.checkpoint()
            script.asked.clear()
            gc.collect()
            places = Counter(map(place_of, gc.garbage))
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert not {place for place in places if re.search(r"\b(stream|envs|workers|test_episode)\b", place)}, places


async def test_a_prompt_without_an_environment_is_one_turn_without_tools():
    completion = await completion_of([call("put"), "never"], env=None)
    assert (completion.turns, completion.tool_calls, completion.snapshot) == (1, 0, None)
    assert completion.messages == [{"role": "assistant", "content": call("put")}]


async def test_reward_functions_of_the_rollout_see_the_snapshots_of_valid_completions():
    def count(completions, environments, weight_of):
        return [
            len(env.seen) * w if len(env.seen) < 2 else None for env, w in zip(environments, weight_of, strict=True)
        ]

    def script(turn, text):
        if not turn:
            return EngineError("500") if "it.2" in text else call("put") * (1 + ("it.1" in text))
        return "Done."

    class Told(Box):
        def reset(self, completion_index, **row):
            super().reset()
            return str(completion_index)

    prompt = make_prompt(group_size=3, fields={"weight_of": 5})
    function = RewardFunction(count, "count", weight=0.5, run_in="rollout")
    group = await group_of(script, env=Told, prompt=prompt, rewards=[function])
    parts = [[(p.name, p.weight) for p in c.parts] for c in group.completions]
    assert parts == [[("env", 1.0), ("count", 0.5)], [("env", 1.0), ("count", 0.5)], []]
    assert group.completions[0].parts[1].reward == Measured(5.0)
    assert group.completions[1].parts[1].reward.reason is RewardReason.MISSING
    assert all(c.reward is None for c in group.completions)


async def test_reward_functions_work_without_environments():
    def exact(completions, answer):
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    prompt = make_prompt(environment=None, is_plain_text=True, fields={"answer": "4"})
    function = RewardFunction(exact, "exact", run_in="rollout")
    (completion,) = (await group_of(["4"], env=None, prompt=prompt, rewards=[function])).completions
    assert [p.reward for p in completion.parts] == [Measured(1.0)]


class Numbered(Box):
    def reset(self, completion_index, **row):
        super().reset(seed=row["seed"], completion_seed=row["completion_seed"])
        return str(completion_index)  # appended to "Fill it."


async def test_a_greedy_completion_differs_only_in_its_temperature():
    def count(completions):
        return [float(len(completions))] * len(completions)

    sampler = Scripted([call("put"), "Done."])
    function = RewardFunction(count, "count", run_in="rollout")
    prompt = make_prompt(group_size=3)
    group = await group_of(sampler, env=Numbered, prompt=prompt, rewards=[function], with_greedy=True, temperature=0.7)
    assert [(c.index, c.greedy) for c in group.completions] == [(0, False), (1, False), (2, False), (3, True)]
    temperatures = {i: [s.temperature for ids, s, _ in sampler.asked if f"it.{i}" in text_of(ids)] for i in range(4)}
    assert temperatures == {0: [0.7] * 2, 1: [0.7] * 2, 2: [0.7] * 2, 3: [0.0] * 2}
    assert {
        (s.max_tokens, s.stop_token_ids) for ids, s, _ in sampler.asked if "<|im_start|>tool" not in text_of(ids)
    } == {(512, make_chat().stop_token_ids)}
    greedy = group.completions[3]
    assert thaw(greedy.snapshot, factory_of(Numbered)).row == {"seed": 100, "completion_seed": 103}
    assert [(p.name, p.reward) for p in greedy.parts] == [("env", Measured(1.0)), ("count", Measured(4.0))]
    assert (greedy.turns, greedy.tool_calls, greedy.failure) == (2, 1, None)


async def test_there_is_no_greedy_completion_by_default():
    sampler = Scripted(["Done."])
    group = await group_of(sampler, prompt=make_prompt(group_size=2), temperature=0.7)
    assert [c.greedy for c in group.completions] == [False, False]
    assert [sampling.temperature for _, sampling, _ in sampler.asked] == [0.7, 0.7]


async def test_a_failed_greedy_completion_does_not_affect_the_others():
    def script(turn, text):
        return EngineError("500") if "it.2" in text else "Done."

    group = await group_of(script, env=Numbered, prompt=make_prompt(group_size=2), with_greedy=True)
    assert [c.failure and c.failure.reason for c in group.completions] == [None, None, RolloutReason.ENGINE]
    assert [c.greedy for c in group.completions] == [False, False, True]


async def test_temperature_0_reaches_the_engine_for_the_greedy_completion_alone():
    def reply(token_ids, request):
        return ids("Done." + END)

    async with (
        ScriptedEngine(reply, version="0") as engine,
        EngineClient([engine.url], request_timeout_s=5, max_attempts=3, unavailable_timeout_s=5) as client,
    ):
        group = await group_of(
            client, env=Numbered, prompt=make_prompt(group_size=2), with_greedy=True, temperature=0.7
        )
    asked = {text_of(request.token_ids): request.sampling_params.temperature for request in engine.requests}
    assert {text.partition("it.")[2][0]: temperature for text, temperature in asked.items()} == {
        "0": 0.7,
        "1": 0.7,
        "2": 0.0,
    }
    assert [c.greedy for c in group.completions] == [False, False, True]


# Rewards by turn


class ByTurn(Box):
    def get_reward(self, messages):
        return [float(len(m.get("tool_calls", ()))) for m in messages if m["role"] == "assistant"]


@pytest.mark.parametrize(
    ("script", "limits", "expected"),
    [
        ([call("put") * 2, "<tool_call>oops</tool_call>", "Done."], {}, [2.0, 0.0, 0.0]),
        (["Done."], {}, [0.0]),
        ([call("put"), "x" * 500], {"max_tokens_per_turn": 60}, [1.0, 0.0]),
        ([call("put"), call("put") * 2], {"max_turns": 2}, [1.0, 2.0]),
        ([call("put"), EngineRefusedError("This model's maximum context length is 64 tokens")], {}, [1.0]),
        ([call("put"), SampledTurn([], [], "stop", [])], {}, [1.0, 0.0]),
    ],
)
async def test_an_environment_may_reward_each_turn_however_the_episode_ends(script, limits, expected):
    group = await group_of(script, env=ByTurn, **limits)
    (completion,) = group.completions
    assert [(p.name, p.turn, p.reward) for p in completion.parts] == [
        ("env", turn, Measured(reward)) for turn, reward in enumerate(expected)
    ]
    assert completion.turns == len(expected)
    completion.reward = merge_parts(completion.parts)
    batch = collate([group])
    assert float(batch.turn_rewards_RT.sum()) == sum(expected)
    ends = [len(completion.rows[0].prompt) + end - 1 for _, end in completion.rows[0].sampled_ranges]
    assert batch.turn_rewards_RT[0, ends].tolist() == expected[: len(ends)]


async def test_a_list_of_the_wrong_length_leaves_the_completion_unmeasured():
    class Short(Box):
        def get_reward(self):
            return [1.0]

    completion = await completion_of([call("put"), "Done."], env=Short)
    assert [(p.turn, p.reward.reason) for p in completion.parts] == [(None, RewardReason.SHAPE)]
    assert (completion.failure, len(completion.rows)) == (None, 1)


async def test_a_cancelled_group_leaves_no_environment_in_use():
    pool = EnvironmentPool({"box": factory_of(Box)}, size=2)
    async with pool:
        with anyio.move_on_after(0.1):
            await GroupRunner(
                chats={"box": ChatSetup(make_chat(), TOOL_FORMATS["hermes"])},
                sampler=Scripted(lambda *_: anyio.sleep(60)),
                pool=pool,
                limits=RolloutSettings(),
            ).run(make_prompt(group_size=2))
        with anyio.fail_after(1):
            await pool.acquire("box")
            await pool.acquire("box")


async def test_completions_that_an_earlier_attempt_finished_do_not_run_again():
    prompt = make_prompt(group_size=3)
    first = await group_of(["Done."], prompt=prompt)
    finished, failed = first.completions[0], first.completions[2]
    failed.failure, failed.rows = Failure(reason=RolloutReason.ENGINE, detail="three tries"), []
    script, saved = Scripted(["Done.", "Done.", "Done."]), SavedGroup()
    greedy_now = msgspec.structs.replace(finished, index=1, greedy=True)
    beyond = msgspec.structs.replace(finished, index=3)
    saved.completions = {str(n): encode(each) for n, each in enumerate([failed, finished, greedy_now, beyond])}
    group = await group_of(script, prompt=prompt, journal=await saved.journal(), min_policy_version=1000)
    assert [c.index for c in group.completions] == [0, 1, 2]
    assert [group.completions[0], group.completions[2]] == [finished, failed]
    assert len(script.asked) == 1


async def test_each_completion_is_saved():
    saved, prompt = SavedGroup(), make_prompt(group_size=3)
    group = await group_of(["Done."], prompt=prompt, journal=await saved.journal(), with_greedy=True)
    kept = [decode(record, Completion) for record in saved.completions.values()]
    assert sorted(kept, key=lambda each: each.index) == group.completions
    again = await group_of(Scripted([]), prompt=prompt, journal=await saved.journal(), with_greedy=True)
    assert again.completions == group.completions


async def test_an_episode_can_run_alone():
    context = EpisodeContext(
        prompt=make_prompt(environment=None),
        index=5,
        chat=make_chat(),
        tool_format=TOOL_FORMATS["hermes"],
        sampler=Scripted(["Done."]),
        slot=None,
        limits=RolloutSettings(),
    )
    completion = await run_episode(context)
    assert (completion.index, completion.rows[0].tokens.tolist()) == (5, ids("Done." + END))
    assert completion.rows[0].logprobs == array("f", [-0.5] * 6).tobytes()


class Hasty(Box):
    """States how long its episodes may take."""

    episode_timeout_s = 0.2


async def test_an_environment_shortens_its_episodes():
    completion = await completion_of(lambda *_: anyio.sleep(60), env=Hasty, episode_timeout_s=50.0)
    assert completion.truncated is TruncationReason.WALL_CLOCK
