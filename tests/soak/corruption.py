"""Ways to corrupt a record: some leave its checksum wrong, as corrupted bytes do; others recompute it.

No decoder may accept a record of the first kind. One of the second kind may be valid, with unusual values in a valid
form.
"""

import zlib
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
from msgspec import Raw

from envs.snapshot.value_codec import Tag
from stream.records import SCHEMA

HEADER = 7
"""Bytes before the body: two letters, the schema, the checksum."""

_EXTREMES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 2**31, 2**32 + 1, 2**62, 2**63, 2**64 - 1, -(2**63), 1.5, 1e308, float("nan")),
    *(float("inf"), -float("inf"), "", "x", "🙂", b"", b"\0", b"\xff" * 9, [], {}, [[]], {"": None}, [1, 2], {"a": 1}),
)
_LENGTHS = (
    *(b"\xc6\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff"),
    *(b"\xdf\xff\xff\xff\xff", b"\xdd\x00\x0f\xff\xff", b"\xdf\x00\x0f\xff\xff", b"\xc4\xff", b"\xd9\xff"),
    *(b"\xdc\xff\xff", b"\xde\xff\xff"),
)
"""Headers of msgpack that announce more data than follows."""


def seal(body: bytes, schema: int = SCHEMA) -> bytes:
    """Return a body under a header with the right checksum."""
    return b"PS" + bytes([schema]) + zlib.crc32(body, schema).to_bytes(4, "little") + body


# -- bytes: payload, another payload, chance -> bytes that differ from the payload


def noise(payload: bytes, _other: bytes, chance: Random) -> bytes:
    """Random bytes."""
    return chance.randbytes(chance.choice((0, 1, HEADER, 20, len(payload))))


def truncated(payload: bytes, _other: bytes, chance: Random) -> bytes:
    """The payload without its end."""
    return payload[: chance.randrange(len(payload))]


def extended(payload: bytes, _other: bytes, chance: Random) -> bytes:
    """The payload with more bytes behind it."""
    return payload + chance.randbytes(chance.randint(1, 9))


