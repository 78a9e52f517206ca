"""Finds finished sequences whose keys and values are still cached, for the next turn of an episode."""

from collections import OrderedDict

_TOKEN_BYTES = 4


class PrefixCache:
    """Maps token sequences to cache slots and evicts the least recently used; the tensors are in `SlotKVCache`.

    Args:
        slots: slots for finished sequences.
    """

    def __init__(self, slots: range) -> None:
        self._free = list(slots)
        self._cached: OrderedDict[int, bytes] = OrderedDict()

    def longest_match(self, tokens: bytes) -> tuple[int, int] | None:
        """Return the slot of the longest sequence that is a prefix of `tokens`, and its length in tokens."""
        slots = [slot for slot, cached in self._cached.items() if tokens.startswith(cached)]
        if not slots:
            return None
        best = max(slots, key=lambda slot: len(self._cached[slot]))
        self._cached.move_to_end(best)
        return best, len(self._cached[best]) // _TOKEN_BYTES

    def reserve(self, tokens: bytes) -> int | None:
        """Reserve a slot for a finished sequence, if necessary by an eviction. None: the sequence is already cached.

        Args:
            tokens: bytes of the sequence as int32.
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
        """Forget all sequences."""
        self._free += self._cached
        self._cached.clear()
