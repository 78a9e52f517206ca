"""What a test sets and reads of an engine without a model: its replies, faults, weights and counters."""

import math
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AsyncExitStack

import anyio
import msgspec

from stream.errors import EngineRefusedError
from tests.scripted_engine.answers import Fault, encode_completion, encode_generation
from workers.engine_api.wire import (
    PROBE_PREFIX,
    UNNAMED_WEIGHTS,
    WEIGHT_TRANSFER_BACKEND,
    FinishUpdateRequest,
    GenerateRequest,
    UpdateWeightsRequest,
    VersionSpan,
)

ReplyFunction = Callable[[list[int], GenerateRequest], list[int]]
"""Returns the token ids that are 'sampled' for a prompt; the engine cuts them at the request's `max_tokens`."""

FaultFunction = Callable[[int, GenerateRequest], Fault | None]
"""Returns the fault of a request, by its number counted from 0; None: no fault."""

DelayFunction = Callable[[GenerateRequest], float]
"""Returns the seconds before a request is answered."""

_MAX_RECORDED = 10_000


def _no_faults(_number: int, _request: GenerateRequest) -> Fault | None:
    return None


class ScriptedState:
    """State of an engine without a model.

    Args:
        reply: returns the tokens of each answer.
        version: initial version of the weights; None as after a restart.
        max_length: prompt tokens from which a request is refused.
        delay_s: seconds for each answer. Its tokens are spread evenly over that time; tokens before a change of weights
            carry the earlier version.
        port: 0: any free port; a fixed one allows a 'restart' at the same address.
        max_concurrency: requests processed at once; others wait. None: no limit.
    """

    def __init__(
        self,
        reply: ReplyFunction,
        *,
        version: str | None = None,
        max_length: int = 4096,
        delay_s: float | DelayFunction = 0.0,
        port: int = 0,
        max_concurrency: int | None = None,
    ) -> None:
        self.url = ""
        """Base URL, once the engine listens."""
        self.port = port
        self.version = version
        self.max_length = max_length
        self.faults: FaultFunction = _no_faults
        self.retry_after = "0"
        """Header of the fault `busy`."""
        self.control_faults: Counter[str] = Counter()
        """Number of next calls that answer 500, by path of the control route."""
        self.transfer_config: dict[str, str] | None = {"backend": WEIGHT_TRANSFER_BACKEND}
        """Weight-transfer configuration in `/server_info`; None: the server was started without one."""
        self.rejected_paths: set[str] = set()
        """Paths of weights that `/update_weights` refuses."""
        self.missing_routes: set[str] = set()
        """Routes that answer 404, as on a server that was started without them."""
        self.is_frozen = False
        """While True, no request is answered, as by a process after SIGSTOP."""
        self.reports_raw_logprobs = False
        """Report log-probs of the raw logits, vLLM's default."""
        self.reports_logits = False
        """Report logits instead, as vLLM does with `--logprobs-mode raw_logits`."""
        self.requests: deque[GenerateRequest] = deque(maxlen=_MAX_RECORDED)
        self.control_calls: deque[str] = deque(maxlen=_MAX_RECORDED)
        """Paths of control calls in order, including calls that failed."""
        self.query_counts: Counter[str] = Counter()
        """Number of calls of each read-only route, by path."""
        self.pushes: list[tuple[str, str]] = []
        """Path and version of each accepted update."""
        self.request_count = 0
        self.too_long_count = 0
        """Requests refused because their prompts are too long; not in `requests`."""
        self.running = 0
        """Unanswered requests, including those that wait."""
        self.aborted_count = 0
        self.is_paused = False
        self.slots = anyio.CapacityLimiter(max_concurrency or math.inf)
        """Requests in progress; the others wait."""
        self.closing = anyio.Event()
        self.server = AsyncExitStack()
        """Holds the HTTP server while it listens."""
        self._reply = reply
        self._delay_s = delay_s
        self._replaced: deque[tuple[float, str]] = deque(maxlen=_MAX_RECORDED)
        """Replaced versions, each with the time of its replacement."""
        self._path: str | None = None
        self._resumed = anyio.Event()

    def close(self) -> None:
        """Answer what is paused or hangs."""
        self.closing.set()
        self._resumed.set()

    async def wait_resumed(self) -> None:
        """Wait while the engine is paused."""
        while self.is_paused and not self.closing.is_set():
            await self._resumed.wait()

    def delay_s(self, request: GenerateRequest) -> float:
        """Return the seconds before this request is answered."""
        return self._delay_s(request) if callable(self._delay_s) else self._delay_s

    def apply(self, path: str, body: bytes) -> None:
        """Change the state as this control route does; the order of calls is recorded but not enforced.

        Raises:
            EngineRefusedError: the weights are rejected.
        """
        if path == "/pause" and not self.is_paused:
            self.is_paused, self._resumed = True, anyio.Event()
        elif path == "/resume":
            self.is_paused = False
            self._resumed.set()
        elif path == "/update_weights":
            info = msgspec.json.decode(body, type=UpdateWeightsRequest).update_info
            self._path = info.path or info.url
            if self._path in self.rejected_paths:
                raise EngineRefusedError(f"{self._path}: not this model's weights")
        elif path == "/finish_weight_update":
            self._replaced.append((anyio.current_time(), self.version or UNNAMED_WEIGHTS))
            self.version = msgspec.json.decode(body, type=FinishUpdateRequest).weight_version
            self.pushes.append((self._path or "", self.version))

    def generate(self, request: GenerateRequest, fault: Fault | None, began: float) -> bytes:
        """Return the answer of `/inference/v1/generate` to a request that came at `began`."""
        # A probe gets one token without a call of the script.
        is_probe = request.request_id.startswith(PROBE_PREFIX)
        reply = [0] if is_probe else self._reply(list(request.token_ids), request)
        limit = min(request.sampling_params.max_tokens, self.max_length - len(request.token_ids))
        tokens = [] if fault == "empty" else reply[:limit]
        return encode_generation(
            *(request, tokens, self._spans(len(tokens) - (fault == "spans"), began), fault),
            is_cut=len(reply) > limit,
            raw_logprobs=self.reports_raw_logprobs,
            logits=self.reports_logits,
        )

    def complete(self, request: GenerateRequest, fault: Fault | None, began: float) -> bytes:
        """Return the answer of `/v1/completions` to a request that came at `began`."""
        of_encoding = fault in {"garbage", "nan_logprob"}
        return encode_completion(self.generate(request, None if of_encoding else fault, began), fault)

    def _spans(self, end: int, began: float) -> list[VersionSpan]:
        """Return which version sampled which of the first `end` tokens."""
        taken = max(1e-9, anyio.current_time() - began)
        spans: list[VersionSpan] = []
        start = 0
        for until, version in [*self._replaced, (began + taken, self.version or UNNAMED_WEIGHTS)]:
            upto = min(end, round(end * (until - began) / taken))
            if upto > start:
                spans.append(VersionSpan(version, start, upto))
                start = upto
        return spans
