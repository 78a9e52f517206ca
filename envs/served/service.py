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

from envs.call import describe
from envs.extras import missing
from stream.errors import ServiceError, ServiceRefusedError, ServiceUnavailableError

try:
    import aiohttp
except ModuleNotFoundError as error:
    raise missing("aiohttp", "rollout") from error

log = structlog.get_logger()

_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 5.0
_CONNECT_S = 10.0
_TOO_BUSY = (408, 429)
_TOLD = 800
"""Characters of a server's own words, at most."""


class Server:
    """One of them, as this client knows it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.load = 0
        """Requests of ours that it works on."""
        self.failures = 0
        """In a row."""
        self.rests_until = -math.inf
        """Others are asked first until then."""
        self.trusted = False
        """Whoever asks has seen that it is what it should be, and it was not away since."""

    def failed(self, error: ServiceError) -> None:
        """It could not be asked. Said once, however many requests that meets, and however long it lasts."""
        if not self.failures:
            log.warning("service.awaited", url=self.url, why=str(error))
        self.failures += 1
        self.rests_until = anyio.current_time() + min(_MAX_BACKOFF_S, _BACKOFF_S * 2 ** min(self.failures, 10))

    def answered(self) -> None:
        """It was asked, and spoke."""
        if self.failures:
            log.info("service.returned", url=self.url)
        self.failures, self.rests_until = 0, -math.inf


class Service:
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
        self.servers = [Server(url) for url in urls]
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

    async def ask(self, path: str, body: bytes) -> tuple[bytes, Server]:
        """POST to whichever server has least to do. Returns the body of a 2xx, and who gave it.

        Raises:
            ServiceRefusedError: a 4xx other than 408 and 429; the message is the server's.
            ServiceUnavailableError: every try failed.
            ServiceError: an answer that is neither.
        """
        tries, last = 0, None
        while True:
            now = anyio.current_time()
            server = min(self.servers, key=lambda s: (s is last, s.rests_until > now, s.load))
            try:
                return await self.ask_one(server, path, body), server
            except ServiceUnavailableError as error:
                tries, last = tries + 1, server
                if tries >= self._attempts:
                    raise ServiceUnavailableError(f"{tries} tries failed; the last: {error}") from error
            self.retries += 1
            await back_off(tries)

    async def ask_one(self, server: Server, path: str, body: bytes) -> bytes:
        """`ask`, once, of this server."""
        server.load += 1
        try:
            status, payload = await self._post(server.url + path, body)
        except ServiceUnavailableError as error:
            server.trusted = False
            server.failed(error)
            raise
        finally:
            server.load -= 1
        if status >= 500 or status in _TOO_BUSY:
            busy = ServiceUnavailableError(self._told(server, status, payload))
            server.failed(busy)
            raise busy
        server.answered()
        if 200 <= status < 300:
            return payload
        raise (ServiceRefusedError if status >= 400 else ServiceError)(self._told(server, status, payload))

    def hide(self, text: str) -> str:
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
            raise ServiceUnavailableError(f"{url}: {self.hide(describe(error))}") from error

    def _told(self, server: Server, status: int, payload: bytes) -> str:
        return self.hide(in_words(server.url, status, payload))


def in_words(url: str, status: int, payload: bytes) -> str:
    """An answer that nobody asked for, as errors tell it."""
    return f"{url} answers {status}: {error_text(payload)}"


def error_text(payload: bytes) -> str:
    """What an answer says is wrong, in OpenAI's form or any other."""
    try:
        told: Any = json.loads(payload)
        text = told["error"]["message"] if isinstance(told["error"], dict) else told["error"]
    except (ValueError, KeyError, TypeError, RecursionError):
        text = payload[:_TOLD].decode(errors="replace")
    return str(text)[:_TOLD]


async def back_off(tries: int) -> None:
    """Sleep with full jitter; longer after more tries."""
    await anyio.sleep(random.uniform(0, min(_MAX_BACKOFF_S, _BACKOFF_S * 2 ** min(tries, 10))))
