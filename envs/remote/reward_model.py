"""`reward_model`: raw scores (logits) of conversations from a served reward model.

::

    [[rewards]]
    ref = "reward_model"
    args = { urls = ["http://gpu-3:8000", "http://gpu-4:8000"] }

The servers speak vLLM's `POST /classify` (`vllm serve MODEL --runner pooling`, or `penstock serve MODEL`), one
conversation for each request, rendered by the server with the model's chat template. Requests of many groups are
collected for a few milliseconds and sent together, so that the server can run them in one forward pass.

A conversation without a score is `unavailable` (every attempt failed), `raised` (a 4xx, e.g. too long), `shape` (not
exactly one score) or `not_finite`. With `worst_score` the server is then asked to score a harmless answer to the same
prompt (`service_client.py`): where it does, the model's own text is the cause and has the worst score. Else the
completion is unmeasured, never 0.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, Self

import anyio
import structlog
from anyio import CancelScope
from anyio.abc import TaskGroup

from envs.messages import build_conversation
from envs.remote.classify_api import (
    CLASSIFY_PATH,
    MODELS_PATH,
    check_same_model,
    classify_request,
    parse_context_tokens,
    parse_score,
    probe_server,
)
from envs.remote.service_client import (
    HARMLESS_ANSWER,
    RETRY_BACKOFF,
    ClientOptions,
    RewardServiceClient,
    ServerState,
    ServiceStats,
    blame,
    parse_client_options,
)
from envs.rewards.loading import CallOptions
from stream.errors import RunFailedError, ServiceError, ServiceRefusedError, ServiceUnavailableError, SettingsError
from stream.records import Message
from stream.validity import Reward, RewardReason, Unmeasured

log = structlog.get_logger()

_MAX_BATCHES_PER_SERVER = 4
"""Concurrent batches for each server; beyond them, callers wait."""
_LOG_INTERVAL_S = 30.0
"""Seconds between two log events `reward_model.served`."""


class _PendingRequest:
    """One conversation waiting for its score."""

    __slots__ = ("body", "done", "reward")

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.done = anyio.Event()
        self.reward: Reward = Unmeasured(RewardReason.UNAVAILABLE, "no request was sent")


class RewardModel:
    """The reward function. Entering it checks each server; see `classify_api.py`. Each completion is a call of its own.

    Args:
        urls: servers of the same model; the least-loaded one is used.
        max_batch_size: conversations sent together, at most.
        batch_wait_ms: how long the first conversation of a batch waits for others.
        chat_template_kwargs: extra arguments of the server's chat template.
        scores_in_unit_interval: the model's raw scores lie between 0 and 1; do not refuse the server for them.
        worst_score: reward of a completion that the model cannot score because of its text, for example because it is
            too long; no higher than the model's lowest scores. None: it is unmeasured, and `penstock check` refuses a
            model with a shorter context than the run's.
        startup_timeout_s: how long to wait for the servers when entering.
        client: deadline and attempts of a request, see `ClientOptions`.
    """

    call_options = CallOptions(granularity="row")

    def __init__(
        self,
        urls: str | Sequence[str],
        max_batch_size: int = 32,
        batch_wait_ms: float = 4.0,
        *,
        chat_template_kwargs: Mapping[str, Any] = MappingProxyType({}),
        scores_in_unit_interval: bool = False,
        worst_score: float | None = None,
        startup_timeout_s: float = 60.0,
        client: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        urls = [urls] if isinstance(urls, str) else list(urls)
        if not urls or max_batch_size < 1 or batch_wait_ms < 0:
            raise SettingsError("reward_model: args need at least one URL and a positive max_batch_size")
        if worst_score is not None and not math.isfinite(worst_score):
            raise SettingsError(f"reward_model: args.worst_score is {worst_score}; expected a finite number")
        self.worst_score = worst_score
        self.context_tokens = 0
        """Longest conversation that all servers take, in tokens; 0: they do not say."""
        self._client = RewardServiceClient(urls, parse_client_options(client, ClientOptions, "reward_model"))
        self._max_batch_size = max_batch_size
        self._batch_wait_s = batch_wait_ms / 1000
        self._chat_template_kwargs = chat_template_kwargs
        self._scores_in_unit_interval = scores_in_unit_interval
        self._startup_timeout_s = startup_timeout_s
        self._stats = ServiceStats()
        self._limiter = anyio.CapacityLimiter(len(urls) * _MAX_BATCHES_PER_SERVER * max_batch_size)
        self._pending: deque[_PendingRequest] = deque()
        self._request_added, self._batch_full = anyio.Event(), anyio.Event()
        self._verify_lock = anyio.Lock()
        self._resources = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as resources:
            await self._client.__aenter__()
            resources.push_async_callback(self._close)
            await self._verify_all()
            tasks = await resources.enter_async_context(anyio.create_task_group())
            resources.callback(tasks.cancel_scope.cancel)
            tasks.start_soon(self._form_batches, tasks)
            tasks.start_soon(self._log_stats)
            self._resources = resources.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._resources.__aexit__(kind, error, trace)

    async def _close(self) -> None:
        self._stats.log_and_reset(self._client.retries)
        with CancelScope(shield=True):
            await self._client.__aexit__(None, None, None)

    async def __call__(self, prompts: list[Any], completions: list[Any], **_: Any) -> list[Any]:
        """Return the raw score of each conversation, or why there is none."""
        rewards = await self.score([build_conversation(p, c) for p, c in zip(prompts, completions, strict=True)])
        return [await self._blame(prompt, reward) for prompt, reward in zip(prompts, rewards, strict=True)]

    async def _blame(self, prompt: Any, reward: Reward) -> Reward:
        async def control() -> Reward:
            (scored,) = await self.score([build_conversation(prompt, HARMLESS_ANSWER)])
            return scored

        return reward if self.worst_score is None else await blame(reward, self.worst_score, control)

    async def score(self, conversations: Sequence[Sequence[Message]]) -> list[Reward]:
        """Score conversations; the rewards are in their order."""
        rewards: list[Reward] = [Unmeasured(RewardReason.UNAVAILABLE)] * len(conversations)

        async def score_one(i: int) -> None:
            rewards[i] = await self._enqueue(classify_request(conversations[i], self._chat_template_kwargs))

        async with anyio.create_task_group() as tasks:
            for i in range(len(conversations)):
                tasks.start_soon(score_one, i)
        return rewards

    async def _enqueue(self, body: bytes) -> Reward:
        request = _PendingRequest(body)
        async with self._limiter:
            self._pending.append(request)
            self._request_added.set()
            if len(self._pending) >= self._max_batch_size:
                self._batch_full.set()
            try:
                await request.done.wait()
            except anyio.get_cancelled_exc_class():
                if request in self._pending:
                    self._pending.remove(request)
                raise
        return request.reward

    async def _form_batches(self, tasks: TaskGroup) -> None:
        """Send batches of pending requests: when one is full, or when its first request has waited long enough."""
        while True:
            await self._request_added.wait()
            if len(self._pending) < self._max_batch_size:
                with anyio.move_on_after(self._batch_wait_s):
                    await self._batch_full.wait()
            batch = [self._pending.popleft() for _ in range(min(self._max_batch_size, len(self._pending)))]
            if not self._pending:
                self._request_added = anyio.Event()
            if len(self._pending) < self._max_batch_size:
                self._batch_full = anyio.Event()
            self._stats.record_batch(len(batch))
            for request in batch:
                tasks.start_soon(self._complete_request, request)

    async def _complete_request(self, request: _PendingRequest) -> None:
        start = anyio.current_time()
        try:
            request.reward = await self._fetch_reward(request.body)
        finally:
            request.done.set()
        self._stats.record(request.reward, anyio.current_time() - start)

    async def _fetch_reward(self, body: bytes) -> Reward:
        try:
            payload, server = await self._client.post(CLASSIFY_PATH, body)
            if not server.is_verified:  # its connection failed since the last check: another server may answer now
                await self._verify(server)
        except ServiceRefusedError as error:
            return Unmeasured(RewardReason.RAISED, str(error))
        except (ServiceError, RunFailedError) as error:
            return Unmeasured(RewardReason.UNAVAILABLE, str(error))
        return parse_score(payload, server.url)

    async def _verify_all(self) -> None:
        """Wait for all servers and check that they serve the same reward model.

        Raises:
            RunFailedError: a server is not a reward model, applies an activation, or serves another model than the
                others.
            ServiceUnavailableError: a server did not respond within `startup_timeout_s`.
        """
        scores: dict[str, list[float]] = {}
        with anyio.move_on_after(self._startup_timeout_s):
            for server in self._client.servers:
                scores[server.url] = await self._wait_for_probe(server)
        missing = [server.url for server in self._client.servers if server.url not in scores]
        if missing:
            raise ServiceUnavailableError(
                f"no reward model answers at {missing[0]}; tried for {self._startup_timeout_s:g} s"
            )
        check_same_model(scores)
        contexts = [await self._fetch_context(server) for server in self._client.servers]
        self.context_tokens = min((context for context in contexts if context), default=0)
        log.info("reward_model.found", scores=scores, context_tokens=self.context_tokens)

    async def _fetch_context(self, server: ServerState) -> int:
        """Return the tokens of the longest conversation that a server takes; 0 if it does not say."""
        try:
            return parse_context_tokens(await self._client.get_from(server, MODELS_PATH))
        except ServiceError:  # a proxy may pass on `/classify` alone
            return 0

    async def _wait_for_probe(self, server: ServerState) -> list[float]:
        attempts = 0
        while True:
            try:
                return await self._probe(server)
            except ServiceUnavailableError:
                attempts += 1
                await anyio.sleep(RETRY_BACKOFF.delay_s(attempts))

    async def _verify(self, server: ServerState) -> None:
        async with self._verify_lock:
            if not server.is_verified:
                await self._probe(server)

    async def _probe(self, server: ServerState) -> list[float]:
        scores = await probe_server(
            partial(self._client.post_to, server, CLASSIFY_PATH),
            server.url,
            self._chat_template_kwargs,
            scores_in_unit_interval=self._scores_in_unit_interval,
        )
        server.is_verified = True
        return scores

    async def _log_stats(self) -> None:
        while True:
            await anyio.sleep(_LOG_INTERVAL_S)
            self._stats.log_and_reset(self._client.retries)
