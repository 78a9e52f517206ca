"""Records of scored groups: that of the rollout, and beside it what scoring has found."""

from stream.codec import decode, encode
from stream.errors import RecordError
from stream.records import Group, Scores


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
