"""Frames write exactly what the template writes, or leave it to the template."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream.errors import PenstockError
from tests.cases.chats import TEMPLATE
from tests.cases.families import chat_of
from workers.rollout.chat.continuation_frames import ContinuationFrames
from workers.rollout.chat.renderer import ConversationRenderer
from workers.rollout.chat.template import ChatTemplate

FRAMED = ("qwen2.5", "qwen3", "llama3.1", "mistral-nemo", "granite-4", "lfm2.5")
"""Families whose templates write the result as it is, stripped, or as JSON, in a text that does not depend on it."""
CONTENTS = st.text(max_size=30) | st.sampled_from(["<tool_response>", "</tool_call>", "tool", "\n 7 \n", '{"a": 1}'])


def tool(content: str, number: int = 1) -> dict[str, str]:
    return {"role": "tool", "name": "add", "tool_call_id": f"call{number:05}", "content": content}


def frames_of(template: str) -> tuple[ContinuationFrames, list[int]]:
    """Return frames for tool messages of a template, and a list that grows when it renders."""
    renderer = ConversationRenderer(ChatTemplate(template, {}, Path("folder")), None)
    renderer.set_end_of_turn("<|im_end|>")
    rendered: list[int] = []

    def render(messages):
        rendered.append(len(messages))
        return renderer.render_continuation(messages)

    frames = ContinuationFrames(render, template)
    frames.learn(["tool"])
    rendered.clear()
    return frames, rendered


@pytest.fixture(scope="module")
def chats():
    """A chat tokenizer of each family, with frames where its template allows them."""
    made = {name: chat_of(name, [{"type": "function", "function": {"name": "add"}}]) for name in FRAMED}
    for chat in made.values():
        chat.renderer.learn_frames(["tool", "user"])
    return made


@given(family=st.sampled_from(FRAMED), contents=st.lists(CONTENTS, min_size=1, max_size=4))
def test_every_family_gets_the_text_that_its_template_writes(chats, family, contents):
    renderer = chats[family].renderer
    for messages in ([tool(c, i) for i, c in enumerate(contents)], [{"role": "user", "content": contents[0]}]):
        text = renderer._frames.text(messages)
        if text is not None:
            assert text == renderer._after_dummy(messages, renderer._continuation_tools)


def test_common_families_have_frames_for_several_results(chats):
    messages = [tool("3"), tool("4", 2)]
    assert {name for name, chat in chats.items() if chat.renderer._frames.text(messages) is not None} == set(FRAMED)


def test_a_frame_replaces_the_rendering():
    frames, rendered = frames_of(TEMPLATE)
    for number in range(64):
        assert "\n<tool_response>\n7 \n</tool_response>" in frames.text([tool("7 ", number)])
    assert len(rendered) == 7  # at the 1st, 2nd, 4th, ... use


@pytest.mark.parametrize("condition", ["== 'so much'", "[:4] == 'so m'", ".endswith('so much')"])
def test_a_template_that_looks_for_a_text_in_a_result_gets_no_frame(condition):
    special = TEMPLATE.replace(
        "message.content + '\\n</", f"('!' if message.content{condition} else message.content) + '\\n</"
    )
    assert special != TEMPLATE
    frames, _ = frames_of(special)
    assert frames.text([tool("3")]) is None


def test_a_frame_is_dropped_when_a_real_result_shows_that_it_is_wrong():
    special = TEMPLATE.replace(
        "message.content + '\\n</", "(message.content if message.content|length < 99 * 101 else '!') + '\\n</"
    )
    frames, _ = frames_of(special)
    assert frames.text([tool("3")]) is not None
    assert frames.text([tool("x" * 10_000)]) is None
    assert frames.text([tool("3")]) is None


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": [{"type": "text", "text": "3"}], "name": "add", "tool_call_id": "call00001"},
        {"role": "tool", "content": "3", "tool_call_id": "call00001"},
        {"role": "tool", "content": "3", "name": "add", "tool_call_id": "call00001", "is_error": True},
        {"role": "system", "content": "3"},
    ],
)
def test_messages_of_another_form_are_rendered(message):
    assert frames_of(TEMPLATE)[0].text([message]) is None


def test_a_template_that_refuses_a_sample_gets_no_frame():
    special = TEMPLATE.replace(
        "{%- if message.role == 'tool' %}",
        "{%- if message.role == 'tool' %}{% if message.content == '' %}{{ raise_exception('empty') }}{% endif %}",
    )
    frames, _ = frames_of(special)
    assert frames.text([tool("3")]) is None
    with pytest.raises(PenstockError, match="empty"):
        ConversationRenderer(ChatTemplate(special, {}, Path("folder")), None).render_prompt([tool("")])


AS_JSON = TEMPLATE.replace(
    "+ message.content + '\\n</", "+ {'name': message.name, 'is': message.content}|tojson + '\\n</"
)
SPECIAL_NAME = TEMPLATE.replace(
    "+ message.content + '\\n</", "+ ('!' if message.name == 'sum' else '') + message.content + '\\n</"
)
SHORTENED = TEMPLATE.replace("+ message.content + '\\n</", "+ message.content[:8000] + '\\n</")
FIRST_LINES = TEMPLATE.replace(
    "+ message.content + '\\n</", "+ message.content.split('\\n')[:30] | join('\\n') + '\\n</"
)
REPEATED = TEMPLATE.replace(
    "+ message.content + '\\n</",
    "+ ('same' if loop.previtem.content == message.content else message.content) + '\\n</",
)


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (AS_JSON, [tool("3") | {"name": 'a"dd\n'}]),
        (SPECIAL_NAME, [tool("3") | {"name": "sum"}]),
        (SHORTENED, [tool("x" * 9000)]),
        (FIRST_LINES, [tool("x\n" * 40)]),
        (REPEATED, [tool("3"), tool("3", 2)]),
    ],
)
def test_names_lengths_and_repetitions_that_a_template_treats_differently_are_rendered(template, messages):
    assert template != TEMPLATE
    frames, _ = frames_of(template)
    for _ in range(4):  # the next use is not compared
        frames.text([tool("3")])
    assert frames.text(messages) is None


def test_a_frame_writes_a_name_that_needs_no_escape():
    frames, _ = frames_of(AS_JSON)
    assert '{"name": "add", "is": "3"}' in frames.text([tool("3")])
