"""The connection to a run's server: calls with retries, scripts, and waiting without polling.

Every call goes through `RunConnection.with_retry`. If the server is down, loading or out of memory, the call is
repeated with jittered back-off for up to `reconnect_s`; in a cluster the connection follows the run to its node. The
scripts are written so that a call whose reply was lost can be repeated.
"""

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import anyio
import structlog
from hiredis import pack_command
from redis.asyncio import Redis
from redis.commands.core import AsyncScript
from redis.exceptions import MovedError, NoScriptError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from stream.connection.address import SENTINEL_HINT, ClusterRouter, RedisAddress
from stream.connection.keys import CONSUMER_GROUP, STAGES, key, key_prefix
from stream.connection.scripts import load_scripts
from stream.connection.server_errors import (
    GARBLED_REPLY_ERRORS,
    HANDLED_ERRORS,
    describe_error,
    fatal_reason,
    is_connection_error,
    is_disk_error,
    is_retryable,
)
from stream.disk_space import disk_problem, wait_limit_s
from stream.errors import ServerError
from stream.waiting import Backoff

log = structlog.get_logger()

MAX_BLOCK_S = 5.0
"""The longest blocking read; well below `_ANSWER_TIMEOUT_S`, so that a server without news does not look hung."""
_ANSWER_TIMEOUT_S = 15.0
"""How long one attempt at a call may take, connecting included."""
_MIN_VERSION = (7, 0)
_MAX_GARBLED_REPLIES = 3
"""Unreadable replies from a server that never sent a readable one: it is not Redis."""
_BACKOFF = Backoff(0.05, 2.0)
T = TypeVar("T")


