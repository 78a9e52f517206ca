"""An OpenAI-compatible endpoint inside a rollout worker, for environments that run their own loop.

Each episode has its own URL with a secret, valid until the episode ends::

    POST http://host:port/SECRET/v1/chat/completions      {"messages": [...], "tools": [...], "stream": true}

Only messages and tools of a request are read; temperature and limits come from the run's settings.

One episode of an environment that runs its own loop: it asks the endpoint for every turn of the model.
"""

import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec
import structlog
from aiohttp import web

from envs.contract import Observation
from envs.factory import EnvironmentFactory
from stream.errors import EngineRefusedError, EngineUnavailableError
from stream.queue.in_flight import Activity
from stream.records import Completion, Failure, Message, Row
from stream.validity import RolloutReason, TruncationReason
from workers.engine_api.http_server import MAX_BODY_BYTES, error_middleware, error_response, listen
from workers.rollout.agent_endpoint.openai_messages import Reply, to_openai_message
from workers.rollout.agent_endpoint.recorder import Recorder
from workers.rollout.environment_slot import EnvironmentSlot
from workers.rollout.episode import BaseEpisode, EpisodeContext, EpisodeEnd

log = structlog.get_logger()

MODEL_NAME = "policy"
"""Name of the only model that it serves."""


class AgentEndpoint:
    """Gives each running episode its own URL. Made by `serve_endpoint`.

    Args:
        url: where the routes are served.
        recorders: the recorder of each running episode, by its secret; the routes read it.
    """

    def __init__(self, url: str, recorders: dict[str, Recorder]) -> None:
        self.url = url
        self._recorders = recorders

    @contextmanager
    def episode(self, recorder: Recorder) -> Iterator[str]:
        """Serve one episode while the context is open; yields its base URL. Leaving cancels a running request."""
        secret = secrets.token_urlsafe(16)
        self._recorders[secret] = recorder
        try:
            yield f"{self.url}/{secret}/v1"
        finally:
            del self._recorders[secret]
            recorder.close()


class _Routes:
    """Answers the requests of the running episodes."""

    def __init__(self, recorders: Mapping[str, Recorder]) -> None:
        self._recorders = recorders

    def app(self) -> web.Application:
        """Return the web application."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[error_middleware])
        app.router.add_post("/{secret}/v1/chat/completions", self._complete)
        app.router.add_get("/{secret}/v1/models", self._models)
        return app

    async def _models(self, _: web.Request) -> web.Response:
        """List the policy as the only model."""
        return web.json_response({"object": "list", "data": [{"id": MODEL_NAME, "object": "model"}]})

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        """Sample a turn; its tokens become part of the completion."""
        recorder = self._recorders.get(http.match_info["secret"])
        if recorder is None:
            return error_response(404, "no such episode, or it has ended")
        try:
            request = msgspec.json.decode(await http.read(), type=dict[str, Any])
        except ValueError as error:
            raise EngineRefusedError(f"the request is not a JSON object: {error}") from error
        is_retry = http.headers.get("x-stainless-retry-count", "0") != "0"
        try:
            reply = await recorder.complete(request, is_retry=is_retry)
        except EngineUnavailableError as error:
            return error_response(503, str(error))
        answer = _response_body(reply)
        if not request.get("stream"):
            return web.json_response(answer)
        return await _stream(http, answer, with_usage=bool((request.get("stream_options") or {}).get("include_usage")))


@asynccontextmanager
async def serve_endpoint(host: str) -> AsyncIterator[AgentEndpoint]:
    """Serve an endpoint on a free port.

    Args:
        host: address to listen on, under which the environments reach it.

    Raises:
        EngineError: this machine does not have that address.
    """
    recorders: dict[str, Recorder] = {}
    async with listen(_Routes(recorders).app(), host, 0) as url:
        yield AgentEndpoint(url, recorders)


@asynccontextmanager
async def serve_endpoint_if_needed(
    factories: Mapping[str, EnvironmentFactory], host: str
) -> AsyncIterator[AgentEndpoint | None]:
    """Serve an endpoint if one of these environments runs its own loop; yields None otherwise."""
    if not any(factory.runs_own_loop for factory in factories.values()):
        yield None
        return
    async with serve_endpoint(host) as endpoint:
        log.info("endpoint.listening", url=endpoint.url)
        yield endpoint


def _response_body(reply: Reply) -> dict[str, Any]:
    """Return an OpenAI chat completion."""
    usage = {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }
    choice = {"index": 0, "message": to_openai_message(reply), "finish_reason": reply.finish_reason, "logprobs": None}
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL_NAME,
        "choices": [choice],
        "usage": usage,
    }


async def _stream(http: web.Request, answer: dict[str, Any], *, with_usage: bool) -> web.StreamResponse:
    """Send the whole answer as server-sent events: one with the message, one with the finish reason."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(http)
    (choice,) = answer["choices"]
    delta = dict(choice["message"])
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    head = {name: answer[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
    ]
    if with_usage:
        chunks.append({"choices": [], "usage": answer["usage"]})
    for chunk in chunks:
        await response.write(b"data: " + msgspec.json.encode(head | chunk) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def run_agent_episode(context: EpisodeContext, slot: EnvironmentSlot, endpoint: AgentEndpoint) -> Completion:
    """Run one episode; see `BaseEpisode.run`.

    Args:
        context: of the episode.
        slot: the context's environment.
        endpoint: where the environment asks for turns.
    """
    return await AgentEpisode(context, slot, endpoint).run()


class AgentEpisode(BaseEpisode):
    """An episode whose turns the environment drives; this worker samples and records them."""

    def __init__(self, context: EpisodeContext, slot: EnvironmentSlot, endpoint: AgentEndpoint) -> None:
        super().__init__(context)
        self._slot, self._endpoint = slot, endpoint
        self._recorder = Recorder(context, self.completion, self.clock)

    def prompt_messages(self, _observation: Observation) -> list[Message]:
        """Return the prompt; the environment's first request replaces it."""
        return self.context.prompt.messages

    async def run_turns(self) -> EpisodeEnd:
        """Run the environment's loop."""
        limits, recorder = self.context.limits, self._recorder
        sampling = {"temperature": limits.temperature, "max_tokens": limits.max_tokens_per_turn}
        self.context.progress.activity = Activity.OWN_LOOP
        end: EpisodeEnd = TruncationReason.WALL_CLOCK
        with self._endpoint.episode(recorder) as url:
            with self.clock, self.clock.tools:  # the program's own time, since it calls the tools
                end = await self._slot.run_episode(url, sampling, 2 * limits.episode_timeout_s)
            if self.clock.is_up:
                end = self.clock.running
        if recorder.error is not None:
            raise recorder.error
        if recorder.end is not None:  # a missing turn or a limit ended it; how the environment coped does not matter
            return recorder.end
        if end is None and not self.completion.turns:
            detail = f"{self._slot.name}: the episode ended without a turn of the model"
            return Failure(reason=RolloutReason.ENV_STEP, detail=detail)
        return end

    def rows(self) -> list[Row]:
        """Return one row per branch of the conversation."""
        return self._recorder.rows()

    def versions(self) -> set[int]:
        """Return the policy versions that sampled so far."""
        return self._recorder.versions()
