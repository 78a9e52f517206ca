"""Continuous batching: one thread that owns the model, and loops over *admit, prefill, decode, sample, finish*.

Running sequences always lie in slots 0 .. n-1 of the cache, so a decode step reads one contiguous slice; where one
finishes, the last moves into the hole. Slots from `max_batch` on keep finished sequences: the next turn of an episode
begins with one of them, and siblings of a group share their prompt, so most of a prefill is a copy.

Everything reaches the thread through one mailbox, in order; nothing else is shared.
"""

import math
from array import array
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Literal

import structlog
import torch

from stream.errors import EngineError, EngineRefusedError
from workers.engine_api.wire import UNNAMED_WEIGHTS, UPDATE_SEQUENCE, PauseMode
from workers.local_engine import weight_loader as weights
from workers.local_engine.admission import AdmissionQueue
from workers.local_engine.messages import Deliver, EngineMessage, Generation, ModelCommand
from workers.local_engine.prefix_cache import PrefixCache
from workers.local_engine.sampling import sample
from workers.local_engine.slot_model import SlotModel

log = structlog.get_logger()

SchedulerState = Literal["running", "draining", "paused"]
UpdateState = Literal["none", "started", "updated"]


class Scheduler:
    """The generation loop and its state.

    Args:
        model: with twice as many slots as `max_batch`.
        max_batch: sequences decoded together.
        deliver: hands finished mail back to the event loop.
    """

    def __init__(
        self, model: SlotModel, max_batch: int, deliver: Deliver, on_failure: Callable[[], object] = lambda: None
    ) -> None:
        self.state: SchedulerState = "running"
        self.version: str | None = None
        self.failure: Exception | None = None
        """What ended generation for good."""
        self.tokens_sampled = 0
        self._model = model
        self._max_batch = max_batch
        self._deliver = deliver
        self._on_failure = on_failure
        self._mailbox: SimpleQueue[EngineMessage | None] = SimpleQueue()
        self._running: list[Generation] = []
        self._prefix_cache = PrefixCache(range(max_batch, model.slots))
        self._admission = AdmissionQueue(model, self._prefix_cache, max_batch)
        self._update_state: UpdateState = "none"
        self._keep_kv_cache = False
        self._pending_pauses: list[ModelCommand] = []
        self._finished: list[EngineMessage] = []
        self._stopping = False

    # What the event loop may call.

    @property
    def running(self) -> int:
        """Sequences being decoded."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that have no place yet."""
        return len(self._admission.waiting) + self._mailbox.qsize()

    @property
    def tokens_prefilled(self) -> int:
        """Tokens of prompts that went through the model; those that the cache had are not among them."""
        return self._admission.tokens_prefilled

    @property
    def kv_cache_usage(self) -> float:
        """Part of the running slots' positions that is in use."""
        return sum(g.cached_length for g in list(self._running)) / (self._max_batch * self._model.max_length)

    def submit(self, message: EngineMessage) -> None:
        """Hand over a request or an order."""
        self._mailbox.put(message)

    def abort(self, generation: Generation) -> None:
        """Stop working on a request: nobody waits for it any more."""
        self._mailbox.put(ModelCommand(lambda _: self._abort(generation), _ignore))

    def stop(self) -> None:
        """Let `run` return soon; what is unfinished is answered with an error."""
        self._stopping = True
        self._mailbox.put(None)

    # The generation thread.

    def run(self, threads: int) -> None:
        """Generate until `stop`; the body of the generation thread."""
        torch.set_num_threads(threads)
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self.step()
        except Exception as error:  # whatever it is: /health reports it, and no request may hang
            log.exception("engine.failed")
            self.failure = error
            self._on_failure()
        while not self._stopping:
            self._reject(EngineError(f"generation has failed: {self.failure!r}; restart the engine"))
            self._collect(self._mailbox.get())
        self._reject(EngineError("the engine is shutting down"))

    def step(self) -> None:
        """Take the mail in, generate one token for every running sequence, hand out what is finished."""
        self._read_mailbox()
        if self.state == "draining" and not self._running:
            self._drained()
        if self.state != "paused":
            self._generate()
        if self._finished:
            finished, self._finished = self._finished, []
            self._deliver(finished)

    def _read_mailbox(self) -> None:
        """Empty the mailbox; where there is nothing else to do, wait for mail."""
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
                carried_out = message.action(message)
            except EngineError as error:
                message.error, carried_out = error, True
            if carried_out:
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
        ids, logprobs, likeliest = sample(
            logits_BV, [g.params for g in self._running], [g.rng for g in self._running], banned
        )
        self.tokens_sampled += len(ids)
        ended = []
        for row, generation in enumerate(self._running):
            if not math.isfinite(logprobs[row]):
                generation.error = EngineError("the model's logits are not finite")
                self._model.clear_slot(row)
                ended.append(row)
            elif generation.append_token(ids[row], logprobs[row], likeliest[row]):
                ended.append(row)
        for row in reversed(ended):
            self._finish(row)

    def _finish(self, row: int) -> None:
        """Take a sequence out of the running ones, keep its keys and values, and close the gap."""
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

    # Orders: called on the generation thread, between two steps.

    def _abort(self, generation: Generation) -> bool:
        generation.finish_reason = "abort"
        if generation in self._admission.waiting:
            self._admission.waiting.remove(generation)
        elif generation in self._running:
            self._finish(self._running.index(generation))
        return True

    def pause(self, mode: PauseMode, command: ModelCommand, *, keep_kv_cache: bool = False) -> bool:
        """Freeze between two tokens; with `wait` after the running sequences end, with `abort` after ending them.

        Args:
            mode: what becomes of the running sequences.
            command: to be answered once it is done.
            keep_kv_cache: new weights leave the running sequences the keys and values that they have.
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
        self._drained()
        return True

    def _drained(self) -> None:
        self.state = "paused"
        self._finished += self._pending_pauses
        self._pending_pauses = []

    def resume(self) -> bool:
        """Go on. Refused while the live weights are new but have no version yet."""
        if self._update_state == "updated":
            raise EngineRefusedError(f"weights were updated but not finished; the order is {UPDATE_SEQUENCE}")
        self._update_state = "none"
        self._drained()
        self.state = "running"
        return True

    def start_weight_update(self) -> bool:
        """Open an update; again, where an earlier one failed."""
        if self.state != "paused":
            raise EngineRefusedError(f"start_weight_update while not paused; the order is {UPDATE_SEQUENCE}")
        if self._update_state == "none":
            self._update_state = "started"
        return True

    def update_weights(self, path: Path) -> bool:
        """Bring the weights at `path` into the model."""
        if self._update_state == "none":
            raise EngineRefusedError(f"update_weights before start_weight_update; the order is {UPDATE_SEQUENCE}")
        weights.load_weights(self._model.model, path)
        self._update_state = "updated"
        return True

    def finish_weight_update(self, version: str) -> bool:
        """Name the new weights; compute the running sequences' keys and values again with them, or mark them old."""
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
        """Forget the finished sequences' keys and values."""
        self._prefix_cache.clear()
        return True

    def _collect(self, message: EngineMessage | None) -> None:
        if message is not None:
            self._finished.append(message)

    def _reject(self, error: EngineError) -> None:
        """Answer everything that is here with an error."""
        while not self._mailbox.empty():
            self._collect(self._mailbox.get())
        rejected: list[EngineMessage] = [
            *self._finished,
            *self._running,
            *self._admission.waiting,
            *self._pending_pauses,
        ]
        self._running, self._pending_pauses, self._finished = [], [], []
        self._admission.waiting.clear()
        for mail in rejected:
            mail.error = mail.error or error
        if rejected:
            self._deliver(rejected)


def _ignore() -> None:
    """Nobody waits for it."""
