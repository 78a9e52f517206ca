"""HTTP services that measure rewards: asked with deadlines, and again only where that may help.

What may be wrong with an answer, and what is done about it::

    no connection, no answer in time,      try again after a back-off with jitter, another server first,
    a 5xx, 408, 429                        `attempts` times                        ServiceUnavailableError
    any other 4xx                          a fact about the request: never again   ServiceRefusedError
    a redirect                             nobody meant it: never again            ServiceError
"""

import json
import math
import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, Self

import anyio
import structlog

from envs.call import describe_error
from envs.extras import missing_extra
from stream.errors import ServiceError, ServiceRefusedError, ServiceUnavailableError

try:
    import aiohttp
except ModuleNotFoundError as error:
    raise missing_extra("aiohttp", "rollout") from error

log = structlog.get_logger()

_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 5.0
_CONNECT_S = 10.0
_RETRYABLE_STATUSES = (408, 429)
_MAX_ERROR_CHARS = 800
"""Characters of a server's own words, at most."""


class ServerState:
    """One of them, as this client knows it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.in_flight = 0
        """Requests of ours that it works on."""
        self.consecutive_failures = 0
        """In a row."""
        self.backoff_until = -math.inf
        """Others are asked first until then."""
        self.is_verified = False
        """Whoever asks has seen that it is what it should be, and it was not away since."""

    def record_failure(self, error: ServiceError) -> None:
        """It could not be asked. Said once, however many requests that meets, and however long it lasts."""
        if not self.consecutive_failures:
            log.warning("service.waiting", url=self.url, why=str(error))
        self.consecutive_failures += 1
        self.backoff_until = anyio.current_time() + min(
            _MAX_BACKOFF_S, _BACKOFF_S * 2 ** min(self.consecutive_failures, 10)
        )

    def record_success(self) -> None:
        """It was asked, and spoke."""
        if self.consecutive_failures:
            log.info("service.recovered", url=self.url)
        self.consecutive_failures, self.backoff_until = 0, -math.inf


class RewardServiceClient:
    """One server, or several that are alike; an asynchronous context manager.

    Args:
        urls: of the servers.
        timeout_s: for one answer.
        attempts: tries of one request.
        headers: sent with each request.
        secret: a text in those headers that no message may show.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout_s: float,
        attempts: int,
        headers: Mapping[str, str] = MappingProxyType({}),
        secret: str = "",
    ) -> None:
        self.servers = [ServerState(url) for url in urls]
        self.retries = 0
        """Tries after the first, of all requests."""
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._headers = dict(headers)
        self._secret = secret

    async def __aenter__(self) -> Self:
        # Requests under way are bounded by whoever asks.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), headers={"Content-Type": "application/json"} | self._headers
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def post(self, path: str, body: bytes) -> tuple[bytes, ServerState]:
        """POST to whichever server has least to do. Returns the body of a 2xx, and who gave it.

        Raises:
            ServiceRefusedError: a 4xx other than 408 and 429; the message is the server's.
            ServiceUnavailableError: every try failed.
            ServiceError: an answer that is neither.
        """
        tries, last = 0, None
        while True:
            now = anyio.current_time()
            server = min(self.servers, key=lambda s: (s is last, s.backoff_until > now, s.in_flight))
            try:
                return await self.post_to(server, path, body), server
            except ServiceUnavailableError as error:
                tries, last = tries + 1, server
                if tries >= self._attempts:
                    raise ServiceUnavailableError(f"{tries} tries failed; the last: {error}") from error
            self.retries += 1
            await back_off(tries)

    async def post_to(self, server: ServerState, path: str, body: bytes) -> bytes:
        """`ask`, once, of this server."""
        server.in_flight += 1
        try:
            status, payload = await self._post(server.url + path, body)
        except ServiceUnavailableError as error:
            server.is_verified = False
            server.record_failure(error)
            raise
        finally:
            server.in_flight -= 1
        if status >= 500 or status in _RETRYABLE_STATUSES:
            busy = ServiceUnavailableError(self._describe_response(server, status, payload))
            server.record_failure(busy)
            raise busy
        server.record_success()
        if 200 <= status < 300:
            return payload
        raise (ServiceRefusedError if status >= 400 else ServiceError)(self._describe_response(server, status, payload))

    def redact(self, text: str) -> str:
        """The text without the secret, which a server may repeat."""
        return text.replace(self._secret, "***") if self._secret else text

    async def _post(self, url: str, body: bytes) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=_CONNECT_S)
        try:
            async with self._session.post(url, data=body, timeout=timeout, allow_redirects=False) as response:
                return response.status, await response.read()
        except aiohttp.InvalidURL as error:
            raise ServiceError(f"{url}: no URL that can be asked") from error
        except TimeoutError as error:
            raise ServiceUnavailableError(f"{url}: no answer within {self._timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, RuntimeError) as error:  # the last: uvloop, of a connection just lost
            raise ServiceUnavailableError(f"{url}: {self.redact(describe_error(error))}") from error

    def _describe_response(self, server: ServerState, status: int, payload: bytes) -> str:
        return self.redact(describe_response(server.url, status, payload))


def describe_response(url: str, status: int, payload: bytes) -> str:
    """An answer that nobody asked for, as errors tell it."""
    return f"{url} answers {status}: {error_message(payload)}"


def error_message(payload: bytes) -> str:
    """What an answer says is wrong, in OpenAI's form or any other."""
    try:
        told: Any = json.loads(payload)
        text = told["error"]["message"] if isinstance(told["error"], dict) else told["error"]
    except (ValueError, KeyError, TypeError, RecursionError):
        text = payload[:_MAX_ERROR_CHARS].decode(errors="replace")
    return str(text)[:_MAX_ERROR_CHARS]


async def back_off(tries: int) -> None:
    """Sleep with full jitter; longer after more tries."""
    await anyio.sleep(random.uniform(0, min(_MAX_BACKOFF_S, _BACKOFF_S * 2 ** min(tries, 10))))
