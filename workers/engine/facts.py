"""What every server of a model tells: whether it lives, how busy it is, what it serves and who it is."""

from collections.abc import Callable, Iterable

import msgspec
from aiohttp import web

from workers.engine.owner import Owner
from workers.engine.site import refused

MAX_WAITING = 4096
"""Requests that wait for the thread that owns the model; more are answered with 429."""

_encoder = msgspec.json.Encoder()


class Facts:
    """The routes that read, and change nothing.

    Args:
        owner: does the work.
        work: what that is, in a word.
        counts: (name in vLLM's metrics, kind, value).
        name: the model's name in `/v1/models`.
        max_length: tokens of a sequence.
        release: Penstock's own.
    """

    def __init__(
        self,
        owner: Owner,
        work: str,
        counts: Callable[[], Iterable[tuple[str, str, float]]],
        *,
        name: str,
        max_length: int,
        release: str,
    ) -> None:
        self._owner = owner
        self._work = work
        self._counts = counts
        self._name = name
        self._max_length = max_length
        self._release = release

    def routes(self) -> list[web.RouteDef]:
        """To be added to an application."""
        return [
            web.get("/health", self.health),
            web.get("/metrics", self.metrics),
            web.get("/v1/models", self.models),
            web.get("/version", self.version),
        ]

    def crowded(self) -> web.Response | None:
        """The answer to a request that there is no room for, if there is none."""
        if self._owner.waiting < MAX_WAITING:
            return None
        return refused(429, f"{MAX_WAITING} requests are waiting")

    async def health(self, _: web.Request) -> web.Response:
        """200 while the work goes on, else 503 with what ended it."""
        failure = self._owner.failure
        if failure is None:
            return web.Response()
        return refused(503, f"{self._work} has failed: {failure!r}")

    async def metrics(self, _: web.Request) -> web.Response:
        """Prometheus' text format, under vLLM's names."""
        lines = (f"# TYPE {name} {kind}\n{name} {value}\n" for name, kind, value in self._counts())
        return web.Response(text="".join(lines))

    async def models(self, _: web.Request) -> web.Response:
        """The one model that is served."""
        one = {"id": self._name, "object": "model", "owned_by": "penstock", "max_model_len": self._max_length}
        return as_json({"object": "list", "data": [one]})

    async def version(self, _: web.Request) -> web.Response:
        """Who answers."""
        return as_json({"version": f"penstock-{self._release}"})


def as_json(answer: object) -> web.Response:
    """An answer of 200."""
    return web.Response(body=_encoder.encode(answer), content_type="application/json")
