"""An endpoint inside a rollout worker, for programs and environments that run their own loop.

It speaks three dialects (`dialects`). Each episode has a key, valid until the episode ends, which a client sends as it
sends its vendor's key, or which stands in the URL::

    POST http://host:port/v1/messages                     Authorization: Bearer KEY, or x-api-key: KEY
    POST http://host:port/KEY/v1/chat/completions         {"messages": [...], "tools": [...], "stream": true}

`fields` says which fields of a request have an effect; temperature and limits come from the run's settings.

One episode of an environment that runs its own loop: it asks the endpoint for every turn of the model.
"""

import hashlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
import msgspec
import structlog
from aiohttp import web

from envs.contract import Observation
from envs.factory import EnvironmentFactory
from stream.errors import EngineError, EngineRefusedError, EngineUnavailableError
from stream.queue.in_flight import Activity
from stream.records import Completion, Failure, Message, Row
from stream.validity import RolloutReason, TruncationReason
from workers.engine_api.http_server import MAX_BODY_BYTES, error_middleware, listen
from workers.rollout.agent_endpoint.answers import Answers
from workers.rollout.agent_endpoint.dialects import CHAT, MESSAGES, RESPONSES
from workers.rollout.agent_endpoint.dialects.base import MODEL_NAME, Dialect
from workers.rollout.agent_endpoint.neutral import ModelReply, ModelRequest, RequestRefusedError
from workers.rollout.agent_endpoint.recorder import Recorder
from workers.rollout.agent_endpoint.request_log import DIALECT, ERROR, FIELD_NAMES, ROLES, RequestLog
from workers.rollout.environment_slot import EnvironmentSlot
from workers.rollout.episode import BaseEpisode, EpisodeContext, EpisodeEnd

log = structlog.get_logger()

_PING_S: Final = 5.0
"""A stream begins after this time, and then says as often that it is alive. Earlier errors keep their status."""
_RETRY_AFTER: Final = {"Retry-After": "5"}
_LENGTHS: Final = ("context_length", "max_model_len", "max_input_tokens")
"""Names that clients know for the length of a model's context."""
_OVER: Final = "the episode is over, or never was: no episode has this key"


class AgentEndpoint:
    """Gives each running episode its own key and URL. Made by `serve_endpoint`.

    Args:
        url: where the routes are served.
        episodes: the answers of each running episode, by the digest of its key; the routes read it.
    """

    def __init__(self, url: str, episodes: dict[bytes, Answers]) -> None:
        self.url = url
        self._episodes = episodes

    @asynccontextmanager
    async def episode(self, recorder: Recorder, context_length: int = 0) -> AsyncIterator[str]:
        """Serve one episode while the context is open; yields its base URL. Leaving cancels what is being sampled.

        Args:
            recorder: samples and records the turns.
            context_length: tokens that an engine takes, for `GET /v1/models`; 0 if it is not known.
        """
        key = secrets.token_urlsafe(32)
        self._episodes[_digest(key)] = Answers(recorder, context_length)
        try:
            yield f"{self.url}/{key}/v1"
        finally:
            del self._episodes[_digest(key)]
            recorder.close()


