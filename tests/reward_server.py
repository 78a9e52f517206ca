"""A reward server without a model: a plain function scores the conversation, and faults are injected on demand."""

import json
import math
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
from aiohttp import web

from workers.engine_api.http_server import listen


def by_length(messages: list[dict[str, Any]]) -> float:
    """Return a score that differs between conversations, on both sides of 0."""
    return len(str(messages[-1]["content"])) - 10.5


class RewardServer:
    """Answers `/classify` as vLLM does.

    `fault(number, messages)` returns the fault for that request: a status, `hang`, `reset`, or a whole body; None for
    no fault.
    """

    def __init__(self, score: Callable[[list[dict[str, Any]]], float] = by_length) -> None:
        self.score = score
        self.fault: Callable[[int, list[dict[str, Any]]], Any] = lambda *_: None
        self.applies_activation = False
        self.asked: list[dict[str, Any]] = []
        """Bodies of the requests, without the probe's."""
        self.probed = 0
        self.under_way = self.most = 0
        self.together = 0
        """Answers are held back until this many requests wait."""
        self.release = anyio.Event()
        self.url = ""
        self.models: dict[str, Any] | None = None
        """Answer to `GET /v1/models`; None: there is no such route."""

    async def list_models(self, _: web.Request) -> web.Response:
        return web.Response(status=404) if self.models is None else web.json_response(self.models)

    async def classify(self, http: web.Request) -> web.Response:
        request = json.loads(await http.read())
        messages = request["messages"]
        if "capital of France" in str(messages):
            self.probed += 1
            return self._answer(request)
        number = len(self.asked)
        self.asked.append(request)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        if self.under_way >= self.together:
            self.release.set()
        try:
            await self.release.wait()
        finally:
            self.under_way -= 1
        match self.fault(number, messages):
            case None:
                return self._answer(request)
            case "hang":
                await anyio.sleep_forever()
            case "reset":
                http.transport.abort()
            case int(status):
                body = json.dumps({"error": {"message": f"status {status}, said the server"}})
                return web.Response(status=status, text=body, headers={"Location": "/elsewhere"})
            case str(body):
                return web.Response(text=body)
        raise AssertionError

    def _answer(self, request: dict[str, Any]) -> web.Response:
        score = self.score(request["messages"])
        if self.applies_activation or request.get("use_activation") is not False:
            score = 1 / (1 + math.exp(-score))
        return web.Response(text=answer([score]))


def answer(*entries: list[Any]) -> str:
    """Return the body of an answer with these `probs`."""
    data = [
        {"index": i, "label": "LABEL_0", "probs": probs, "num_classes": len(probs)} for i, probs in enumerate(entries)
    ]
    return json.dumps({"object": "list", "data": data})


@asynccontextmanager
async def reward_server(score: Callable[[list[dict[str, Any]]], float] = by_length, port: int = 0):
    """Run a reward server for as long as the context is open."""
    server = RewardServer(score)
    app = web.Application()
    app.router.add_post("/classify", server.classify)
    app.router.add_get("/v1/models", server.list_models)
    async with listen(app, "127.0.0.1", port) as url:
        server.url = url
        yield server
