"""Keys and values of all sequences in preallocated slots, behind transformers' `Cache` interface.

Each layer has the layout `[slot, position, head, channel]`: writing one token of many rows is one `index_copy_`, moving
a sequence is one contiguous copy, and reading the first n slots up to the longest sequence is a view.

What slots take is bounded by `max_tokens`: a slot takes memory only where something was written, and gives it back when
all of them together would take more. Slots of finished sequences are kept for the next turn of their episode.
"""

import mmap
from bisect import bisect, insort
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from workers.local_engine.shared_prefill import TOKEN_BYTES, longest_shared


class SlotKVCache(Cache):  # type: ignore[misc]
    """A fixed number of slots, each for one sequence of at most `max_length` tokens.

    `begin_pass` selects the slots of a forward pass; then each attention layer calls `update`, which writes the new
    keys and values and returns all keys and values of the selected slots.
    """

    def __init__(self, slots: int, max_length: int) -> None:
        super().__init__(layers=[])
        self._slots = slots
        self._max_length = max_length
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._rows: slice | Tensor = slice(0)
        self._pass_length = 0
        self._slot_mapping = torch.empty(0, dtype=torch.long)
        self._unpadded: Tensor | None = None
        self._memory: list[tuple[mmap.mmap, int]] = []
        """The memory of each layer's keys, or values, and the bytes of one position."""
        self._written = [0] * slots
        """Positions of each slot that take memory."""

    @property
    def written_tokens(self) -> int:
        """Positions of all slots that take memory."""
        return sum(self._written)

    @property
    def token_bytes(self) -> int:
        """Bytes of one position in all layers; 0 before the first pass."""
        return sum(size for _, size in self._memory)

    def release(self, kept: Mapping[int, int]) -> None:
        """Give back the memory of all slots, but for the first positions of some.

        Args:
            kept: number of positions to keep, by slot.
        """
        for slot, written in enumerate(self._written):
            keep = kept.get(slot, 0)
            if written <= keep:
                continue
            for memory, size in self._memory:
                first = (slot * self._max_length + keep) * size
                end = (slot * self._max_length + written) * size
                first, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
                if end > first:  # the rest shares pages with other positions
                    memory.madvise(mmap.MADV_DONTNEED, first, end - first)
            self._written[slot] = keep

    def begin_pass(self, rows: slice | Tensor, max_length: int, slot_mapping: Tensor, unpadded: Tensor | None) -> None:
        """Select the slots and positions of the next forward pass.

        Args:
            rows: slots to read; slots that are neighbours, as a slice, are read without a copy.
            max_length: number of positions to read.
            slot_mapping: `slot * capacity + position` of each new token, in the order of the batch, where `capacity` is
                the length of a slot.
            unpadded: flat indices (rows x columns) of the tokens that are not padding; None if there is no padding.
        """
        self._rows, self._pass_length, self._slot_mapping, self._unpadded = rows, max_length, slot_mapping, unpadded
        numbers = range(self._slots)[rows] if isinstance(rows, slice) else rows.tolist()
        for slot in numbers:
            self._written[slot] = max(self._written[slot], max_length)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write states [row, head, column, channel] of new tokens, and return all states of the selected slots."""
        if layer_idx == len(self._keys):
            self._keys.append(self._allocate(key_states))
            self._values.append(self._allocate(value_states))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        self._write(keys, key_states)
        self._write(values, value_states)
        return (
            keys[self._rows, : self._pass_length].transpose(1, 2),
            values[self._rows, : self._pass_length].transpose(1, 2),
        )

    def copy_slot(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        for layer in (*self._keys, *self._values):
            layer[target, :length] = layer[source, :length]
        self._written[target] = max(self._written[target], length)

    def clear_slot(self, slot: int) -> None:
        """Zero a slot that may hold NaN: masked positions are multiplied by 0, which keeps NaN."""
        for layer in (*self._keys, *self._values):
            layer[slot].zero_()

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Return 0. Models call this, but positions and mask are always passed explicitly."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002
        """Return the number of keys in the next pass, and the position of the first key."""
        return self._pass_length, 0

    def _allocate(self, states_BHTC: Tensor) -> Tensor:
        """Allocate one layer: zeros that take no physical memory until written, and then by small pages.

        With huge pages, as numpy asks for them, a short sequence in a long slot would take 2 MiB of each layer.
        """
        _, heads, _, channels = states_BHTC.shape
        size = heads * channels * states_BHTC.element_size()
        count = self._slots * self._max_length * size
        try:
            memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"{count:,} bytes of addresses for one layer's keys: {error}") from error
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        self._memory.append((memory, size))
        flat = torch.frombuffer(memory, dtype=states_BHTC.dtype)
        return flat.view(self._slots, self._max_length, heads, channels)

    def _write(self, layer: Tensor, states_BHTC: Tensor) -> None:
        flat = states_BHTC.transpose(1, 2).reshape(-1, layer.shape[2] * layer.shape[3])
        if self._unpadded is not None:
            flat = flat[self._unpadded]
        layer.view(-1, flat.shape[1]).index_copy_(0, self._slot_mapping, flat)


class PrefixCache:
    """Maps token sequences to cache slots and evicts the least recently used; the tensors are in `SlotKVCache`.

    Args:
        slots: slots for finished sequences.
    """

    def __init__(self, slots: range) -> None:
        self._free = list(slots)
        self._cached: OrderedDict[int, bytes] = OrderedDict()
        self._ordered: list[tuple[bytes, int]] = []
        """The same, in lexicographic order."""

    def longest_match(self, tokens: bytes) -> tuple[int, int]:
        """Return the slot of the sequence that begins as `tokens` do, for longest, and the tokens shared.

        (0, 0): none begins so.
        """
        slot, length = longest_shared(self._ordered, tokens)
        if length:
            self._cached.move_to_end(slot)
        return slot, length

    def reserve(self, tokens: bytes) -> int | None:
        """Reserve a slot for a finished sequence, if necessary by an eviction. None: the sequence is already cached.

        Args:
            tokens: bytes of the sequence as int32.
        """
        place = bisect(self._ordered, (tokens, -1))
        if place < len(self._ordered) and self._ordered[place][0] == tokens:
            return None
        if not self._free:
            self._evict()
        slot = self._free.pop()
        self._cached[slot] = tokens
        insort(self._ordered, (tokens, slot))
        return slot

    def _evict(self) -> int:
        """Forget the sequence that was used least recently; return its bytes."""
        slot, tokens = self._cached.popitem(last=False)
        self._ordered.remove((tokens, slot))
        self._free.append(slot)
        return len(tokens)

    @property
    def lengths(self) -> dict[int, int]:
        """Tokens of each cached sequence, by slot."""
        return {slot: len(cached) // TOKEN_BYTES for slot, cached in self._cached.items()}

    def shrink(self, max_tokens: int) -> None:
        """Forget sequences, the least recently used first, until the others have at most this number of tokens."""
        tokens = sum(self.lengths.values())
        while self._cached and tokens > max_tokens:
            tokens -= self._evict() // TOKEN_BYTES

    def clear(self) -> None:
        """Forget all sequences."""
        self._free += self._cached
        self._cached.clear()
        self._ordered.clear()
