"""A Hugging Face causal model that extends many sequences together, each in its own cache slot."""

from array import array
from collections.abc import Mapping, Sequence
from inspect import signature
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor

from stream.errors import EngineError
from workers.local_engine.kv_cache import SlotKVCache
from workers.local_engine.shared_prefill import plan_shared_passes
from workers.local_engine.weights import load_model

log = structlog.get_logger()

MAX_TOKENS_PER_PASS = 4096
"""Largest number of tokens in one forward pass, padding included; longer prompts are fed in parts."""


class SlotModel:
    """A model with its cache. Not thread-safe: the generation thread owns it."""

    def __init__(self, model: Any, *, slots: int, max_length: int, max_cache_bytes: int = 1 << 62) -> None:
        """Wrap a loaded model.

        Args:
            model: transformers' causal model, on the CPU.
            slots: number of sequences in the cache.
            max_length: largest number of tokens in a sequence; at most the model's positions.
            max_cache_bytes: memory for keys and values; there is always room for one sequence.

        Raises:
            EngineError: the model's attention is not supported.
        """
        config = model.config.get_text_config()
        positions = getattr(config, "max_position_embeddings", None) or max_length
        if positions < max_length:
            log.warning("engine.max_length_reduced", asked=max_length, length=positions)
        self.max_length: int = min(max_length, positions)
        _check_attention(config, self.max_length)
        self.slots = slots
        self.vocab_size: int = config.vocab_size
        self.model = model.eval().requires_grad_(requires_grad=False)
        self.eos_token_ids = frozenset(
            _eos_token_ids(model.config) + _eos_token_ids(getattr(model, "generation_config", None))
        )
        self._cache = SlotKVCache(slots, self.max_length)
        self._token_bytes = _token_bytes(config, model.dtype)
        self.max_cached_tokens = max(self.max_length, max_cache_bytes // self._token_bytes)
        """Tokens for whose keys and values there is memory."""
        # transformers 5.24 deprecates the older name; older releases know it alone.
        self._cache_argument = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
        self._positions = torch.arange(self.max_length)
        self._visible = torch.zeros((), dtype=model.dtype)
        self._masked = torch.full((), float("-inf"), dtype=model.dtype)

    @classmethod
    def load(
        cls, path: Path, *, slots: int, max_length: int, dtype: str, max_cache_bytes: int = 1 << 62
    ) -> "SlotModel":
        """Load a model folder.

        Raises:
            SettingsError: the folder holds no causal model, or an incomplete one.
            EngineError: the model's attention is not supported.
        """
        model = load_model(path, "causal model", getattr(torch, dtype), attn_implementation="sdpa")
        return cls(model, slots=slots, max_length=max_length, max_cache_bytes=max_cache_bytes)

    @property
    def cache_bytes(self) -> int:
        """Memory that keys and values take."""
        return self._cache.written_tokens * (self._cache.token_bytes or self._token_bytes)

    @property
    def max_cache_bytes(self) -> int:
        """Memory that keys and values may take."""
        return min(self.max_cached_tokens, self.slots * self.max_length) * self._token_bytes

    def fit_cache(self, kept: Mapping[int, int]) -> None:
        """Give back memory of slots if they take more than they may.

        Args:
            kept: tokens of each sequence that is still needed, by slot.
        """
        if self._cache.written_tokens > self.max_cached_tokens:
            self._cache.release(kept)

    def prefill(
        self, slots: Sequence[int], sequences: Sequence[Sequence[int]], known: Sequence[int]
    ) -> tuple[Tensor, int]:
        """Compute sequences to their ends; what several of them begin with is computed once, and copied.

        Args:
            slots: one for each sequence.
            sequences: all tokens of each sequence.
            known: number of tokens that the slot of each sequence holds already; less than all.

        Returns:
            Logits as of `extend`, and the number of tokens that were computed.
        """
        held, computed = [*known], 0
        plan = plan_shared_passes([array("i", tokens).tobytes() for tokens in sequences], known)
        for _, level in groupby(plan, attrgetter("level")):
            shared = [*level]
            new = [each for each in shared if each.end > held[each.row]]
            if new:
                tokens = [sequences[each.row][held[each.row] : each.end] for each in new]
                self.extend([slots[each.row] for each in new], tokens, [held[each.row] for each in new])
                computed += sum(map(len, tokens))
            for each in shared:
                held[each.row] = max(held[each.row], each.end)
                for copy in each.copies:
                    self.copy_slot(slots[each.row], slots[copy], each.end)
                    held[copy] = each.end
        tokens = [sequence[have:] for sequence, have in zip(sequences, held, strict=True)]
        return self.extend(slots, tokens, held), computed + sum(map(len, tokens))

    def extend(
        self, slots: Sequence[int], new_tokens: Sequence[Sequence[int]], cached_lengths: Sequence[int]
    ) -> Tensor:
        """Feed tokens to sequences.

        Args:
            slots: slot of each sequence.
            new_tokens: tokens of each sequence, at least one.
            cached_lengths: number of tokens that the slot of each sequence holds already.

        Returns:
            float32 logits [len(new_tokens), vocabulary] after the last token of each sequence.
        """
        if len(new_tokens) == 1 and len(new_tokens[0]) > MAX_TOKENS_PER_PASS:
            suffix, done = new_tokens[0], cached_lengths[0]
            while len(suffix) > MAX_TOKENS_PER_PASS:
                self._forward(slots, [suffix[:MAX_TOKENS_PER_PASS]], [done])
                suffix, done = suffix[MAX_TOKENS_PER_PASS:], done + MAX_TOKENS_PER_PASS
            return self._forward(slots, [suffix], [done])
        rows = max(1, MAX_TOKENS_PER_PASS // max(map(len, new_tokens)))
        parts = []
        for start in range(0, len(new_tokens), rows):
            part = slice(start, start + rows)
            extend = self._forward if rows > 1 or len(new_tokens) == 1 else self.extend
            parts.append(extend(slots[part], new_tokens[part], cached_lengths[part]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def copy_slot(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        self._cache.copy_slot(source, target, length)

    def clear_slot(self, slot: int) -> None:
        """Zero a slot."""
        self._cache.clear_slot(slot)

    def _forward(
        self, slots: Sequence[int], new_tokens: Sequence[Sequence[int]], cached_lengths: Sequence[int]
    ) -> Tensor:
        """Run one forward pass. Padding is on the left, so that the last column has the last token of each row."""
        count, width = len(new_tokens), max(map(len, new_tokens))
        padded = width > 1 and any(len(suffix) < width for suffix in new_tokens)
        ids_BT = torch.tensor([[0] * (width - len(suffix)) + [*suffix] for suffix in new_tokens])
        lengths = [done + len(suffix) for done, suffix in zip(cached_lengths, new_tokens, strict=True)]
        positions_BT = torch.tensor(lengths)[:, None] - width + self._positions[:width]
        numbers = torch.tensor(slots)
        places_BT = numbers[:, None] * self.max_length + positions_BT
        wanted = None
        if padded:
            padding = torch.tensor([width - len(suffix) for suffix in new_tokens])[:, None]
            wanted = (self._positions[:width] >= padding).flatten().nonzero().squeeze(1)
            positions_BT = positions_BT.clamp_(min=0)
        places = places_BT.flatten() if wanted is None else places_BT.flatten()[wanted]
        longest = max(lengths)
        mask_BTL = torch.where(self._positions[:longest] <= positions_BT[..., None], self._visible, self._masked)
        are_neighbours = all(slot == slots[0] + row for row, slot in enumerate(slots))
        rows = slice(slots[0], slots[0] + count) if are_neighbours else numbers
        self._cache.begin_pass(rows, longest, places, wanted)
        output = self.model(
            input_ids=ids_BT,
            attention_mask=mask_BTL[:, None],
            position_ids=positions_BT,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: self._cache},
        )
        logits_BV: Tensor = output.logits[:, -1].float()
        return logits_BV


def _eos_token_ids(config: Any) -> list[int]:
    """Return the EOS token ids of a model configuration or a generation configuration."""
    ids = getattr(config, "eos_token_id", None)
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else list(ids)


def _token_bytes(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of the keys and values of one token."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    fewer = getattr(config, "num_key_value_heads", None) or heads
    return int(2 * config.num_hidden_layers * fewer * size * dtype.itemsize)


def _check_attention(config: Any, max_length: int) -> None:
    """Refuse models with layers other than full attention.

    Raises:
        EngineError: the model has another kind of layer; the message names it.
    """
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    strange = kinds - {"full_attention", "sliding_attention"}
    if strange or ("sliding_attention" in kinds and window and window < max_length):
        what = ", ".join(sorted(strange)) or f"a sliding window of {window} tokens, less than max_length {max_length}"
        raise EngineError(f"the local engine cannot run {config.model_type} with {what}; serve it with vLLM")
