"""The token ids of a conversation that grows turn by turn, kept as numbers and as the JSON of engine requests."""

from array import array
from collections.abc import Iterator, Sequence
from typing import overload

import msgspec

_encode = msgspec.json.Encoder().encode


class TokenIds(Sequence[int]):
    """An append-only sequence of token ids that also keeps the ids' JSON.

    A turn of a long episode therefore converts only the ids that it adds, never the whole context again. An id takes
    four bytes, and about six more as JSON, instead of a Python object. Copies share the JSON, a list of byte strings.

    Example:
        >>> ids = TokenIds([1, 2])
        >>> ids.extend([3])
        >>> ids.json
        b'[1,2,3]'
    """

    __slots__ = ("_ids", "_json")

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self._ids = array("i")
        self._json: list[bytes] = []
        self.extend(ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        """Return an id, or the list of a slice's ids."""
        return self._ids[index].tolist() if isinstance(index, slice) else self._ids[index]

    @property
    def json(self) -> bytes:
        """The ids as a JSON array."""
        return b"".join((b"[", *self._json, b"]"))

    def extend(self, ids: Sequence[int]) -> None:
        """Append ids, and the JSON of these ids alone."""
        if not ids:
            return
        if self._ids:
            self._json.append(b",")
        if type(ids) is TokenIds:  # `isinstance` with an abstract class is slow for a list
            self._json += ids._json  # noqa: SLF001  (the same class)
            self._ids += ids._ids  # noqa: SLF001
        else:
            listed = ids if type(ids) is list else list(ids)
            self._json.append(_encode(listed)[1:-1])
            self._ids.fromlist(listed)  # takes half the time of `extend`, which accepts any iterable

    def copy(self) -> "TokenIds":
        """Return a copy, which grows on its own."""
        copied = TokenIds()
        copied._ids[:], copied._json[:] = self._ids, self._json
        return copied

    def is_prefix_of(self, ids: "TokenIds") -> bool:
        """Return whether `ids` begins with all ids of this sequence."""
        count, last, others = len(self), self._ids[-1:], ids._ids  # noqa: SLF001  (the same class)
        # The last id alone mostly decides, without the copy that the slice of the whole prefix makes.
        return last == others[count - len(last) : count] and self._ids == others[:count]

    def tobytes(self, start: int, end: int) -> bytes:
        """Return the ids of a range as int32."""
        return self._ids[start:end].tobytes()

    def tolist(self) -> list[int]:
        """Return the ids as a new list."""
        return self._ids.tolist()