class RunConnection:
    """A connection to one run. Open it with `connect`."""

    def __init__(self, address: RedisAddress, run: str, reconnect_s: float, server_data: Path | None = None) -> None:
        self.run = run
        self.reconnect_s = reconnect_s
        self.stopping = anyio.Event()
        """Set when this process must give up its work: after `penstock stop`, or by the owner of the process."""
        self.ignored_stop = 0
        """Number of the last stop request made before this process connected; it does not apply to this process."""
        self._server_data = server_data
        self._address = address
        self._cluster = ClusterRouter(address)
        self._waiting = False
        """Whether an outage of the server was logged that has not ended."""
        self._reached = False
        """The server has answered at least once."""
        self._scripts: dict[str, AsyncScript] = {}

    @property
    def redis(self) -> "Redis":
        """The client of the server that has the run; in a cluster another one after the run has moved."""
        return self._cluster.redis

    @property
    def display_url(self) -> str:
        """The server's URL without secrets, for messages."""
        return self._address.display_url

    def key(self, name: str) -> str:
        """Return the full name of one of the run's keys."""
        return key(self.run, name)

    async def run_script(self, name: str, *args: str | bytes | float) -> Any:
        """Run `stream/lua/NAME.lua` on the run's keys, as one atomic step, and return its answer."""
        script = self._script(name)
        return await self.with_retry(lambda: self._call_script(script, args))

    async def store_and_run_script(self, stored_at: str, value: bytes, expire_s: float, name: str, *args: str) -> Any:
        """Store a value, and run a script after it, in one round trip; return the script's answer.

        Args:
            stored_at: name of the key.
            value: what to store there.
            expire_s: when the key expires, unless the script keeps it.
            name: of the script.
            args: its arguments.

        Raises:
            ServerError: as `with_retry`. While the server has no memory for the value, both commands are repeated.
        """
        script, store = self._script(name), ("SET", self.key(stored_at), value, "PX", int(1000 * expire_s))
        return await self.with_retry(lambda: self._call_script(script, args, store))

    async def read_values(self, names: Sequence[str]) -> list[bytes | None]:
        """Return the values of the run's keys with these names; None where there is none."""
        answers = await self.with_retry(lambda: self._exchange(("MGET", *map(self.key, names))))
        return cast("list[bytes | None]", answers[0])

    async def _call_script(
        self, script: AsyncScript, args: tuple[str | bytes | float, ...], *before: tuple[Any, ...]
    ) -> Any:
        """Send commands and the call of a script after them in one packet; return the script's answer."""
        call = ("EVALSHA", script.sha, 1, key_prefix(self.run), *args)
        try:
            return (await self._exchange(*before, call))[-1]
        except NoScriptError:
            script.sha = await self.redis.script_load(script.script)
            return (await self._exchange(*before, call))[-1]

    async def _exchange(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Send commands in one packet; return their answers.

        A script is called for every group at every stage, so this does without what the client's own methods add:
        options of each command, callbacks, metrics, packing in Python. They take twice as long.

        Raises:
            ResponseError: the first error among the answers.
        """
        pool = self.redis.connection_pool
        connection = await pool.get_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.send_packed_command([pack_command(command) for command in commands])
            answers = [await _read_answer(connection) for _ in commands]
        finally:
            await pool.release(connection)
        for answer in answers:
            if isinstance(answer, ResponseError):
                raise answer
        return answers

    def _script(self, name: str) -> AsyncScript:
        script = self._scripts.get(name)
        if script is None:
            script = self._scripts[name] = self.redis.register_script(load_scripts()[name])
        return script

    async def ignore_earlier_stops(self) -> None:
        """Ignore stop requests made until now: the run was started again since, and this process is part of it."""
        self.ignored_stop = await self._read_stop()

    def observe_stop(self, stop: int) -> None:
        """Set `stopping` if this number, from a script's answer, is a stop request made after we connected."""
        if stop > self.ignored_stop and not self.stopping.is_set():
            log.info("stop.received", run=self.run)
            self.stopping.set()

    async def poll_stop(self) -> None:
        """Read the last stop request and observe it; for processes that call no script whose answer has it."""
        self.observe_stop(await self._read_stop())

    async def _read_stop(self) -> int:
        return int((await self.read_hash("meta")).get("stop", 0))

    async def read_hash(self, name: str) -> dict[str, str]:
        """Return one of the run's hashes as text."""

        async def read() -> dict[str, str]:
            found: Any = await cast("Awaitable[Any]", self.redis.hgetall(self.key(name)))
            return {k.decode(): v.decode(errors="replace") for k, v in found.items()}

        return await self.with_retry(read)

    async def write_hash(self, name: str, values: dict[str, str]) -> None:
        """Set fields of one of the run's hashes, and wake all waiting workers."""
        await self.with_retry(
            lambda: cast("Awaitable[Any]", self.redis.hset(self.key(name), mapping=cast("dict[Any, Any]", values)))
        )
        await self.with_retry(
            lambda: cast("Awaitable[Any]", self.redis.xadd(self.key("wake"), {"e": ""}, maxlen=1, approximate=False))
        )

    async def create_stream(self, stage: str) -> None:
        """Create a stage's stream and consumer group if they do not exist."""
        try:
            await self.with_retry(
                lambda: self.redis.xgroup_create(self.key(stage), CONSUMER_GROUP, id="0", mkstream=True)
            )
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def ping(self) -> bool:
        """Return whether the server answers now; once, without retries."""
        try:
            return bool(await _within_deadline(lambda: cast("Awaitable[Any]", self.redis.ping())))
        except HANDLED_ERRORS:
            return False

    async def with_retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call; repeat it while the server cannot answer, in a cluster on the node that has the run.

        Args:
            call: must read `RunConnection.redis` each time it is called.

        Raises:
            ServerError: the server was down, or its disk was full, for too long; it refuses access, or lost the run.
        """
        failures, moves, waited_s, disk_s = 0, 0, 0.0, 0.0
        while True:
            began = time.monotonic()
            try:
                result = await _within_deadline(call)
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
                    log.info("redis.recovered", server=self.display_url)
                if moves:
                    await self._cluster.refresh()
                return result
            delay_s = _BACKOFF.delay_s(failures + max(0, moves - 1))
            # A process that was suspended, with its container or machine, has not waited for the server meanwhile.
            passed_s = min(time.monotonic() - began, _ANSWER_TIMEOUT_S) + delay_s
            disk = await self._disk_problem(problem)
            waited_s, disk_s = waited_s + passed_s * (not disk), disk_s + passed_s * bool(disk)
            if waited_s > self.reconnect_s or disk_s > wait_limit_s(self.reconnect_s):
                limit_s = wait_limit_s(self.reconnect_s) if disk else self.reconnect_s
                why = disk or describe_error(problem)
                raise ServerError(f"Redis at {self.display_url} did not answer for {limit_s:g} s: {why}") from problem
            if failures and not self._waiting:
                self._waiting = True
                log.warning("redis.waiting", server=self.display_url, error=describe_error(problem))
            await anyio.sleep(delay_s)

    async def _disk_problem(self, error: Exception) -> str:
        """Return why the server cannot write; empty if its disk is not the cause of the error."""
        if is_disk_error(error):
            return describe_error(error)
        if self._server_data is None or not is_connection_error(error):
            return ""
        # A server that forces each write to the disk ends when it is full.
        return str(await anyio.to_thread.run_sync(disk_problem, self._server_data) or "")

    async def _raise_if_fatal(self, error: Exception, failures: int) -> None:
        """Return if a repeated call may succeed; otherwise raise an error that names the remedy."""
        reason = fatal_reason(error)
        if reason is None and not self._reached:
            if is_connection_error(error) and failures == 1:
                reason = await self._address.probe()
            elif isinstance(error, GARBLED_REPLY_ERRORS) and failures == _MAX_GARBLED_REPLIES:
                reason = f"the server that answers is not Redis: {error}"
        if reason is not None:
            raise ServerError(f"Redis at {self.display_url}: {reason}") from error
        if is_retryable(error):
            return
        if str(error).startswith("NOGROUP"):
            raise ServerError(
                f"Redis at {self.display_url} does not know run {self.run!r} any more: it was "
                "emptied, or restarted without its data. Started again, the run is rebuilt from ledger and checkpoint"
            ) from error
        raise error

    async def find_node(self) -> None:
        """Find the node that has the run, and check its configuration.

        Raises:
            ServerError: its version is too old, it is configured to evict keys, or it refuses a command.
        """
        checked = None
        with self.explained_refusals():
            while checked is not self.redis:  # the run may move meanwhile
                checked = self.redis
                if await _check_server(self):
                    await self._cluster.refresh()
                await self.ignore_earlier_stops()

    @contextmanager
    def explained_refusals(self) -> Iterator[None]:
        """Turn an error that the server answers, and that nothing here expects, into one that names the server.

        Raises:
            ServerError: the server does not know a command, or another program uses the run's keys.
        """
        try:
            yield
        except ResponseError as error:
            raise ServerError(
                f"Redis at {self.display_url} refuses a command: {error}. Penstock needs all commands of Redis >= 7.0, "
                f"and keys that begin with {key_prefix(self.run)} for itself"
            ) from error

    async def aclose(self) -> None:
        """Close all connections."""
        await self._cluster.aclose()

    async def wait_for_change(self, after: str, timeout_s: float) -> str:
        """Block until a script has added an entry to `wake` after the entry `after`, or the time is over.

        Returns:
            The entry to wait after the next time.
        """
        block_ms = max(1, int(1000 * min(timeout_s, MAX_BLOCK_S)))
        found: Any = await self.with_retry(lambda: self.redis.xread({self.key("wake"): after}, block=block_ms))
        return str(found[0][1][-1][0].decode()) if found else after


@asynccontextmanager
async def connect(
    url: str, run: str, *, reconnect_s: float = 60.0, create: bool = True, server_data: Path | None = None
) -> AsyncIterator[RunConnection]:
    """Connect to the server of a run, and check that the server is fit for one.

    Args:
        url: `redis://`, `rediss://` or `unix://`, with user, password, database and TLS files in redis-py's form; of
            any node if it is a cluster.
        run: the run's name.
        reconnect_s: how long to retry while the server is down, now and later.
        create: create the run's streams if they do not exist. False for commands that only read.
        server_data: folder of a private server here: it may be down for as long as its disk is full.

    Raises:
        ServerError: no server answers; or it refuses access, is too old, or is configured to evict keys; the
            message names the remedy.
    """
    address = RedisAddress(url)
    await address.prepare()
    await anyio.to_thread.run_sync(load_scripts)
    connection = RunConnection(address, run, reconnect_s, server_data)
    try:
        await connection.find_node()
        if create:
            for stage in STAGES:
                await connection.create_stream(stage)
        yield connection
    finally:
        with anyio.CancelScope(shield=True):
            await connection.aclose()


async def _within_deadline(call: Callable[[], Awaitable[T]]) -> T:
    """Make a call, and end it if the server does not answer.

    The client's own timeouts would make a task for each command that is sent.
    """
    with anyio.move_on_after(_ANSWER_TIMEOUT_S):
        return await call()
    raise RedisTimeoutError(f"no answer within {_ANSWER_TIMEOUT_S:g} s")


async def _read_answer(connection: Any) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


async def _check_server(connection: RunConnection) -> bool:
    """Refuse a server that could lose work. Uses INFO, which managed servers and least-privilege users allow.

    A field that is missing from the answer is unknown, not safe: it is logged.

    Returns:
        Whether the server is, or may be, a node of a cluster.
    """
    info = await connection.with_retry(lambda: connection.redis.info("server", "memory", "persistence", "cluster"))
    if (info.get("redis_mode") or info.get("server_mode")) == "sentinel":  # Valkey has the second name
        raise ServerError(f"the server at {connection.display_url} is a Sentinel: {SENTINEL_HINT}")
    version = info.get("valkey_version") or info.get("redis_version")
    numbers = re.match(r"(\d+)\.(\d+)", str(version))
    if numbers and (int(numbers[1]), int(numbers[2])) < _MIN_VERSION:
        raise ServerError(f"the server's version is {version}; Penstock needs Redis >= 7.0 or Valkey")
    policy = info.get("maxmemory_policy")
    if policy not in {None, "noeviction"}:
        raise ServerError(f"the server's maxmemory-policy is {policy}: it would evict work; set it to noeviction")
    persistent, in_cluster = info.get("aof_enabled"), info.get("cluster_enabled")
    known = {
        "redis_version": numbers,
        "maxmemory_policy": policy,
        "aof_enabled": persistent,
        "cluster_enabled": in_cluster,
    }
    for field in (name for name, value in known.items() if value is None):
        log.warning("redis.setting_unknown", field=field, why="INFO does not have this field, so it was not checked")
    if persistent == 0:
        log.warning("redis.persistence_off", why="appendonly is off: a crash loses everything since the last snapshot")
    return in_cluster != 0
