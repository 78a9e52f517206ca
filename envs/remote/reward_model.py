"""`reward_model`: a served reward model scores the conversation; raw logits, whoever its neighbours are.

::

    [[rewards]]
    ref = "reward_model"
    args = { urls = ["http://gpu-3:8000", "http://gpu-4:8000"] }

The servers speak vLLM's `POST /classify` (`vllm serve MODEL --runner pooling`, or `penstock serve MODEL`): one
conversation a request, rendered there by the model's own chat template. What many groups ask for at the same time is
gathered for a moment and goes to one server together, which puts it into one pass.

What came of a conversation, if not a number: `unavailable` (every try failed), `raised` (refused, a 4xx: too long, for
one), `shape` (another number of scores than one), `not_finite`. Never 0.
"""

from collections import deque
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import anyio
import structlog
from anyio import CancelScope

from envs.messages import build_conversation
from envs.remote.classify_api import CLASSIFY_PATH, classify_request, parse_score
from envs.remote.model_check import check_same_model, probe_server
from envs.remote.service_client import RewardServiceClient, ServerState, back_off
from envs.remote.stats import ServiceStats
from stream.errors import RunFailedError, ServiceError, ServiceRefusedError, ServiceUnavailableError, SettingsError
from stream.records import Message
from stream.validity import Reward, RewardReason, Unmeasured

log = structlog.get_logger()

_MAX_BATCHES_PER_SERVER = 4
"""For each server; beyond them, callers wait."""


class _PendingRequest:
    """One conversation that waits for its score."""

    __slots__ = ("body", "done", "reward")

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.done = anyio.Event()
        self.reward: Reward = Unmeasured(RewardReason.UNAVAILABLE, "it was not asked")


