"""Requests that have no place yet, and how they come by one: with as much of their prompts as the cache has already."""

from collections import deque
from itertools import islice

import torch

from workers.local_engine.messages import Generation
from workers.local_engine.prefix_cache import PrefixCache
from workers.local_engine.slot_model import SlotModel

_MIN_WAITING_FRACTION, _MAX_DEFERRED_STEPS = 8, 3
"""A prefill costs a step as much for one request as for ten: fewer than an eighth of the running ones wait, so long."""


class AdmissionQueue:
    """The queue, and the prefill at its end.

    Args:
        model: whose slots from 0 on are places.
        prefix_cache: finished sequences that a prompt may begin with.
        max_running: how many there are.
    """

    def __init__(self, model: SlotModel, prefix_cache: PrefixCache, max_running: int) -> None:
        self.waiting: deque[Generation] = deque()
        """In the order in which they came."""
        self.tokens_prefilled = 0
        self._model = model
        self._prefix_cache = prefix_cache
        self._max_running = max_running
        self._deferred_steps = 0

    def should_prefill(self, running: int) -> bool:
        """Whether to prefill in this step, asked once: for several at once, or for whoever has waited a few steps.

        Args:
            running: how many have places.
        """
        waiting = len(self.waiting)
        if not waiting or running == self._max_running:
            return False
        self._deferred_steps += 1
        return waiting * _MIN_WAITING_FRACTION >= running or self._deferred_steps > _MAX_DEFERRED_STEPS

    def admit(self, running: list[Generation], version: str) -> torch.Tensor:
        """Give places to waiting requests, and feed their prompts.

        Args:
            running: those that have places; whoever is admitted is appended.
            version: of the weights.

        Returns:
            Logits (B, V) of those that were admitted, in the order of their rows.
        """
        self._deferred_steps = 0
        first = len(running)
        count = min(self._max_running - first, len(self.waiting))
        unique: dict[bytes, Generation] = {}
        copies = []
        for g in islice(self.waiting, count):
            g.begin_version(version)
            if unique.setdefault(g.prompt_key, g) is not g:
                copies.append(g)
        sources = {key: self._cached_prefix(g, running) for key, g in unique.items()}
        fresh = sorted(unique.values(), key=lambda g: g.prompt_length - sources[g.prompt_key][1])  # alike side by side
        known = [sources[g.prompt_key][1] for g in fresh]
        rows = {g.prompt_key: row for row, g in enumerate(fresh)}
        for g, length in zip(fresh, known, strict=True):
            if length:
                self._model.copy_slot(sources[g.prompt_key][0], first + rows[g.prompt_key], length)
        logits_BV = self._model.extend(first, [g.tokens[k:] for g, k in zip(fresh, known, strict=True)], known)
        self.tokens_prefilled += sum(g.prompt_length for g in fresh) - sum(known)
        for row, g in enumerate(copies, start=first + len(fresh)):
            self._model.copy_slot(first + rows[g.prompt_key], row, g.prompt_length)
        for _ in range(count):  # only now: what fails on the way is still in one of the two
            self.waiting.popleft()
        running += fresh + copies
        if copies:
            logits_BV = logits_BV[[*range(len(fresh)), *(rows[g.prompt_key] for g in copies)]]
        return logits_BV

    def _cached_prefix(self, g: Generation, running: list[Generation]) -> tuple[int, int]:
        """A slot that holds the beginning of a prompt, and how much; one token is always left, to get its logits."""
        for row, sibling in enumerate(running):
            if sibling.prompt_key == g.prompt_key and not sibling.has_stale_kv:
                return row, g.prompt_length - 1
        slot, length = self._prefix_cache.longest_match(g.prompt_key) or (0, 0)
        return slot, min(length, g.prompt_length - 1)
