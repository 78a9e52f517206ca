"""A conversation that its template rewrites is rendered from its last turns: exactly as the whole, or as the whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tests.cases.chats import TEMPLATE
from tests.cases.families import FAMILIES, chat_of, tokenizer_of
from tests.unit.test_families import SYSTEM, THOUGHTS, TOOLS
from workers.rollout.chat.chat_tokenizer import ChatTokenizer
from workers.rollout.chat.known_parts import KnownParts
from workers.rollout.chat.renderer import AssistantTurn
from workers.rollout.chat.template import ChatTemplate

ASK = {"role": "user", "content": "What is 1 + 2?"}
REWRITING = {
    "qwq": {},
    "deepseek-r1": {},
    "qwen3": {"enable_thinking": False},
    "mistral-nemo": {},
}
"""Families whose templates rewrite history that has tool results, with arguments of the template."""
CONTENTS = st.text(max_size=20) | st.sampled_from(["<tool_response>", "</think>", "user", "3", "\n 7 \n", '{"a": 1}'])


def result(content: str, number: int = 1) -> dict[str, str]:
    return {"role": "tool", "name": "add", "tool_call_id": f"call{number:05}", "content": content}


def rewriting(name: str, **learn: bool) -> ChatTokenizer:
    """Make a family's chat tokenizer, which has learned whether a window is exact."""
    chat = chat_of(name, TOOLS, **REWRITING[name])
    assert chat.check_history(**learn).rewrites_history
    return chat


def whole_only(chat: ChatTokenizer) -> ChatTokenizer:
    """Return the same chat tokenizer, which has learned nothing."""
    return chat.with_tools(TOOLS)


def turn_of(chat: ChatTokenizer, text: str, *replies: dict, opening: str = "") -> AssistantTurn:
    """Make a turn whose tokens encode its text."""
    ids = [*chat._encoder.encode(text), chat.end_of_turn_id]
    return AssistantTurn(ids, chat.decode(ids), replies, opening)


def contexts(chat: ChatTokenizer, messages, turns):
    """Return what the engine gets after each turn."""
    known = KnownParts()
    found = []
    for count in range(1, len(turns) + 1):
        ids, new = chat.conversation_ids(messages, turns[:count], known)
        found.append((ids.tolist(), new, ids.json))
    return found


@pytest.fixture(scope="module")
def chats():
    """Chat tokenizers of every rewriting family, for environments that answer with user messages, and others."""
    return {(name, users): rewriting(name, with_user_replies=users) for name in REWRITING for users in (False, True)}


@st.composite
def episodes(draw):
    """Draw a family, a prompt, and turns with and without reasoning, answered by tools and perhaps by a user."""
    name, users = draw(st.sampled_from(sorted(REWRITING))), draw(st.booleans())
    thought, opening = THOUGHTS.get(name, ""), "<think>\n" if name in ("qwq", "deepseek-r1") else ""
    turns = []
    for number in range(draw(st.integers(4, 11))):
        start = thought.format(draw(CONTENTS)) if draw(st.booleans()) else ""
        replies = [result(text, i) for i, text in enumerate(draw(st.lists(CONTENTS, min_size=1, max_size=2)))]
        if users and draw(st.integers(0, 5)) == 0:
            replies = [{"role": "user", "content": draw(CONTENTS)}]
        turns.append((start + f"Step {number}.", replies, opening if start and number % 3 else ""))
    return name, users, draw(st.booleans()), turns


@given(episodes())
def test_a_context_is_what_rendering_the_whole_conversation_gives(chats, episode):
    name, users, system, drawn = episode
    chat = chats[name, users]
    messages = [SYSTEM, ASK] if system else [ASK]
    turns = [turn_of(chat, text, *replies, opening=opening) for text, replies, opening in drawn]
    assert contexts(chat, messages, turns) == contexts(whole_only(chat), messages, turns)
    assert chat._window._is_exact is not (name == "deepseek-r1" and users)


