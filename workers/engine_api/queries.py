"""What every client of an engine asks: whether it is healthy, and which weights it has."""

from http import HTTPStatus

from envs.remote.service_client import describe_response
from stream.errors import EngineError
from workers.engine_api.connection import QUERY_TIMEOUT_S, ConnectionPool
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
    return (await connections.get(engine_url + WEIGHT_INFO_PATH, WeightInfo, timeout_s)).weight_version
