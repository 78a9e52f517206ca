"""The state of an object: attributes, slots, contents of a built-in base class; and its encoded form."""

import struct
import types
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from msgspec import Raw, Struct

from envs.call import replace_surrogates

VERSION = 1
CONTENTS = "(contents)"
"""Stands for the contents of a derived dict, list or the like among the omitted attributes."""

BUILTIN_READERS: dict[type, Callable[[Any], Any]] = {
    dict: lambda v: dict(dict.items(v)),
    list: lambda v: list(list.__iter__(v)),
    tuple: lambda v: tuple(tuple.__iter__(v)),
    set: lambda v: set(set.__iter__(v)),
    frozenset: lambda v: frozenset(frozenset.__iter__(v)),
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    bytes: lambda v: bytes(bytes.__iter__(v)),
}
"""How to read the contents of a class derived from a built-in, without running the derived class's code."""

_POINTER = struct.calcsize("P")
_HEAP_TYPE, _MANAGED_DICT = 1 << 9, 1 << 4  # CPython's type flags


class FrozenObject(Struct, array_like=True):
    """The encoded form of an object."""

    head: int | str
    """The format version, or the class name of a nested object."""
    attributes: dict[str, Raw]
    omitted: dict[str, str] = {}
    contents: tuple[Raw, ...] = ()
    """One entry for a class derived from dict, list or the like; else empty."""


@lru_cache(maxsize=1024)
def has_hidden_state(cls: type, base: type) -> bool:
    """Return whether instances have state beyond their attributes, e.g. tensors or locks implemented in C.

    Same test as in `object.__reduce_ex__`: an instance must be no larger than its base, dict, weak references and
    slots.
    """
    if issubclass(cls, Struct):
        return False  # all its state is in its fields
    if any(not c.__flags__ & _HEAP_TYPE for c in cls.__mro__ if c not in (base, object)):
        return True
    slots = sum(1 for c in cls.__mro__ for m in vars(c).values() if isinstance(m, types.MemberDescriptorType))
    own_dict = bool(cls.__dictoffset__) and not cls.__flags__ & _MANAGED_DICT
    return cls.__basicsize__ > base.__basicsize__ + _POINTER * (slots + own_dict + (cls.__weakrefoffset__ > 0))


@lru_cache(maxsize=1024)
def builtin_base(cls: type) -> type | None:
    """Return the built-in class with contents that a class derives from, or None."""
    return next((c for c in cls.__mro__ if c in BUILTIN_READERS), None)


def instance_attributes(obj: object) -> Iterator[tuple[str, Any]]:
    """Yield every instance attribute: those in `__dict__` and in all slots. Lone surrogates in names become `?`."""
    try:
        own = dict(object.__getattribute__(obj, "__dict__"))
    except AttributeError:
        own = {}
    cls: type = type(obj)
    for name, member in _slots(cls):
        if name not in own:
            try:
                own[name] = member.__get__(obj, cls)
            except AttributeError:
                continue  # a slot that was never set
    names = map(str, own)
    return zip((name if name.isascii() else replace_surrogates(name) for name in names), own.values(), strict=True)


@lru_cache(maxsize=1024)
def _slots(cls: type) -> tuple[tuple[str, types.MemberDescriptorType], ...]:
    """Return the slots of a class and of its bases."""
    members = [item for c in cls.__mro__ for item in vars(c).items()]
    return tuple((name, member) for name, member in members if isinstance(member, types.MemberDescriptorType))
