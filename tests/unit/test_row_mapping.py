import datetime as dt

import msgspec
import numpy as np
import pytest

from stream.codec import decode, encode
from stream.errors import DataError
from stream.records import Prompt
from workers.datasets.row_mapping import row_to_prompt
from workers.settings.toml_file import parse_settings


def settings(**sections):
    data = {"path": "/somewhere/train.jsonl"} | sections.pop("data", {})
    table = {"model": {"path": "m"}, "data": data, "environments": {"calc": "calculator", "guess": "guess"}}
    return parse_settings(table | sections)


def prompt_of(row, number=17, epoch=2, **sections):
    return row_to_prompt(row, number, epoch, settings=settings(**sections))


def test_a_text_prompt_becomes_a_user_message():
    prompt = prompt_of({"prompt": "2 + 2?", "answer": "4"}, rollout={"group_size": 4})
    assert prompt.messages == [{"role": "user", "content": "2 + 2?"}]
    assert prompt.is_plain_text
    assert (prompt.id, prompt.epoch, prompt.row) == ("train:2:17", 2, 17)
    assert (prompt.fields, prompt.group_size, prompt.environment) == ({"answer": "4"}, 4, "calc")


def test_a_conversation_is_unchanged():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "3", "name": "f"},
    ]
    prompt = prompt_of({"prompt": messages})
    assert prompt.messages == messages
    assert not prompt.is_plain_text


def test_the_system_message_comes_first_unless_the_row_has_its_own():
    data = {"system": "Be brief."}
    brief = {"role": "system", "content": "Be brief."}
    assert prompt_of({"prompt": "Hi"}, data=data).messages[0] == brief
    assert prompt_of({"prompt": [{"role": "user", "content": "Hi"}]}, data=data).messages[0] == brief
    own = [{"role": "system", "content": "Be long."}, {"role": "user", "content": "Hi"}]
    assert prompt_of({"prompt": own}, data=data).messages == own


def test_keys_without_a_value_that_columnar_formats_add_to_messages_are_left_out():
    row = {"prompt": [{"role": "user", "content": "Hi", "tool_calls": None, "name": None}]}
    assert prompt_of(row).messages == [{"role": "user", "content": "Hi"}]


def test_an_assistants_message_may_have_calls_instead_of_content():
    calls = [{"function": {"name": "f", "arguments": {}}}]
    row = {"prompt": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": calls}]}
    assert prompt_of(row).messages[1] == {"role": "assistant", "tool_calls": calls}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "column 'prompt' is missing or empty"),
        ("", "column 'prompt' is missing or empty"),
        ("  ", "column 'prompt' is missing or empty"),
        ([], "column 'prompt' is missing or empty"),
        (
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " "}],
            "messages of column 'prompt' are empty",
        ),
        (7, "column 'prompt' is int"),
        (["Hi"], "message 0 of column 'prompt' is str"),
        ([{"content": "Hi"}], "message 0 of column 'prompt' has no 'role'"),
        ([{"role": "user", "content": "Hi"}, {"role": "user"}], "message 1 of column 'prompt' has no 'content'"),
        ([{"role": "user", "content": 7}], "has no 'content' that is text"),
    ],
)
def test_an_invalid_prompt_is_refused_with_file_and_row(value, message):
    with pytest.raises(DataError, match=r"^/somewhere/train\.jsonl: row 17: ") as raised:
        prompt_of({"prompt": value})
    assert message in str(raised.value)


def test_columns_are_renamed_and_the_prompt_may_have_another_name():
    row = {"question": "Hi", "solution": "4", "level": 2}
    prompt = prompt_of(row, data={"prompt": "question", "columns": {"answer": "solution"}})
    assert prompt.fields == {"answer": "4", "level": 2}


def test_two_columns_may_swap_their_names_and_the_prompt_may_be_passed_on():
    row = {"prompt": "Hi", "a": 1, "b": 2}
    prompt = prompt_of(row, data={"columns": {"a": "b", "b": "a", "question": "prompt"}})
    assert prompt.fields == {"a": 2, "b": 1, "question": "Hi"}


