"""Continuous batching: the model's thread repeats *admit, prefill, decode one token for all, sample, finish*.

Running sequences always occupy slots 0 .. n-1 of the cache, so that a decode step reads one contiguous slice; when a
sequence finishes, the last one moves into its slot. Slots from `max_batch` on hold finished sequences. The next turn of
an episode extends one of them, the siblings of a group share a prompt, and prompts begin alike, so most of a prefill is
a copy.
"""

import math
from array import array
from collections import deque
from collections.abc import Callable
from itertools import islice
from operator import itemgetter
from pathlib import Path
from queue import Empty
from typing import ClassVar, Literal

import torch

from stream.errors import EngineError, EngineRefusedError
from workers.engine_api.wire import UNNAMED_WEIGHTS, UPDATE_SEQUENCE, PauseMode
from workers.local_engine.base_weights import BaseWeights
from workers.local_engine.kv_cache import PrefixCache
from workers.local_engine.model_thread import EngineMessage, Generation, ModelCommand, ModelThread
from workers.local_engine.shared_prefill import TOKEN_BYTES, longest_shared
from workers.local_engine.slot_model import SlotModel
from workers.local_engine.token_sampling import sample
from workers.local_engine.weights import holds_adapter, load_weights

SchedulerState = Literal["running", "draining", "paused"]
UpdateState = Literal["none", "started", "updated"]


