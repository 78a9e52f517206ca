"""Keys and values of all sequences in preallocated slots, behind transformers' `Cache` interface.

Each layer has the layout `[slot, position, head, channel]`: writing one token of many rows is one `index_copy_`, moving
a sequence is one contiguous copy, and reading the first n slots up to the longest sequence is a view.

Finds finished sequences whose keys and values are still cached, for the next turn of an episode.
"""

from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache


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
        self._rows = slice(0)
        self._pass_length = 0
        self._slot_mapping = torch.empty(0, dtype=torch.long)
        self._unpadded: Tensor | None = None

    def begin_pass(self, rows: slice, max_length: int, slot_mapping: Tensor, unpadded: Tensor | None) -> None:
        """Select the slots and positions of the next forward pass.

        Args:
            rows: slots to read.
            max_length: number of positions to read.
            slot_mapping: `slot * capacity + position` of each new token, in the order of the batch, where `capacity` is
                the length of a slot.
            unpadded: flat indices (rows x columns) of the tokens that are not padding; None if there is no padding.
        """
        self._rows, self._pass_length, self._slot_mapping, self._unpadded = rows, max_length, slot_mapping, unpadded

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
        """Allocate one layer. Zeros from numpy take no physical memory until written."""
        _, heads, _, channels = states_BHTC.shape
        count = self._slots * self._max_length * heads * channels
        memory = torch.from_numpy(np.zeros(count * states_BHTC.element_size(), dtype=np.uint8))
        return memory.view(states_BHTC.dtype).view(self._slots, self._max_length, heads, channels)

    def _write(self, layer: Tensor, states_BHTC: Tensor) -> None:
        flat = states_BHTC.transpose(1, 2).reshape(-1, layer.shape[2] * layer.shape[3])
        if self._unpadded is not None:
            flat = flat[self._unpadded]
        layer.view(-1, flat.shape[1]).index_copy_(0, self._slot_mapping, flat)


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
