"""Routes of every model server: health, metrics, model name and version."""

from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from workers.engine_api.http_server import error_response
from workers.local_engine.model_thread import ModelThread

MAX_WAITING = 4096
"""Largest number of requests that wait for the model's thread; further requests get status 429."""

_VERSION = version("penstock")
_encoder = msgspec.json.Encoder()

EngineFigure = GaugeMetricFamily | CounterMetricFamily
"""One figure of an engine; names are the same as vLLM's."""


class _EngineCollector(Collector):
    """Reports the figures of an engine at each scrape."""

    def __init__(self, read: Callable[[], Iterable[EngineFigure]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """Return the figures."""
        return self._read()

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering reads nothing."""
        return []


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
        read_metrics: Callable[[], Iterable[EngineFigure]],
        model_name: str,
        max_length: int,
    ) -> None:
        self._model_thread = model_thread
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(read_metrics))
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
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

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
