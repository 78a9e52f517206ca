"""A Hugging Face causal model that extends many sequences at once, each in its own slot of the cache."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor

from stream.errors import EngineError
from workers.engine.cache import SlotCache
from workers.engine.model_folder import load_model

log = structlog.get_logger()

PASS_TOKENS = 4096
"""Tokens of one forward pass, padding included; a longer prompt goes in pieces."""


class SlotModel:
    """Model and cache together; not thread-safe, the generation thread owns it."""

    def __init__(self, model: Any, *, slots: int, max_length: int) -> None:
        """Take over a loaded model.

        Args:
            model: a causal model of transformers' own kind, on the CPU.
            slots: sequences that can be held.
            max_length: tokens of a sequence; lowered to what the model knows positions for.
        """
        config = model.config.get_text_config()
        positions = getattr(config, "max_position_embeddings", None) or max_length
        if positions < max_length:
            log.warning("engine.length_lowered", asked=max_length, length=positions)
        self.max_length: int = min(max_length, positions)
        _check_attention(config, self.max_length)
        self.slots = slots
        self.vocabulary: int = config.vocab_size
        self.model = model.eval().requires_grad_(requires_grad=False)
        self.end_ids = frozenset(_end_ids(model.config) + _end_ids(getattr(model, "generation_config", None)))
        self._cache = SlotCache(slots, self.max_length)
        self._positions = torch.arange(self.max_length)
        self._open = torch.zeros((), dtype=model.dtype)
        self._shut = torch.full((), float("-inf"), dtype=model.dtype)

    @classmethod
    def load(cls, path: Path, *, slots: int, max_length: int, dtype: str) -> "SlotModel":
        """Read a model folder.

        Raises:
            SettingsError: the folder holds no causal model, or not all of one.
            EngineError: one that this engine cannot run.
        """
        model = load_model(path, "causal model", getattr(torch, dtype), attn_implementation="sdpa")
        return cls(model, slots=slots, max_length=max_length)

    def extend(self, first: int, suffixes: Sequence[Sequence[int]], known: Sequence[int]) -> Tensor:
        """Feed tokens to the sequences in slots `first`, `first + 1`, ...

        Args:
            first: slot of the first sequence.
            suffixes: tokens to feed, at least one for each sequence.
            known: for each sequence the tokens that its slot already holds.

        Returns:
            float32 logits [len(suffixes), vocabulary] after the last token of each.
        """
        if len(suffixes) == 1 and len(suffixes[0]) > PASS_TOKENS:
            suffix, done = suffixes[0], known[0]
            while len(suffix) > PASS_TOKENS:
                self._forward(first, [suffix[:PASS_TOKENS]], [done])
                suffix, done = suffix[PASS_TOKENS:], done + PASS_TOKENS
            return self._forward(first, [suffix], [done])
        rows = max(1, PASS_TOKENS // max(map(len, suffixes)))
        parts = [
            self._forward(first + start, suffixes[start : start + rows], known[start : start + rows])
            if rows > 1 or len(suffixes) == 1
            else self.extend(first + start, suffixes[start : start + 1], known[start : start + 1])
            for start in range(0, len(suffixes), rows)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy what one slot holds to another."""
        self._cache.copy(source, target, length)

    def clear(self, slot: int) -> None:
        """Forget what a slot holds."""
        self._cache.clear(slot)

    def _forward(self, first: int, suffixes: Sequence[Sequence[int]], known: Sequence[int]) -> Tensor:
        """One pass. Padding stands on the left, so that the last column is everybody's last token."""
        count, width = len(suffixes), max(map(len, suffixes))
        padded = width > 1 and any(len(suffix) < width for suffix in suffixes)
        ids_BT = torch.tensor([[0] * (width - len(suffix)) + [*suffix] for suffix in suffixes])
        lengths = [done + len(suffix) for done, suffix in zip(known, suffixes, strict=True)]
        positions_BT = torch.tensor(lengths)[:, None] - width + self._positions[:width]
        places_BT = torch.arange(first, first + count)[:, None] * self.max_length + positions_BT
        wanted = None
        if padded:
            padding = torch.tensor([width - len(suffix) for suffix in suffixes])[:, None]
            wanted = (self._positions[:width] >= padding).flatten().nonzero().squeeze(1)
            positions_BT = positions_BT.clamp_(min=0)
        places = places_BT.flatten() if wanted is None else places_BT.flatten()[wanted]
        longest = max(lengths)
        mask_BTL = torch.where(self._positions[:longest] <= positions_BT[..., None], self._open, self._shut)
        self._cache.aim(slice(first, first + count), longest, places, wanted)
        output = self.model(
            input_ids=ids_BT,
            attention_mask=mask_BTL[:, None],
            position_ids=positions_BT,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits_BV: Tensor = output.logits[:, -1].float()
        return logits_BV


def _end_ids(config: Any) -> list[int]:
    """The ids that end a turn, of a model's or a generation configuration."""
    ids = getattr(config, "eos_token_id", None)
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else list(ids)


def _check_attention(config: Any, max_length: int) -> None:
    """Refuse models whose layers keep something other than all keys and values."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    strange = kinds - {"full_attention", "sliding_attention"}
    if strange or ("sliding_attention" in kinds and window and window < max_length):
        what = ", ".join(sorted(strange)) or f"a sliding window of {window} tokens, less than max_length {max_length}"
        raise EngineError(f"the local engine cannot run {config.model_type} with {what}; serve it with vLLM")
