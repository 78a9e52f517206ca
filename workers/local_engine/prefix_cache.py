"""Which finished sequences are still in the cache, so that the next turn of an episode need not compute them again."""

from collections import OrderedDict

_TOKEN_BYTES = 4


class PrefixCache:
    """Least recently used book-keeping over a range of slots; the keys and values themselves lie in the cache."""

    def __init__(self, slots: range) -> None:
        self._free = list(slots)
        self._cached: OrderedDict[int, bytes] = OrderedDict()

    def longest_match(self, tokens: bytes) -> tuple[int, int] | None:
        """The slot with the longest sequence that `tokens` begins with, and how many tokens that sequence has."""
        slots = [slot for slot, held in self._cached.items() if tokens.startswith(held)]
        if not slots:
            return None
        best = max(slots, key=lambda slot: len(self._cached[slot]))
        self._cached.move_to_end(best)
        return best, len(self._cached[best]) // _TOKEN_BYTES

    def reserve(self, tokens: bytes) -> int | None:
        """Reserve a slot for a finished sequence, at the cost of the one unused longest; None where it is held already.

        Args:
            tokens: the sequence as int32.
        """
        if tokens in self._cached.values():
            return None
        if not self._free:
            slot, _ = self._cached.popitem(last=False)
        else:
            slot = self._free.pop()
        self._cached[slot] = tokens
        return slot

    def clear(self) -> None:
        """Forget everything: the weights have changed, or somebody asked."""
        self._free += self._cached
        self._cached.clear()
