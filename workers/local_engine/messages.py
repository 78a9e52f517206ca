"""Messages to the generation thread: requests for tokens, and commands."""

from array import array
from collections.abc import Callable
from random import Random
from typing import Any

from stream.errors import EngineError, EngineRefusedError
from workers.engine_api.wire import FinishReason, GenerateRequest, TokenLogprob, VersionSpan
from workers.local_engine.stop_strings import make_matcher


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
