"""HTTP client of one or several equivalent servers: deadlines, retries with back-off, least-loaded choice.

=========================================  =============================================================================
no connection, no response in time,        retried on another server after a back-off with jitter, `max_attempts` times
a 5xx, 408 or 429                          in all: `ServiceUnavailableError`. The header `Retry-After` delays the next
                                           attempt, at most by `timeout_s`
any other 4xx                              the request is at fault, never retried: `ServiceRefusedError`
a redirect                                 never followed or retried: `ServiceError`
=========================================  =============================================================================

`ServiceStats` collects scores, latencies and errors, and logs them at intervals.

`blame` decides who is at fault if a judge or a reward model gives no score: the model's text, or the service. A refusal
looks the same either way. So the service is asked a control question: the same prompt, with a harmless
answer. If that gets a score, the service works and handles this prompt, so the model's text is the cause, and its
reward is the worst (`worst_reward`). If not, nobody knows what the model's answer is worth: it stays unmeasured. An
outage (`unavailable`) is never the model's fault, whatever a control question would say: it may just have ended.
"""

import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from types import MappingProxyType, TracebackType
from typing import Annotated, Any, Self, TypeVar

import anyio
import msgspec
import structlog

from envs.call import describe_error, replace_surrogates
from envs.references import missing_extra
from stream.errors import ServiceError, ServiceRefusedError, ServiceUnavailableError, SettingsError
from stream.validity import Measured, Reward, RewardReason, worst_reward
from stream.waiting import Backoff

try:
    import aiohttp
except ModuleNotFoundError as error:
    raise missing_extra("aiohttp", "rollout") from error

log = structlog.get_logger()

RETRY_BACKOFF = Backoff(0.2, 5.0, jitter=1.0)
"""Delay before a request is tried again."""
_SERVER_BACKOFF = Backoff(0.2, 5.0, jitter=0.0)
"""Time for which other servers are preferred after a failure."""
_MAX_RETRY_AFTER_S = 60.0
_CONNECT_S = 10.0
_RETRYABLE_STATUSES = (408, 429)
_MAX_ERROR_CHARS = 800
_MAX_ERROR_BYTES = 100_000
"""A longer error is shown as it begins, because parsing it would hold up the event loop."""


class ClientOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How requests are made: `args.client` of a remote reward."""

    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 8.0
    """Deadline of one attempt. All attempts should fit into `rollout.call_timeout_s`."""
    max_attempts: Annotated[int, msgspec.Meta(ge=1)] = 3
    """Attempts of one request."""


_Options = TypeVar("_Options", bound=ClientOptions)


def parse_client_options(options: Mapping[str, Any], kind: type[_Options], reward: str) -> _Options:
    """Read the table `args.client` of a reward.

    Raises:
        SettingsError: a key is unknown, or a value out of range.
    """
    try:
        return msgspec.convert(dict(options), kind)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{reward}: args.client: {error}") from error


class ServerState:
    """What this client knows about one server."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.in_flight = 0
        """Requests of this client that the server is processing."""
        self.consecutive_failures = 0
        self.backoff_until = -math.inf
        """Other servers are preferred until then."""
        self.refuses_until = -math.inf
        """The server does not want to be asked before, as it said."""
        self.is_verified = False
        """The server passed the caller's check, and its connection has not failed since."""

    def record_failure(self, error: ServiceError) -> None:
        """Count a failed attempt; logs `service.waiting` at the first of an outage."""
        if not self.consecutive_failures:
            log.warning("service.waiting", url=self.url, why=str(error))
        self.consecutive_failures += 1
        self.backoff_until = anyio.current_time() + _SERVER_BACKOFF.delay_s(self.consecutive_failures)

    def record_success(self) -> None:
        """Reset the failures; logs `service.recovered` at the end of an outage."""
        if self.consecutive_failures:
            log.info("service.recovered", url=self.url)
        self.consecutive_failures, self.backoff_until = 0, -math.inf


