"""HTTP requests to engines, with distinct errors for unreachable engines, timeouts, refusals and invalid answers."""

from types import TracebackType
from typing import Final, Self, TypeVar

import aiohttp
import msgspec

from envs.remote.service_client import describe_response
from stream.errors import EngineError, EngineRefusedError

QUERY_TIMEOUT_S: Final = 10.0
"""Time limit of a request that does not sample, and of connecting."""
_RETRYABLE_STATUSES: Final = (408, 429)
_KEEPALIVE_S: Final = 4.0
"""Shorter than the 5 s after which vLLM closes an idle connection, perhaps while the next request arrives."""

T = TypeVar("T")


class UnreachableError(EngineError):
    """The server did not answer: no connection, or a broken one."""


class RequestTimeoutError(EngineError):
    """A connected server did not answer in time."""


class ConnectionPool:
    """Connections to any number of servers; an async context manager.

    Args:
        keep_alive: reuse a connection for the next request to the same server.
    """

    def __init__(self, *, keep_alive: bool = True) -> None:
        self._keep_alive = keep_alive

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=_connector(keep_alive=self._keep_alive),
            headers={"Content-Type": "application/json"},
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def get(self, url: str, kind: type[T], timeout_s: float = QUERY_TIMEOUT_S) -> T:
        """Send a GET request that does not sample; return the decoded answer.

        Raises:
            EngineError: no answer, a status other than 200, or a body that does not decode as `kind`.
        """
        status, payload = await self.request("GET", url, timeout_s)
        try:
            return decode_response(status, payload, url, msgspec.json.Decoder(kind))
        except EngineRefusedError as error:  # nothing was sampled, so only the engine is at fault
            raise EngineError(str(error)) from error

    async def request(self, method: str, url: str, timeout_s: float, body: bytes | None = None) -> tuple[int, bytes]:
        """Send a request; return status and payload, whatever the status.

        Raises:
            UnreachableError: the server could not be reached, or the connection broke.
            RequestTimeoutError: no answer within `timeout_s`.
            EngineError: the answer is not valid HTTP.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=QUERY_TIMEOUT_S)
        try:
            async with self._session.request(method, url, data=body, timeout=timeout) as response:
                return response.status, await response.read()
        except aiohttp.ConnectionTimeoutError as error:
            raise UnreachableError(f"{url}: no connection within {QUERY_TIMEOUT_S:g} s") from error
        except TimeoutError as error:
            raise RequestTimeoutError(f"{url}: no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
            raise UnreachableError(f"{url}: {error or type(error).__name__}") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise EngineError(f"{url}: {type(error).__name__}: {error}") from error


def _connector(*, keep_alive: bool) -> aiohttp.TCPConnector:
    if keep_alive:
        return aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
    return aiohttp.TCPConnector(limit=0, force_close=True)


def decode_response(status: int, payload: bytes, url: str, decoder: "msgspec.json.Decoder[T]") -> T:
    """Decode an answer.

    Raises:
        EngineRefusedError: status 4xx other than 408 and 429.
        EngineError: any other status than 200, or a body that does not decode.
    """
    if status != 200:
        kind = EngineRefusedError if 400 <= status < 500 and status not in _RETRYABLE_STATUSES else EngineError
        raise kind(describe_response(url, status, payload))
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise EngineError(f"{url} answers junk: {error}") from error
