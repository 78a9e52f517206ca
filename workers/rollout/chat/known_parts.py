"""What is known of one conversation from its earlier turns, where the template writes everything anew before each."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from workers.rollout.chat.renderer import Piece
from workers.rollout.token_ids import TokenIds

T = TypeVar("T")


class KnownParts:
    """The ids of one conversation's parts, so that a turn encodes only what is new.

    Attributes:
        settled: the first pieces, which the template writes as before.
        settled_ids: the ids of all of them.
        parts: ids of texts and turns, settled or not.
        segments: ids of texts between special tokens: a tool's result stays when the text around it changes.
    """

    def __init__(self) -> None:
        self.settled: list[Piece] = []
        self.settled_ids = TokenIds()
        self.parts: RecentlyUsed[TokenIds] = RecentlyUsed()
        self.segments: RecentlyUsed[list[int]] = RecentlyUsed()

    def unsettle(self) -> None:
        """Forget which pieces are settled: the template wrote another one of them now."""
        self.settled, self.settled_ids = [], TokenIds()

    def drop_unused(self) -> None:
        """Forget the parts that were not asked for since the last time."""
        self.parts.drop_unused()
        self.segments.drop_unused()


class RecentlyUsed(Generic[T]):
    """Values by key, those alone that were asked for recently."""

    def __init__(self) -> None:
        self._last: dict[Hashable, T] = {}
        self._now: dict[Hashable, T] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value of a key; make it if it is not there."""
        value = self._now.get(key)
        if value is None:
            value = self._last.get(key)
            self._now[key] = value = make() if value is None else value
        return value

    def drop_unused(self) -> None:
        """Forget the values that were not asked for since the last time."""
        self._last, self._now = self._now, {}
