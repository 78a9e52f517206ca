"""Freeze an environment to bytes, a snapshot; thaw a snapshot to an object for reading.

Attributes that cannot be frozen, or are too large, are omitted; reading one of them raises an error with the reason.
"""

import copy
import copyreg
import sys
import types
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw, Struct

from envs.call import describe_error
from envs.factory import EnvironmentFactory
from envs.references import class_key
from envs.sandboxes.contract import EpisodeSandboxes, Sandbox
from envs.snapshot.object_state import (
    BUILTIN_READERS,
    CONTENTS,
    VERSION,
    FrozenObject,
    builtin_base,
    has_hidden_state,
    instance_attributes,
)
from envs.snapshot.value_codec import OVER_LIMIT, Packer, Tag, UnfreezableError, Unpacker, encode
from stream.errors import EnvironmentFailure, RecordError

_MAX_REASON = 200
_COPYING = (
    *("__copy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"),
    *("__new__", "__getnewargs__", "__getnewargs_ex__"),
)
"""Methods by which a class may decide itself what a copy of an instance contains."""


def freeze(env: object, max_bytes: int) -> bytes:
    """Encode an environment's state.

    Args:
        env: the environment, with no call in progress.
        max_bytes: size limit; the largest attributes are omitted until the rest fits. Names of omitted attributes are
            always kept, even beyond the limit.

    Returns:
        The snapshot.

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
    """Return a copy of the object; the object itself if its class leaves copying to Python, or cannot be copied."""
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
    """Return whether a class leaves copying to `object`, so that a copy would have the same attributes."""
    is_default = all(getattr(cls, name, None) is getattr(object, name, None) for name in _COPYING)
    return is_default and cls not in copyreg.dispatch_table


class _Freezer:
    """Encodes the values of one environment.

    Args:
        env: the live object; references back to it are omitted.
        source: the object whose attributes are encoded: a copy of `env`, or `env` itself.
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
        """Encode a nested object; a member that cannot be encoded is omitted from this object alone."""
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
    if Sandbox in cls.__mro__ or EpisodeSandboxes in cls.__mro__:  # it refers to the worker's connections
        return "a sandbox ends with its episode"
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


class Namespace:
    """Thawed object whose class is unknown here: its attributes, read-only."""

    def __setattr__(self, name: str, value: object) -> None:
        """Raise an AttributeError: snapshots are read-only."""
        raise AttributeError(f"{name} cannot be set: snapshots are read-only")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({inside})"


class TooLarge(Struct):
    """Names of attributes that a snapshot lacks because they were over the size limit."""

    omitted: set[str] = set()
    """All such names, including names in nested objects."""
    read: set[str] = set()
    """Those that were read since; each read raised an AttributeError."""


def thaw(data: bytes, factory: EnvironmentFactory | None) -> object:
    """Decode a snapshot, as `thaw_and_watch` does, and return the object alone."""
    return thaw_and_watch(data, factory)[0]


