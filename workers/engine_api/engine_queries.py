"""What every client of an engine asks: whether it is healthy, and which weights it has.

An engine that stops answering is logged once, and once more when it answers again.
"""

from http import HTTPStatus

import structlog

from envs.remote.service_client import describe_response
from stream.errors import EngineError
from workers.engine_api.connection_pool import QUERY_TIMEOUT_S, ConnectionPool
from workers.engine_api.wire import WeightInfo

WEIGHT_INFO_PATH = "/weight_info"


async def check_health(connections: ConnectionPool, engine_url: str, timeout_s: float = QUERY_TIMEOUT_S) -> None:
    """Require that the engine answers 200 at `/health`.

    Raises:
        EngineError: it does not.
    """
    url = f"{engine_url}/health"
    status, payload = await connections.request("GET", url, timeout_s)
    if status != HTTPStatus.OK:
        is_client_url = status == HTTPStatus.NOT_FOUND and engine_url.endswith("/v1")  # as OpenAI's clients take it
        hint = "; write the engine's address without /v1" if is_client_url else ""
        raise EngineError(f"{describe_response(url, status, payload)}{hint}")


async def fetch_weight_name(
    connections: ConnectionPool, engine_url: str, timeout_s: float = QUERY_TIMEOUT_S
) -> str | None:
    """Return the name of the engine's weights; None before the first update.

    Raises:
        EngineError: the engine does not answer, or does not name its weights.
    """
    return (await fetch_weight_info(connections, engine_url, timeout_s)).weight_version


async def fetch_weight_info(
    connections: ConnectionPool, engine_url: str, timeout_s: float = QUERY_TIMEOUT_S
) -> WeightInfo:
    """Return what the engine says of its weights and its cache; raises as `fetch_weight_name`."""
    return await connections.get(engine_url + WEIGHT_INFO_PATH, WeightInfo, timeout_s)


log = structlog.get_logger()


class EngineAvailability:
    """One client's record of one engine's availability.

    Args:
        url: the engine's base URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.problem: EngineError | None = None
        """Why the last request failed; None if it succeeded, or before the first."""
        self._waiting_for: set[str] = set()

    @property
    def is_available(self) -> bool:
        """Whether the last request succeeded, or there was none."""
        return self.problem is None

    def mark_available(self) -> None:
        """Record that the engine answers."""
        self.problem = None
        self.log_recovered("answer")

    def mark_unavailable(self, error: EngineError) -> None:
        """Record that the engine does not answer."""
        self.problem = error
        self.log_waiting("answer", error)

    def mark_ejected(self, error: EngineError) -> None:
        """Record that the client stops using the engine after it failed; logs `engine.ejected` instead of a wait."""
        self.problem = error
        self._waiting_for.add("answer")
        log.warning("engine.ejected", url=self.url, why=str(error))

    def log_waiting(self, what: str, error: EngineError) -> None:
        """Log that the client waits for `what` from this engine; repeated calls before `log_recovered` log nothing."""
        if what not in self._waiting_for:
            self._waiting_for.add(what)
            log.warning("engine.waiting", url=self.url, what=what, why=str(error))

    def log_recovered(self, what: str) -> None:
        """Log that `what` arrived, if `log_waiting` was called for it."""
        if what in self._waiting_for:
            self._waiting_for.discard(what)
            log.info("engine.recovered", url=self.url, what=what)