def flipped(payload: bytes, _other: bytes, chance: Random) -> bytes:
    """The payload with one to three bits flipped."""
    altered = bytearray(payload)
    for bit in chance.sample(range(8 * len(payload)), chance.randint(1, 3)):
        altered[bit // 8] ^= 1 << bit % 8
    return bytes(altered)


def overwritten(payload: bytes, _other: bytes, chance: Random) -> bytes:
    """The payload with a stretch of bytes overwritten."""
    at, size = chance.randrange(len(payload)), chance.randint(1, 40)
    return (payload[:at] + chance.randbytes(size) + payload[at + size :])[: len(payload)]


def spliced(payload: bytes, other: bytes, chance: Random) -> bytes:
    """The beginning of one payload and the end of the other."""
    return payload[: chance.randrange(len(payload))] + other[chance.randrange(len(other)) :]


def oversized(payload: bytes, _other: bytes, chance: Random) -> bytes:
    """The payload with a length that announces more data than follows."""
    at, length = chance.randrange(HEADER, len(payload)), chance.choice(_LENGTHS)
    return payload[:at] + length + payload[at + len(length) :]


def renumbered(payload: bytes, _other: bytes, chance: Random) -> bytes:
    """The payload with another schema number in its header alone."""
    return payload[:2] + bytes([chance.choice((0, 2, 3, 255))]) + payload[3:]


BYTES: tuple[Callable[[bytes, bytes, Random], bytes], ...] = (
    *(noise, truncated, extended, flipped, overwritten, spliced, oversized, renumbered),
)


# -- trees: a record as plain lists and maps, changed in one place


def wrong_type(tree: Any, chance: Random) -> Any:
    """Replace a value by one of another type."""
    return _at_some_place(tree, chance, lambda _: chance.choice(_EXTREMES))


def extreme(tree: Any, chance: Random) -> Any:
    """Replace a number by another one."""
    numbers = [each for each in _EXTREMES if type(each) in (int, float)]
    return _at_some_place(tree, chance, lambda _: chance.choice(numbers), only=(int, float))


def duplicated(tree: Any, chance: Random) -> Any:
    """Repeat a field with another value, or repeat an item."""

    def twice(value: Any) -> Any:
        if isinstance(value, list):
            return value + value[:1]
        pairs = [(k, v) for k, v in value.items()]
        pairs.insert(chance.randint(0, len(pairs)), (chance.choice(pairs)[0], chance.choice(_EXTREMES)))
        flat = b"".join(_pack(key) + _pack(item) for key, item in pairs)
        return Raw(b"\xdf" + len(pairs).to_bytes(4, "big") + flat)

    return _at_some_place(tree, chance, twice, only=(list, dict))


def missing(tree: Any, chance: Random) -> Any:
    """Remove a field or an item."""

    def without(value: Any) -> Any:
        place = chance.randrange(len(value))
        if isinstance(value, list):
            return value[:place] + value[place + 1 :]
        return {k: v for i, (k, v) in enumerate(value.items()) if i != place}

    return _at_some_place(tree, chance, without, only=(list, dict))


def unknown(tree: Any, chance: Random) -> Any:
    """Add an unknown field."""
    return _at_some_place(tree, chance, lambda v: {**v, "invented_later": chance.choice(_EXTREMES)}, only=(dict,))


def reordered(tree: Any, chance: Random) -> Any:
    """Reorder fields or items."""

    def shuffled(value: Any) -> Any:
        items = list(value.items()) if isinstance(value, dict) else list(value)
        chance.shuffle(items)
        return dict(items) if isinstance(value, dict) else items

    return _at_some_place(tree, chance, shuffled, only=(list, dict))


def nested(tree: Any, chance: Random) -> Any:
    """Replace a value by hundreds or thousands of nested brackets."""
    depth = chance.choice((50, 200, 400, 700, 900, 2_000, 20_000))
    opening, closing = chance.choice(((b"\x91", b"\x01"), (b"\x81\xa1a", b"\x01")))
    return _at_some_place(tree, chance, lambda _: Raw(opening * depth + closing))


def stretched(tree: Any, chance: Random) -> Any:
    """Change the length of a buffer or text."""
    return _at_some_place(
        tree, chance, lambda v: (v + v[:1] * chance.randint(1, 9))[chance.randint(0, 9) :], only=(bytes, str)
    )


def thawed(tree: Any, chance: Random) -> Any:
    """Replace a snapshot by random bytes, or change the values in it."""

    def spoiled(value: Any) -> Any:
        if not value or chance.random() < 0.2:
            return chance.randbytes(9)
        if chance.random() < 0.3:
            return flipped(value, b"", chance)
        frozen = msgspec.msgpack.decode(value)
        change = chance.choice((wrong_type, missing, duplicated, _tagged))
        return _pack(change(frozen, chance))

    results = [c for c in tree.get("completions", ()) if isinstance(c.get("snapshot"), bytes)]
    if results:
        completion = chance.choice(results)
        completion["snapshot"] = spoiled(completion["snapshot"])
    return tree


def _tagged(tree: Any, chance: Random) -> Any:
    """Replace a value by one of the snapshot's own types with invalid content."""
    inside = chance.choice(
        (*_EXTREMES, ["1e9"], [1, 0], [None, 3], ["<U3", [2], b"abc"], msgspec.msgpack.Ext(17, b"\x93\0\5\1"))
    )
    return _at_some_place(tree, chance, lambda _: msgspec.msgpack.Ext(int(chance.choice(list(Tag))), _pack(inside)))


TREES: tuple[Callable[[Any, Random], Any], ...] = (
    *(wrong_type, extreme, duplicated, missing, unknown, reordered, nested, stretched, thawed),
)


def spoil_tree(body: bytes, change: Callable[[Any, Random], Any], chance: Random) -> bytes:
    """Return a body with one change in its decoded content."""
    return _pack(change(msgspec.msgpack.decode(body), chance))


def _pack(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def _at_some_place(
    tree: Any, chance: Random, change: Callable[[Any], Any], only: tuple[type, ...] | None = None
) -> Any:
    """Change one value of the tree, of the types in `only`; with `only`, empty lists and maps are excluded."""
    places = [
        path for path, value in _walk(tree, ()) if only is None or (type(value) in only and value not in ([], {}))
    ]
    if not places:
        return tree
    path = chance.choice(places)
    if not path:
        return change(tree)
    parent = tree
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = change(parent[path[-1]])
    return tree


def _walk(value: Any, path: tuple[Any, ...]) -> Any:
    yield path, value
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _walk(item, (*path, key))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from _walk(item, (*path, place))
