"""A connection to the server of one run: patient calls, scripts, the wait without polling.

Every call goes through `Link.patiently`: a server that is gone, loading or out of memory is waited for with jittered
back-off up to `reconnect_s`, then it is an error. The scripts are written so that a call whose reply was lost can be
repeated.
"""

import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar, cast

import anyio
import structlog
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
)
from redis.exceptions import (
    TimeoutError as RedisTimeoutError,
)

from stream.errors import ServerError
from stream.keys import GROUP, STAGES, key, prefix

log = structlog.get_logger()

LONGEST_WAIT_S = 5.0
"""One blocking read; well below the socket's time-out, so that a hung server is told from a quiet one."""
_SOCKET_TIMEOUT_S = 15.0
_MINIMUM = (7, 0)
_MOST_CONNECTIONS = 1000
_PASSING = (RedisConnectionError, RedisTimeoutError, BusyLoadingError, OutOfMemoryError, ReadOnlyError, OSError)
_PASSING_WORDS = ("MISCONF", "BUSY ", "NOREPLICAS", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN")
"""Beginnings of other errors that pass: its disk is full, a script of somebody's takes long, it fails over."""

T = TypeVar("T")


class Link:
    """A run's connection. Make one with `connect`."""

    def __init__(self, redis: "Redis", url: str, run: str, reconnect_s: float) -> None:
        self.redis = redis
        self.run = run
        self.reconnect_s = reconnect_s
        self.stopping = anyio.Event()
        """Set when this process is to let go of its work: by `penstock stop`, or by whoever owns the process."""
        self.stop_before = 0
        """The last request to stop that was made before we came: not meant for us."""
        self._where = _without_password(url)
        self._scripts: dict[str, AsyncScript] = {}

    def key(self, name: str) -> str:
        """The full name of one of the run's keys."""
        return key(self.run, name)

    async def script(self, name: str, *args: str | bytes | float) -> Any:
        """Run `lua/NAME.lua` on the run's keys: one atomic step."""
        script = self._scripts.get(name)
        if script is None:
            script = self._scripts[name] = self.redis.register_script(_sources()[name])
        return await self.patiently(lambda: script(keys=[prefix(self.run)], args=args))

    async def arrive(self) -> None:
        """Pass by requests to stop that were made before: the run was started again since, and we are part of it."""
        self.stop_before = await self._last_stop()

    def hear(self, stop: int) -> None:
        """Take note of the last request to stop, of which a script told: one made since we came sets `stopping`."""
        if stop > self.stop_before and not self.stopping.is_set():
            log.info("stop.heard", run=self.run)
            self.stopping.set()

    async def listen(self) -> None:
        """`hear`, for those who call no script that would tell."""
        self.hear(await self._last_stop())

    async def _last_stop(self) -> int:
        return int((await self.read_hash("meta")).get("stop", 0))

    async def read_hash(self, name: str) -> dict[str, str]:
        """One of the run's hashes, as text."""
        found: Any = await self.patiently(lambda: cast("Awaitable[Any]", self.redis.hgetall(self.key(name))))
        return {k.decode(): v.decode(errors="replace") for k, v in found.items()}

    async def write_hash(self, name: str, values: dict[str, str]) -> None:
        """Set fields of one of the run's hashes, and wake whoever waits."""
        await self.patiently(
            lambda: cast("Awaitable[Any]", self.redis.hset(self.key(name), mapping=cast("dict[Any, Any]", values)))
        )
        await self.patiently(
            lambda: cast("Awaitable[Any]", self.redis.xadd(self.key("wake"), {"e": ""}, maxlen=1, approximate=False))
        )

    async def patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call, and make it again while the server is away.

        Raises:
            ServerError: it was away for `reconnect_s`, refuses us, or does not know the run any more.
        """
        deadline = time.monotonic() + self.reconnect_s
        delay, told = 0.05, False
        while True:
            try:
                result = await call()
            except (*_PASSING, ResponseError) as error:
                self._raise_unless_passing(error)
                if time.monotonic() + delay > deadline:
                    message = f"Redis at {self._where} did not answer for {self.reconnect_s:g} s: {error}"
                    raise ServerError(message) from error
                if not told:
                    log.warning("redis.awaited", server=self._where, error=str(error))
                    told = True
                await anyio.sleep(random.uniform(delay / 2, delay))
                delay = min(2 * delay, 2.0)
            else:
                if told:
                    log.info("redis.returned", server=self._where)
                return result

    def _raise_unless_passing(self, error: Exception) -> None:
        """Let pass what time may mend; say of all else what is to be done."""
        refusals = (AuthenticationError, NoPermissionError)
        if isinstance(error, refusals) or isinstance(error.__cause__, refusals):  # while connecting it is the cause
            raise ServerError(f"Redis at {self._where} refuses us: {error}") from error
        if isinstance(error, _PASSING) or str(error).startswith(_PASSING_WORDS):
            return
        if str(error).startswith("NOGROUP"):
            raise ServerError(
                f"Redis at {self._where} no longer knows run {self.run!r}: it was emptied, or came back without its "
                "data. Started again, the run is rebuilt from its ledger and checkpoint"
            ) from error
        raise error

    async def wait(self, after: str, at_most_s: float) -> None:
        """Block until anything of interest happened after the `wake` entry `after`, or the time is over."""
        block_ms = max(1, int(1000 * min(at_most_s, LONGEST_WAIT_S)))
        await self.patiently(lambda: self.redis.xread({self.key("wake"): after}, block=block_ms))


@asynccontextmanager
async def connect(url: str, run: str, *, reconnect_s: float = 60.0, create: bool = True) -> AsyncIterator[Link]:
    """Connect to the server of a run, and check that it can be trusted with one.

    Args:
        url: `redis://`, `rediss://` or `unix://`, with password and database as redis-py takes them.
        run: the run's name.
        reconnect_s: how long to wait for a server that is away, now and later.
        create: make the run's streams where they do not exist. False for those who only look.

    Raises:
        ServerError: no server there, too old, or set up to evict keys.
    """
    try:
        redis = Redis.from_url(
            url,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=_SOCKET_TIMEOUT_S,
            protocol=2,
            max_connections=_MOST_CONNECTIONS,
            driver_info=None,  # it would look up its own version on the disk at every connection
        )
    except ValueError as error:
        raise ServerError(f"{_without_password(url)} is no Redis URL: {error}") from error
    await anyio.to_thread.run_sync(_sources)
    link = Link(redis, url, run, reconnect_s)
    try:
        await _check(link)
        if create:
            await _make_streams(link)
        await link.arrive()
        yield link
    finally:
        with anyio.CancelScope(shield=True):
            await redis.aclose()


async def _check(link: Link) -> None:
    info = await link.patiently(lambda: link.redis.info("server"))
    version = str(info.get("valkey_version") or info["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < _MINIMUM:
        raise ServerError(f"the server is version {version}; Penstock needs Redis >= 7.0 or Valkey")
    try:
        config = await link.redis.config_get("maxmemory-policy", "appendonly", "save")
    except ResponseError as error:  # managed servers and least-privilege users may not ask
        log.info("server.unchecked", why=str(error))
        return
    policy = config.get("maxmemory-policy", "noeviction")
    if policy != "noeviction":
        raise ServerError(f"the server's maxmemory-policy is {policy}: it would evict work; set it to noeviction")
    if config.get("appendonly") == "no":
        log.warning("server.forgetful", why="appendonly is off: what was done since its last snapshot is lost with it")


async def _make_streams(link: Link) -> None:
    for stage in STAGES:
        try:
            await link.patiently(lambda s=stage: link.redis.xgroup_create(link.key(s), GROUP, id="0", mkstream=True))  # type: ignore[misc]
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise


@cache
def _sources() -> dict[str, str]:
    """The scripts, each with `common.lua` behind its first line, which says how it is to be run."""
    texts = {file.name.removesuffix(".lua"): file.read_text() for file in (files("stream") / "lua").iterdir()}
    common = texts.pop("common")
    return {name: text.replace("\n", f"\n{common}", 1) for name, text in texts.items()}


def _without_password(url: str) -> str:
    """The URL as people may see it; redis-py takes passwords before the @ and behind the ?."""
    scheme, separator, rest = url.partition("?")[0].partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
