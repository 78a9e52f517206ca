"""A Hugging Face causal model that extends many sequences together, each in its own cache slot."""

from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor

from stream.errors import EngineError
from workers.local_engine.kv_cache import SlotKVCache
from workers.local_engine.weights import load_model

log = structlog.get_logger()

MAX_TOKENS_PER_PASS = 4096
"""Largest number of tokens in one forward pass, padding included; longer prompts are fed in parts."""


class SlotModel:
    """A model with its cache. Not thread-safe: the generation thread owns it."""

    def __init__(self, model: Any, *, slots: int, max_length: int) -> None:
        """Wrap a loaded model.

        Args:
            model: transformers' causal model, on the CPU.
            slots: number of sequences in the cache.
            max_length: largest number of tokens in a sequence; at most the model's positions.

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
        # transformers 5.24 deprecates the older name; older releases know it alone.
        self._cache_argument = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
        self._positions = torch.arange(self.max_length)
        self._visible = torch.zeros((), dtype=model.dtype)
        self._masked = torch.full((), float("-inf"), dtype=model.dtype)

    @classmethod
    def load(cls, path: Path, *, slots: int, max_length: int, dtype: str) -> "SlotModel":
        """Load a model folder.

        Raises:
            SettingsError: the folder holds no causal model, or an incomplete one.
            EngineError: the model's attention is not supported.
        """
        model = load_model(path, "causal model", getattr(torch, dtype), attn_implementation="sdpa")
        return cls(model, slots=slots, max_length=max_length)

    def extend(self, first_slot: int, new_tokens: Sequence[Sequence[int]], cached_lengths: Sequence[int]) -> Tensor:
        """Feed tokens to the sequences in slots `first_slot`, `first_slot + 1`, ...

        Args:
            first_slot: slot of the first sequence.
            new_tokens: tokens of each sequence, at least one.
            cached_lengths: number of tokens that the slot of each sequence holds already.

        Returns:
            float32 logits [len(new_tokens), vocabulary] after the last token of each sequence.
        """
        if len(new_tokens) == 1 and len(new_tokens[0]) > MAX_TOKENS_PER_PASS:
            suffix, done = new_tokens[0], cached_lengths[0]
            while len(suffix) > MAX_TOKENS_PER_PASS:
                self._forward(first_slot, [suffix[:MAX_TOKENS_PER_PASS]], [done])
                suffix, done = suffix[MAX_TOKENS_PER_PASS:], done + MAX_TOKENS_PER_PASS
            return self._forward(first_slot, [suffix], [done])
        rows = max(1, MAX_TOKENS_PER_PASS // max(map(len, new_tokens)))
        parts = [
            self._forward(first_slot + start, new_tokens[start : start + rows], cached_lengths[start : start + rows])
            if rows > 1 or len(new_tokens) == 1
            else self.extend(first_slot + start, new_tokens[start : start + 1], cached_lengths[start : start + 1])
            for start in range(0, len(new_tokens), rows)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def copy_slot(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        self._cache.copy_slot(source, target, length)

    def clear_slot(self, slot: int) -> None:
        """Zero a slot."""
        self._cache.clear_slot(slot)

    def _forward(self, first_slot: int, new_tokens: Sequence[Sequence[int]], cached_lengths: Sequence[int]) -> Tensor:
        """Run one forward pass. Padding is on the left, so that the last column has the last token of each row."""
        count, width = len(new_tokens), max(map(len, new_tokens))
        padded = width > 1 and any(len(suffix) < width for suffix in new_tokens)
        ids_BT = torch.tensor([[0] * (width - len(suffix)) + [*suffix] for suffix in new_tokens])
        lengths = [done + len(suffix) for done, suffix in zip(cached_lengths, new_tokens, strict=True)]
        positions_BT = torch.tensor(lengths)[:, None] - width + self._positions[:width]
        places_BT = torch.arange(first_slot, first_slot + count)[:, None] * self.max_length + positions_BT
        wanted = None
        if padded:
            padding = torch.tensor([width - len(suffix) for suffix in new_tokens])[:, None]
            wanted = (self._positions[:width] >= padding).flatten().nonzero().squeeze(1)
            positions_BT = positions_BT.clamp_(min=0)
        places = places_BT.flatten() if wanted is None else places_BT.flatten()[wanted]
        longest = max(lengths)
        mask_BTL = torch.where(self._positions[:longest] <= positions_BT[..., None], self._visible, self._masked)
        self._cache.begin_pass(slice(first_slot, first_slot + count), longest, places, wanted)
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
