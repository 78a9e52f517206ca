"""What every tier of tests shares: the event loop, a private server, a run of one's own, a watch for blocking calls."""

import os
import subprocess
import tempfile
import time
import uuid
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import structlog
from blockbuster import BlockBuster, blockbuster_ctx
from hypothesis import HealthCheck, settings
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from stream.connection.keys import StageName
from stream.connection.run_connection import RunConnection, connect
from stream.operator.run_status import read_status
from stream.queue.feed import Feed
from stream.queue.stage import RetryPolicy, Stage
from stream.records import Completion, Group, Prompt
from stream.server_process import command_line, find_server
from stream.validity import Measured
from tests.cases.rows import sampled_row
from tests.preload.fixtures import preloaded, pytest_collection_finish  # noqa: F401  (a fixture, a hook)

settings.register_profile("dev", max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", max_examples=200, deadline=None, derandomize=True, print_blob=True)
settings.register_profile(
    "nightly", max_examples=100, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


LONG_S = 300.0
"""A test that may take longer than this is in no slice: it is run at night only."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slice", metavar="K/N", help="only one N-th of the tests, without those that take very long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one slice of the tests: by name, so that other tests stay in their slices when one is added."""
    if not (chosen := config.getoption("--slice")):
        return
    number, count = map(int, chosen.split("/"))
    kept = [item for item in items if zlib.crc32(item.nodeid.encode()) % count == number and _limit_s(item) < LONG_S]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _limit_s(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker is not None else 0.0


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """Plain asyncio: uvloop's sockets are out of blockbuster's sight."""
    return "asyncio", {"debug": False, "use_uvloop": False}


@pytest.fixture(autouse=True)
def plain_logging() -> Iterator[None]:
    """A command run in the test's own process sets up logging; the next test begins without it."""
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@pytest.fixture(scope="session", autouse=True)
def blockbuster() -> Iterator[BlockBuster]:
    """A blocking call on the event loop, anywhere below our packages, fails the test that makes it."""
    with blockbuster_ctx(scanned_modules=[_folder_of(name) for name in ("stream", "envs", "workers")]) as found:
        for function in found.functions.values():
            # A log line is one short write to a terminal or a file. A process is started by fork and exec, which has
            # no other way; waiting for it is asynchronous. A module is imported once.
            function.can_block_in("structlog/_output.py", {"msg", "__call__"})
            function.can_block_in("subprocess.py", {"_execute_child"})
            function.can_block_in("<frozen importlib._bootstrap>", {"_find_and_load"})
        yield found


def _folder_of(package: str) -> ModuleType:
    """Stands for a package by its folder alone, so that arming imports nothing."""
    module = ModuleType(package)
    module.__path__ = [str(Path(__file__).parents[1] / package)]
    return module


class Server:
    """A private server that a test may start, kill and start again on the same data; one process at a time."""

    def __init__(self, folder: Path, binary: Path, *options: str, fsync: str = "everysec") -> None:
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._process: subprocess.Popen[bytes] | None = None
        self._command = [*command_line(binary, folder, self.socket, fsync), *options]

    def start(self) -> "Server":
        """Start it, and wait until it answers. In the main thread: it dies with the thread that started it."""
        self._process = subprocess.Popen(self._command, start_new_session=True)
        with Redis.from_url(self.url) as redis:
            for _ in range(500):
                assert self._process.poll() is None, f"the server ended at once: {self._command}"
                try:
                    if redis.ping():
                        return self
                except RedisConnectionError:
                    time.sleep(0.02)
        raise AssertionError("the server does not answer")

    def kill(self) -> None:
        """End it with SIGKILL, as a machine that fails would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process is not None
        return self._process.pid


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A server for this test process alone, without persistence; under xdist each worker has its own."""
    with tempfile.TemporaryDirectory(prefix="penstock-test-") as folder:  # a socket's path must be short
        server = Server(Path(folder), find_server(), "--appendonly", "no").start()
        yield server.url
        server.kill()


@pytest.fixture
def make_server() -> Iterator[Callable[..., Server]]:
    """A server of the test's own, not started yet: `make_server(*options, binary=..., fsync=...)`."""
    with tempfile.TemporaryDirectory(prefix="penstock-test-") as folder:
        made: list[Server] = []
        found = find_server()

        def make(*options: str, binary: Path = found, fsync: str = "everysec") -> Server:
            home = Path(folder) / str(len(made))
            home.mkdir()
            made.append(Server(home, binary, *options, fsync=fsync))
            return made[-1]

        yield make
        for server in made:
            server.kill()


class Pipe:
    """Short ways to what tests of a run do again and again.

    Leases last 30 s and back-offs 10 ms unless a test says otherwise.
    """

    def __init__(self, connection: RunConnection) -> None:
        self.connection = connection

    def stage(self, name: StageName, consumer: str = "w", capacity: int | None = None, **terms: float) -> Stage:
        """One worker's view of a stage."""
        return Stage(
            self.connection, name, consumer, RetryPolicy(**{"lease_s": 30.0, "backoff_s": 0.01, **terms}), capacity
        )

    async def feed(self, *prompt_ids: str) -> None:
        """Feed prompts behind what was fed before."""
        feed = Feed(self.connection, max_queued_prompts=100_000)
        before = await feed.cursor()
        await feed.put([Prompt(id=each, messages=[]) for each in prompt_ids], before, f"{before}{len(prompt_ids)};")

    async def rolled_out(self, *prompt_ids: str) -> None:
        """Feed prompts, and take them to the scoring stage."""
        await self.feed(*prompt_ids)
        await self._pass_on("prompts", "groups", len(prompt_ids))

    async def scored(self, *prompt_ids: str) -> None:
        """Feed prompts, and take them to the trainer."""
        await self.rolled_out(*prompt_ids)
        await self._pass_on("groups", "scored", len(prompt_ids))

    async def _pass_on(self, stage: StageName, into: StageName, count: int) -> None:
        worker = self.stage(stage, f"passing-{stage}")
        for lease in (await worker.claim(count)).leases:
            await worker.complete(lease, into, self.group(lease.prompt_id))

    @staticmethod
    def group(prompt_id: str, tokens: tuple[int, ...] = (1, 2, 3)) -> Group:
        """A group of one completion."""
        row = sampled_row(tokens, [-0.5] * len(tokens), prompt=[7])
        completion = Completion(index=0, rows=[row], reward=Measured(1.0))
        return Group(prompt=Prompt(id=prompt_id, messages=[]), completions=[completion])

    async def balance(self) -> dict[str, int]:
        """The run's account, which must balance: fed = trained + dropped + dead + outstanding."""
        balance = (await read_status(self.connection)).balance
        assert balance["fed"] == sum(n for name, n in balance.items() if name != "fed"), balance
        return balance


@pytest.fixture
def run_name() -> str:
    """The name of a run that nobody else uses."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def connection(redis_url: str, run_name: str) -> AsyncIterator[RunConnection]:
    """A connection to the test's own run."""
    async with connect(redis_url, run_name, reconnect_s=5.0) as found:
        yield found


@pytest.fixture
def pipe(connection: RunConnection) -> Pipe:
    """Helpers on the test's own run."""
    return Pipe(connection)


@pytest.fixture
def pipe_on() -> type[Pipe]:
    """The same helpers for a connection that the test makes itself: `pipe_on(link)`."""
    return Pipe
