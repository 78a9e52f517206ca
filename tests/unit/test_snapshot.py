"""Snapshots: the facts of an environment at the end of an episode, unaffected by later changes of the environment."""

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import io
import math
import pathlib
import random
import sys
import threading
import types
import uuid
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from envs.builtin.calculator import Calculator
from envs.factory import EnvironmentFactory
from envs.references import Reference
from envs.snapshot import Namespace, freeze, omitted_attributes, thaw
from stream.errors import EnvironmentFailure, RecordError

LIMIT = 1_000_000


class Mood(enum.Enum):
    GOOD = "good"
    BAD = "bad"


class Flags(enum.Flag):
    A = 1
    B = 2


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: int = 0


@dataclasses.dataclass(slots=True)
class Slotted:
    x: int


class Cell(msgspec.Struct):
    name: str
    inside: list[int] = []


class Pair(NamedTuple):
    a: int
    b: object


class Deck(list):
    """A list with an attribute."""

    owner = "nobody"


class Env:
    """Has the attributes that a test passes."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def reset(self): ...


def factory_of(cls, module=__name__):
    return EnvironmentFactory(Reference("test", "module", cls, sys.modules[module]), cls, cls())


FACTORY = factory_of(Env)


def through(value):
    return thaw(freeze(Env(value=value), LIMIT), FACTORY).value


VALUES = [
    None,
    True,
    False,
    0,
    -1,
    2**63,
    2**64 - 1,
    2**64,
    -(2**63) - 1,
    -(10**400),
    1.5,
    math.inf,
    "text",
    "",
    "half \ud800 of a pair",
    b"bytes",
    bytearray(b"ab"),
    1 + 2j,
    [1, [2, []]],
    (),
    (1, (2, "a")),
    {1, 2},
    frozenset({(1, 2)}),
    {},
    {"a": 1},
    {"ä": 1},
    {1: "a", (2, 3): "b", None: "c", 2**70: "d", "e": "f"},
    {frozenset({1}): {2}},
    collections.deque([1, 2], maxlen=3),
    collections.OrderedDict(b=1, a=2),
    collections.Counter("abca"),
    collections.defaultdict(list, {"a": [1]}),
    types.SimpleNamespace(a=1, b=(2,)),
    dt.datetime(2026, 8, 21, 12, 30, 1, 5),  # noqa: DTZ001
    dt.datetime(2026, 8, 21, tzinfo=dt.UTC),
    dt.datetime(2026, 8, 21, tzinfo=dt.timezone(dt.timedelta(hours=-5, minutes=30))),
    dt.date(2026, 8, 21),
    dt.time(1, 2, 3),
    dt.timedelta(days=-1, seconds=2, microseconds=3),
    decimal.Decimal("1.10"),
    fractions.Fraction(10**30, 3),
    uuid.UUID(int=5),
    pathlib.Path("a/b"),
    range(1, 10, 3),
    ...,
    Mood.GOOD,
    Flags.A | Flags.B,
    Level.LOW,
    {Mood.BAD: 1},
    Point(1, 2),
    {Point(1, 2)},
    Slotted(3),
    Cell("a", [1]),
    Pair(1, (2,)),
    Deck([1, 2]),
    np.float32(1.5),
    np.int64(-3),
    np.bool_(True),
    np.datetime64("2026-08-21"),
    np.str_("ab"),
]


@pytest.mark.parametrize("value", VALUES, ids=[f"{i}-{type(v).__name__}" for i, v in enumerate(VALUES)])
def test_a_value_comes_back_equal_and_of_its_type(value):
    back = through(value)
    assert back == value
    assert type(back) is type(value)


def test_nan_comes_back():
    assert math.isnan(through(math.nan))


def test_the_fold_and_the_factory_of_a_default_survive():
    assert through(dt.datetime(2026, 10, 25, 2, 30, fold=1)).fold == 1  # noqa: DTZ001
    assert through(collections.defaultdict(list))["missing"] == []
    assert through(collections.deque([1], maxlen=3)).maxlen == 3


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.arange(6, dtype=">i2").reshape(3, 2).T,
        np.array([True, False]),
        np.array(3 + 4j),
        np.zeros((0, 4), np.uint8),
        np.array(["ab", "c"]),
        np.array(["2026-08-21"], "M8[D]"),
    ],
)
def test_an_array_comes_back_with_dtype_shape_and_room_to_write(array):
    back = through(array)
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)
    assert back.flags.writeable


def test_user_objects_thaw_to_their_class_without_init():
    class Local(Env):
        pass

    class Board:
        def __init__(self, size):
            self.cells = [[0] * size]

        def full(self):
            return all(self.cells[0])

    factory = factory_of(Local)
    factory.known_classes[f"{__name__}:{Board.__qualname__}"] = Board
    back = thaw(freeze(Local(board=Board(2)), LIMIT), factory)
    assert type(back) is Local
    assert type(back.board) is Board
    assert back.board.full() is False


class Private:
    __slots__ = ("__score", "note", "unset")

    def __init__(self):
        self.__score = 0.5
        self.note = "n"

    def reset(self): ...

    @property
    def reward(self):
        return self.__score * 2


def test_a_property_over_a_private_slot_works_after_thawing():
    back = thaw(freeze(Private(), LIMIT), factory_of(Private))
    assert isinstance(back, Private)
    assert back.reward == 1.0
    assert back.note == "n"
    with pytest.raises(AttributeError):
        _ = back.unset


class Derived(Private):
    def __init__(self):
        super().__init__()
        self._hidden = 3

    @property
    def hidden(self):
        return self._hidden


def test_slots_and_dict_of_all_base_classes_are_frozen():
    back = thaw(freeze(Derived(), LIMIT), factory_of(Derived))
    assert (back.reward, back.hidden) == (1.0, 3)


class Row(dict):
    def reset(self): ...


def test_an_environment_derived_from_a_dict_keeps_its_contents():
    row = Row(a=1)
    row.extra = (1, 2)
    back = thaw(freeze(row, LIMIT), factory_of(Row))
    assert (back, back.extra) == ({"a": 1}, (1, 2))
    assert isinstance(back, Row)


# Copied immediately, by the class's own rules


def test_later_changes_of_the_environment_do_not_reach_the_snapshot():
    env = Env(state={"won": True}, moves=[[1]])
    data = freeze(env, LIMIT)
    env.state.clear()  # as reset would; a shallow copy alone shares that dict
    env.moves[0].append(2)
    back = thaw(data, FACTORY)
    assert (back.state, back.moves) == ({"won": True}, [[1]])


class Handled:
    def __init__(self):
        self.socket = "a live connection"
        self.score = 1

    def __copy__(self):
        kept = object.__new__(type(self))
        kept.score = self.score
        return kept

    def reset(self): ...


def test_copy_decides_what_is_frozen():
    env = Handled()
    back = thaw(freeze(env, LIMIT), factory_of(Handled))
    assert vars(back) == {"score": 1}
    assert omitted_attributes(back) == {}
    assert env.socket == "a live connection"


class Stateful(Env):
    def __getstate__(self):
        return {"kept": self.kept}


def test_getstate_decides_what_is_frozen():
    assert vars(thaw(freeze(Stateful(kept=1, handle=2), LIMIT), FACTORY)) == {"kept": 1}


def test_a_copy_that_raises_is_a_failure_of_the_environment():
    class Broken(Env):
        def __copy__(self):
            raise OSError("the server is gone")

    with pytest.raises(EnvironmentFailure, match="OSError: the server is gone"):
        freeze(Broken(), LIMIT)


class Wrapper:
    """Delegates every attribute, as wrappers do, and so breaks `copy.copy`."""

    def __init__(self):
        self.inner = Env(won=True)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def reset(self): ...


def test_an_environment_that_cannot_be_copied_is_frozen_directly():
    back = thaw(freeze(Wrapper(), LIMIT), factory_of(Wrapper))
    assert back.won is True
    with pytest.raises(AttributeError):
        _ = back.absent


# Attributes omitted by name


class Session:
    session = None

    def __init__(self):
        self.session = threading.Lock()
        self.score = 1

    def reset(self): ...

    def __getattr__(self, name):
        if name == "computed":
            return 42
        raise AttributeError(f"no {name}")


def test_reading_an_omitted_attribute_raises_with_its_name_and_reason():
    back = thaw(freeze(Session(), LIMIT), factory_of(Session))
    with pytest.raises(AttributeError, match=r"Session\.session was omitted from the snapshot: a _thread\.lock"):
        _ = back.session  # and does not return the class's default
    assert isinstance(back, Session)
    assert type(back).__name__ == "Session"
    assert (back.score, back.computed) == (1, 42)
    assert list(omitted_attributes(back)) == ["session"]
    assert not hasattr(back, "unknown")


def test_an_attribute_whose_name_has_a_lone_surrogate_is_kept_under_a_name_without():
    env = Env(number=1)
    setattr(env, "half\udc80", 2)
    thawed = thaw(freeze(env, LIMIT), FACTORY)
    assert (thawed.number, getattr(thawed, "half?")) == (1, 2)


def test_an_omitted_attribute_can_be_set():
    back = thaw(freeze(Session(), LIMIT), factory_of(Session))
    back.session = "another"
    assert back.session == "another"
    with pytest.raises(AttributeError, match="was omitted"):
        _ = thaw(freeze(Session(), LIMIT), factory_of(Session)).session


def test_init_subclass_of_the_environment_is_not_run_by_thawing():
    class Registered(Env):
        names = []  # noqa: RUF012

        def __init_subclass__(cls, *, name, **rest):
            cls.names.append(name)

    back = thaw(freeze(Registered(lock=threading.Lock()), LIMIT), factory_of(Registered))
    assert Registered.names == []
    assert list(omitted_attributes(back)) == ["lock"]


def generator():
    yield


@pytest.mark.parametrize(
    "value",
    [
        threading.Lock(),
        lambda: None,
        io.TextIOWrapper(io.BytesIO()),
        generator(),
        sys,
        random.Random(1),
        object(),
        int,
        memoryview(b"a"),
        np.array([object()]),
        np.zeros(2, [("a", "i4")]),
        np.ma.array([1, 2], mask=[0, 1]),
        ValueError("x"),
        [threading.Lock()],
        {"a": (threading.Lock(),)},
    ],
)
def test_objects_with_hidden_state_are_omitted(value):
    back = thaw(freeze(Env(value=value, kept=1), LIMIT), FACTORY)
    assert list(omitted_attributes(back)) == ["value"]
    assert back.kept == 1


def test_objects_of_libraries_are_omitted():
    from rich.console import Console

    back = thaw(freeze(Env(console=Console()), LIMIT), FACTORY)
    assert "a library's object" in omitted_attributes(back)["console"]


def test_a_nested_object_keeps_what_can_be_frozen():
    class Client(Env):
        pass

    back = thaw(freeze(Env(client=Client(lock=threading.Lock(), host="h")), LIMIT), FACTORY)
    assert back.client.host == "h"
    with pytest.raises(AttributeError, match=r"Client\.lock was omitted"):
        _ = back.client.lock


def test_cycles_are_omitted_where_they_close():
    env = Env(items=[], child=Env(name="child"))
    env.items.append(env.items)
    env.me = env
    env.child.parent = env
    back = thaw(freeze(env, LIMIT), FACTORY)
    assert set(omitted_attributes(back)) == {"items", "me"}
    assert back.child.name == "child"
    assert list(omitted_attributes(back.child)) == ["parent"]


def test_depth_is_limited():
    deep = []
    for _ in range(10_000):
        deep = [deep]
    back = thaw(freeze(Env(deep=deep, kept=1), LIMIT), FACTORY)
    assert "levels deep" in omitted_attributes(back)["deep"]
    assert back.kept == 1


def test_a_value_shared_within_one_attribute_is_no_cycle():
    shared = [1]
    assert through([shared, shared]) == [[1], [1]]


# Size


@pytest.mark.parametrize(
    "large",
    [b"x" * 5000, "x" * 5000, list(range(5000)), np.zeros(5000), {"a": [Point(i) for i in range(500)]}, 10**4000],
)
def test_over_the_limit_the_largest_attributes_are_omitted(large):
    env = Env(small=1, large=large, medium="m" * 700)
    data = freeze(env, 1000)
    assert len(data) <= 1000
    back = thaw(data, FACTORY)
    assert (back.small, back.medium) == (1, "m" * 700)
    with pytest.raises(AttributeError, match="1000"):
        _ = back.large


def test_attributes_are_omitted_until_the_rest_fits():
    env = Env(**{f"a{i}": "x" * (100 + i) for i in range(20)})
    data = freeze(env, 2000)
    back = thaw(data, FACTORY)
    assert len(data) <= 2000
    assert "a0" in vars(back)
    assert "a19" in omitted_attributes(back)
    assert set(vars(back)) | set(omitted_attributes(back)) == {f"a{i}" for i in range(20)}


# Classes by name


def test_without_a_factory_there_is_a_namespace_to_read():
    back = thaw(freeze(Env(point=Point(1, 2), mood=Mood.GOOD, pair=Pair(1, 2), deck=Deck([1])), LIMIT), None)
    assert isinstance(back, Namespace)
    assert (back.point.x, back.mood, back.pair, back.deck) == (1, "good", (1, 2), [1])
    assert repr(back.point) == "Point(x=1, y=2)"
    with pytest.raises(AttributeError, match="read-only"):
        back.mood = "bad"
    with pytest.raises(AttributeError, match="was omitted"):
        _ = thaw(freeze(Env(lock=threading.Lock()), LIMIT), None).lock


def test_only_known_classes_are_made():
    back = thaw(freeze(Env(point=Point(1, 2)), LIMIT), EnvironmentFactory.load("calculator"))
    assert isinstance(back, Calculator)
    assert isinstance(back.point, Namespace)


def test_a_name_in_the_data_is_never_imported():
    data = freeze(Env(point=Point(1, 2)), LIMIT).replace(b"test_snapshot:Point", b"antigravity_x:Point")
    back = thaw(data, FACTORY)
    assert isinstance(back.point, Namespace)
    assert "antigravity_x" not in sys.modules


def test_a_known_class_with_hidden_state_is_not_made():
    factory = factory_of(Env)
    factory.known_classes[f"{__name__}:Point"] = threading.local
    assert isinstance(thaw(freeze(Env(point=Point(1)), LIMIT), factory).point, Namespace)


class Grumpy:
    """Its hash needs an attribute that a snapshot omits."""

    def __init__(self):
        self.lock = threading.Lock()

    def __hash__(self):
        return hash(self.lock)

    def __eq__(self, other):
        return self is other


def test_values_that_cannot_be_thawed_are_omitted():
    back = thaw(freeze(Env(bad={Grumpy()}, good=1), LIMIT), FACTORY)
    assert back.good == 1
    assert "cannot be hashed" in omitted_attributes(back)["bad"]


RANGE = msgspec.msgpack.encode(msgspec.msgpack.Ext(17, b"\x93\x00\x05\x01"))
"""A stored range: if it were long, anything made from it could fill the memory."""


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"junk",
        msgspec.msgpack.encode(3),
        msgspec.msgpack.encode([2, {}]),
        msgspec.msgpack.encode(["mod:Class", {}]),
        msgspec.msgpack.encode([1, {"a": msgspec.msgpack.Ext(99, b"")}]),
        msgspec.msgpack.encode([1, {"a": msgspec.msgpack.Ext(7, b"\xa1x")}]),
        msgspec.msgpack.encode([1, {"a": msgspec.msgpack.Ext(24, msgspec.msgpack.encode(["|O8", [1], b"12345678"]))}]),
        freeze(Env(a=[1, 2, 3]), LIMIT)[:-1],
        *(msgspec.msgpack.encode([1, {"a": msgspec.msgpack.Ext(code, RANGE)}]) for code in (1, 13, 20, 21)),
        msgspec.msgpack.encode([1, {"a": msgspec.msgpack.Ext(19, b"\x92" + RANGE + b"\xc0")}]),
        msgspec.msgpack.encode([1, {"a": msgspec.msgpack.Ext(13, b"\x91\xa31e9")}]),
    ],
)
def test_bytes_that_are_no_snapshot_are_refused(data):
    with pytest.raises(RecordError):
        thaw(data, FACTORY)


def test_an_attribute_without_a_slot_is_refused():
    with pytest.raises(RecordError):
        thaw(freeze(Env(surplus=1), LIMIT), factory_of(Private))


def test_a_snapshot_of_the_built_in_environments():
    env = Calculator()
    env.reset(problem="1 + 2", answer=3)
    env.add(1, 2)
    back = thaw(freeze(env, LIMIT), EnvironmentFactory.load("calculator"))
    assert isinstance(back, Calculator)
    assert back.calls == env.calls
