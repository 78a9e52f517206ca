"""Routes that every model server has: health, metrics, model name and version."""

from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

import msgspec
from aiohttp import web

from workers.local_engine.model_thread import ModelThread
from workers.runtime.http_server import error_response

MAX_WAITING = 4096
"""Requests that may wait for the model's thread; further ones are answered with 429."""

_VERSION = version("penstock")
_encoder = msgspec.json.Encoder()

Metric = tuple[str, str, float]
"""Name (the same as vLLM's), Prometheus type, value."""


class InfoRoutes:
    """Handlers that change nothing.

    Args:
        model_thread: does the server's work.
        read_metrics: returns the current values.
        model_name: name of the model in `/v1/models`.
        max_length: tokens of a sequence.
    """

    def __init__(
        self,
        model_thread: ModelThread[Any],
        read_metrics: Callable[[], Iterable[Metric]],
        model_name: str,
        max_length: int,
    ) -> None:
        self._model_thread = model_thread
        self._read_metrics = read_metrics
        self._model_name = model_name
        self._max_length = max_length

    def routes(self) -> list[web.RouteDef]:
        """Return the routes, to be added to an application."""
        return [
            web.get("/health", self.health),
            web.get("/metrics", self.metrics),
            web.get("/v1/models", self.models),
            web.get("/version", self.version),
        ]

    def overload_response(self) -> web.Response | None:
        """Return the response to one request more if too many wait, else None."""
        if self._model_thread.waiting < MAX_WAITING:
            return None
        return error_response(429, f"{MAX_WAITING} requests are waiting")

    async def health(self, _: web.Request) -> web.Response:
        """Answer 200 as long as the thread works, then 503 with its error."""
        failure = self._model_thread.failure
        if failure is None:
            return web.Response()
        return error_response(503, f"{self._model_thread.activity} has failed: {failure!r}")

    async def metrics(self, _: web.Request) -> web.Response:
        """Return the metrics in Prometheus' text format."""
        lines = (f"# TYPE {name} {kind}\n{name} {value}\n" for name, kind, value in self._read_metrics())
        return web.Response(text="".join(lines))

    async def models(self, _: web.Request) -> web.Response:
        """List the one model."""
        model = {
            "id": self._model_name,
            "object": "model",
            "owned_by": "penstock",
            "max_model_len": self._max_length,
        }
        return json_response({"object": "list", "data": [model]})

    async def version(self, _: web.Request) -> web.Response:
        """Return the name and version of the server."""
        return json_response({"version": f"penstock-{_VERSION}"})


def json_response(answer: object) -> web.Response:
    """Return a response with status 200."""
    return web.Response(body=_encoder.encode(answer), content_type="application/json")
