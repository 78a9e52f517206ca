"""An engine without a model: speaks the engines' protocol, samples from a plain function, and injects faults.

>>> async with ScriptedEngine(lambda token_ids, request: [7, 8, 2]) as engine:  # doctest: +SKIP
...     engine.faults = lambda number, request: "500" if number % 5 == 0 else None
...     client = EngineClient([engine.url], ...)
"""

from types import TracebackType
from typing import Self

from tests.scripted_engine.routes import ScriptedRoutes
from tests.scripted_engine.state import ScriptedState
from workers.engine_api.http_server import listen


class ScriptedEngine(ScriptedState):
    """An engine that listens while the context is open; `ScriptedState` describes arguments and attributes."""

    async def __aenter__(self) -> Self:
        app = ScriptedRoutes(self).application()
        self.url = await self.server.enter_async_context(listen(app, "127.0.0.1", self.port))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        await self.server.aclose()
