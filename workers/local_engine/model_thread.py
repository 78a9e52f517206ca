"""A thread that owns a model, and its bridge to the event loop that serves requests.

::

    event loop ── submit(message) ──► mailbox ──► ModelThread: works in steps, one at a time
        ▲                                              │
        └── LoopBridge ── message.wake() ◄── deliver ──┘

Messages to the generation thread: requests for tokens, and commands.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from queue import SimpleQueue
from random import Random
from typing import Any, ClassVar, Generic, NoReturn, Protocol, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import structlog
import torch

from stream.errors import EngineError, EngineRefusedError
from workers.engine_api.wire import FinishReason, GenerateRequest, TokenLogprob, VersionSpan
from workers.local_engine.token_sampling import make_matcher

log = structlog.get_logger()

_FAILURE_REPLY_S = 1.0
"""Seconds between a failure and the exit of the server, in which waiting requests get their errors."""


class ThreadMessage(Protocol):
    """A piece of work for the thread, with its result. The thread owns it until `wake` is called."""

    error: EngineError | None
    """Why the message has no result; None: it has one, or is not finished."""

    @property
    def wake(self) -> Callable[[], None]:
        """Function that wakes the waiting request; called on the event loop."""


Message = TypeVar("Message", bound=ThreadMessage)


class ModelThread(ABC, Generic[Message]):
    """Processes the messages in its mailbox until it is stopped or fails.

    Subclasses implement one step of the work. Other threads may use only `submit`, `stop` and the counters.

    Args:
        deliver: passes a batch of finished messages to the event loop, which calls `wake` on each.
        on_failure: called once, when the work has failed permanently.
    """

    activity: ClassVar[str]
    """Name of the thread's work in error messages, for example `generation`."""

    def __init__(self, deliver: Callable[[list[Message]], object], on_failure: Callable[[], object]) -> None:
        self.failure: Exception | None = None
        """The error that ended the work; None: it has not failed."""
        self._deliver = deliver
        self._on_failure = on_failure
        self._mailbox: SimpleQueue[Message | None] = SimpleQueue()
        """Incoming messages; None wakes the thread so that it notices `stop`."""
        self._stopping = False

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Number of requests that have not been started."""

    def submit(self, message: Message) -> None:
        """Put a message into the mailbox. Thread-safe."""
        self._mailbox.put(message)

    def stop(self) -> None:
        """Make `run` return after its current step; unfinished messages get an error. Thread-safe."""
        self._stopping = True
        self._mailbox.put(None)

    def run(self, threads: int) -> None:
        """Process messages until `stop`; the body of the thread.

        Args:
            threads: number of torch threads.
        """
        torch.set_num_threads(threads)
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self.step()
        except Exception as error:  # any error: /health must report it, and no request may wait forever
            log.exception("engine.failed")
            self.failure = error
            self._on_failure()
            failed = EngineError(f"{self.activity} has failed: {error!r}; restart the server")
            self._reject(self._take_unfinished(), failed)
            while not self._stopping:
                self._reject([self._mailbox.get()], failed)
        self._reject(self._take_unfinished(), EngineError("the server is shutting down"))

    @abstractmethod
    def step(self) -> None:
        """Do the next piece of work; block until a message arrives if there is none."""

    @abstractmethod
    def _take_unfinished(self) -> list[Message]:
        """Remove and return all unfinished messages; messages in the mailbox may stay there."""

    def _reject(self, messages: Sequence[Message | None], error: EngineError) -> None:
        """Finish these messages, and all in the mailbox, with an error."""
        rejected = [message for message in messages if message is not None]
        while not self._mailbox.empty():
            if (message := self._mailbox.get()) is not None:
                rejected.append(message)
        for message in rejected:
            message.error = message.error or error
        if rejected:
            self._deliver(rejected)


class LoopBridge:
    """Connects a `ModelThread` to the event loop. Create it on the loop; the thread calls `deliver` and `fail`."""

    def __init__(self) -> None:
        self._loop: Any = anyio.lowlevel.current_token().native_token  # from_thread.run would block until it ran
        self._failed = anyio.Event()

    def deliver(self, messages: Iterable[ThreadMessage]) -> None:
        """Wake the requests that wait for these messages."""
        self._loop.call_soon_threadsafe(_wake_all, messages)

    def fail(self) -> None:
        """Make `wait_failed` return."""
        self._loop.call_soon_threadsafe(self._failed.set)

    async def wait_failed(self, thread: ModelThread[Any]) -> NoReturn:
        """Wait until the thread has failed, and give its requests time to be answered.

        Raises:
            EngineError: the thread has failed.
        """
        await self._failed.wait()
        await anyio.sleep(_FAILURE_REPLY_S)
        raise EngineError(f"{thread.activity} has failed: {thread.failure!r}; {_remedy(thread.failure)}")


@asynccontextmanager
async def run_model_thread(thread: ModelThread[Any], threads: int) -> AsyncIterator[None]:
    """Run the thread while the context is open.

    Args:
        thread: the thread to run.
        threads: number of torch threads.
    """
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(anyio.to_thread.run_sync, thread.run, threads, limiter=anyio.CapacityLimiter(1)))
        try:
            yield
        finally:
            thread.stop()


def _wake_all(messages: Iterable[ThreadMessage]) -> None:
    for message in messages:
        message.wake()


def _remedy(failure: Exception | None) -> str:
    if isinstance(failure, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(failure):
        return "lower engine.max_batch_size or engine.max_model_len, which decide the size of the cache"
    return "a restart of the server may help"


class Generation:
    """A waiting or running request. The generation thread owns it until `wake` is called on the event loop."""

    __slots__ = (
        "_version_starts",
        "error",
        "finish_reason",
        "has_stale_kv",
        "logprobs",
        "max_length",
        "on_token",
        "params",
        "prompt_key",
        "prompt_length",
        "rng",
        "stop_matcher",
        "stop_token_ids",
        "tokens",
        "top_logprobs",
        "wake",
    )

    def __init__(
        self,
        request: GenerateRequest,
        *,
        vocab_size: int,
        max_length: int,
        eos_token_ids: frozenset[int],
        tokenizer: Any = None,
        wake: Callable[[], None],
        on_token: "TokenNotice | None" = None,
    ) -> None:
        """Check a request against the model.

        Raises:
            EngineRefusedError: the prompt is empty or too long, a token is outside the vocabulary, or there are stop
                strings but no tokenizer.
        """
        params, prompt = request.sampling_params, request.token_ids
        if not prompt:
            raise EngineRefusedError("token_ids is empty: there is nothing to continue")
        if len(prompt) >= max_length:
            raise EngineRefusedError(
                f"the prompt has {len(prompt)} tokens and the maximum context length is {max_length}, "
                "which leaves no room for another token"
            )
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise EngineRefusedError(f"token_ids holds an id outside the model's vocabulary of {vocab_size}")
        foreign = sorted(t for t in (*params.logit_bias, *params.stop_token_ids) if not 0 <= t < vocab_size)
        if foreign:
            raise EngineRefusedError(
                f"logit_bias or stop_token_ids holds {foreign[0]}, outside the model's vocabulary of {vocab_size}"
            )
        if params.min_tokens > params.max_tokens:
            raise EngineRefusedError(f"min_tokens ({params.min_tokens}) is more than max_tokens ({params.max_tokens})")
        self.params = params
        self.prompt_length = len(prompt)
        self.tokens = prompt
        """The prompt, then the sampled tokens."""
        self.logprobs: list[float] = []
        self.top_logprobs: list[list[TokenLogprob]] = []
        """Most probable tokens at each sampled token, if the request wants them."""
        self.max_length = min(len(prompt) + params.max_tokens, max_length)
        """Length of `tokens` at which the request ends."""
        self.stop_token_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        self.stop_matcher = make_matcher(tokenizer, prompt, params.stop)
        self.rng = Random(params.seed) if params.seed is not None else Random()
        self.prompt_key = array("i", prompt).tobytes()
        """The prompt as bytes, for fast comparison."""
        self.finish_reason: FinishReason | None = None
        self.error: EngineError | None = None
        self.wake = wake
        self.on_token = on_token
        """Delivered after each token before the last one, if the request streams."""
        self.has_stale_kv = False
        """Whether some cached keys and values were computed with earlier weights."""
        self._version_starts: list[tuple[str, int]] = []

    @property
    def is_finished(self) -> bool:
        """Whether no further token will be sampled; `tokens` are complete then."""
        return self.finish_reason is not None or self.error is not None

    @property
    def sampled(self) -> list[int]:
        """Sampled tokens."""
        return self.tokens[self.prompt_length :]

    @property
    def cached_length(self) -> int:
        """Number of tokens in the KV cache while the request runs: all but the last one."""
        return len(self.tokens) - 1

    @property
    def banned_tokens(self) -> frozenset[int]:
        """Tokens that may not be sampled next: the stop tokens, until `min_tokens` is reached."""
        return self.stop_token_ids if len(self.logprobs) < self.params.min_tokens else frozenset()

    def begin_version(self, version: str) -> None:
        """Attribute the next token and all later ones to this version of the weights."""
        start = len(self.tokens) - self.prompt_length
        if self._version_starts and self._version_starts[-1][1] == start:
            self._version_starts.pop()
        if not self._version_starts or self._version_starts[-1][0] != version:
            self._version_starts.append((version, start))

    def append_token(self, token: int, logprob: float, top_logprobs: list[TokenLogprob]) -> bool:
        """Append a sampled token. Returns whether the request has finished."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.top_logprobs.append(top_logprobs)
        may_stop = len(self.logprobs) > self.params.min_tokens
        stop_string_found = self.stop_matcher is not None and self.stop_matcher.append(token, may_stop=may_stop)
        if token in self.stop_token_ids or stop_string_found:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.max_length:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def version_spans(self) -> list[VersionSpan]:
        """Return the version of the weights for each range of sampled tokens; empty if there are no tokens."""
        count = len(self.tokens) - self.prompt_length
        ends = [start for _, start in self._version_starts[1:]] + [count]
        pairs = zip(self._version_starts, ends, strict=bool(self._version_starts))
        return [VersionSpan(version, start, end) for (version, start), end in pairs if end > start]


class ModelCommand:
    """A function that the generation thread calls between two steps; a control route waits for the result."""

    __slots__ = ("action", "error", "wake")

    def __init__(self, action: Callable[["ModelCommand"], bool], wake: Callable[[], None]) -> None:
        self.action = action
        """Function that returns whether the command is complete; if not, the scheduler completes it later."""
        self.wake = wake
        self.error: EngineError | None = None


class TokenNotice:
    """Wakes a request that streams, so that it reads the new tokens."""

    __slots__ = ("error", "wake")

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        self.error: EngineError | None = None


EngineMessage = Generation | ModelCommand | TokenNotice
