"""A connection to the server of one run: patient calls, scripts, the wait without polling.

Every call goes through `RunConnection.with_retry`: a server that is gone, loading or out of memory is waited for with
jittered
back-off up to `reconnect_s`, then it is an error; in a cluster the run is followed to where it is. The scripts are
written so that a call whose reply was lost can be repeated.
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
from redis.commands.core import AsyncScript
from redis.exceptions import MovedError, ResponseError

from stream.connection.address import RedisAddress
from stream.connection.cluster import ClusterRouter
from stream.connection.keys import CONSUMER_GROUP, STAGES, key, key_prefix
from stream.connection.server_errors import (
    GARBLED_REPLY_ERRORS,
    HANDLED_ERRORS,
    describe_error,
    fatal_reason,
    is_connection_error,
    is_retryable,
)
from stream.errors import ServerError

log = structlog.get_logger()

MAX_BLOCK_S = 5.0
"""One blocking read; well below the socket's time-out, so that a hung server is told from a quiet one."""
_MIN_VERSION = (7, 0)
_MAX_GARBLED_REPLIES = 3
"""Answers that are none, from a server that never gave one: it is no Redis."""
T = TypeVar("T")


class RunConnection:
    """A run's connection. Make one with `connect`."""

    def __init__(self, address: RedisAddress, run: str, reconnect_s: float) -> None:
        self.run = run
        self.reconnect_s = reconnect_s
        self.stopping = anyio.Event()
        """Set when this process is to let go of its work: by `penstock stop`, or by whoever owns the process."""
        self.ignored_stop = 0
        """The last request to stop that was made before we came: not meant for us."""
        self._address = address
        self._cluster = ClusterRouter(address)
        self._waiting = False
        """It is away, and that was said."""
        self._reached = False
        self._scripts: dict[str, AsyncScript] = {}

    @property
    def redis(self) -> "Redis":
        """The client of the server that has the run; in a cluster, another one when the run has moved."""
        return self._cluster.redis

    def key(self, name: str) -> str:
        """The full name of one of the run's keys."""
        return key(self.run, name)

    async def run_script(self, name: str, *args: str | bytes | float) -> Any:
        """Run `lua/NAME.lua` on the run's keys: one atomic step."""
        script = self._scripts.get(name)
        if script is None:
            script = self._scripts[name] = self.redis.register_script(_load_scripts()[name])
        return await self.with_retry(lambda: script(keys=[key_prefix(self.run)], args=args, client=self.redis))

    async def ignore_earlier_stops(self) -> None:
        """Pass by requests to stop that were made before: the run was started again since, and we are part of it."""
        self.ignored_stop = await self._read_stop()

    def observe_stop(self, stop: int) -> None:
        """Take note of the last request to stop, of which a script told: one made since we came sets `stopping`."""
        if stop > self.ignored_stop and not self.stopping.is_set():
            log.info("stop.received", run=self.run)
            self.stopping.set()

    async def poll_stop(self) -> None:
        """`hear`, for those who call no script that would tell."""
        self.observe_stop(await self._read_stop())

    async def _read_stop(self) -> int:
        return int((await self.read_hash("meta")).get("stop", 0))

    async def read_hash(self, name: str) -> dict[str, str]:
        """One of the run's hashes, as text."""

        async def read() -> dict[str, str]:
            found: Any = await cast("Awaitable[Any]", self.redis.hgetall(self.key(name)))
            return {k.decode(): v.decode(errors="replace") for k, v in found.items()}

        return await self.with_retry(read)

    async def write_hash(self, name: str, values: dict[str, str]) -> None:
        """Set fields of one of the run's hashes, and wake whoever waits."""
        await self.with_retry(
            lambda: cast("Awaitable[Any]", self.redis.hset(self.key(name), mapping=cast("dict[Any, Any]", values)))
        )
        await self.with_retry(
            lambda: cast("Awaitable[Any]", self.redis.xadd(self.key("wake"), {"e": ""}, maxlen=1, approximate=False))
        )

    async def with_retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call, and make it again while the server is away; in a cluster, where the run is.

        Args:
            call: must ask `Link.redis` for the client each time.

        Raises:
            ServerError: it was away for `reconnect_s`, refuses us, or does not know the run any more.
        """
        deadline = time.monotonic() + self.reconnect_s
        delay, failures, moves = 0.05, 0, 0
        while True:
            try:
                result = await call()
            except MovedError as error:
                self._cluster.redirect(error)
                moves += 1
                if moves == 1:
                    continue
                problem: Exception = error
            except HANDLED_ERRORS as error:
                failures += 1
                await self._raise_if_fatal(error, failures)
                if is_connection_error(error):
                    self._cluster.try_next_node()
                problem = error
            else:
                self._reached = True
                if failures and self._waiting:
                    self._waiting = False
                    log.info("redis.recovered", server=self._address.display_url)
                if moves:
                    await self._cluster.refresh()
                return result
            if time.monotonic() + delay > deadline:
                message = f"Redis at {self._address.display_url} did not answer for {self.reconnect_s:g} s: {describe_error(problem)}"
                raise ServerError(message) from problem
            if failures and not self._waiting:
                self._waiting = True
                log.warning("redis.waiting", server=self._address.display_url, error=describe_error(problem))
            await anyio.sleep(random.uniform(delay / 2, delay))
            delay = min(2 * delay, 2.0)

    async def _raise_if_fatal(self, error: Exception, failures: int) -> None:
        """Let pass what time may mend; say of all else what is to be done."""
        reason = fatal_reason(error)
        if reason is None and not self._reached:
            if is_connection_error(error) and failures == 1:
                reason = await self._address.probe()
            elif isinstance(error, GARBLED_REPLY_ERRORS) and failures == _MAX_GARBLED_REPLIES:
                reason = f"what answers there is no Redis: {error}"
        if reason is not None:
            raise ServerError(f"Redis at {self._address.display_url}: {reason}") from error
        if is_retryable(error):
            return
        if str(error).startswith("NOGROUP"):
            raise ServerError(
                f"Redis at {self._address.display_url} no longer knows run {self.run!r}: it was emptied, or came back "
                "without its data. Started again, the run is rebuilt from its ledger and checkpoint"
            ) from error
        raise error

    async def find_node(self) -> None:
        """Find the node that has the run, and see that it can be trusted with one.

        Raises:
            ServerError: it is too old, or set up to evict keys.
        """
        checked = None
        while checked is not self.redis:  # it may move while we ask
            checked = self.redis
            if await _check_server(self):
                await self._cluster.refresh()
            await self.ignore_earlier_stops()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._cluster.aclose()

    async def wait_for_change(self, after: str, timeout_s: float) -> str:
        """Block until anything of interest happened after the `wake` entry `after`, or the time is over.

        Returns:
            The entry to wait after the next time.
        """
        block_ms = max(1, int(1000 * min(timeout_s, MAX_BLOCK_S)))
        found: Any = await self.with_retry(lambda: self.redis.xread({self.key("wake"): after}, block=block_ms))
        return str(found[0][1][-1][0].decode()) if found else after


@asynccontextmanager
async def connect(
    url: str, run: str, *, reconnect_s: float = 60.0, create: bool = True
) -> AsyncIterator[RunConnection]:
    """Connect to the server of a run, and check that it can be trusted with one.

    Args:
        url: `redis://`, `rediss://` or `unix://`, with user, password, database and TLS files as redis-py takes them;
            of any node, where it is a cluster.
        run: the run's name.
        reconnect_s: how long to wait for a server that is away, now and later.
        create: make the run's streams where they do not exist. False for those who only look.

    Raises:
        ServerError: no server there, it refuses us, is too old, or set up to evict keys; says what is to be done.
    """
    address = RedisAddress(url)
    await address.prepare()
    await anyio.to_thread.run_sync(_load_scripts)
    connection = RunConnection(address, run, reconnect_s)
    try:
        await connection.find_node()
        if create:
            await _create_streams(connection)
        yield connection
    finally:
        with anyio.CancelScope(shield=True):
            await connection.aclose()


async def _check_server(connection: RunConnection) -> bool:
    """Refuse a server that would lose work. By INFO, which managed servers and least-privilege users may ask.

    Returns:
        Whether it is a node of a cluster.
    """
    info = await connection.with_retry(lambda: connection.redis.info("server", "memory", "persistence", "cluster"))
    version = str(info.get("valkey_version") or info["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < _MIN_VERSION:
        raise ServerError(f"the server is version {version}; Penstock needs Redis >= 7.0 or Valkey")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise ServerError(f"the server's maxmemory-policy is {policy}: it would evict work; set it to noeviction")
    if not info.get("aof_enabled", 1):
        log.warning(
            "redis.persistence_off", why="appendonly is off: what was done since its last snapshot is lost with it"
        )
    return bool(info.get("cluster_enabled"))


async def _create_streams(connection: RunConnection) -> None:
    for stage in STAGES:
        await create_consumer_group(connection, stage)


async def create_consumer_group(connection: RunConnection, stage: str) -> None:
    """Create a stage's stream and its consumer group, unless they exist."""
    stream = connection.key(stage)
    try:
        await connection.with_retry(
            lambda: connection.redis.xgroup_create(stream, CONSUMER_GROUP, id="0", mkstream=True)
        )
    except ResponseError as error:
        if "BUSYGROUP" not in str(error):
            raise


@cache
def _load_scripts() -> dict[str, str]:
    """The scripts, each with `common.lua` behind its first line, which says how it is to be run."""
    texts = {file.name.removesuffix(".lua"): file.read_text() for file in (files("stream") / "lua").iterdir()}
    common = texts.pop("common")
    return {name: text.replace("\n", f"\n{common}", 1) for name, text in texts.items()}
