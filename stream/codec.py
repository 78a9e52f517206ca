"""Encoding of records: a header with schema version and checksum, then msgpack.

::

    b"PS"  schema (1 byte)  crc32 of schema and body (4 bytes, little-endian)  body (msgpack)

The record of a scored group is that of the rollout, with what scoring has found beside it.
"""

import struct
from typing import TypeVar
from zlib import crc32

import msgspec

from stream.errors import NewerSchemaError, RecordError
from stream.records import SCHEMA, Group, Scores

_HEADER = struct.Struct("<2sBI")
_MAGIC = b"PS"
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type, msgspec.msgpack.Decoder[object]] = {}

MAX_RECORD_BYTES = 256 * 1024 * 1024
"""The largest record that is written or read; Redis itself accepts at most 512 MiB."""

T = TypeVar("T", bound=msgspec.Struct)


def encode(record: msgspec.Struct) -> bytes:
    """Encode a record.

    Raises:
        RecordError: the record is larger than `MAX_RECORD_BYTES`, or has a value that msgpack cannot represent.
    """
    try:
        body = _encoder.encode(record)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RecordError(f"a {type(record).__name__} cannot be encoded: {error}") from error
    if len(body) > MAX_RECORD_BYTES:
        raise RecordError(f"a {type(record).__name__} of {len(body)} bytes is over the limit of {MAX_RECORD_BYTES}")
    return _HEADER.pack(_MAGIC, SCHEMA, crc32(body, SCHEMA)) + body


def decode(payload: bytes, kind: type[T]) -> T:
    """Decode a record of the given kind.

    Raises:
        NewerSchemaError: a newer major version wrote it.
        RecordError: the bytes are invalid for any other reason.
    """
    if len(payload) < _HEADER.size or len(payload) > MAX_RECORD_BYTES + _HEADER.size:
        raise RecordError(f"{len(payload)} bytes cannot be a record")
    magic, schema, checksum = _HEADER.unpack_from(payload)
    if magic != _MAGIC:
        raise RecordError("not a record: it does not begin with the bytes PS")
    body = memoryview(payload)[_HEADER.size :]
    if crc32(body, schema) != checksum:
        raise RecordError("damaged: the checksum does not match")
    if schema > SCHEMA:
        raise NewerSchemaError(f"schema {schema}; this version reads up to {SCHEMA}")
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        return decoder.decode(body)  # type: ignore[return-value]
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not a {kind.__name__}: {error}") from error


def decode_group(payload: bytes, scores: bytes) -> Group:
    """Decode a group, and set its scores; empty: the record has them, or there are none.

    Raises:
        NewerSchemaError: a newer major version wrote one of them.
        RecordError: the bytes are invalid, or do not belong together.
    """
    group = decode(payload, Group)
    if scores:
        group.set_scores(decode(scores, Scores))
    return group


def join_record(payload: bytes, scores: bytes) -> bytes:
    """Return the record of a group with its scores; the payload alone if they cannot be joined."""
    if not scores:
        return payload
    try:
        return encode(decode_group(payload, scores))
    except RecordError:
        return payload