def thaw_and_watch(data: bytes, factory: EnvironmentFactory | None) -> tuple[object, TooLarge]:
    """Decode a snapshot.

    Args:
        data: the result of `freeze`.
        factory: knows the environment's class and the classes of nested objects. Without it, the object is a read-only
            `Namespace`.

    Returns:
        An instance of the environment's class, made without `__init__`, and the attributes that were over the size
        limit. Reading an omitted attribute raises an AttributeError that says why it was omitted.

    Raises:
        RecordError: the bytes are not a snapshot, or do not fit this class.
    """
    thawer = _Thawer(factory.known_classes if factory is not None else {})
    try:
        frozen = msgspec.msgpack.decode(data, type=FrozenObject)
        if frozen.head != VERSION:
            raise RecordError(f"the snapshot has version {frozen.head!r}; expected {VERSION}")
        cls = factory.environment_class if factory is not None else Namespace
        return thawer.make_object(cls, frozen), thawer.too_large
    except (msgspec.MsgspecError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
        raise RecordError(f"not a snapshot of this environment: {type(error).__name__}: {error}") from error
    except (RecursionError, MemoryError, UnfreezableError) as error:
        raise RecordError(f"this snapshot cannot be read here: {type(error).__name__}: {error}") from error


def omitted_attributes(snapshot: object) -> dict[str, str]:
    """Return the omitted attributes of a thawed object, each with the reason."""
    return dict(vars(type(snapshot)).get("__omitted__", {}))


class _Thawer:
    """Decodes objects; a nested object gets its class from the known ones, by name, and never by an import."""

    def __init__(self, known: dict[str, type]) -> None:
        self.too_large = TooLarge()
        self._known = known
        self._unpacker = Unpacker(known, self._make_nested)

    def _make_nested(self, data: memoryview) -> object:
        frozen = msgspec.msgpack.decode(data, type=FrozenObject)
        if not isinstance(frozen.head, str):
            raise TypeError("a nested object has no class name")
        cls = self._known.get(frozen.head)
        base = builtin_base(cls) if cls is not None else None
        if cls is not None and not has_hidden_state(cls, base or object):
            return self.make_object(cls, frozen)
        if frozen.contents:
            return self._unpacker.unpack(frozen.contents[0])  # the plain value
        return self.make_object(_named_namespace(frozen.head), frozen)

    def make_object(self, cls: type, frozen: FrozenObject) -> object:
        """Make an instance with the frozen attributes, without running the class's code."""
        attributes: dict[str, Any] = {}
        omitted = dict(frozen.omitted)
        for name, raw in frozen.attributes.items():
            try:
                attributes[name] = self._unpacker.unpack(raw)
            except UnfreezableError as error:
                omitted[name] = str(error)
        contents = self._unpacker.unpack(frozen.contents[0]) if frozen.contents else None
        if issubclass(cls, Struct):
            return (
                _make_struct(cls, attributes)
                if not omitted
                else self.make_object(_named_namespace(class_key(cls)), frozen)
            )
        self.too_large.omitted.update(name for name, reason in omitted.items() if OVER_LIMIT in reason)
        instance = _new_uninitialized(_with_omissions(cls, omitted, self.too_large) if omitted else cls, contents)
        slots = {
            name: member
            for base in cls.__mro__
            for name, member in vars(base).items()
            if isinstance(member, types.MemberDescriptorType)
        }
        for name, value in attributes.items():
            if name in slots:
                slots[name].__set__(instance, value)
            else:
                object.__getattribute__(instance, "__dict__")[name] = value
        return instance


def _new_uninitialized(cls: type, contents: Any) -> Any:
    """Make an instance without `__new__` and `__init__`, with the contents of its built-in base."""
    base = builtin_base(cls)
    if base is None:
        return object.__new__(cls)
    if contents is not None and not isinstance(contents, base):
        raise TypeError(f"the contents of a {base.__name__} are a {type(contents).__name__}")
    if base in (dict, list, set):
        instance: Any = base.__new__(cls)
        if contents is not None:
            (list.extend if base is list else base.update)(instance, contents)
        return instance
    return base.__new__(cls, *([] if contents is None else [contents]))


def _make_struct(cls: type[Struct], attributes: dict[str, Any]) -> Struct:
    """Make a msgspec struct by its constructor, the only way there is; attributes that are no fields are left out."""
    names = cls.__struct_fields__
    return cls(**{name: value for name, value in attributes.items() if name in names})


def _named_namespace(key: str) -> type:
    """Return a namespace class whose `repr` shows the original class name."""
    name = key.rpartition(":")[2].rpartition(".")[2]
    return type(name if name.isidentifier() else "Namespace", (Namespace,), {})


class _NoInitSubclass:
    """Keeps a user's `__init_subclass__` from running when a subclass is made on the fly."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        """Do nothing, and do not call the user's."""


class _OmittedAttribute:
    """Descriptor in place of an omitted attribute: reading it raises; setting the attribute removes the descriptor."""

    def __init__(self, name: str, text: str, too_large: TooLarge) -> None:
        self.name = name
        self.text = text
        self._too_large = too_large

    def __get__(self, instance: object, owner: type) -> Any:
        if self.name in self._too_large.omitted:
            self._too_large.read.add(self.name)
        raise AttributeError(self.text)

    def __set__(self, instance: object, value: object) -> None:
        delattr(type(instance), self.name)
        setattr(instance, self.name, value)


def _with_omissions(cls: type, omitted: dict[str, str], too_large: TooLarge) -> type:
    """Make a subclass, for one instance, on which reading an omitted attribute raises an error with the reason.

    It needs descriptors, because a default on the class (`session = None`) would replace a missing attribute of the
    instance. It needs its own `__getattr__`, because Python would call the user's after a descriptor's AttributeError.
    """
    texts = {name: f"{cls.__name__}.{name} was omitted from the snapshot: {why}" for name, why in omitted.items()}

    def __getattr__(self: object, name: str) -> Any:  # noqa: N807
        users_own = getattr(cls, "__getattr__", None)
        if name in texts or users_own is None:
            raise AttributeError(texts.get(name, f"{cls.__name__!r} object has no attribute {name!r}"))
        return users_own(self, name)

    members: dict[str, Any] = {
        name: _OmittedAttribute(name, text, too_large) for name, text in texts.items() if name != CONTENTS
    }
    members |= {"__omitted__": omitted, "__getattr__": __getattr__, "__qualname__": cls.__qualname__}
    members |= {"__module__": cls.__module__, "__doc__": cls.__doc__}
    if cls is not Namespace and not issubclass(cls, Namespace):
        members["__slots__"] = ()
    return type(cls)(cls.__name__, (_NoInitSubclass, cls), members)
