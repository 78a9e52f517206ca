"""Thaw an environment: decode a snapshot to an object for reading."""

import types
from typing import Any

import msgspec
from msgspec import Struct

from envs.factory import EnvironmentFactory
from envs.references import class_key
from envs.snapshot.object_state import CONTENTS, VERSION, FrozenObject, builtin_base, has_hidden_state
from envs.snapshot.value_codec import OVER_LIMIT, UnfreezableError, Unpacker
from stream.errors import RecordError


class Namespace:
    """A frozen object of an unknown class: read-only attributes."""

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
    """Attributes of a snapshot that were omitted because they were over the size limit."""

    omitted: set[str] = set()
    """Their names, including those of nested objects."""
    read: set[str] = set()
    """Those that were read since, which raised."""


def thaw(data: bytes, factory: EnvironmentFactory | None) -> object:
    """Decode a snapshot, as `thaw_and_watch`."""
    return thaw_and_watch(data, factory)[0]


def thaw_and_watch(data: bytes, factory: EnvironmentFactory | None) -> tuple[object, TooLarge]:
    """Decode a snapshot.

    Args:
        data: the result of `freeze`.
        factory: gives the environment's class and the classes of nested objects; None gives a read-only namespace.

    Returns:
        An instance of the factory's class, made without `__init__`, and its attributes over the size limit. Reading an
        omitted attribute raises an AttributeError that says why it was omitted.

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
    """Decodes objects; nested objects get their class from a closed table."""

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
        slots = {n: m for c in cls.__mro__ for n, m in vars(c).items() if isinstance(m, types.MemberDescriptorType)}
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
    """Make a struct by its constructor; msgspec offers no other way."""
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

    Descriptors on the class are needed because a class default (`session = None`) would answer for a missing instance
    attribute; `__getattr__` is needed because Python calls a user's `__getattr__` after an AttributeError.
    """
    texts = {n: f"{cls.__name__}.{n} was omitted from the snapshot: {reason}" for n, reason in omitted.items()}

    def __getattr__(self: object, name: str) -> Any:  # noqa: N807
        fallback = getattr(cls, "__getattr__", None)
        if name in texts or fallback is None:
            raise AttributeError(texts.get(name, f"{cls.__name__!r} object has no attribute {name!r}"))
        return fallback(self, name)

    members: dict[str, Any] = {
        name: _OmittedAttribute(name, text, too_large) for name, text in texts.items() if name != CONTENTS
    }
    members |= {"__omitted__": omitted, "__getattr__": __getattr__, "__qualname__": cls.__qualname__}
    members |= {"__module__": cls.__module__, "__doc__": cls.__doc__}
    if cls is not Namespace and not issubclass(cls, Namespace):
        members["__slots__"] = ()
    return type(cls)(cls.__name__, (_NoInitSubclass, cls), members)
