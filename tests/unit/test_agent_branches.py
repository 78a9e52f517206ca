"""Requests of one episode form a tree: each sampled token is in one row, whatever the order in which they come."""

import random

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream.errors import EngineRefusedError
from stream.validity import TruncationReason
from tests.cases.agent_requests import recorded
from tests.cases.families import FAMILIES, template_of
from tests.unit.test_episode import Scripted, make_chat, sampled
from tests.unit.test_recorder import recorder_of, user
from workers.rollout.agent_endpoint.dialects import DIALECTS
from workers.rollout.agent_endpoint.neutral import ContextOverflowError, ModelRequest
from workers.rollout.agent_endpoint.role_rules import RoleRules, find_role_rules

_, RESPONSES, MESSAGES = DIALECTS


class Seeded:
    """Samples a text that the seed alone decides; notes how many turns are sampled at once."""

    def __init__(self, delays=None):
        self.asked, self.turns, self.most, self._now = [], [], 0, 0
        self._delays = delays or random.Random(0)

    async def sample(self, prompt_ids, options, *, min_policy_version=0):
        self._now += 1
        self.most = max(self.most, self._now)
        await anyio.sleep(self._delays.random() * 0.01)
        self._now -= 1
        turn = sampled(f"answer {options.seed % 1000}", options.max_tokens)
        self.asked.append(list(prompt_ids))
        self.turns.append(turn.token_ids)
        return turn


async def ask(recorder, *messages):
    """Ask for a turn; returns the conversation with the answer."""
    reply = await recorder.complete(ModelRequest(messages=list(messages)))
    return [*messages, reply.message]


def assert_each_token_once(recorder, sampler):
    """Assert that the rows hold each sampled turn once, after exactly what the engine was asked for it."""
    rows = recorder.record()[0]
    found = []
    for row in rows:
        whole = [*row.prompt, *row.tokens]
        for start, end in row.sampled_ranges:
            found.append((whole[: len(row.prompt) + start], list(row.tokens[start:end])))
    assert sorted(found) == sorted(zip(sampler.asked, sampler.turns, strict=True))
    return rows


async def test_sub_agents_are_sampled_at_once_and_each_has_a_row():
    sampler = Seeded()
    recorder, completion = recorder_of(sampler)
    main = await ask(recorder, user("task"))

    async def work(number):
        conversation = [user(f"sub {number}")]
        for turn in range(3):
            conversation = [*await ask(recorder, *conversation), user(f"go on {turn}")]

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(work, number)
    await ask(recorder, *main, user("results"))
    assert sampler.most == 3
    rows = assert_each_token_once(recorder, sampler)
    assert sorted(len(row.sampled_ranges) for row in rows) == [2, 3, 3, 3]
    assert completion.turns == 11


async def test_any_order_of_arrival_samples_the_same_tokens():
    results = []
    for order in range(20):
        sampler = Seeded(random.Random(order))
        recorder, _ = recorder_of(sampler)
        main = await ask(recorder, user("task"))
        chance = random.Random(order)

        async def work(number, after_s, recorder=recorder, main=main):
            await anyio.sleep(after_s)
            await ask(recorder, *main, user(f"part {number}"))

        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(work, number, chance.random() * 0.02)
        assert sampler.most > 1
        assert_each_token_once(recorder, sampler)
        results.append(sorted(sampler.turns))
    assert results == results[:1] * 20
    assert len({*map(tuple, results[0])}) == 9


async def test_a_second_answer_to_the_same_conversation_is_a_sibling_with_its_own_row():
    sampler = Seeded()
    recorder, _ = recorder_of(sampler)
    start = [*await ask(recorder, user("a")), user("b")]
    one, other = await ask(recorder, *start), await ask(recorder, *start)
    assert one[-1] != other[-1]
    await ask(recorder, *one, user("c"))
    await ask(recorder, *other, user("c"))
    rows = assert_each_token_once(recorder, sampler)
    assert [len(row.sampled_ranges) for row in rows] == [3, 2]
    assert [*rows[1].prompt][: len(rows[0].prompt)] == [*rows[0].prompt]


async def test_a_compacted_history_is_a_new_root_and_the_old_row_stays():
    sampler = Seeded()
    recorder, _ = recorder_of(sampler)
    history = await ask(recorder, user("a"))
    history = await ask(recorder, *history, user("b"))
    await ask(recorder, user("summary of a and b"), user("c"))
    rows = assert_each_token_once(recorder, sampler)
    assert [len(row.sampled_ranges) for row in rows] == [2, 1]


async def test_the_limit_of_a_sub_agent_ends_its_branch_alone():
    recorder, _ = recorder_of(Seeded(), max_turns=2)
    main = await ask(recorder, user("task"))
    sub = await ask(recorder, user("sub"))
    sub = await ask(recorder, *sub, user("more"))
    assert (await ask(recorder, *sub, user("more")))[-1]["content"] == ""
    assert recorder.end() is None
    main = await ask(recorder, *main, user("more"))
    assert (await ask(recorder, *main, user("more")))[-1]["content"] == ""
    assert recorder.end() is TruncationReason.MAX_TURNS


