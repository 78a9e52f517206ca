"""Whatever happens to a payload on its way: it is the record that was sent, or a `RecordError`."""

import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream.codec import decode, encode
from stream.errors import RecordError
from stream.records import SCHEMA, Completion, Failure, Group, Part, Prompt, Row, Span
from stream.validity import Measured, RewardReason, RolloutReason, TruncationReason, Unmeasured

floats = st.floats(width=32)
rewards = st.builds(Measured, st.floats(allow_nan=False)) | st.builds(
    Unmeasured, st.sampled_from(RewardReason), st.text()
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
messages = st.lists(st.dictionaries(st.text(), values, max_size=3), max_size=3)
prompts = st.builds(Prompt, id=st.text(), messages=messages, fields=st.dictionaries(st.text(), values, max_size=3))


@st.composite
def rows(draw) -> Row:
    lengths = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=3))
    sampled, at = [], 0
    for gap, size in lengths:
        sampled.append((at + gap, at + gap + size))
        at += gap + size
    count = sum(size for _, size in lengths)
    return Row(
        prompt_ids=draw(st.binary(max_size=3)) * 4,
        token_ids=draw(st.binary(min_size=4 * at, max_size=4 * at)),
        sampled=sampled,
        logprobs=draw(st.binary(min_size=4 * count, max_size=4 * count)),
        spans=[Span(draw(st.integers(0, 99)), start, end) for start, end in sampled],
    )


completions = st.builds(
    Completion,
    index=st.integers(0, 99),
    rows=st.lists(rows(), max_size=2),
    messages=messages,
    failure=st.none() | st.builds(Failure, reason=st.sampled_from(RolloutReason), detail=st.text()),
    truncated=st.none() | st.sampled_from(TruncationReason),
    parts=st.lists(st.builds(Part, name=st.text(), reward=rewards), max_size=2),
    reward=st.none() | rewards,
    snapshot=st.none() | st.binary(),
)
groups = st.builds(Group, prompt=prompts, completions=st.lists(completions, max_size=3), worker=st.text())


@given(groups)
def test_what_is_sent_is_what_is_read(group):
    assert decode(encode(group), Group) == group


@given(groups, st.data())
def test_a_cut_payload_is_refused(group, data):
    payload = encode(group)
    with pytest.raises(RecordError):
        decode(payload[: data.draw(st.integers(0, len(payload) - 1))], Group)


@given(groups, st.binary(min_size=1, max_size=8))
def test_a_longer_payload_is_refused(group, more):
    with pytest.raises(RecordError):
        decode(encode(group) + more, Group)


@given(groups, st.data())
def test_flipped_bits_are_refused(group, data):
    """Up to three bits: a CRC of 32 bits sees them all in records of these lengths."""
    payload = bytearray(encode(group))
    for bit in data.draw(st.sets(st.integers(0, 8 * len(payload) - 1), min_size=1, max_size=3)):
        payload[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RecordError):
        decode(bytes(payload), Group)


@given(groups, st.data())
def test_an_overwritten_stretch_is_refused(group, data):
    """Up to four bytes in a row: a burst of 32 bits."""
    payload = encode(group)
    at = data.draw(st.integers(0, len(payload) - 1))
    stretch = data.draw(st.binary(min_size=1, max_size=4))
    altered = payload[:at] + stretch + payload[at + len(stretch) :]
    if altered[: len(payload)] != payload:
        with pytest.raises(RecordError):
            decode(altered, Group)


@given(st.binary(max_size=200))
def test_noise_is_refused(noise):
    with pytest.raises(RecordError):
        decode(noise, Group)


@given(st.binary(max_size=200) | values.map(msgspec.msgpack.encode), st.sampled_from([Prompt, Group]))
def test_noise_under_a_valid_seal_is_a_record_or_refused(body, kind):
    payload = b"PS" + bytes([SCHEMA]) + zlib.crc32(body, SCHEMA).to_bytes(4, "little") + body
    try:
        record = decode(payload, kind)
    except RecordError:
        return
    assert decode(encode(record), kind) == record


@given(prompts, st.sampled_from(["id", "messages", "fields", "group_size", "seed", "fed_at"]), values)
def test_a_field_of_any_value_is_a_record_or_refused(prompt, name, value):
    body = msgspec.msgpack.encode(msgspec.to_builtins(prompt) | {name: value})
    payload = b"PS" + bytes([SCHEMA]) + zlib.crc32(body, SCHEMA).to_bytes(4, "little") + body
    try:
        record = decode(payload, Prompt)
    except RecordError:
        return
    assert getattr(record, name) == value