class Scheduler(ModelThread[EngineMessage]):
    """The generation loop and its state.

    Args:
        model: the model, with twice as many slots as `max_batch`; no other thread may run it.
        max_batch: largest number of sequences decoded together.
        deliver: see `ModelThread`.
        on_failure: see `ModelThread`.
    """

    activity: ClassVar[str] = "generation"

    def __init__(
        self,
        model: SlotModel,
        max_batch: int,
        deliver: Callable[[list[EngineMessage]], object],
        on_failure: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(deliver, on_failure)
        self.state: SchedulerState = "running"
        self.version: str | None = None
        """Name of the weights; None before the first update."""
        self.tokens_sampled = 0
        self._model = model
        self._base = BaseWeights(model.model)
        self._max_batch = max_batch
        self._running: list[Generation] = []
        self._prefix_cache = PrefixCache(range(max_batch, model.slots))
        self._admission = AdmissionQueue(model, self._prefix_cache, max_batch)
        self._update_state: UpdateState = "none"
        self._keep_kv_cache = False
        self._pending_pauses: list[ModelCommand] = []
        self._finished: list[EngineMessage] = []

    # Called by other threads.

    @property
    def running(self) -> int:
        """Number of sequences that are being decoded."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of requests that have not been started."""
        return len(self._admission.waiting) + self._mailbox.qsize()

    @property
    def tokens_prefilled(self) -> int:
        """Prompt tokens that the model has processed, without tokens found in the cache."""
        return self._admission.tokens_prefilled

    @property
    def kv_cache_usage(self) -> float:
        """Fraction of the positions in the slots for running sequences that is in use."""
        return sum(g.cached_length for g in list(self._running)) / (self._max_batch * self._model.max_length)

    def abort(self, generation: Generation) -> None:
        """Abort a request whose client has disconnected."""
        self.submit(ModelCommand(lambda _: self._abort(generation), _ignore))

    # The generation thread.

    def step(self) -> None:
        """Read the mailbox, generate one token for every running sequence, and deliver finished messages."""
        self._read_mailbox()
        if self.state == "draining" and not self._running:
            self._complete_pauses()
        if self.state != "paused":
            self._generate()
        if self._finished:
            finished, self._finished = self._finished, []
            self._deliver(finished)

    def _read_mailbox(self) -> None:
        """Receive all messages in the mailbox; block until one arrives if there is nothing else to do."""
        if self.state == "paused" or (self.state == "running" and not self._running and not self._admission.waiting):
            self._receive(self._mailbox.get())
        while True:
            try:
                self._receive(self._mailbox.get_nowait())
            except Empty:
                return

    def _receive(self, message: EngineMessage | None) -> None:
        if isinstance(message, Generation):
            self._admission.waiting.append(message)
        elif isinstance(message, ModelCommand):
            try:
                is_done = message.action(message)
            except EngineError as error:
                message.error, is_done = error, True
            if is_done:
                self._finished.append(message)

    def _generate(self) -> None:
        count = len(self._running)
        parts = []
        if self.state == "running" and self._admission.should_prefill(self._running):
            parts.append(self._admission.admit(self._running, self.version or UNNAMED_WEIGHTS))
        if count:
            old = self._running[:count]
            lengths = [g.cached_length for g in old]
            parts.insert(0, self._model.extend(range(count), [g.tokens[-1:] for g in old], lengths))
        if not parts:
            return
        logits_BV = parts[0] if len(parts) == 1 else torch.cat(parts)
        banned = [g.banned_tokens for g in self._running]
        token_ids, logprobs, top_logprobs = sample(
            logits_BV, [g.params for g in self._running], [g.rng for g in self._running], banned
        )
        self.tokens_sampled += len(token_ids)
        ended = []
        for row, generation in enumerate(self._running):
            if not math.isfinite(logprobs[row]):
                generation.error = EngineError("the model's logits are not finite")
                self._model.clear_slot(row)
                ended.append(row)
            elif generation.append_token(token_ids[row], logprobs[row], top_logprobs[row]):
                ended.append(row)
            elif generation.on_token is not None:
                self._finished.append(generation.on_token)
        for row in reversed(ended):
            self._finish(row)

    def _finish(self, row: int) -> None:
        """Remove a running sequence, cache its keys and values, and move the last sequence into its slot."""
        generation = self._running[row]
        if generation.error is None and not generation.has_stale_kv:
            slot = self._prefix_cache.reserve(array("i", generation.tokens[:-1]).tobytes())
            if slot is not None:
                self._model.copy_slot(row, slot, generation.cached_length)
        last = self._running.pop()
        if last is not generation:
            self._running[row] = last
            self._model.copy_slot(len(self._running), row, last.cached_length)
        self._admission.fit_cache(self._running)
        self._finished.append(generation)

    def _take_unfinished(self) -> list[EngineMessage]:
        unfinished = [*self._finished, *self._running, *self._admission.waiting, *self._pending_pauses]
        self._running, self._pending_pauses, self._finished = [], [], []
        self._admission.waiting.clear()
        return unfinished

    # Commands: called on the generation thread, between two steps. Each returns whether it is complete.

    def _abort(self, generation: Generation) -> bool:
        generation.finish_reason = "abort"
        if generation in self._admission.waiting:
            self._admission.waiting.remove(generation)
        elif generation in self._running:
            self._finish(self._running.index(generation))
        return True

    def pause(self, mode: PauseMode, command: ModelCommand, *, keep_kv_cache: bool = False) -> bool:
        """Stop decoding between two tokens.

        Args:
            mode: `keep` freezes the running sequences, `wait` lets them finish first, `abort` aborts all requests.
            command: the message to answer once decoding has stopped.
            keep_kv_cache: keep the keys and values of running sequences when new weights arrive.
        """
        self._keep_kv_cache = keep_kv_cache
        if self.state == "paused":
            return True
        if mode == "wait" and self._running:
            self.state = "draining"
            self._pending_pauses.append(command)
            return False
        if mode == "abort":
            for generation in [*self._running, *self._admission.waiting]:
                self._abort(generation)
                if generation not in self._finished:
                    self._finished.append(generation)
        self._complete_pauses()
        return True

    def _complete_pauses(self) -> None:
        """Enter the state `paused`, and answer all pending pause commands."""
        self.state = "paused"
        self._finished += self._pending_pauses
        self._pending_pauses = []

    def resume(self) -> bool:
        """Resume decoding. Refused between `update_weights` and `finish_weight_update`: the weights are unnamed."""
        if self._update_state == "updated":
            raise EngineRefusedError(f"weights were updated but not finished; the order is {UPDATE_SEQUENCE}")
        self._update_state = "none"
        self._complete_pauses()
        self.state = "running"
        return True

    def start_weight_update(self) -> bool:
        """Begin an update; allowed again after a failed update."""
        if self.state != "paused":
            raise EngineRefusedError(f"start_weight_update while not paused; the order is {UPDATE_SEQUENCE}")
        if self._update_state == "none":
            self._update_state = "started"
        return True

    def update_weights(self, path: Path) -> bool:
        """Load the weights at `path` into the model, or add the adapter there to its base weights."""
        if self._update_state == "none":
            raise EngineRefusedError(f"update_weights before start_weight_update; the order is {UPDATE_SEQUENCE}")
        if holds_adapter(path):
            self._base.add(path)
        else:
            load_weights(self._model.model, path)
            self._base.forget()
        self._update_state = "updated"
        return True

    def finish_weight_update(self, version: str) -> bool:
        """Name the new weights; recompute the keys and values of running sequences, or mark them as stale."""
        if self._update_state != "updated":
            raise EngineRefusedError(f"finish_weight_update before update_weights; the order is {UPDATE_SEQUENCE}")
        self.version = version
        self._prefix_cache.clear()
        if self._running and not self._keep_kv_cache:
            count = len(self._running)
            self._model.prefill(range(count), [g.tokens[:-1] for g in self._running], [0] * count)
        for generation in self._running:
            generation.begin_version(version)
            generation.has_stale_kv = self._keep_kv_cache
        self._update_state = "none"
        return True

    def reset_prefix_cache(self) -> bool:
        """Forget the keys and values of finished sequences."""
        self._prefix_cache.clear()
        return True


def _ignore() -> None:
    """Do nothing: no request waits for the command."""


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

    def should_prefill(self, running: list[Generation]) -> bool:
        """Return whether to prefill in this step; called once per step.

        Args:
            running: running sequences.
        """
        waiting = len(self.waiting)
        if not self._count_fitting(running):
            return False
        self._deferred_steps += 1
        return waiting * _RUNNING_PER_WAITING >= len(running) or self._deferred_steps > _MAX_DEFERRED_STEPS

    def fit_cache(self, running: list[Generation]) -> None:
        """Forget finished sequences, and give back memory, so that running ones have room to their ends."""
        self._prefix_cache.shrink(self._model.max_cached_tokens - sum(g.max_length for g in running))
        in_use = {row: g.cached_length for row, g in enumerate(running)}
        self._model.fit_cache(in_use | self._prefix_cache.lengths)

    def _count_fitting(self, running: list[Generation]) -> int:
        """Return how many of the waiting requests, in order, fit beside the running ones at their greatest lengths."""
        tokens, count = sum(g.max_length for g in running), 0
        for g in islice(self.waiting, self._max_running - len(running)):
            tokens += g.max_length
            if tokens > self._model.max_cached_tokens:
                break
            count += 1
        return count

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
        count = self._count_fitting(running)
        self.fit_cache([*running, *islice(self.waiting, count)])
        unique: dict[bytes, Generation] = {}
        copies = []
        for g in islice(self.waiting, count):
            g.begin_version(version)
            if unique.setdefault(g.prompt_key, g) is not g:
                copies.append(g)
        ordered = sorted((g.prompt_key, row) for row, g in enumerate(running) if not g.has_stale_kv)
        sources = {key: self._cached_prefix(key, ordered) for key in unique}
        fresh = sorted(
            unique.values(), key=lambda g: g.prompt_length - sources[g.prompt_key][1]
        )  # similar lengths share a pass, with little padding
        known = [sources[g.prompt_key][1] for g in fresh]
        rows = {g.prompt_key: row for row, g in enumerate(fresh)}
        for g, length in zip(fresh, known, strict=True):
            if length:
                self._model.copy_slot(sources[g.prompt_key][0], first + rows[g.prompt_key], length)
        slots = range(first, first + len(fresh))
        logits_BV, computed = self._model.prefill(slots, [g.tokens for g in fresh], known)
        self.tokens_prefilled += computed
        for row, g in enumerate(copies, start=first + len(fresh)):
            self._model.copy_slot(first + rows[g.prompt_key], row, g.prompt_length)
        for _ in range(count):  # last, so that no request is lost after an error
            self.waiting.popleft()
        running += fresh + copies
        if copies:
            logits_BV = logits_BV[[*range(len(fresh)), *(rows[g.prompt_key] for g in copies)]]
        return logits_BV

    def _cached_prefix(self, prompt: bytes, running: list[tuple[bytes, int]]) -> tuple[int, int]:
        """Return a slot that holds the beginning of a prompt, and the length of the beginning.

        The beginning excludes the prompt's last token, which must be computed for its logits.

        Args:
            prompt: tokens as int32.
            running: prompts of running sequences with their slots, in lexicographic order.
        """
        best = max(longest_shared(running, prompt), self._prefix_cache.longest_match(prompt), key=itemgetter(1))
        return best[0], min(best[1], len(prompt) // TOKEN_BYTES - 1)