class RewardServiceClient:
    """Client of one server, or of several that serve the same. An asynchronous context manager.

    Args:
        urls: base URLs of the servers.
        options: deadline and attempts of a request.
        headers: sent with each request.
        secret: a text in the headers that messages must not contain.
    """

    def __init__(
        self,
        urls: Sequence[str],
        options: ClientOptions,
        *,
        headers: Mapping[str, str] = MappingProxyType({}),
        secret: str = "",
    ) -> None:
        self.servers = [ServerState(url) for url in urls]
        self.retries = 0
        """Attempts after the first, over all requests."""
        self._options = options
        self._headers = dict(headers)
        self._secret = secret

    async def __aenter__(self) -> Self:
        # No connection limit: callers limit their concurrent requests.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), headers={"Content-Type": "application/json"} | self._headers
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def post(self, path: str, body: bytes) -> tuple[bytes, ServerState]:
        """POST to the least-loaded server, with retries.

        Returns:
            The body of a 2xx response, and the server that sent it.

        Raises:
            ServiceRefusedError: a 4xx other than 408 and 429; the message is the server's.
            ServiceUnavailableError: every attempt failed.
            ServiceError: any other response.
        """
        attempts, last = 0, None
        while True:
            now = anyio.current_time()
            server = min(
                self.servers, key=lambda s: (s.refuses_until > now, s is last, s.backoff_until > now, s.in_flight)
            )
            try:
                return await self.post_to(server, path, body), server
            except ServiceUnavailableError as error:
                attempts, last = attempts + 1, server
                if attempts >= self._options.max_attempts:
                    raise ServiceUnavailableError(f"{attempts} attempts failed; the last: {error}") from error
            self.retries += 1
            refused_s = min(server.refuses_until for server in self.servers) - anyio.current_time()
            await anyio.sleep(RETRY_BACKOFF.delay_s(attempts) + max(refused_s, 0.0))

    async def post_to(self, server: ServerState, path: str, body: bytes) -> bytes:
        """POST to one server, without retries. Raises the same errors as `post`."""
        return await self._request(server, "POST", path, body)

    async def get_from(self, server: ServerState, path: str) -> bytes:
        """GET from one server, without retries. Raises the same errors as `post`."""
        return await self._request(server, "GET", path, None)

    async def _request(self, server: ServerState, method: str, path: str, body: bytes | None) -> bytes:
        server.in_flight += 1
        try:
            status, retry_after, payload = await self._send(method, server.url + path, body)
        except ServiceUnavailableError as error:
            server.is_verified = False
            server.record_failure(error)
            raise
        finally:
            server.in_flight -= 1
        if status >= 500 or status in _RETRYABLE_STATUSES:
            busy = ServiceUnavailableError(self._describe_response(server, status, payload))
            server.record_failure(busy)
            refused_s = min(parse_retry_after(retry_after) or 0.0, self._options.timeout_s)
            server.refuses_until = anyio.current_time() + refused_s
            raise busy
        server.record_success()
        if 200 <= status < 300:
            return payload
        raise (ServiceRefusedError if status >= 400 else ServiceError)(self._describe_response(server, status, payload))

    def redact(self, text: str) -> str:
        """Return the text with the secret replaced, in case a server repeats it."""
        return text.replace(self._secret, "***") if self._secret else text

    async def _send(self, method: str, url: str, body: bytes | None) -> tuple[int, str, bytes]:
        """Return status, the header `Retry-After`, and the body."""
        timeout_s = self._options.timeout_s
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S)
        try:
            request = self._session.request(method, url, data=body, timeout=timeout, allow_redirects=False)
            async with request as response:
                return response.status, response.headers.get("Retry-After", ""), await response.read()
        except aiohttp.InvalidURL as error:
            raise ServiceError(f"{url}: not a valid URL") from error
        except TimeoutError as error:
            raise ServiceUnavailableError(f"{url}: no response within {timeout_s:g} s") from error
        except (
            aiohttp.ClientError,
            OSError,
            RuntimeError,
        ) as error:  # uvloop raises RuntimeError for a lost connection
            raise ServiceUnavailableError(f"{url}: {self.redact(describe_error(error))}") from error

    def _describe_response(self, server: ServerState, status: int, payload: bytes) -> str:
        return self.redact(describe_response(server.url, status, payload))


