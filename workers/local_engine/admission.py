"""The queue of waiting requests. Admission prefills their prompts and reuses cached keys and values."""

from collections import deque
from itertools import islice

import torch

from workers.local_engine.messages import Generation
from workers.local_engine.prefix_cache import PrefixCache
from workers.local_engine.slot_model import SlotModel

_RUNNING_PER_WAITING, _MAX_DEFERRED_STEPS = 8, 3
"""A prefill costs about one decode step, no matter whether for one request or for ten. It is therefore deferred, by
three steps at most, while fewer than one request waits for every eight running sequences."""


class AdmissionQueue:
    """Waiting requests, admitted in batches.

    Args:
        model: the model; running sequences occupy its first slots.
        prefix_cache: finished sequences that may be a prefix of a prompt.
        max_running: largest number of running sequences.
    """

    def __init__(self, model: SlotModel, prefix_cache: PrefixCache, max_running: int) -> None:
        self.waiting: deque[Generation] = deque()
        """Requests in order of arrival."""
        self.tokens_prefilled = 0
        self._model = model
        self._prefix_cache = prefix_cache
        self._max_running = max_running
        self._deferred_steps = 0

    def should_prefill(self, running: int) -> bool:
        """Return whether to prefill in this step; called once per step.

        Args:
            running: number of running sequences.
        """
        waiting = len(self.waiting)
        if not waiting or running == self._max_running:
            return False
        self._deferred_steps += 1
        return waiting * _RUNNING_PER_WAITING >= running or self._deferred_steps > _MAX_DEFERRED_STEPS

    def admit(self, running: list[Generation], version: str) -> torch.Tensor:
        """Start waiting requests: compute the keys and values of their prompts.

        Args:
            running: running sequences; the admitted requests are appended.
            version: name of the weights.

        Returns:
            Logits [admitted, vocabulary] after each prompt, in the order of `running`.
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
        fresh = sorted(
            unique.values(), key=lambda g: g.prompt_length - sources[g.prompt_key][1]
        )  # similar lengths share a pass, with little padding
        known = [sources[g.prompt_key][1] for g in fresh]
        rows = {g.prompt_key: row for row, g in enumerate(fresh)}
        for g, length in zip(fresh, known, strict=True):
            if length:
                self._model.copy_slot(sources[g.prompt_key][0], first + rows[g.prompt_key], length)
        logits_BV = self._model.extend(first, [g.tokens[k:] for g, k in zip(fresh, known, strict=True)], known)
        self.tokens_prefilled += sum(g.prompt_length for g in fresh) - sum(known)
        for row, g in enumerate(copies, start=first + len(fresh)):
            self._model.copy_slot(first + rows[g.prompt_key], row, g.prompt_length)
        for _ in range(count):  # last, so that no request is lost after an error
            self.waiting.popleft()
        running += fresh + copies
        if copies:
            logits_BV = logits_BV[[*range(len(fresh)), *(rows[g.prompt_key] for g in copies)]]
        return logits_BV

    def _cached_prefix(self, g: Generation, running: list[Generation]) -> tuple[int, int]:
        """Return a slot that holds a prefix of a prompt, and the length of the prefix.

        The prefix excludes the prompt's last token, which must be computed for its logits.
        """
        for row, sibling in enumerate(running):
            if sibling.prompt_key == g.prompt_key and not sibling.has_stale_kv:
                return row, g.prompt_length - 1
        slot, length = self._prefix_cache.longest_match(g.prompt_key) or (0, 0)
        return slot, min(length, g.prompt_length - 1)
