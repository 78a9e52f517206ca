"""An engine without a model: speaks the engines' protocol, samples from a plain function, and injects faults.

>>> async with ScriptedEngine(lambda token_ids, request: [7, 8, 2]) as engine:  # doctest: +SKIP
...     engine.faults = lambda number, request: "500" if number % 5 == 0 else None
...     client = EngineClient([engine.url], ...)
"""

from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from workers.runtime.http_server import listen
from workers.testing.scripted_routes import ScriptedRoutes
from workers.testing.scripted_state import DelayFunction, ReplyFunction, ScriptedState


class ScriptedEngine(ScriptedState):
    """An engine that listens while the context is open.

    Args:
        reply: returns the tokens of each answer.
        version: initial version of the weights; None as after a restart.
        max_length: prompt tokens from which a request is refused.
        delay_s: seconds for each answer. Its tokens are spread evenly over that time; tokens before a change of weights
            carry the earlier version.
        port: 0: any free port; a fixed one allows a 'restart' at the same address.
        max_concurrency: requests processed at once; others wait. None: no limit.
    """

    def __init__(
        self,
        reply: ReplyFunction,
        *,
        version: str | None = None,
        max_length: int = 4096,
        delay_s: float | DelayFunction = 0.0,
        port: int = 0,
        max_concurrency: int | None = None,
    ) -> None:
        super().__init__(
            reply, version=version, max_length=max_length, delay_s=delay_s, max_concurrency=max_concurrency
        )
        self.url = ""
        """Its base URL, once it listens."""
        self._port = port
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        app = ScriptedRoutes(self).application()
        self.url = await self._stack.enter_async_context(listen(app, "127.0.0.1", self._port))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        await self._stack.aclose()