def test_a_missing_renamed_column_is_named():
    with pytest.raises(
        DataError, match=r"no column 'solution', which data\.columns calls 'answer'; there are: 'prompt'"
    ):
        prompt_of({"prompt": "Hi"}, data={"columns": {"answer": "solution"}})


def test_renaming_onto_an_existing_column_is_refused():
    with pytest.raises(DataError, match="calls 'solution' 'answer', but there is a column of that name too"):
        prompt_of({"prompt": "Hi", "solution": 1, "answer": 2}, data={"columns": {"answer": "solution"}})


def test_a_row_picks_its_environment_and_the_first_is_the_default():
    assert prompt_of({"prompt": "Hi", "environment": "guess"}).environment == "guess"
    assert prompt_of({"prompt": "Hi", "environment": "guess"}).fields == {}
    assert prompt_of({"prompt": "Hi", "environment": None}).environment == "calc"
    assert prompt_of({"prompt": "Hi", "env": "guess"}, data={"columns": {"environment": "env"}}).environment == "guess"


def test_an_unknown_environment_is_refused_with_the_known_ones():
    with pytest.raises(DataError, match=r"environment 'chess' is unknown; \[environments\] has: 'calc', 'guess'"):
        prompt_of({"prompt": "Hi", "environment": "chess"})


def test_without_environments_the_environment_column_is_an_ordinary_field():
    prompt = prompt_of({"prompt": "Hi", "environment": "kitchen"}, environments={}, rewards=[{"ref": "m:f"}])
    assert prompt.environment is None
    assert prompt.fields == {"environment": "kitchen"}


def test_values_of_other_libraries_become_python_values():
    import pyarrow as pa

    row = {
        "prompt": "Hi",
        "int": np.int64(3),
        "float": np.float64(0.5),
        "bool": np.bool_(True),
        "text": np.str_("é"),
        "array": np.array([[1, 2], [3, 4]]),
        "arrow": pa.scalar([1, None]),
        "nested": {"deep": [np.float32(0.25), (1, 2)]},
        "none": None,
        "bytes": b"\x00",
    }
    fields = prompt_of(row).fields
    expected = {
        "int": 3,
        "float": 0.5,
        "bool": True,
        "text": "é",
        "array": [[1, 2], [3, 4]],
        "arrow": [1, None],
        "nested": {"deep": [0.25, [1, 2]]},
        "none": None,
        "bytes": b"\x00",
    }
    assert fields == expected
    assert {name: type(value) for name, value in fields.items()} == {name: type(v) for name, v in expected.items()}
    assert decode(encode(prompt_of(row)), Prompt).fields == expected


@pytest.mark.parametrize("value", [object(), 2**70, "\ud800", {"deep": [object()]}])
def test_a_value_that_cannot_be_stored_is_refused_with_its_column(value):
    with pytest.raises(DataError, match="row 17: column 'gold' has a value that cannot be stored"):
        prompt_of({"prompt": "Hi", "gold": value})


def test_a_prompt_with_a_lone_surrogate_is_refused():
    with pytest.raises(DataError, match="column 'prompt' has a value that cannot be stored"):
        prompt_of({"prompt": "\ud800"})


def test_a_date_is_stored():
    assert "when" in prompt_of({"prompt": "Hi", "when": dt.date(2026, 1, 1)}).fields


def test_a_seed_depends_on_run_and_id_and_has_31_bits():
    row = {"prompt": "Hi"}
    first = prompt_of(row)
    assert first.seed == prompt_of(row).seed
    assert (
        len({first.seed, prompt_of(row, 18).seed, prompt_of(row, epoch=3).seed, prompt_of(row, run={"seed": 1}).seed})
        == 4
    )
    assert all(0 <= prompt_of(row, number).seed < 2**31 for number in range(200))
    assert row_to_prompt(row, 0, 0, settings=settings()).seed == 153924715  # a change would reseed resumed runs


def test_the_row_is_not_modified():
    row = {"prompt": [{"role": "user", "content": "Hi", "name": None}], "environment": "guess", "list": [1]}
    copy = msgspec.json.decode(msgspec.json.encode(row))
    prompt_of(row)
    assert row == copy