class RewardModel:
    """The reward function; entered before its first call, which probes each server, and left after the last.

    Args:
        urls: servers of the same model; the one with least to do is asked.
        batch: conversations that are sent together, at most.
        wait_ms: how long the first of a batch waits for others.
        timeout_s: for one answer. `attempts` of them should fit into `rollout.call_timeout_s`, past which the
            reason is `timeout`.
        attempts: tries of one conversation.
        start_s: how long to wait for the servers at the start.
        template_args: further arguments of the server's chat template.
        from_0_to_1: this model's own scores lie between 0 and 1: do not take that for an activation.
        report_s: seconds between two log events `reward_model.served`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        batch: int = 32,
        wait_ms: float = 4.0,
        timeout_s: float = 8.0,
        attempts: int = 3,
        start_s: float = 60.0,
        template_args: dict[str, Any] | None = None,
        from_0_to_1: bool = False,
        report_s: float = 30.0,
    ) -> None:
        urls = [urls] if isinstance(urls, str) else list(urls)
        if not urls or batch < 1 or attempts < 1 or timeout_s <= 0 or wait_ms < 0:
            raise SettingsError("reward_model takes one URL or more, and positive batch, attempts and timeout_s")
        self._service = RewardServiceClient(urls, timeout_s=timeout_s, attempts=attempts)
        self._batch = batch
        self._wait_s = wait_ms / 1000
        self._start_s = start_s
        self._template_args = template_args or {}
        self._from_0_to_1 = from_0_to_1
        self._report_s = report_s
        self._pending: deque[_PendingRequest] = deque()
        self._verify_lock = anyio.Lock()

    async def __aenter__(self) -> Self:
        self._limiter = anyio.Semaphore(len(self._service.servers) * _MAX_BATCHES_PER_SERVER * self._batch)
        self._arrived, self._full = anyio.Event(), anyio.Event()
        self._stats = ServiceStats()
        await self._service.__aenter__()
        try:
            await self._verify_all()
        except BaseException:
            with CancelScope(shield=True):
                await self._service.__aexit__(None, None, None)
            raise
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._form_batches)
        self._tasks.start_soon(self._log_stats)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._tasks.cancel_scope.cancel()
        try:
            return await self._tasks.__aexit__(kind, error, trace)
        finally:
            self._stats.log_and_reset(self._service.retries)
            with CancelScope(shield=True):
                await self._service.__aexit__(None, None, None)

    async def __call__(self, prompts: list[Any], completions: list[Any], **_: Any) -> list[Any]:
        """One raw logit for each conversation, or why there is none."""
        conversations = [build_conversation(p, c) for p, c in zip(prompts, completions, strict=True)]
        return await self.score(conversations)

    async def score(self, conversations: Sequence[Sequence[Message]]) -> list[Reward]:
        """Score conversations, in their order."""
        rewards: list[Reward] = [Unmeasured(RewardReason.UNAVAILABLE)] * len(conversations)

        async def score(position: int) -> None:
            rewards[position] = await self._enqueue(classify_request(conversations[position], self._template_args))

        async with anyio.create_task_group() as tasks:
            for position in range(len(conversations)):
                tasks.start_soon(score, position)
        return rewards

    async def _enqueue(self, body: bytes) -> Reward:
        item = _PendingRequest(body)
        async with self._limiter:
            self._pending.append(item)
            self._arrived.set()
            if len(self._pending) >= self._batch:
                self._full.set()
            try:
                await item.done.wait()
            except anyio.get_cancelled_exc_class():
                if item in self._pending:
                    self._pending.remove(item)
                raise
        return item.reward

    async def _form_batches(self) -> None:
        """Form batches: whatever came within a few milliseconds of the first, `batch` at most."""
        while True:
            await self._arrived.wait()
            if len(self._pending) < self._batch:
                with anyio.move_on_after(self._wait_s):
                    await self._full.wait()
            batch = [self._pending.popleft() for _ in range(min(self._batch, len(self._pending)))]
            if not self._pending:
                self._arrived = anyio.Event()
            if len(self._pending) < self._batch:
                self._full = anyio.Event()
            self._stats.batch_sizes.append(len(batch))
            for item in batch:
                self._tasks.start_soon(self._complete_request, item)

    async def _complete_request(self, item: _PendingRequest) -> None:
        began = anyio.current_time()
        try:
            item.reward = await self._fetch_reward(item.body)
        finally:
            item.done.set()
        self._stats.record(item.reward, anyio.current_time() - began)

    async def _fetch_reward(self, body: bytes) -> Reward:
        try:
            payload, server = await self._service.post(CLASSIFY_PATH, body)
            if not server.is_verified:  # it was away, and whoever came back may be another one
                await self._verify(server)
        except ServiceRefusedError as error:
            return Unmeasured(RewardReason.RAISED, str(error))
        except (ServiceError, RunFailedError) as error:
            return Unmeasured(RewardReason.UNAVAILABLE, str(error))
        return parse_score(payload, server.url)

    async def _verify_all(self) -> None:
        """See that each server serves the same reward model; those that do not answer yet are waited for.

        Raises:
            RunFailedError: one is no reward model, squashes its scores, or is another model than its siblings.
            ServiceUnavailableError: one has not answered for `start_s`.
        """
        scores: dict[str, list[float]] = {}
        with anyio.move_on_after(self._start_s):
            for server in self._service.servers:
                scores[server.url] = await self._wait_for_probe(server)
        missing = [server.url for server in self._service.servers if server.url not in scores]
        if missing:
            raise ServiceUnavailableError(f"no reward model answers at {missing[0]}; tried for {self._start_s:g} s")
        check_same_model(scores)
        log.info("reward_model.found", scores=scores)

    async def _wait_for_probe(self, server: ServerState) -> list[float]:
        tries = 0
        while True:
            try:
                return await self._probe(server)
            except ServiceUnavailableError:
                tries += 1
                await back_off(tries)

    async def _verify(self, server: ServerState) -> None:
        async with self._verify_lock:
            if not server.is_verified:
                await self._probe(server)

    async def _probe(self, server: ServerState) -> list[float]:
        post = partial(self._service.post_to, server, CLASSIFY_PATH)
        scores = await probe_server(post, server.url, self._template_args, from_0_to_1=self._from_0_to_1)
        server.is_verified = True
        return scores

    async def _log_stats(self) -> None:
        while True:
            await anyio.sleep(self._report_s)
            self._stats.log_and_reset(self._service.retries)
