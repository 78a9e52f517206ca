"""A payload altered in any way decodes to the record that was sent, or raises `RecordError`."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from stream.codec import decode, encode
from stream.errors import RecordError
from stream.records import Completion, Failure, Group, Prompt, RewardPart, Row, Span
from stream.validity import Measured, RewardReason, RolloutReason, TruncationReason, Unmeasured
from tests.soak.corruption import BYTES, TREES, seal
from tests.soak.damaged_records import fuzz

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
        sampled_ranges=sampled,
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
    parts=st.lists(st.builds(RewardPart, name=st.text(), reward=rewards), max_size=2),
    reward=st.none() | rewards,
    snapshot=st.none() | st.binary(),
)
groups = st.builds(Group, prompt=prompts, completions=st.lists(completions, max_size=3), worker=st.text())


@given(groups)
def test_decoding_reverses_encoding(group):
    assert decode(encode(group), Group) == group


def test_damaged_records_are_refused_or_safe_for_every_worker():
    """Run `tests/soak/damaged_records.py` briefly: altered bytes, and altered bodies whose checksum is recomputed."""
    report = fuzz(2_500, seed=1)
    assert report["failures"] == []
    outcomes = report["outcomes"]
    assert [outcomes[way.__name__].keys() for way in BYTES] == [{"refused"}] * len(BYTES)
    of_trees = set().union(*(outcomes[f"sealed {way.__name__}"] for way in TREES))
    fates = {"rollout": {"played", "data at fault"}, "score": {"scored"}, "train": {"trained", "dropped"}}
    for worker, result in fates.items():
        assert {f"{worker}: {fate}" for fate in result | {"unreadable", "newer schema"}} <= of_trees


@given(st.binary(max_size=200) | values.map(msgspec.msgpack.encode), st.sampled_from([Prompt, Group]))
def test_noise_with_a_valid_checksum_is_a_record_or_refused(body, kind):
    try:
        record = decode(seal(body), kind)
    except RecordError:
        return
    assert decode(encode(record), kind) == record


@given(prompts, st.sampled_from(["id", "messages", "fields", "group_size", "seed", "fed_at"]), values)
def test_a_field_of_any_value_is_a_record_or_refused(prompt, name, value):
    body = msgspec.msgpack.encode(msgspec.to_builtins(prompt) | {name: value})
    try:
        record = decode(seal(body), Prompt)
    except RecordError:
        return
    assert getattr(record, name) == value
