"""Objects in parts: attributes, slots, the contents of a built-in base; as they lie in memory, and as bytes."""

import struct
import types
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from msgspec import Raw, Struct

VERSION = 1
CONTENTS = "(contents)"
"""The name of what is in a derived dict, list or the like, among what was left out."""

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
"""Built-in classes that others derive from, and how to read such a one without running the derived class's code."""

_POINTER = struct.calcsize("P")
_HEAP_TYPE, _MANAGED_DICT = 1 << 9, 1 << 4  # CPython's type flags


class FrozenObject(Struct, array_like=True):
    """An object as bytes."""

    head: int | str
    """The format's version, or the class of an object within another one."""
    attributes: dict[str, Raw]
    omitted: dict[str, str] = {}
    contents: tuple[Raw, ...] = ()
    """One entry for what derives from a dict, list or the like; else none."""


@lru_cache(maxsize=1024)
def has_hidden_state(cls: type, base: type) -> bool:
    """Whether instances hold more than their attributes: something written in C, such as a tensor or a lock.

    As `object.__reduce_ex__` finds out: an instance must be no larger than its base, dict, weak references and slots.
    """
    if issubclass(cls, Struct):
        return False  # its fields are all there is
    if any(not c.__flags__ & _HEAP_TYPE for c in cls.__mro__ if c not in (base, object)):
        return True
    slots = sum(1 for c in cls.__mro__ for m in vars(c).values() if isinstance(m, types.MemberDescriptorType))
    own_dict = bool(cls.__dictoffset__) and not cls.__flags__ & _MANAGED_DICT
    return cls.__basicsize__ > base.__basicsize__ + _POINTER * (slots + own_dict + (cls.__weakrefoffset__ > 0))


def builtin_base(cls: type) -> type | None:
    """The built-in class with contents that a class derives from, if it does."""
    return next((c for c in cls.__mro__ if c in BUILTIN_READERS), None)


def instance_attributes(obj: object) -> Iterator[tuple[str, Any]]:
    """Every instance attribute: of `__dict__` and of all slots in the classes above."""
    try:
        own = dict(object.__getattribute__(obj, "__dict__"))
    except AttributeError:
        own = {}
    for cls in type(obj).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, types.MemberDescriptorType) and name not in own:
                try:
                    own[name] = member.__get__(obj, type(obj))
                except AttributeError:
                    continue  # a slot that was never set
    return ((str(name), value) for name, value in own.items())