def turns_with_results(chat: ChatTokenizer, count: int) -> list[AssistantTurn]:
    return [turn_of(chat, f"<think>\nHm.\n</think>\n\nStep {i}.", result(f"r{i}", i)) for i in range(count)]


def rendered_messages(monkeypatch, chat, messages, turns) -> list[int]:
    """Return how many messages the template gets before each turn."""
    counts = []
    render = ChatTemplate.render

    def counted(template, messages, *more, **options):
        counts[-1] += len(messages)
        return render(template, messages, *more, **options)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    known = KnownParts()
    for count in range(1, len(turns) + 1):
        counts.append(0)
        chat.conversation_ids(messages, turns[:count], known)
    return counts


@pytest.mark.parametrize("name", REWRITING)
def test_a_late_turn_renders_as_many_messages_as_an_early_one(monkeypatch, name):
    chat = rewriting(name)
    counts = rendered_messages(monkeypatch, chat, [ASK], turns_with_results(chat, 40))
    assert set(counts[4:7] + counts[8:15] + counts[16:31] + counts[32:]) == {9}  # the prompt, and four turns
    assert counts[31] == 9 + 65  # the 32nd turn is compared with the whole


def test_user_messages_let_the_whole_be_rendered(monkeypatch, chats):
    chat = chats["qwen3", True]
    turns = turns_with_results(chat, 14)
    turns[5] = turn_of(chat, "It is 3.", {"role": "user", "content": "Are you sure?"})
    counts = rendered_messages(monkeypatch, chat, [ASK], turns)
    assert counts[4:] == [9, 13, 15, 17, 9, 9, 9, 9, 9, 9]


def own_template(change: str, by: str) -> ChatTokenizer:
    """Make the chat tokenizer of a template that drops earlier reasoning, changed in one more place."""
    forgetful = TEMPLATE.replace(
        "+ message.content + '<|im_end|>",
        "+ (message.content.split('</think>')[-1] if message.role == 'assistant' else message.content) + '<|im_end|>",
    )
    assert change in forgetful
    tokenizer = tokenizer_of("qwen2.5")
    template = ChatTemplate(forgetful.replace(change, by), {}, FAMILIES["qwen2.5"].file)
    chat = ChatTokenizer(tokenizer, template, TOOLS, {tokenizer.token_to_id("<|im_end|>")})
    chat.check_history()
    assert chat.rewrites_history
    return chat


RESULT = "message.content + '\\n</tool_response>'"
LOOKS_FURTHER = {
    "numbers its messages": "loop.index0 ~ message.content + '\\n</tool_response>'",
    "leaves out old results": "(message.content if messages|length - loop.index < 6 else '-') + '\\n</tool_response>'",
    "leaves out repeated results": (
        "('-' if messages|selectattr('content', 'equalto', message.content)|list|length > 1 else message.content)"
        " + '\\n</tool_response>'"
    ),
}


@pytest.mark.parametrize("way", LOOKS_FURTHER)
def test_a_template_that_looks_further_is_always_given_the_whole(way):
    chat = own_template(RESULT, LOOKS_FURTHER[way])
    assert not chat._window._is_exact
    turns = turns_with_results(chat, 12)
    assert contexts(chat, [ASK], turns) == contexts(whole_only(chat), [ASK], turns)


def test_a_template_that_looks_further_than_the_samples_is_found_out_by_a_real_conversation():
    chat = own_template(
        RESULT, "(message.content if messages|length - loop.index < 8 * 7 else '-') + '\\n</tool_response>'"
    )
    assert chat._window._is_exact
    turns = turns_with_results(chat, 40)
    with capture_logs() as logs:
        found = contexts(chat, [ASK], turns)
    assert [(entry["event"], entry["turns"]) for entry in logs] == [("template.window_dropped", 32)]
    expected = contexts(whole_only(chat), [ASK], turns)
    assert found[31:] == expected[31:]
    assert contexts(chat, [ASK], turns) == expected
