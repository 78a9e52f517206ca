"""What the event loop hands to the generation thread, and gets back: requests for tokens, and orders."""

from array import array
from collections.abc import Callable
from random import Random
from typing import Any

from stream.errors import EngineError, EngineRefusedError
from workers.engine.stopping import stop_strings
from workers.engine.wire import FinishReason, GenerateRequest, TokenLogprob, VersionSpan


class Generation:
    """One request while it runs. The generation thread owns it until `done` is called on the loop."""

    __slots__ = (
        "_marks",
        "done",
        "error",
        "key",
        "likeliest",
        "limit",
        "logprobs",
        "old_kv",
        "params",
        "prompt_length",
        "random",
        "reason",
        "stop_strings",
        "stops",
        "tokens",
    )

    def __init__(
        self,
        request: GenerateRequest,
        *,
        vocabulary: int,
        max_length: int,
        end_ids: frozenset[int],
        tokenizer: Any = None,
        done: Callable[[], None],
    ) -> None:
        """Check a request against the model.

        Raises:
            EngineRefusedError: an empty or too long prompt, a token that the model does not have, or a stop string
                where nobody knows the text of tokens.
        """
        params, prompt = request.sampling_params, request.token_ids
        if not prompt:
            raise EngineRefusedError("token_ids is empty: there is nothing to continue")
        if len(prompt) >= max_length:
            raise EngineRefusedError(
                f"the prompt has {len(prompt)} tokens and the maximum context length is {max_length}, "
                "which leaves no room for a token more"
            )
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            raise EngineRefusedError(f"token_ids holds an id outside the model's vocabulary of {vocabulary}")
        foreign = sorted(t for t in (*params.logit_bias, *params.stop_token_ids) if not 0 <= t < vocabulary)
        if foreign:
            raise EngineRefusedError(
                f"logit_bias or stop_token_ids holds {foreign[0]}, outside the model's vocabulary of {vocabulary}"
            )
        if params.min_tokens > params.max_tokens:
            raise EngineRefusedError(f"min_tokens ({params.min_tokens}) is more than max_tokens ({params.max_tokens})")
        self.params = params
        self.prompt_length = len(prompt)
        self.tokens = prompt
        """Prompt, then what was sampled."""
        self.logprobs: list[float] = []
        self.likeliest: list[list[TokenLogprob]] = []
        """For each sampled token, where that was asked for."""
        self.limit = min(len(prompt) + params.max_tokens, max_length)
        """Length of `tokens` at which it ends."""
        self.stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else end_ids)
        self.stop_strings = stop_strings(tokenizer, prompt, params.stop)
        self.random = Random(params.seed) if params.seed is not None else Random()
        self.key = array("i", prompt).tobytes()
        """The prompt, to compare quickly."""
        self.reason: FinishReason | None = None
        self.error: EngineError | None = None
        self.done = done
        self.old_kv = False
        """Some of its keys and values come from weights that the model has no more."""
        self._marks: list[tuple[str, int]] = []

    @property
    def sampled(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[self.prompt_length :]

    @property
    def fed(self) -> int:
        """Tokens whose keys and values the cache holds while it runs: all but the one sampled last."""
        return len(self.tokens) - 1

    @property
    def banned(self) -> frozenset[int]:
        """Tokens that may not be sampled next: before `min_tokens`, those that would end it."""
        return self.stops if len(self.logprobs) < self.params.min_tokens else frozenset()

    def mark(self, version: str) -> None:
        """From the next token on, this is the version of the weights."""
        start = len(self.tokens) - self.prompt_length
        if self._marks and self._marks[-1][1] == start:
            self._marks.pop()
        if not self._marks or self._marks[-1][0] != version:
            self._marks.append((version, start))

    def take(self, token: int, logprob: float, likeliest: list[TokenLogprob]) -> bool:
        """Append a sampled token. Returns whether that was the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.likeliest.append(likeliest)
        counts = len(self.logprobs) > self.params.min_tokens
        said = self.stop_strings is not None and self.stop_strings.complete(token, counts=counts)
        if token in self.stops or said:
            self.reason = "stop"
        elif len(self.tokens) >= self.limit:
            self.reason = "length"
        return self.reason is not None

    def spans(self) -> list[VersionSpan]:
        """Which version sampled which of the tokens; empty where there are none."""
        count = len(self.tokens) - self.prompt_length
        ends = [start for _, start in self._marks[1:]] + [count]
        pairs = zip(self._marks, ends, strict=bool(self._marks))
        return [VersionSpan(version, start, end) for (version, start), end in pairs if end > start]


class Order:
    """Something to do on the generation thread between two steps; a control route waits for its answer."""

    __slots__ = ("action", "done", "error")

    def __init__(self, action: Callable[["Order"], bool], done: Callable[[], None]) -> None:
        self.action = action
        """Returns whether the order is carried out; else whoever has kept it answers later."""
        self.done = done
        self.error: EngineError | None = None


Mail = Generation | Order
Deliver = Callable[[list[Any]], None]
"""Hands finished mail to the event loop, which calls `done` on each; one call for many."""
