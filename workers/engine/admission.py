"""Requests that have no place yet, and how they come by one: with as much of their prompts as the cache has already."""

from collections import deque
from itertools import islice

import torch

from workers.engine.generation import Generation
from workers.engine.model import SlotModel
from workers.engine.prefixes import Prefixes

_FEW, _PATIENCE_STEPS = 8, 3
"""A prefill costs a step as much for one request as for ten: fewer than an eighth of the running ones wait, so long."""


class Admission:
    """The queue, and the prefill at its end.

    Args:
        model: whose slots from 0 on are places.
        prefixes: finished sequences that a prompt may begin with.
        places: how many there are.
    """

    def __init__(self, model: SlotModel, prefixes: Prefixes, places: int) -> None:
        self.waiting: deque[Generation] = deque()
        """In the order in which they came."""
        self.tokens_prefilled = 0
        self._model = model
        self._prefixes = prefixes
        self._places = places
        self._held_back = 0

    def is_due(self, running: int) -> bool:
        """Whether to prefill in this step, asked once: for several at once, or for whoever has waited a few steps.

        Args:
            running: how many have places.
        """
        waiting = len(self.waiting)
        if not waiting or running == self._places:
            return False
        self._held_back += 1
        return waiting * _FEW >= running or self._held_back > _PATIENCE_STEPS

    def admit(self, running: list[Generation], version: str) -> torch.Tensor:
        """Give places to waiting requests, and feed their prompts.

        Args:
            running: those that have places; whoever is admitted is appended.
            version: of the weights.

        Returns:
            Logits (B, V) of those that were admitted, in the order of their rows.
        """
        self._held_back = 0
        first = len(running)
        count = min(self._places - first, len(self.waiting))
        unique: dict[bytes, Generation] = {}
        copies = []
        for g in islice(self.waiting, count):
            g.mark(version)
            if unique.setdefault(g.key, g) is not g:
                copies.append(g)
        sources = {key: self._source(g, running) for key, g in unique.items()}
        fresh = sorted(unique.values(), key=lambda g: g.prompt_length - sources[g.key][1])  # alike side by side
        known = [sources[g.key][1] for g in fresh]
        rows = {g.key: row for row, g in enumerate(fresh)}
        for g, length in zip(fresh, known, strict=True):
            if length:
                self._model.copy(sources[g.key][0], first + rows[g.key], length)
        logits_BV = self._model.extend(first, [g.tokens[k:] for g, k in zip(fresh, known, strict=True)], known)
        self.tokens_prefilled += sum(g.prompt_length for g in fresh) - sum(known)
        for row, g in enumerate(copies, start=first + len(fresh)):
            self._model.copy(first + rows[g.key], row, g.prompt_length)
        for _ in range(count):  # only now: what fails on the way is still in one of the two
            self.waiting.popleft()
        running += fresh + copies
        if copies:
            logits_BV = logits_BV[[*range(len(fresh)), *(rows[g.key] for g in copies)]]
        return logits_BV

    def _source(self, g: Generation, running: list[Generation]) -> tuple[int, int]:
        """A slot that holds the beginning of a prompt, and how much; one token is always left, to get its logits."""
        for row, sibling in enumerate(running):
            if sibling.key == g.key and not sibling.old_kv:
                return row, g.prompt_length - 1
        slot, length = self._prefixes.find(g.key) or (0, 0)
        return slot, min(length, g.prompt_length - 1)
