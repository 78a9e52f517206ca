"""What every server of a model tells: whether it lives, how busy it is, what it serves and who it is."""

from collections.abc import Callable, Iterable

import msgspec
from aiohttp import web

from workers.local_engine.model_thread import ModelThread
from workers.runtime.http_server import error_response

MAX_WAITING = 4096
"""Requests that wait for the thread that owns the model; more are answered with 429."""

_encoder = msgspec.json.Encoder()


class InfoRoutes:
    """The routes that read, and change nothing.

    Args:
        model_thread: does the work.
        activity: what that is, in a word.
        read_metrics: (name in vLLM's metrics, kind, value).
        model_name: the model's name in `/v1/models`.
        max_length: tokens of a sequence.
        penstock_version: Penstock's own.
    """

    def __init__(
        self,
        model_thread: ModelThread,
        activity: str,
        read_metrics: Callable[[], Iterable[tuple[str, str, float]]],
        *,
        model_name: str,
        max_length: int,
        penstock_version: str,
    ) -> None:
        self._model_thread = model_thread
        self._activity = activity
        self._read_metrics = read_metrics
        self._model_name = model_name
        self._max_length = max_length
        self._penstock_version = penstock_version

    def routes(self) -> list[web.RouteDef]:
        """To be added to an application."""
        return [
            web.get("/health", self.health),
            web.get("/metrics", self.metrics),
            web.get("/v1/models", self.models),
            web.get("/version", self.version),
        ]

    def overload_response(self) -> web.Response | None:
        """The answer to a request that there is no room for, if there is none."""
        if self._model_thread.waiting < MAX_WAITING:
            return None
        return error_response(429, f"{MAX_WAITING} requests are waiting")

    async def health(self, _: web.Request) -> web.Response:
        """200 while the work goes on, else 503 with what ended it."""
        failure = self._model_thread.failure
        if failure is None:
            return web.Response()
        return error_response(503, f"{self._activity} has failed: {failure!r}")

    async def metrics(self, _: web.Request) -> web.Response:
        """Prometheus' text format, under vLLM's names."""
        lines = (f"# TYPE {name} {kind}\n{name} {value}\n" for name, kind, value in self._read_metrics())
        return web.Response(text="".join(lines))

    async def models(self, _: web.Request) -> web.Response:
        """The one model that is served."""
        one = {"id": self._model_name, "object": "model", "owned_by": "penstock", "max_model_len": self._max_length}
        return json_response({"object": "list", "data": [one]})

    async def version(self, _: web.Request) -> web.Response:
        """Who answers."""
        return json_response({"version": f"penstock-{self._penstock_version}"})


def json_response(answer: object) -> web.Response:
    """An answer of 200."""
    return web.Response(body=_encoder.encode(answer), content_type="application/json")