async def test_all_branches_together_have_sixteen_times_the_turns_of_one():
    recorder, completion = recorder_of(Seeded(), max_turns=2)
    for number in range(32):
        await ask(recorder, user(f"sub {number}"))
    assert completion.turns == 32
    assert (await ask(recorder, user("one more")))[-1]["content"] == ""


@given(steps=st.lists(st.tuples(st.integers(0, 30), st.sampled_from("abc")), min_size=1, max_size=25))
async def test_whatever_a_program_continues_each_sampled_token_is_in_one_row(steps):
    """Each step continues some earlier conversation, or none, with one of three messages."""
    sampler = Seeded()
    sampler._delays = type("At once", (), {"random": staticmethod(lambda: 0.0)})
    recorder, _ = recorder_of(sampler, max_turns=40, max_tokens=100_000)
    conversations = [[]]
    for which, text in steps:
        conversations.append(await ask(recorder, *conversations[which % len(conversations)], user(text)))
    assert_each_token_once(recorder, sampler)
    assert len(sampler.turns) == len(steps)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dialect", "name"), [(MESSAGES, "claude-code-turns"), (RESPONSES, "codex-turns")])
def test_every_template_shows_all_that_claude_code_and_codex_send(family, dialect, name):
    request, *_ = recorded(name)
    asked = dialect.parse(request.body, {})
    chat, messages = make_chat(template_of(family)).with_tools(asked.tools[:2]), asked.messages  # these are whole
    rules = find_role_rules(chat)
    text = chat.renderer.render_prompt(rules.apply(messages))
    for message in messages:
        assert message["content"].strip()[-40:] in text, message["role"]


def test_rules_never_change_what_was_sent_when_more_is_sent():
    rules = find_role_rules(make_chat(template_of("gemma-2")))
    assert not rules.system
    messages = [user("a"), {"role": "system", "content": "b"}, user("c"), {"role": "assistant", "content": "d"}]
    more = [*messages, {"role": "system", "content": "e"}, user("f")]
    assert rules.apply(messages) == [user("a\n\nb\n\nc"), messages[-1]]
    assert rules.apply(more)[:2] == rules.apply(messages)
    assert rules.apply(more)[2:] == [user("e\n\nf")]


@pytest.mark.parametrize(
    ("rules", "roles", "cases"),
    [
        (RoleRules(), ["system", "user", "system"], []),
        (RoleRules(late_system=False), ["user", "system", "system"], ["system after user", "system after system"]),
        (RoleRules(late_system=False), ["user", "assistant", "system"], ["system after assistant"]),
        (RoleRules(system=False), ["system", "user"], ["system"]),
        (RoleRules(repeated_user=False), ["user", "user", "user"], ["user after user"]),
    ],
)
def test_roles_that_a_template_does_not_take_are_named_where_they_stand(rules, roles, cases):
    assert rules.not_taken(roles) == cases


async def test_scripted_turns_keep_the_text_that_a_stop_text_ends():
    recorder, _ = recorder_of(Scripted(["one STOP two", "three"]))
    reply = await recorder.complete(ModelRequest(messages=[user("a")], stop=("STOP",)))
    assert reply.text == "one "
    await recorder.complete(ModelRequest(messages=[user("a"), reply.message, user("b")]))
    assert len(recorder.record()[0]) == 1


async def test_a_limit_that_a_turn_of_the_same_branch_follows_is_forgotten():
    class Narrow(Seeded):
        async def sample(self, prompt_ids, options, *, min_policy_version=0):
            if len(prompt_ids) > 400:
                raise EngineRefusedError("the maximum context length is 400 tokens")
            return await super().sample(prompt_ids, options)

    recorder, _ = recorder_of(Narrow())
    main = await ask(recorder, user("task"))
    with pytest.raises(ContextOverflowError):
        await ask(recorder, *main, user("long" * 200))
    assert recorder.end() is TruncationReason.CONTEXT
    await ask(recorder, *main, user("short"))
    assert recorder.end() is None
    assert recorder.record()[1] == []


async def test_a_program_that_compacts_without_end_is_refused_after_a_hundred_contexts_that_are_too_long():
    def say(_, context):
        return EngineRefusedError("the maximum context length is 9") if "history" in context else "a summary"

    recorder, completion = recorder_of(Scripted(say), max_turns=1000)
    await ask(recorder, user("start"))
    refusals = []
    for number in range(150):
        for conversation in (user(f"history {number}"), user(f"summarise {number}")):
            try:
                await ask(recorder, conversation)
            except EngineRefusedError as error:
                refusals.append(error)
    overflows = [isinstance(error, ContextOverflowError) for error in refusals]
    assert overflows == [True] * 100 + [False] * 101
    assert str(refusals[-1]) == "the episode is over: 100 of its contexts were too long"
    assert completion.turns == 100
    assert recorder.end() is TruncationReason.CONTEXT
