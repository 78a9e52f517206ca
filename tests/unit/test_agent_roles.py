"""What each branch of a program's conversations is for, on the recorded requests of real programs."""

import json

import pytest
from msgspec.structs import replace

from stream.records import BranchRole, DiscardReason
from tests.cases.agent_requests import names, recorded
from tests.unit.test_episode import make_chat, sampled
from tests.unit.test_recorder import recorder_of, user
from workers.rollout.agent_endpoint.dialects import DIALECTS
from workers.rollout.agent_endpoint.neutral import ModelRequest, RequestRefusedError, RequestSource
from workers.rollout.agent_endpoint.request_source import source_of
from workers.settings import AgentSettings

CHAT, RESPONSES, MESSAGES = DIALECTS
ROUTES = {"/v1/chat/completions": CHAT, "/v1/responses": RESPONSES, "/v1/messages": MESSAGES}


class Scripted:
    """Gives the next answer; notes the contexts."""

    def __init__(self):
        self.answer, self.asked = "", []

    async def sample(self, prompt_ids, options, *, min_policy_version=0):
        self.asked.append(list(prompt_ids))
        return sampled(self.answer, options.max_tokens)


def spoken(answer):
    """Return the text with which a model of the hermes format gives a recorded answer."""
    calls = [
        "<tool_call>\n"
        + json.dumps({"name": name.replace("NS:", "multi_agent_v1__"), "arguments": arguments})
        + "\n</tool_call>"
        for name, arguments in answer.get("calls", ())
    ]
    return "\n".join([answer.get("text", ""), *calls]).strip()


async def branches_of(name):
    """Replay a recorded conversation; returns its rows and branches."""
    sampler = Scripted()
    recorder, _ = recorder_of(sampler, max_tokens=1_000_000, max_tokens_per_turn=10_000)
    for each in recorded(name):
        if each.path not in ROUTES:
            continue
        request = ROUTES[each.path].parse(each.body, each.headers)
        if each.answer.get("status") == 400:  # too long: the turns that it holds are not in the file
            await replay_turns(recorder, sampler, request)
            continue
        sampler.answer = spoken(each.answer)
        await recorder.complete(request)
    return recorder.record()


