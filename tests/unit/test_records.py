"""Inconsistent rows are refused."""

from array import array

import msgspec
import pytest

from stream.codec import decode, encode
from stream.errors import RecordError
from stream.records import Completion, Group, Prompt, Row, Span


def row(tokens=7, sampled=((0, 3), (5, 7)), logprobs=5) -> Row:
    return Row(
        prompt_ids=array("i", [1, 2]).tobytes(),
        token_ids=array("i", range(tokens)).tobytes(),
        sampled_ranges=list(sampled),
        logprobs=array("f", [-1.0] * logprobs).tobytes(),
        spans=[Span(7, 0, 3), Span(8, 5, 7)],
    )


def test_a_two_turn_row_reads_as_it_was_written():
    good = row()
    assert (list(good.prompt), list(good.tokens)) == ([1, 2], list(range(7)))
    assert (good.sampled_count, len(good.sampled_logprobs)) == (5, 5)


@pytest.mark.parametrize(
    "facts",
    [
        {"logprobs": 4},
        {"logprobs": 7},
        {"tokens": 6},
        {"sampled": [(0, 3), (5, 8)], "logprobs": 6},
        {"sampled": [(-1, 3), (5, 6)]},
        {"sampled": [(3, 0), (0, 8)]},
        {"sampled": [(0, 3), (2, 4)]},
        {"sampled": [(5, 7), (0, 3)]},
        {"sampled": [(0, 5), (7, 7)]},
    ],
)
def test_inconsistent_buffers_are_refused(facts):
    with pytest.raises(ValueError, match=r"do not (fit together|ascend)"):
        row(**facts)


@pytest.mark.parametrize("field", ["prompt_ids", "token_ids"])
def test_half_an_integer_is_refused(field):
    with pytest.raises(ValueError, match="int32"):
        Row(**{"prompt_ids": b"", "token_ids": b"", field: b"\0\0\0"})


def test_an_inconsistent_row_is_refused_when_decoded():
    good = Group(prompt=Prompt(id="a", messages=[]), completions=[Completion(index=0, rows=[row()])])
    bad = msgspec.structs.replace(good)
    bad.completions[0].rows[0].logprobs = b"\0\0\0\0"
    with pytest.raises(RecordError, match="do not fit together"):
        decode(encode(bad), Group)


def test_a_row_without_sampled_tokens_is_a_row():
    assert Row(prompt_ids=b"", token_ids=b"\0\0\0\0").sampled_count == 0


def test_a_completion_without_the_greedy_field_is_not_greedy():
    group = Group(prompt=Prompt(id="a", messages=[]), completions=[Completion(index=0, rows=[row()])])
    table = msgspec.to_builtins(group)
    assert table["completions"][0].pop("greedy") is False
    assert msgspec.convert(table, Group) == group


def test_the_oldest_version_of_a_group_is_over_all_its_rows():
    group = Group(
        prompt=Prompt(id="a", messages=[]), completions=[Completion(index=0, rows=[row()]), Completion(index=1)]
    )
    assert group.oldest_version == 7
    assert Group(prompt=group.prompt, completions=[]).oldest_version is None
