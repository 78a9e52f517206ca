"""Routes of every model server: health, metrics, model name and version."""

from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

import msgspec
from aiohttp import web

from workers.local_engine.model_thread import ModelThread
from workers.runtime.http_server import error_response

MAX_WAITING = 4096
"""Largest number of requests that wait for the model's thread; further requests get status 429."""

_VERSION = version("penstock")
_encoder = msgspec.json.Encoder()

Metric = tuple[str, str, float]
"""(name, Prometheus type, value); names are the same as vLLM's."""


class InfoRoutes:
    """Handlers of read-only routes.

    Args:
        model_thread: thread that runs the model.
        read_metrics: returns the current metrics.
        model_name: name of the model in `/v1/models`.
        max_length: largest number of tokens in a sequence.
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
        """Return the routes for an application."""
        return [
            web.get("/health", self.health),
            web.get("/metrics", self.metrics),
            web.get("/v1/models", self.models),
            web.get("/version", self.version),
        ]

    def overload_response(self) -> web.Response | None:
        """Return a response with status 429 if `MAX_WAITING` requests wait, else None."""
        if self._model_thread.waiting < MAX_WAITING:
            return None
        return error_response(429, f"{MAX_WAITING} requests are waiting")

    async def health(self, _: web.Request) -> web.Response:
        """Answer 200 while the thread works; 503 with the error after it failed."""
        failure = self._model_thread.failure
        if failure is None:
            return web.Response()
        return error_response(503, f"{self._model_thread.activity} has failed: {failure!r}")

    async def metrics(self, _: web.Request) -> web.Response:
        """Return the metrics in Prometheus' text format."""
        lines = (f"# TYPE {name} {kind}\n{name} {value}\n" for name, kind, value in self._read_metrics())
        return web.Response(text="".join(lines))

    async def models(self, _: web.Request) -> web.Response:
        """List the served model."""
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
