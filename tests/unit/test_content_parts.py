"""Content parts from `reset` and tools reach the prompt, the record and reward functions, or raise a clear error."""

from pathlib import Path

import pytest

from envs.rewards import RewardFunction
from stream.errors import DataError
from stream.validity import Measured, RolloutReason
from tests.cases.families import chat_of, template_of
from tests.unit.test_episode import TEMPLATE, Box, call, completion_of, group_of, make_chat, make_prompt, text_of
from workers.rollout.chat.renderer import ContentAdapter
from workers.rollout.chat.template import ChatTemplate
from workers.rollout.tool_result import to_tool_result

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TEXT = {"type": "text", "text": "A cat."}
SEEING = TEMPLATE.replace(
    "{{- '<|im_start|>tool\\n' + message.content + '<|im_end|>\\n' }}",
    "{{- '<|im_start|>tool\\n' }}{%- if message.content is string %}{{- message.content }}{%- else %}"
    "{%- for part in message.content %}{{- '<img>' if part.type.startswith('image') else part.text }}{%- endfor %}"
    "{%- endif %}{{- '<|im_end|>\\n' }}",
).replace("'[' + part.text + ']'", "'<img>' if part.type.startswith('image') else '[' + part.text + ']'")


def seeing():
    return make_chat(ChatTemplate(SEEING, {}, Path("model")))


class Camera(Box):
    def look(self):
        return [TEXT, IMAGE]

    async def glance(self):
        return [TEXT, {"type": "text", "text": "It sleeps."}]

    def develop(self):
        return [{"type": "image", "image": object()}]

    def entries(self):
        return [{"type": "cat", "text": "no content part"}]


async def test_a_tools_parts_reach_its_message_the_record_and_the_reward_function():
    seen = []

    def sees(completions):
        seen.extend(completions)
        return [1.0] * len(completions)

    function = RewardFunction(sees, "sees", run_in="rollout")
    group = await group_of([call("look"), "Done."], env=Camera, chat=seeing(), rewards=[function])
    (completion,) = group.completions
    assert completion.messages[1]["content"] == [TEXT, IMAGE]
    assert seen[0][1]["content"] == [TEXT, IMAGE]
    assert "<|im_start|>tool\nA cat.<img><|im_end|>" in text_of(completion.rows[0].tokens)
    assert [part.reward for part in completion.parts] == [Measured(0.0), Measured(1.0)]
    assert completion.tool_errors == 0


async def test_text_parts_are_joined_if_the_template_renders_no_parts():
    completion = await completion_of([call("glance"), "Done."], env=Camera)
    assert [part["text"] for part in completion.messages[1]["content"]] == ["A cat.", "It sleeps."]
    assert "<|im_start|>tool\nA cat.\nIt sleeps.<|im_end|>" in text_of(completion.rows[0].tokens)


async def test_an_image_that_the_template_would_omit_is_an_error():
    with pytest.raises(DataError, match="no content parts of type 'image_url' in messages of the role 'tool'"):
        await completion_of([call("look"), "Done."], env=Camera)
    prompt = make_prompt(fields={"greeting": [IMAGE]})
    with pytest.raises(DataError, match="no content parts of type 'image_url' in messages of the role 'user'"):
        await completion_of(["Done."], prompt=prompt)


async def test_an_image_from_reset_is_rendered_and_kept():
    completion = await completion_of(["Done."], chat=seeing(), prompt=make_prompt(fields={"greeting": [IMAGE]}))
    assert completion.prompt_messages[0]["content"] == [{"type": "text", "text": "Fill it."}, IMAGE]
    assert "[Fill it.]<img>" in text_of(completion.rows[0].prompt)


async def test_a_part_that_a_record_cannot_hold_fails_the_episode():
    completion = await completion_of([call("develop"), "Done."], env=Camera, chat=seeing())
    assert completion.failure.reason is RolloutReason.ENV_STEP
    assert "content parts that are not plain data" in completion.failure.detail


async def test_other_lists_of_mappings_are_plain_results():
    completion = await completion_of([call("entries"), "Done."], env=Camera, chat=seeing())
    assert completion.messages[1]["content"] == '[{"type":"cat","text":"no content part"}]'


def test_lone_surrogates_in_parts_do_not_break_the_environment():
    result = to_tool_result([{"type": "text", "text": "half \ud800"}])
    assert result.content == [{"type": "text", "text": "half ?"}]
    assert result.text == "half ?"


def test_a_tool_may_change_its_result_later():
    value = [dict(TEXT)]
    result = to_tool_result(value)
    value[0]["text"] = "A dog."
    assert result.content == [TEXT]
    assert result.text == "A cat."


def test_a_real_template_that_silently_drops_parts_gets_their_text():
    prompt = chat_of("qwen3", None).renderer.render_prompt([{"role": "user", "content": [TEXT, TEXT]}])
    assert prompt == "<|im_start|>user\nA cat.\nA cat.<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(DataError, match="'image_url'"):
        ContentAdapter(template_of("qwen3")).adapt([{"role": "user", "content": [TEXT, IMAGE]}])


def test_a_real_template_that_renders_parts_gets_them_unchanged():
    messages = [{"role": "user", "content": [TEXT, IMAGE]}]
    assert ContentAdapter(template_of("ministral-3")).adapt(messages) == messages
    assert "[INST]" in chat_of("ministral-3", None).renderer.render_prompt(messages)


@pytest.mark.parametrize("written", ["m.content if m.content is string else m.content[0].text", "m.content[0].text"])
def test_texts_of_which_a_template_writes_the_first_alone_are_joined(written):
    template = ChatTemplate("{% for m in messages %}{{ " + written + " }}{% endfor %}", {}, Path("model"))
    messages = ContentAdapter(template).adapt(
        [{"role": "user", "content": [TEXT, {"type": "text", "text": "It sleeps."}]}]
    )
    assert template.render(messages, None, add_generation_prompt=True) == "A cat.\nIt sleeps."
