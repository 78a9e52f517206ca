"""Encode Python values as msgpack and decode them without losing their types.

msgspec turns tuples and sets into arrays, drops the fold of datetimes and refuses integers beyond 64 bits, without
calling its hook. So values are walked here, and types that msgpack lacks become extensions: a code from `Tag` and a
msgpack payload. Decoding uses no pickle and no eval, and never imports a name from the data.

To add a type: add a `Tag` (numbers are never reused), a line in `_PACKERS` and a line in `_READERS`.
"""

import datetime as dt
import sys
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from enum import Enum, Flag, IntEnum
from fractions import Fraction
from pathlib import Path, PurePath
from typing import Any

import msgspec
from msgspec.msgpack import Ext

from envs.references import class_key

OVER_LIMIT = "the snapshot limit of"
"""Words in the reason why something was omitted that was too large."""
_MAX_DEPTH = 100
_INT64_RANGE = 1 << 63
_DTYPE_KINDS = frozenset("biufcSUmM")
"""numpy dtypes that their bytes fully describe: booleans, numbers, fixed-width text, dates."""
_FACTORIES: dict[str, Callable[[], Any]] = {f.__name__: f for f in (int, float, str, bool, list, dict, set, tuple)}
"""Factories of a `defaultdict` that survive; others are dropped."""

_encoder = msgspec.msgpack.Encoder()


class Tag(IntEnum):
    """Codes of msgpack extensions. They are stored: never renumber."""

    TUPLE = 1
    SET = 2
    FROZENSET = 3
    MAP = 4
    INT = 5
    COMPLEX = 6
    DATETIME = 7
    DATE = 8
    TIME = 9
    TIMEDELTA = 10
    BYTEARRAY = 11
    TEXT = 12
    DECIMAL = 13
    FRACTION = 14
    UUID = 15
    PATH = 16
    RANGE = 17
    ELLIPSIS = 18
    DEQUE = 19
    ORDERED = 20
    COUNTER = 21
    DEFAULTDICT = 22
    NAMESPACE = 23
    NDARRAY = 24
    SCALAR = 25
    ENUM = 26
    OBJECT = 27


class UnfreezableError(Exception):
    """A value cannot be encoded, or cannot be decoded here."""


def encode(value: object) -> bytes:
    """Encode the result of `Packer.pack`."""
    return _encoder.encode(value)


class Packer:
    """Converts one value to msgpack types and extensions.

    Args:
        limit: maximum bytes; a value that needs more is refused early.
        pack_object: converts objects of other classes.
    """

    def __init__(self, limit: int, pack_object: "Callable[[object, Packer], Any]") -> None:
        self._limit = limit
        self._bytes_left = limit
        self._path: set[int] = set()
        self._pack_object = pack_object

    def pack(self, value: Any) -> Any:
        """Convert a value.

        Raises:
            UnfreezableError: the value, or something in it, cannot be encoded.
        """
        kind = type(value)
        self.reserve(len(value) if kind in (str, bytes, bytearray) else 1)
        packer = _PACKERS.get(kind)
        if packer is not None:
            return packer(self, value)
        if isinstance(value, Enum):
            return self._pack_nested(value, Tag.ENUM, lambda: [class_key(kind), value.name, self.pack(value.value)])
        if isinstance(value, PurePath):
            return self.extension(Tag.PATH, str(value))
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
            return self._pack_numpy(value)
        return self._pack_object(value, self)

    def reserve(self, size: int) -> None:
        """Count bytes that the value needs at least."""
        self._bytes_left -= size
        if self._bytes_left < 0:
            raise UnfreezableError(f"it exceeds {OVER_LIMIT} {self._limit} bytes")

    def enter(self, value: object) -> None:
        """Enter a container or object; call `leave` afterwards. Detects cycles and excessive depth."""
        if id(value) in self._path:
            raise UnfreezableError("it contains itself")
        if len(self._path) >= _MAX_DEPTH:
            raise UnfreezableError(f"it is nested more than {_MAX_DEPTH} levels deep")
        self._path.add(id(value))

    def leave(self, value: object) -> None:
        """Leave a container or object entered by `enter`."""
        self._path.discard(id(value))

    def extension(self, tag: Tag, payload: object) -> Ext:
        """Make an extension."""
        return _ext(tag, _encoder.encode(payload))

    def _pack_nested(self, value: object, tag: Tag | None, pack: Callable[[], Any]) -> Any:
        self.enter(value)
        try:
            payload = pack()
        finally:
            self.leave(value)
        return payload if tag is None else self.extension(tag, payload)

    def pack_items(self, tag: Tag | None, values: Iterable[Any]) -> Any:
        """Convert a sequence to an array, in an extension if there is a tag."""
        return self._pack_nested(values, tag, lambda: [self.pack(item) for item in values])

    def pack_pairs(self, value: Mapping[Any, Any]) -> list[list[Any]]:
        """Convert a mapping to a list of pairs, for keys that are not strings."""
        return [[self.pack(key), self.pack(item)] for key, item in value.items()]

    def pack_mapping(self, value: Mapping[Any, Any]) -> Any:
        """Convert a dict: to a msgpack map if all keys are ASCII strings, else to pairs."""
        if all(type(key) is str and key.isascii() for key in value):
            return self._pack_nested(
                value, None, lambda: {self.pack(key): self.pack(item) for key, item in value.items()}
            )
        return self._pack_nested(value, Tag.MAP, lambda: self.pack_pairs(value))

    def _pack_numpy(self, value: Any) -> Ext:
        numpy = sys.modules["numpy"]
        is_array = type(value) is numpy.ndarray
        dtype = value.dtype
        if dtype.kind not in _DTYPE_KINDS or not (is_array or isinstance(value, numpy.generic)):
            raise UnfreezableError(f"a numpy {type(value).__qualname__} of {dtype} cannot be stored as bytes")
        self.reserve(value.nbytes)
        return self.extension(Tag.NDARRAY if is_array else Tag.SCALAR, [dtype.str, list(value.shape), value.tobytes()])


