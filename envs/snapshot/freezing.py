"""Freeze an environment: encode its data, and note what was omitted."""

import copy
import copyreg
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from msgspec import Raw

from envs.call import describe_error
from envs.references import class_key
from envs.snapshot.object_state import (
    BUILTIN_READERS,
    CONTENTS,
    VERSION,
    FrozenObject,
    builtin_base,
    has_hidden_state,
    instance_attributes,
)
from envs.snapshot.value_codec import OVER_LIMIT, Packer, Tag, UnfreezableError, encode
from stream.errors import EnvironmentFailure

_MAX_REASON = 200
_COPYING = (
    *("__copy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"),
    *("__new__", "__getnewargs__", "__getnewargs_ex__"),
)
"""What a class may define to decide itself what a copy of an instance is."""


def freeze(env: object, max_bytes: int) -> bytes:
    """Encode an environment's state.

    Args:
        env: the environment, with no call in progress.
        max_bytes: size limit; the largest attributes are omitted until the rest fits. Names of omitted attributes are
            always kept.

    Raises:
        EnvironmentFailure: the class's own `__copy__` raised.
    """
    source = _copy(env)
    freezer = _Freezer(env, source, max_bytes)
    attributes: dict[str, bytes] = {}
    omitted: dict[str, str] = {}
    for name, value in instance_attributes(source):
        try:
            attributes[name] = freezer.freeze_value(value)
        except UnfreezableError as error:
            omitted[name] = str(error)[:_MAX_REASON]
    contents: tuple[Raw, ...] = ()
    cls: type = type(source)
    base = builtin_base(cls)
    if base is not None:
        try:
            contents = (Raw(freezer.freeze_value(BUILTIN_READERS[base](source))),)
        except UnfreezableError as error:
            omitted[CONTENTS] = str(error)[:_MAX_REASON]
    while True:
        data = encode(FrozenObject(VERSION, {k: Raw(v) for k, v in attributes.items()}, omitted, contents))
        if len(data) <= max_bytes or not attributes:
            return data
        largest = max(attributes, key=lambda name: len(attributes[name]))
        size = len(attributes.pop(largest))
        omitted[largest] = f"its {size} bytes exceed {OVER_LIMIT} {max_bytes} bytes"


def _copy(env: object) -> object:
    """Return what the class makes of a copy; the object itself if that would only have the same attributes."""
    cls: type = type(env)
    if _is_copied_plainly(cls):
        return env
    try:
        return copy.copy(env)
    except Exception as error:
        if hasattr(cls, "__copy__"):
            raise EnvironmentFailure(f"{cls.__name__}.__copy__ raised {describe_error(error)}") from error
        return env  # not copyable: read the attributes of the live object


@lru_cache(maxsize=1024)
def _is_copied_plainly(cls: type) -> bool:
    """Return whether a class leaves copying to `object`."""
    is_default = all(getattr(cls, name, None) is getattr(object, name, None) for name in _COPYING)
    return is_default and cls not in copyreg.dispatch_table


class _Freezer:
    """Encodes the values of one environment.

    Args:
        env: the live object; references back to it are omitted.
        source: the copy whose attributes are encoded.
        limit: maximum bytes of a single attribute.
    """

    def __init__(self, env: object, source: object, limit: int) -> None:
        self._roots = (env,) if source is env else (env, source)
        self._environment_class: type = type(env)
        self._limit = limit

    def freeze_value(self, value: object) -> bytes:
        """Encode the value of one attribute."""
        packer = Packer(self._limit, self._pack_object)
        for root in self._roots:
            packer.enter(root)
        try:
            return encode(packer.pack(value))
        except RecursionError:
            raise UnfreezableError("it is nested too deeply") from None

    def _pack_object(self, value: object, packer: Packer) -> Any:
        """Encode a nested object; what cannot be encoded is omitted from that object only."""
        cls: type = type(value)
        base = builtin_base(cls)
        packer.enter(value)
        try:
            reason = _omission_reason(cls, self._environment_class)
            if reason:
                raise UnfreezableError(reason)
            frozen = FrozenObject(class_key(cls), {})
            if base is not None:
                frozen.contents = (Raw(encode(packer.pack(BUILTIN_READERS[base](value)))),)
            for name, member in instance_attributes(value):
                packer.reserve(len(name))
                try:
                    frozen.attributes[name] = Raw(encode(packer.pack(member)))
                except UnfreezableError as error:
                    frozen.omitted[name] = str(error)[:_MAX_REASON]
        finally:
            packer.leave(value)
        return packer.extension(Tag.OBJECT, frozen)


@lru_cache(maxsize=1024)
def _omission_reason(cls: type, environment_class: type) -> str:
    """Return why objects of a class are omitted; empty for data classes and the user's own classes."""
    name, base = f"{cls.__module__}.{cls.__qualname__}", builtin_base(cls)
    user_packages = {c.__module__.partition(".")[0] for c in environment_class.__mro__} - sys.stdlib_module_names
    if has_hidden_state(cls, base or object):
        return f"a {name} is not made of Python attributes"
    marks = ("__dataclass_fields__", "__struct_fields__", "__attrs_attrs__", "__pydantic_fields__")
    if base is not None or any(hasattr(cls, mark) for mark in marks) or _is_user_class(cls, user_packages):
        return ""
    return f"{name} is a library's object, not data"


def _is_user_class(cls: type, user_packages: set[str]) -> bool:
    """Return whether a class belongs to the environment's package or to a file that is not installed."""
    top = cls.__module__.partition(".")[0]
    if top in user_packages:
        return True
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    installed = {"site-packages", "dist-packages"}
    return bool(file) and top not in sys.stdlib_module_names and installed.isdisjoint(Path(str(file)).parts)
