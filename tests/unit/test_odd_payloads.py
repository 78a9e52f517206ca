"""Values of user code that JSON does not have do not keep an operator from reading the rest."""

import json

import msgspec
import pytest

from stream.codec import encode
from stream.operator.dead_letters import DeadLetter
from stream.records import Prompt
from workers.runs.dead_letters import read_payload
from workers.runs.export import encode_json

VALUES = [{None: 1}, {True: 3, False: 1}, {(1, 2): 3}, [{"a": {None: {True: b"x"}}}], msgspec.msgpack.Ext(5, b"x")]


@pytest.mark.parametrize("value", VALUES)
def test_a_dead_letter_with_any_column_is_shown(value):
    letter = DeadLetter(
        id="1-1",
        stage="prompts",
        prompt_id="p",
        reason="data",
        error="",
        infra_failures=0,
        data_failures=1,
        ends_prompt=True,
        payload=encode(Prompt(id="p", messages=[], fields={"answer": 4, "odd": value})),
    )
    shown = json.loads(encode_json(read_payload(letter)))
    assert shown["record"]["fields"]["answer"] == 4


def test_keys_that_json_does_not_have_become_text():
    assert json.loads(encode_json({"a": [{None: 1, True: {2: 3}}]})) == {"a": [{"None": 1, "True": {"2": 3}}]}
    assert encode_json({"a": 1, "b": None}) == b'{"a":1,"b":null}'