def _digest(key: str) -> bytes:
    """Return what a key is found by: the time that takes says nothing about the keys."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class _Routes:
    """Answers the requests of the running episodes."""

    def __init__(self, episodes: Mapping[bytes, Answers]) -> None:
        self._episodes = episodes
        self._unused: set[tuple[str, str]] = set()

    def app(self, seen: RequestLog | None) -> web.Application:
        """Return the web application."""
        noting = [] if seen is None else [seen.middleware()]
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[*noting, error_middleware])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/responses", self._responses)
        app.router.add_post("/v1/messages", self._messages)
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        app.router.add_get("/v1/models", self._models, allow_head=False)
        for route in [*app.router.routes()]:
            path = route.resource.canonical if route.resource else ""
            app.router.add_route(route.method, f"/{{key}}{path}", route.handler)
        return app

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        """Sample a turn, asked for by OpenAI's chat completions; its tokens become part of the completion."""
        return await self._complete(CHAT, http)

    async def _responses(self, http: web.Request) -> web.StreamResponse:
        """Sample a turn, asked for by OpenAI's Responses."""
        return await self._complete(RESPONSES, http)

    async def _messages(self, http: web.Request) -> web.StreamResponse:
        """Sample a turn, asked for by Anthropic's Messages."""
        return await self._complete(MESSAGES, http)

    async def _models(self, http: web.Request) -> web.Response:
        """List the policy as the only model, with the length of its context if an engine reports it."""
        model: dict[str, Any] = {"id": MODEL_NAME, "object": "model", "type": "model", "display_name": MODEL_NAME}
        answers = self._episodes.get(_digest(_key(http)))
        if answers is not None and answers.context_length:
            model |= dict.fromkeys(_LENGTHS, answers.context_length)
        return web.json_response({"object": "list", "data": [model], "has_more": False})

    async def _count_tokens(self, http: web.Request) -> web.Response:
        """Count the tokens of a request to `/v1/messages`, in the form in which the model would see it."""
        try:
            answers, body = await self._receive(http)
            request = self._parse(http, MESSAGES, answers, body)
            return web.json_response({"input_tokens": await answers.recorder.count_tokens(request)})
        except EngineRefusedError as error:
            http[ERROR] = error
            return _error(MESSAGES, error)
        except ConnectionError:
            return _error(MESSAGES, EngineRefusedError("the connection was lost"))

    async def _complete(self, dialect: Dialect, http: web.Request) -> web.StreamResponse:
        try:
            answers, body = await self._receive(http)
            with answers.holding(len(body)):
                request = self._parse(http, dialect, answers, body)
                answer, is_new = answers.get(request)
                reply = answer.sample(answers.recorder, request) if is_new else answer.wait()
                answer.readers.append(http)
                try:
                    response = await (_stream if request.streams else _send)(http, dialect, request, reply)
                    answer.is_delivered = answer.error is None
                finally:
                    answer.readers.remove(http)
        except EngineError as error:
            http[ERROR] = error
            return _error(dialect, error)
        except ConnectionError:  # it was lost: nobody reads this
            return _error(dialect, EngineRefusedError("the connection was lost"))
        return response

    async def _receive(self, http: web.Request) -> tuple[Answers, bytes]:
        """Return the episode, and the body of its request.

        Raises:
            RequestRefusedError: there is no such episode.
        """
        answers = self._episodes.get(_digest(_key(http)))
        if answers is None:  # 401 would make Claude Code wait for minutes
            raise RequestRefusedError(_OVER)
        async with answers.reading:
            return answers, await http.read()

    def _parse(self, http: web.Request, dialect: Dialect, answers: Answers, given: bytes) -> ModelRequest:
        """Return what a body asks for.

        Raises:
            RequestRefusedError: it is malformed.
        """
        try:
            body = msgspec.json.decode(given, type=dict[str, Any])
        except ValueError as error:
            raise RequestRefusedError(f"the request is not a JSON object: {error}") from error
        except RecursionError as error:
            raise RequestRefusedError("the request is nested too deeply") from error
        http[DIALECT], http[FIELD_NAMES] = dialect.name, tuple(body)
        try:
            request = dialect.parse(body, http.headers)
        except RequestRefusedError as error:
            answers.recorder.note_refusal(str(error))
            raise
        http[ROLES] = tuple(str(message["role"]) for message in request.messages)
        for name in request.unused:
            if (dialect.name, name) not in self._unused:
                self._unused.add((dialect.name, name))
                log.warning("endpoint.field_without_effect", dialect=dialect.name, field=name)
        return request