def _ext(tag: Tag, data: bytes) -> Ext:
    return Ext(int(tag), data)  # Ext takes no enum


def _pack_int(packer: Packer, value: int) -> Any:
    if -_INT64_RANGE <= value < 2 * _INT64_RANGE:
        return value
    size = value.bit_length() // 8 + 1
    packer.reserve(size)
    return _ext(Tag.INT, value.to_bytes(size, "little", signed=True))


def _pack_str(_: Packer, value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return _ext(Tag.TEXT, value.encode("utf-8", "surrogatepass"))
    return value


_Packing = Callable[[Packer, Any], Any]
_PACKERS: dict[type, _Packing] = {
    types.NoneType: lambda _, v: v,
    bool: lambda _, v: v,
    float: lambda _, v: v,
    bytes: lambda _, v: v,
    int: _pack_int,
    str: _pack_str,
    list: lambda p, v: p.pack_items(None, v),
    tuple: lambda p, v: p.pack_items(Tag.TUPLE, v),
    set: lambda p, v: p.pack_items(Tag.SET, v),
    frozenset: lambda p, v: p.pack_items(Tag.FROZENSET, v),
    dict: lambda p, v: p.pack_mapping(v),
    deque: lambda p, v: p.extension(Tag.DEQUE, [p.pack_items(None, v), v.maxlen]),
    OrderedDict: lambda p, v: p.extension(Tag.ORDERED, p.pack_mapping(v)),
    Counter: lambda p, v: p.extension(Tag.COUNTER, p.pack_mapping(v)),
    defaultdict: lambda p, v: p.extension(Tag.DEFAULTDICT, [_factory_name(v.default_factory), p.pack_mapping(v)]),
    types.SimpleNamespace: lambda p, v: p.extension(Tag.NAMESPACE, p.pack_mapping(vars(v))),
    bytearray: lambda _, v: _ext(Tag.BYTEARRAY, bytes(v)),
    complex: lambda p, v: p.extension(Tag.COMPLEX, [v.real, v.imag]),
    dt.datetime: lambda p, v: p.extension(Tag.DATETIME, [v.isoformat(), v.fold]),
    dt.date: lambda p, v: p.extension(Tag.DATE, v.isoformat()),
    dt.time: lambda p, v: p.extension(Tag.TIME, [v.isoformat(), v.fold]),
    dt.timedelta: lambda p, v: p.extension(Tag.TIMEDELTA, [v.days, v.seconds, v.microseconds]),
    Decimal: lambda p, v: p.extension(Tag.DECIMAL, str(v)),
    Fraction: lambda p, v: p.extension(Tag.FRACTION, [p.pack(v.numerator), p.pack(v.denominator)]),
    uuid.UUID: lambda _, v: _ext(Tag.UUID, v.bytes),
    range: lambda p, v: p.extension(Tag.RANGE, [p.pack(v.start), p.pack(v.stop), p.pack(v.step)]),
    types.EllipsisType: lambda p, _: p.extension(Tag.ELLIPSIS, None),
}


def _factory_name(factory: object) -> str | None:
    return next((name for name, known in _FACTORIES.items() if known is factory), None)


class Unpacker:
    """Decodes what a `Packer` encoded.

    Args:
        known: the only classes that may be used, by `class_key`.
        make_object: makes an object from the payload of `Tag.OBJECT`.
    """

    def __init__(self, known: dict[str, type], make_object: Callable[[memoryview], object]) -> None:
        self._known = known
        self._make_object = make_object
        self._decoder = msgspec.msgpack.Decoder(ext_hook=self._read)

    def unpack(self, data: "bytes | memoryview | msgspec.Raw") -> Any:
        """Decode a value.

        Raises:
            UnfreezableError: the bytes are valid, but the value cannot be made here.
            Exception: `msgspec.MsgspecError`, `ValueError` and the like for invalid bytes.
        """
        return self._decoder.decode(data)

    def _read(self, code: int, data: memoryview) -> object:
        if code == Tag.OBJECT:
            return self._make_object(data)
        if code in _RAW_READERS:
            return _RAW_READERS[code](bytes(data))
        payload = self._decoder.decode(data)
        if code == Tag.ENUM:
            return self._enum(*payload)
        if code in (Tag.SET, Tag.FROZENSET, Tag.MAP):
            return _read_hashed(code, payload)
        return _READERS[code](payload)

    def _enum(self, key: str, name: str | None, value: object) -> object:
        """Return the member with that name, a flag combination by value, or the plain value for an unknown class."""
        cls = self._known.get(key)
        if not isinstance(cls, type) or not issubclass(cls, Enum):
            return value
        if name is not None and name in cls.__members__:
            return cls.__members__[name]
        if issubclass(cls, Flag) and isinstance(value, int):
            return cls(value)
        raise ValueError(f"{key} has no member {name!r}")


def _read_hashed(code: int, payload: Any) -> object:
    """Make a set or dict; hashing the items may run the user's code."""
    if not isinstance(payload, list):
        raise TypeError("expected an array")
    pairs = [(key, value) for key, value in payload] if code == Tag.MAP else []
    try:
        return dict(pairs) if code == Tag.MAP else (set if code == Tag.SET else frozenset)(payload)
    except Exception as error:
        raise UnfreezableError(f"its items cannot be hashed: {type(error).__name__}: {error}") from error


def _expect(kind: type, value: Any) -> Any:
    """Check a payload's type: a few bytes of another type could expand until memory is full."""
    if not isinstance(value, kind):
        raise TypeError(f"expected a {kind.__name__}, not a {type(value).__name__}")
    return value


def _read_array(dtype: str, shape: list[int], data: bytes) -> Any:
    try:
        import numpy as np
    except ImportError as error:
        raise UnfreezableError("it contains numpy arrays, and numpy is not installed here") from error
    kind = np.dtype(dtype)
    if kind.kind not in _DTYPE_KINDS:
        raise ValueError(f"{dtype} is not a supported dtype")
    if kind.itemsize == 0:
        return np.zeros(shape, kind)
    return np.frombuffer(data, kind).reshape(shape).copy()


_RAW_READERS: dict[int, Callable[[bytes], object]] = {
    Tag.INT: lambda b: int.from_bytes(b, "little", signed=True),
    Tag.TEXT: lambda b: b.decode("utf-8", "surrogatepass"),
    Tag.BYTEARRAY: bytearray,
    Tag.UUID: lambda b: uuid.UUID(bytes=b),
}
_READERS: dict[int, Callable[[Any], object]] = {
    Tag.TUPLE: lambda v: tuple(_expect(list, v)),
    Tag.COMPLEX: lambda v: complex(*v),
    Tag.DATETIME: lambda v: dt.datetime.fromisoformat(v[0]).replace(fold=v[1]),
    Tag.DATE: dt.date.fromisoformat,
    Tag.TIME: lambda v: dt.time.fromisoformat(v[0]).replace(fold=v[1]),
    Tag.TIMEDELTA: lambda v: dt.timedelta(*v),
    Tag.DECIMAL: Decimal,
    Tag.FRACTION: lambda v: Fraction(*(_expect(int, part) for part in v)),
    Tag.PATH: Path,
    Tag.RANGE: lambda v: range(*v),
    Tag.ELLIPSIS: lambda _: ...,
    Tag.DEQUE: lambda v: deque(_expect(list, v[0]), v[1]),
    Tag.ORDERED: lambda v: OrderedDict(_expect(dict, v)),
    Tag.COUNTER: lambda v: Counter(_expect(dict, v)),
    Tag.DEFAULTDICT: lambda v: defaultdict(_FACTORIES.get(v[0]), _expect(dict, v[1])),
    Tag.NAMESPACE: lambda v: types.SimpleNamespace(**v),
    Tag.NDARRAY: lambda v: _read_array(*v),
    Tag.SCALAR: lambda v: _read_array(*v)[()],
}