async def replay_turns(recorder, sampler, request):
    """Sample the turns that a request holds."""
    for place, message in enumerate(request.messages):
        if message["role"] == "assistant":
            calls = [
                (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
            ]
            sampler.answer = spoken({"text": message["content"], "calls": calls})
            await recorder.complete(replace(request, messages=request.messages[:place]))


MAIN, SUB, COMPACT, SIDE = BranchRole.MAIN, BranchRole.SUB, BranchRole.COMPACT, BranchRole.SIDE
LINEAR = [
    *("anthropic-sdk-turns", "claude-code-thinking", "claude-code-turns", "codex-reasoning", "codex-turns"),
    *("langgraph-anthropic-turns", "langgraph-openai-drops-reasoning", "langgraph-openai-turns"),
    *("mini-swe-agent-turns", "openai-agents-chat-turns", "openai-agents-responses-turns", "openai-sdk-turns"),
]
BRANCHED = {
    "claude-code-compaction": [(MAIN, None, 2), (COMPACT, 0, 1), (MAIN, 1, 1)],
    "opencode-compaction": [(MAIN, None, 2), (COMPACT, 0, 1), (MAIN, 1, 1)],
    "codex-compaction": [(MAIN, None, 1), (COMPACT, 0, 1), (MAIN, 0, 1)],
    "claude-code-sub-agents": [(MAIN, None, 2), (SUB, 0, 2), (SUB, 0, 1)],
    "codex-sub-agents": [(MAIN, None, 3), (SUB, 0, 2), (SUB, 0, 1)],
    "opencode-sub-agents": [(MAIN, None, 2), (SUB, 0, 2), (SUB, 0, 1), (SUB, 0, 1)],
    "opencode-turns": [(SIDE, None, 1), (MAIN, None, 2)],
    "claude-code-lost-answer": [(MAIN, None, 1), (MAIN, None, 2)],
}


def test_every_recorded_program_is_here():
    # A title call of Claude Code asks for JSON alone, which is refused.
    assert sorted([*LINEAR, *BRANCHED, "claude-code-side-calls"]) == names()


@pytest.mark.parametrize("name", LINEAR)
async def test_a_linear_conversation_is_one_row_without_branches(name):
    rows, branches = await branches_of(name)
    assert (len(rows), branches) == (1, [])


@pytest.mark.parametrize("name", BRANCHED)
async def test_recorded_conversations_have_these_branches(name):
    rows, branches = await branches_of(name)
    assert [(each.role, each.parent, each.turns) for each in branches] == BRANCHED[name]
    assert [each.rows for each in branches] == [(place,) for place in range(len(rows))]
    assert not any(each.rewritten for each in branches)


async def test_a_side_call_is_not_trained_and_a_lost_answer_is_superseded():
    _, branches = await branches_of("opencode-turns")
    assert [each.discarded for each in branches] == [DiscardReason.ROLE, None]
    _, branches = await branches_of("claude-code-lost-answer")
    assert [each.discarded for each in branches] == [DiscardReason.SUPERSEDED, None]


async def ask(recorder, *messages, **more):
    """Ask for a turn; returns the conversation with the answer."""
    reply = await recorder.complete(ModelRequest(messages=list(messages), **more))
    return [*messages, reply.message]


def answers(*texts):
    """Make a recorder whose turns are these texts."""
    return recorder_of(Sequence([*texts]))[0]


class Sequence(Scripted):
    def __init__(self, texts):
        super().__init__()
        self._texts = texts

    async def sample(self, prompt_ids, options, *, min_policy_version=0):
        self.answer = self._texts.pop(0)
        return await super().sample(prompt_ids, options)


async def test_a_superseded_answer_at_the_end_of_a_row_leaves_the_row_and_its_context_stays_in_both():
    recorder = answers("one", "lost", "two", "three")
    start = [*await ask(recorder, user("a")), user("b")]
    await ask(recorder, *start)
    await ask(recorder, *await ask(recorder, *start), user("c"))
    rows, branches = recorder.record()
    assert [(each.turns, each.rows, each.parent, each.after_turn, each.discarded) for each in branches] == [
        (1, (0,), None, None, None),
        (1, (1,), 0, 1, DiscardReason.SUPERSEDED),
        (2, (2,), 0, 1, None),
    ]
    chat = make_chat()
    assert [chat.decode(list(row.tokens[start:end])) for row in rows for start, end in row.sampled_ranges] == [
        *("one", "lost", "two", "three")
    ]
    assert [*rows[1].prompt] == [*rows[2].prompt]
    assert recorder.record() == (rows, branches)


async def test_a_branch_knows_its_answers_among_the_messages_of_all():
    recorder, completion = recorder_of(Sequence(["one", "sub one", "two", "sub two"]))
    main, sub = await ask(recorder, user("a")), await ask(recorder, user("b"), source=RequestSource(BranchRole.SUB))
    main = await ask(recorder, *main, user("c"))
    await ask(recorder, *sub, user("d"), source=RequestSource(BranchRole.SUB))
    said = [[completion.messages[place]["content"] for place in each.answers] for each in recorder.record()[1]]
    assert said == [["one", "two"], ["sub one", "sub two"]]
    assert [message["content"] for message in completion.messages] == [
        *("one", "b", "sub one", "c", "two", "d", "sub two")
    ]


async def test_of_two_answers_that_nothing_continues_both_are_trained():
    recorder = answers("one", "two")
    await ask(recorder, user("a"))
    await ask(recorder, user("a"))
    assert [each.discarded for each in recorder.record()[1]] == [None, None]


async def test_an_answer_that_another_branch_quotes_is_not_superseded():
    quoted = "the number that I found is 17"
    recorder = answers("I ask two.", quoted, "let me look", "nothing", "done")
    main = await ask(recorder, user("a"), source=RequestSource(name="main"))
    await ask(recorder, user("sub"), source=RequestSource(BranchRole.SUB))
    other = await ask(recorder, user("sub"), source=RequestSource(BranchRole.SUB))
    await ask(recorder, *other, user("go on"), source=RequestSource(BranchRole.SUB))
    await ask(recorder, *main, user(f"they said: {quoted}; nothing"), source=RequestSource(name="main"))
    assert [each.discarded for each in recorder.record()[1]] == [None] * 3


async def test_a_history_with_a_changed_answer_stays_in_its_branch_in_a_new_row():
    recorder = answers("<think>long</think> one", "two", "three")
    system = {"role": "system", "content": "s"}
    first = await ask(recorder, system, user("a"))
    changed = [system, user("a"), {"role": "assistant", "content": "one"}, user("b")]
    assert first[2] != changed[2]
    await ask(recorder, *await ask(recorder, *changed), user("c"))
    rows, branches = recorder.record()
    assert [(each.role, each.turns, each.rows, each.rewritten) for each in branches] == [
        (MAIN, 3, (0, 1), ("program",))
    ]
    assert [len(row.sampled_ranges) for row in rows] == [1, 2]


async def test_a_history_with_a_shortened_result_starts_a_row_with_all_that_the_model_saw():
    sampler = Sequence(["one", "two", "three"])
    recorder = recorder_of(sampler)[0]
    first = await ask(recorder, user("a"))
    second = await ask(recorder, *first, user("a long result"))
    await ask(recorder, *first, user("short"), second[-1], user("c"))
    rows, branches = recorder.record()
    assert [(each.turns, each.rows, each.rewritten) for each in branches] == [(3, (0, 1), ("program",))]
    contexts = [
        [*row.prompt, *row.tokens][: len(row.prompt) + start] for row in rows for start, _ in row.sampled_ranges
    ]
    assert contexts == sampler.asked


async def test_other_tools_or_another_name_start_a_branch():
    recorder = answers("one", "two", "three")
    main = await ask(recorder, user("a"), source=RequestSource(name="x"))
    await ask(recorder, *main, user("b"), source=RequestSource(BranchRole.SUB, "y", "x"))
    await ask(recorder, *main, user("b"), source=RequestSource(name="x"))
    found = [(each.role, each.name, each.parent, each.after_turn) for each in recorder.record()[1]]
    assert found == [(MAIN, "x", None, None), (SUB, "y", 0, 1)]


@pytest.mark.parametrize("train", [("main",), ("sub",), ()])
async def test_the_settings_say_which_roles_are_trained(train):
    recorder = recorder_of(Sequence(["one", "two"]), agents=AgentSettings(train=train))[0]
    await ask(recorder, user("a"))
    await ask(recorder, user("b"), source=RequestSource(BranchRole.SUB))
    kept = [each.role for each in recorder.record()[1] if each.discarded is None]
    assert kept == [*train]
    assert {each.discarded for each in recorder.record()[1]} <= {None, DiscardReason.ROLE}


def test_the_headers_of_an_own_loop_name_role_parent_and_training():
    headers = {"x-penstock-role": "compact", "x-penstock-branch": "b", "x-penstock-parent": "a"}
    assert source_of(headers) == RequestSource(COMPACT, "b", "a")
    assert not source_of({"x-penstock-train": "0"}).is_trained
    with pytest.raises(RequestRefusedError, match="'boss' is no role; the roles are main, sub"):
        source_of({"x-penstock-role": "boss"})
    with pytest.raises(RequestRefusedError, match="neither 0 nor 1"):
        source_of({"x-penstock-train": "no"})


async def test_a_branch_that_its_program_leaves_out_is_discarded():
    recorder = answers("one", "two")
    await ask(recorder, user("a"))
    await ask(recorder, user("b"), source=RequestSource(is_trained=False))
    assert [each.discarded for each in recorder.record()[1]] == [None, DiscardReason.PROGRAM]


async def test_an_answer_that_another_conversation_quotes_is_no_summary_if_it_had_no_history():
    said = "I think that the answer is 17."
    recorder = answers(said, "I agree.", "I do not.")
    await ask(recorder, user("What is it?"))
    await ask(recorder, user(f"Another one said: {said} Do you agree?"))
    await ask(recorder, user(f"Be strict. Another one said: {said}"))
    assert [each.role for each in recorder.record()[1]] == [MAIN, SUB, SUB]
