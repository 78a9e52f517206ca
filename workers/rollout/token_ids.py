"""Token ids of a context that grows turn by turn, and the JSON in which an engine gets them."""

from array import array
from collections.abc import Iterator, Sequence
from typing import overload

import msgspec

_encode = msgspec.json.Encoder().encode


class TokenIds(Sequence[int]):
    """A sequence of token ids that only grows at its end, with its JSON.

    Both are kept, so a turn of a long episode converts only the ids that it adds: four bytes each, and about six of
    JSON, instead of an object for every id of the whole context. Copies share the JSON, which is in parts.

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
        """Append ids."""
        if not ids:
            return
        if self._ids:
            self._json.append(b",")
        if type(ids) is TokenIds:  # `isinstance` with an abstract class takes long for a list
            self._json += ids._json  # noqa: SLF001  (its own class)
            self._ids += ids._ids  # noqa: SLF001
        else:
            listed = ids if type(ids) is list else list(ids)
            self._json.append(_encode(listed)[1:-1])
            self._ids.fromlist(listed)  # half the time of `extend`, which takes any iterable

    def copy(self) -> "TokenIds":
        """Return a copy, which grows on its own."""
        copied = TokenIds()
        copied._ids[:], copied._json[:] = self._ids, self._json
        return copied

    def is_prefix_of(self, ids: "TokenIds") -> bool:
        """Return whether others start with these ids; compares memory."""
        count, last, theirs = len(self), self._ids[-1:], ids._ids  # noqa: SLF001  (its own class)
        return last == theirs[count - len(last) : count] and self._ids == theirs[:count]  # mostly without the copy

    def tobytes(self, start: int, end: int) -> bytes:
        """Return the ids of a range as int32."""
        return self._ids[start:end].tobytes()

    def tolist(self) -> list[int]:
        """Return the ids as a new list."""
        return self._ids.tolist()
