"""Encoding and decoding of records."""

import zlib

import msgspec
import pytest

from stream import codec
from stream.codec import decode, encode
from stream.errors import NewerSchemaError, RecordError
from stream.records import MAX_GROUP_SIZE, SCHEMA, Completion, Group, Prompt, RewardPart, Row, Span
from stream.validity import Measured, RewardReason, TruncationReason, Unmeasured


def sealed(body: bytes, schema: int = SCHEMA) -> bytes:
    """Return a payload with a valid header around any body."""
    return b"PS" + bytes([schema]) + zlib.crc32(body, schema).to_bytes(4, "little") + body


def test_decoding_reverses_encoding():
    row = Row(
        prompt_ids=b"\1\0\0\0",
        token_ids=b"\2\0\0\0\3\0\0\0",
        sampled_ranges=[(0, 1)],
        logprobs=b"\0\0\0\xbf",
        spans=[Span(7, 0, 1)],
    )
    group = Group(
        prompt=Prompt(
            id="train:0:17", messages=[{"role": "user", "content": "2 + 2?"}], fields={"answer": [4, None, {}]}
        ),
        completions=[
            Completion(
                index=0, rows=[row], reward=Measured(0.5), truncated=TruncationReason.LENGTH, snapshot=b"\0\xff"
            ),
            Completion(index=1, parts=[RewardPart(name="env", reward=Unmeasured(RewardReason.RAISED, "boom"))]),
            Completion(index=2, greedy=True, parts=[RewardPart(name="env", reward=Measured(1.0), turn=0)]),
        ],
    )
    again = decode(encode(group), Group)
    assert again == group
    assert isinstance(again.completions[1].parts[0].reward, Unmeasured)
    assert list(again.completions[0].rows[0].tokens) == [2, 3]
    assert list(again.completions[0].rows[0].sampled_logprobs) == [-0.5]
    assert again.oldest_version == 7


def test_unknown_fields_are_ignored():
    body = msgspec.msgpack.encode({"id": "a", "messages": [], "invented_later": {"x": 1}})
    assert decode(sealed(body), Prompt) == Prompt(id="a", messages=[])


def test_missing_fields_take_their_defaults():
    assert decode(sealed(msgspec.msgpack.encode({"id": "a", "messages": []})), Prompt).group_size == 1


def test_a_group_without_the_greedy_field_decodes():
    old = {"prompt": {"id": "a", "messages": []}, "completions": [{"index": 0, "turns": 2}]}
    group = decode(sealed(msgspec.msgpack.encode(old)), Group)
    assert group.completions == [Completion(index=0, turns=2, greedy=False)]


def test_a_newer_schema_is_distinguished_from_junk():
    with pytest.raises(NewerSchemaError, match=f"schema {SCHEMA + 1}"):
        decode(sealed(msgspec.msgpack.encode({}), SCHEMA + 1), Prompt)


def test_an_altered_schema_byte_is_junk():
    payload = bytearray(encode(Prompt(id="a", messages=[])))
    payload[2] = SCHEMA + 1
    with pytest.raises(RecordError, match="checksum") as caught:
        decode(bytes(payload), Prompt)
    assert not isinstance(caught.value, NewerSchemaError)


@pytest.mark.parametrize("payload", [b"", b"PS", b"PS\1\0\0\0", b"XX" + bytes(20), b"\x80\x04pickle...", bytes(7)])
def test_invalid_bytes_are_refused(payload):
    with pytest.raises(RecordError):
        decode(payload, Prompt)


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        {"id": 7, "messages": []},
        {"id": "a", "messages": "hello"},
        {"id": "a", "messages": [], "group_size": "many"},
        {"id": b"\xff\xfe", "messages": []},
    ],
)
def test_a_field_of_the_wrong_type_is_refused(value):
    with pytest.raises(RecordError, match="not a Prompt"):
        decode(sealed(msgspec.msgpack.encode(value)), Prompt)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("prompt.group_size", 0),
        ("prompt.group_size", MAX_GROUP_SIZE + 1),
        ("prompt.seed", 2**62),
        ("completion.turns", 2**31),
        ("completion.tool_calls", -1),
        ("part.weight", float("nan")),
        ("part.weight", float("inf")),
        ("row.spans", [(2**31, 0, 1)]),
        ("row.spans", [(-1, 0, 1)]),
        ("row.spans", [(0, 10**12, 0)]),
        ("row.spans", [(0, 0, 2)]),
    ],
)
def test_a_number_out_of_range_is_refused(where, value):
    """Numbers become entries of 64-bit tensors, counts of completions in memory, and positions in a row."""
    row = Row(
        prompt_ids=b"", token_ids=b"\1\0\0\0", sampled_ranges=[(0, 1)], logprobs=b"\0\0\0\0", spans=[Span(0, 0, 1)]
    )
    completion = Completion(index=0, rows=[row], parts=[RewardPart(name="env", reward=Measured(1.0))])
    tree = msgspec.to_builtins(
        Group(prompt=Prompt(id="a", messages=[]), completions=[completion]), builtin_types=(bytes,)
    )
    assert decode(sealed(msgspec.msgpack.encode(tree)), Group)
    first = tree["completions"][0]
    places = {"prompt": tree["prompt"], "completion": first, "part": first["parts"][0], "row": first["rows"][0]}
    whose, _, name = where.partition(".")
    places[whose][name] = value
    with pytest.raises(RecordError, match="not a Group"):
        decode(sealed(msgspec.msgpack.encode(tree)), Group)


def test_a_record_nested_too_deeply_to_encode_is_refused():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RecordError, match="a Prompt cannot be encoded"):
        encode(Prompt(id="a", messages=[], fields={"x": deep}))


def test_a_record_of_another_kind_is_refused():
    with pytest.raises(RecordError, match="not a Group"):
        decode(encode(Prompt(id="a", messages=[])), Group)


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x81\xa2id\xa1\xff",
        b"",
        b"\x80\x80",
    ],
    ids=["reserved", "huge map", "huge array", "deep", "not utf-8", "empty", "two values"],
)
def test_an_inconsistent_body_is_refused(body):
    with pytest.raises(RecordError):
        decode(sealed(body), Prompt)


def test_deep_nesting_in_a_free_field_is_refused():
    body = b"\x83\xa2id\xa1a\xa8messages\x90\xa6fields\x81\xa1x" + b"\x91" * 100_000
    with pytest.raises(RecordError):
        decode(sealed(body), Prompt)


def test_records_over_the_limit_are_neither_encoded_nor_decoded(monkeypatch):
    payload = encode(Prompt(id="a" * 1000, messages=[]))
    monkeypatch.setattr(codec, "MAX_RECORD_BYTES", 500)
    with pytest.raises(RecordError, match="over the limit of 500"):
        encode(Prompt(id="a" * 1000, messages=[]))
    with pytest.raises(RecordError, match="cannot be a record"):
        decode(payload, Prompt)


@pytest.mark.parametrize("value", [object(), 2**70, {1, 2}.__iter__()])
def test_a_value_that_msgpack_cannot_represent_is_refused(value):
    with pytest.raises(RecordError, match="a Prompt cannot be encoded"):
        encode(Prompt(id="a", messages=[], fields={"x": value}))
