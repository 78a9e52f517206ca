"""Snapshots of any object decode to equal values of the same types; junk raises only `RecordError`."""

import dataclasses
import datetime as dt
import enum
import sys
from decimal import Decimal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from envs.factory import EnvironmentFactory
from envs.references import Reference
from envs.snapshot import freeze, omitted_attributes, thaw
from stream.errors import RecordError


class Suit(enum.Enum):
    HEARTS = 1
    SPADES = 2


@dataclasses.dataclass(frozen=True)
class Card:
    suit: Suit
    rank: object


class World:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def reset(self): ...


FACTORY = EnvironmentFactory(Reference("test", "module", World, sys.modules[__name__]), World, World())

keys = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(max_size=20),
    st.sampled_from(Suit),
    st.datetimes(timezones=st.just(dt.UTC)),
    st.datetimes(),
    st.dates(),
    st.timedeltas(),
    st.decimals(allow_nan=False),
    st.uuids(),
    st.complex_numbers(allow_nan=False),
)
hashable = st.recursive(
    keys,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple),
        st.frozensets(inner, max_size=3),
        st.builds(Card, st.sampled_from(Suit), inner),
    ),
    max_leaves=5,
)
values = st.recursive(
    hashable,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(hashable, inner, max_size=3),
        st.sets(hashable, max_size=3),
    ),
    max_leaves=15,
)


def same(one: object, other: object) -> bool:
    """Return whether both are equal, with equal types at every level: (1,) is not [1], and 1 is not True."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(a, b) and same(one[a], other[b]) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, Card):
        return same((one.suit, one.rank), (other.suit, other.rank))
    if isinstance(one, Decimal):
        return str(one) == str(other)
    return one == other


@given(st.dictionaries(st.text(min_size=1), values, max_size=4))
@example({"a": {1: 2, (1, 2): [True, 1.0, 1]}})
def test_attributes_of_any_type_round_trip(attributes):
    back = thaw(freeze(World(**attributes), 1_000_000), FACTORY)
    assert omitted_attributes(back) == {}
    assert same(vars(back), attributes)


@given(st.dictionaries(st.text(min_size=1, max_size=5), values, max_size=6), st.integers(200, 2000))
def test_every_attribute_is_present_or_listed_as_omitted(attributes, limit):
    data = freeze(World(**attributes), limit)
    back = thaw(data, FACTORY)
    assert len(data) <= limit or not vars(back)
    assert set(vars(back)) | set(omitted_attributes(back)) == set(attributes)
    assert not set(vars(back)) & set(omitted_attributes(back))


@given(st.binary(max_size=200))
def test_junk_is_a_record_error(data):
    with pytest.raises(RecordError):
        thaw(b"\x94\x01" + data + b"\xc1", FACTORY)


@given(st.dictionaries(st.text(min_size=1, max_size=3), values, min_size=1, max_size=3), st.data())
def test_an_altered_snapshot_is_a_record_error_or_a_valid_snapshot(attributes, data):
    frozen = bytearray(freeze(World(**attributes), 1_000_000))
    position = data.draw(st.integers(0, len(frozen) - 1))
    frozen[position] = data.draw(st.integers(0, 255))
    try:
        back = thaw(bytes(frozen), FACTORY)
    except RecordError:
        return
    assert isinstance(back, World)