def parse_retry_after(text: str) -> float | None:
    """Return the seconds in a header `Retry-After`, a number or a date, at most a minute; None if it is neither."""
    try:
        seconds = float(text[:9]) if text.strip().isdecimal() else parsedate_to_datetime(text).timestamp() - time.time()
    except (ValueError, OverflowError):
        return None
    return min(max(seconds, 0.0), _MAX_RETRY_AFTER_S)


def describe_response(url: str, status: int, payload: bytes) -> str:
    """Return an unexpected response as text for an error message."""
    return f"{url} answers {status}: {error_message(payload)}"


def error_message(payload: bytes) -> str:
    """Return the error message in a response, in OpenAI's form or any other."""
    try:
        response: Any = json.loads(payload if len(payload) <= _MAX_ERROR_BYTES else b"")
        text = response["error"]["message"] if isinstance(response["error"], dict) else response["error"]
    except (ValueError, KeyError, TypeError, RecursionError):
        text = payload[: 4 * _MAX_ERROR_CHARS].decode(errors="replace")
    return replace_surrogates(str(text)[:_MAX_ERROR_CHARS])


class ServiceStats:
    """Collects scores, latencies and errors, and logs them as `reward_model.served`."""

    def __init__(self) -> None:
        self._logged_retries = 0
        self._clear()

    def _clear(self) -> None:
        self._batch_sizes: list[int] = []
        self._latencies: list[float] = []
        self._scores: list[float] = []
        self._errors: Counter[str] = Counter()

    def record_batch(self, size: int) -> None:
        """Count a batch of `size` conversations."""
        self._batch_sizes.append(size)

    def record(self, reward: Reward, latency_s: float) -> None:
        """Count the final result of one conversation, and its latency including retries."""
        self._latencies.append(latency_s)
        if isinstance(reward, Measured):
            self._scores.append(reward.value)
        else:
            self._errors[reward.reason] += 1

    def log_and_reset(self, total_retries: int) -> None:
        """Log the statistics since the last call; log nothing if no conversation was scored.

        Args:
            total_retries: retries since the client was opened.
        """
        if not self._latencies:
            return
        log.info(
            "reward_model.served",
            scored=len(self._scores),
            errors=dict(self._errors),
            retries=total_retries - self._logged_retries,
            score_mean=_rounded(statistics.fmean(self._scores) if self._scores else None),
            score_std=_rounded(statistics.stdev(self._scores) if len(self._scores) > 1 else None),
            score_min=_rounded(min(self._scores, default=None)),
            score_max=_rounded(max(self._scores, default=None)),
            latency_mean_s=_rounded(statistics.fmean(self._latencies)),
            latency_max_s=_rounded(max(self._latencies)),
            batch_mean=_rounded(statistics.fmean(self._batch_sizes) if self._batch_sizes else None),
            batch_max=max(self._batch_sizes, default=None),
        )
        self._logged_retries = total_retries
        self._clear()


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


HARMLESS_ANSWER = "I do not know."
"""The answer in a control question."""


async def blame(reward: Reward, worst: float, control: Callable[[], Awaitable[Reward]]) -> Reward:
    """Return the reward of an answer, after a control question if it has none.

    Args:
        reward: what the service said.
        worst: the worst reward that it can give.
        control: asks for the reward of `HARMLESS_ANSWER` to the same prompt.
    """
    if isinstance(reward, Measured) or reward.reason is RewardReason.UNAVAILABLE:
        return reward
    if not isinstance(await control(), Measured):
        return reward
    return worst_reward(
        worst, reward.reason, f"{reward.detail}; the answer {HARMLESS_ANSWER!r} to the same prompt has a score"
    )
