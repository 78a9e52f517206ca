"""Chat templates render as in `transformers`, under the templates of every family."""

from enum import IntEnum, StrEnum
from pathlib import Path

import jinja2
import numpy as np
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from stream.errors import DataError
from tests.cases.chats import ADD
from workers.rollout.chat.template import ChatTemplate, plain_value

FAMILIES = sorted((Path(__file__).parents[1] / "cases/templates").glob("*.jinja"))
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "zwei ü <b>"}}}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "3 & <4>"}
USER = {"role": "user", "content": "What is 1 + 2?"}
CONVERSATIONS = [
    [USER],
    [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "Three."}, USER],
    [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT],
    [USER, {"role": "assistant", "content": "So.", "reasoning": "1 + 2 = 3"}, USER],
    [USER, {"role": "assistant", "content": "So.", "thinking": "hm", "tool_calls": [CALL]}, RESULT],
    [{"role": "user", "content": [{"type": "text", "text": "Look:"}, {"type": "image"}]}],
]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "enable_thinking": False, "date_string": "1 May 2026"}


def rendered_by_both(source, messages, tools, **variables):
    """Return the text of both, or that both refuse."""
    try:
        [expected], _ = render_jinja_template(
            [messages], tools=tools, chat_template=source, add_generation_prompt=True, **variables
        )
    except (jinja2.TemplateError, TypeError):
        expected = "refused"
    try:
        found = ChatTemplate(source, variables, Path()).render(messages, tools, add_generation_prompt=True)
    except DataError:
        found = "refused"
    return found, expected


@pytest.mark.parametrize("file", FAMILIES, ids=lambda file: file.stem)
def test_every_family_renders_as_in_transformers(file):
    texts = set()
    for messages in CONVERSATIONS:
        for tools in (None, [ADD]):
            found, expected = rendered_by_both(file.read_text(), messages, tools, **VARIABLES)
            assert found == expected
            texts.add(found)
    assert len(texts - {"refused"}) > 2


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}\n {% if loop.first %}{% continue %}{% endif %}\n{{ m|tojson(indent=2) }}{% endfor %}",
        "{% generation %}{{ messages[0].content }}{% endgeneration %}!",
        "{% set d = {'items': 1, 'other': 2} %}{{ d.other }}{% for name, value in d.items() %}{{ name }}{% endfor %}",
        "{% set ns = namespace(a=1) %}{% set ns.a = 2 %}{{ ns.a }}{{ dict(b=3) }}{{ dict.fromkeys('ab', 1) }}",
        "{{ messages[-1].reasoning_content }}{{ messages[-1].thinking }}{{ tools }}{{ documents }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns._a = 1 %}{{ ns }}",
        "{{ raise_exception('no') }}",
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}{{ dict.__class__ }}",
        "{{ strftime_now('%Y') }}{{ odd }}{{ number }}",
    ],
)
def test_the_language_is_that_of_transformers(source):
    messages = [USER, {"role": "assistant", "content": "ü<>&", "reasoning": "so"}]
    found, expected = rendered_by_both(source, messages, [ADD], odd=object(), number=1.5)
    assert found == expected


def test_a_template_gets_plain_values_of_numpy_and_of_enumerations():
    class Kind(StrEnum):
        A = "a"

    class Number(IntEnum):
        ONE = 1

    value = {"x": np.int64(3), "y": (np.float32(0.5), Kind.A), "z": [Number.ONE, np.bool_(True), np.zeros(2)]}
    plain = plain_value(value)
    assert plain == {"x": 3, "y": (0.5, "a"), "z": [1, True, "<ndarray>"]}
    assert [type(plain["x"]), *map(type, plain["y"]), *map(type, plain["z"])] == [int, float, str, int, bool, str]
