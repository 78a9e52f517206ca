"""Continuous batching: the model's thread repeats *admit, prefill, decode one token for all, sample, finish*.

Running sequences always occupy slots 0 .. n-1 of the cache, so that a decode step reads one contiguous slice; when a
sequence finishes, the last one moves into its slot. Slots from `max_batch` on hold finished sequences. The next turn of
an episode extends one of them, and the siblings of a group share a prompt, so most of a prefill is a copy.
"""

import math
from array import array
from collections.abc import Callable
from pathlib import Path
from queue import Empty
from typing import ClassVar, Literal

import torch

from stream.errors import EngineError, EngineRefusedError
from workers.engine_api.wire import UNNAMED_WEIGHTS, UPDATE_SEQUENCE, PauseMode
from workers.local_engine.admission import AdmissionQueue
from workers.local_engine.messages import EngineMessage, Generation, ModelCommand
from workers.local_engine.model_thread import ModelThread
from workers.local_engine.prefix_cache import PrefixCache
from workers.local_engine.sampling import sample
from workers.local_engine.slot_model import SlotModel
from workers.local_engine.weight_loader import load_weights

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
        if self.state == "running" and self._admission.should_prefill(count):
            parts.append(self._admission.admit(self._running, self.version or UNNAMED_WEIGHTS))
        if count:
            old = self._running[:count]
            parts.insert(0, self._model.extend(0, [g.tokens[-1:] for g in old], [g.cached_length for g in old]))
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
        """Load the weights at `path` into the model."""
        if self._update_state == "none":
            raise EngineRefusedError(f"update_weights before start_weight_update; the order is {UPDATE_SEQUENCE}")
        load_weights(self._model.model, path)
        self._update_state = "updated"
        return True

    def finish_weight_update(self, version: str) -> bool:
        """Name the new weights; recompute the keys and values of running sequences, or mark them as stale."""
        if self._update_state != "updated":
            raise EngineRefusedError(f"finish_weight_update before update_weights; the order is {UPDATE_SEQUENCE}")
        self.version = version
        self._prefix_cache.clear()
        if self._running and not self._keep_kv_cache:
            self._model.extend(0, [g.tokens[:-1] for g in self._running], [0] * len(self._running))
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