def _key(http: web.Request) -> str:
    if key := http.match_info.get("key"):
        return key
    if key := http.headers.get("x-api-key"):
        return key
    return http.headers.get("Authorization", "").removeprefix("Bearer ")


def _status(dialect: Dialect, error: EngineError) -> int:
    if isinstance(error, EngineRefusedError):
        return 400
    if isinstance(error, EngineUnavailableError):
        return 529 if dialect is MESSAGES else 503
    return 500


def _error(dialect: Dialect, error: EngineError) -> web.Response:
    status = _status(dialect, error)
    headers = _RETRY_AFTER if status in (503, 529) else {}
    return web.json_response(dialect.error(status, error), status=status, headers=headers)


async def _send(
    http: web.Request, dialect: Dialect, request: ModelRequest, reply: Awaitable[ModelReply]
) -> web.StreamResponse:
    """Send the answer as one object, to its end: then it is delivered."""
    response = web.json_response(dialect.body(await reply, request))
    await response.prepare(http)
    await response.write_eof()
    return response


async def _stream(
    http: web.Request, dialect: Dialect, request: ModelRequest, reply: Awaitable[ModelReply]
) -> web.StreamResponse:
    """Send the answer as server-sent events; nothing is sent before it is there, or before some seconds."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    answered = anyio.Event()

    async def keep_alive() -> None:
        while not answered.is_set():
            with anyio.move_on_after(_PING_S):
                await answered.wait()
            if answered.is_set():
                return
            try:
                if not response.prepared:
                    await response.prepare(http)
                await response.write(dialect.ping)
            except ConnectionError:  # the program has left; the turn is sampled to its end
                return

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep_alive)
        try:
            chunks = list(dialect.events(await reply, request))
        except EngineError as error:
            http[ERROR] = error
            answered.set()
            if not response.prepared:
                return _error(dialect, error)
            chunks = [dialect.error_event(_status(dialect, error), error)]
        answered.set()
    if not response.prepared:
        await response.prepare(http)
    for chunk in chunks:
        await response.write(chunk)
    await response.write_eof()
    return response


@asynccontextmanager
async def serve_endpoint(host: str, seen: RequestLog | None = None) -> AsyncIterator[AgentEndpoint]:
    """Serve an endpoint on a free port.

    Args:
        host: address to listen on, under which the environments reach it.
        seen: gets all requests.

    Raises:
        EngineError: this machine does not have that address.
    """
    episodes: dict[bytes, Answers] = {}
    # A program whose connection broke asks again: its turn is sampled to the end.
    async with listen(_Routes(episodes).app(seen), host, 0, cancels_handlers=False) as url:
        yield AgentEndpoint(url, episodes)


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

    context: EpisodeContext

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
        sampling: dict[str, Any] = {"temperature": limits.temperature, "max_tokens": limits.max_tokens_per_turn}
        if context_length := self.context.sampler.context_length:
            sampling["context_length"] = context_length
        self.context.progress.activity = Activity.OWN_LOOP
        end: EpisodeEnd = TruncationReason.WALL_CLOCK
        async with self._endpoint.episode(recorder, context_length) as url:
            with self.clock, self.clock.tools:  # the program's own time, since it calls the tools
                end = await self._slot.run_episode(url, sampling, 2 * limits.episode_timeout_s)
            if self.clock.is_up:
                end = self.clock.running
        if recorder.error is not None:
            raise recorder.error
        if (how := recorder.end()) is not None:  # a missing turn, or a limit; how the environment coped does not matter
            return how
        if end is None and not self.completion.turns:
            detail = f"{self._slot.name}: the episode ended without a turn of the model"
            return Failure(reason=RolloutReason.ENV_STEP, detail=detail)
        return end

    def rows(self) -> list[Row]:
        """Return the rows; the completion gets the branches to which they belong."""
        rows, self.completion.branches = self._recorder.record()
        return rows

    def versions(self) -> set[int]:
        """Return the policy versions that sampled so far."""
        return self._recorder.versions()
