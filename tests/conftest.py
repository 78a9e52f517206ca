"""Shared by all tests: the event loop, a private server, a run per test, detection of blocking calls."""

import gc
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
from stream.operator.status import read_status
from stream.private_server import command_line, find_server
from stream.queue.feed import Feed
from stream.queue.stage import RetryPolicy, Stage
from stream.records import Completion, Group, Prompt
from stream.validity import Measured
from tests.cases.disks import skip_without_disk
from tests.cases.rows import sampled_row
from tests.preload.fixtures import (  # noqa: F401  (a fixture and hooks)
    preloaded,
    pytest_collection_finish,
    pytest_xdist_setupnodes,
)

# Collecting imports torch and makes 6,000 tests: the collector would traverse them dozens of times, for nothing.
gc.disable()

# Several test processes share the cores; threads that wait for each other's share of small tensors slow all of them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait for each other must not take others' time

settings.register_profile("dev", max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "ci",
    max_examples=6,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "nightly", max_examples=60, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


LONG_S = 300.0
"""A test that may take longer than this, in seconds, is in no slice: it runs only at night."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slice", metavar="K/N", help="only one N-th of the tests, without those that take very long")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[object]:
    """Collect without the garbage collector; afterwards it ignores what was made until then."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select one slice of the tests by name, so that tests keep their slice when others are added."""
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
    """Plain asyncio: blockbuster cannot see uvloop's sockets."""
    return "asyncio", {"debug": False, "use_uvloop": False}


@pytest.fixture(autouse=True)
def plain_logging() -> Iterator[None]:
    """Reset logging after each test: a command run in the test's process sets it up."""
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@pytest.fixture
def silent_logs() -> None:
    """Logs go to stderr, as a command sends them there, so that stdout has only its output."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())


@pytest.fixture(scope="session", autouse=True)
def blockbuster() -> Iterator[BlockBuster]:
    """Fail a test that makes a blocking call on the event loop anywhere below the project's packages."""
    with blockbuster_ctx(scanned_modules=[_folder_of(name) for name in ("stream", "envs", "workers")]) as result:
        for function in result.functions.values():
            # A log line is one short write to a terminal or a file. A process can only be started by fork and exec;
            # waiting for it is asynchronous. A module is imported once.
            function.can_block_in("structlog/_output.py", {"msg", "__call__"})
            function.can_block_in("subprocess.py", {"_execute_child"})
            function.can_block_in("<frozen importlib._bootstrap>", {"_find_and_load"})
        yield result


def _folder_of(package: str) -> ModuleType:
    """Represents a package by its folder alone, so that arming imports nothing."""
    module = ModuleType(package)
    module.__path__ = [str(Path(__file__).parents[1] / package)]
    return module


class Server:
    """A private server that a test can start, kill and restart on the same data; one process at a time."""

    def __init__(self, folder: Path, binary: Path, *options: str, fsync: str = "everysec") -> None:
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._process: subprocess.Popen[bytes] | None = None
        self._command = [*command_line(binary, folder, self.socket, fsync), *options]

    def start(self) -> "Server":
        """Start the server and wait until it answers. Call it on the main thread: the server dies with its thread."""
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
        """Send SIGKILL, as if the machine had failed."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def pid(self) -> int:
        """The server's process id."""
        assert self._process is not None
        return self._process.pid


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A server for this test process, without persistence; under xdist each worker has its own."""
    with tempfile.TemporaryDirectory(prefix="penstock-test-") as folder:  # the path of a socket must be short
        server = Server(Path(folder), find_server(), "--appendonly", "no").start()
        yield server.url
        server.kill()


@pytest.fixture
def make_server() -> Iterator[Callable[..., Server]]:
    """A factory of private, unstarted servers: `make_server(*options, binary=..., fsync=...)`."""
    with tempfile.TemporaryDirectory(prefix="penstock-test-") as folder:
        made: list[Server] = []
        result = find_server()

        def make(*options: str, binary: Path = result, fsync: str = "everysec") -> Server:
            home = Path(folder) / str(len(made))
            home.mkdir()
            made.append(Server(home, binary, *options, fsync=fsync))
            return made[-1]

        yield make
        for server in made:
            server.kill()


class Pipe:
    """Shortcuts for frequent operations on a run.

    Leases last 30 s and back-offs 10 ms by default.
    """

    def __init__(self, connection: RunConnection) -> None:
        self.connection = connection

    def stage(self, name: StageName, consumer: str = "w", capacity: int | None = None, **terms: float) -> Stage:
        """Return one worker's view of a stage."""
        return Stage(
            self.connection, name, consumer, RetryPolicy(**{"lease_s": 30.0, "backoff_s": 0.01, **terms}), capacity
        )

    async def feed(self, *prompt_ids: str) -> None:
        """Feed prompts behind earlier ones."""
        feed = Feed(self.connection, max_queued_prompts=100_000)
        before = await feed.cursor()
        await feed.put([Prompt(id=each, messages=[]) for each in prompt_ids], before, f"{before}{len(prompt_ids)};")

    async def rolled_out(self, *prompt_ids: str) -> None:
        """Feed prompts and complete their rollouts, so that they wait to be scored."""
        await self.feed(*prompt_ids)
        await self._pass_on("prompts", "groups", len(prompt_ids))

    async def scored(self, *prompt_ids: str) -> None:
        """Feed prompts and complete rollout and scoring, so that they wait for the trainer."""
        await self.rolled_out(*prompt_ids)
        await self._pass_on("groups", "scored", len(prompt_ids))

    async def _pass_on(self, stage: StageName, into: StageName, count: int) -> None:
        worker = self.stage(stage, f"passing-{stage}")
        for lease in (await worker.claim(count)).leases:
            if into == "scored":
                await worker.complete_scored(lease, self.group(lease.prompt_id))
            else:
                await worker.complete(lease, into, self.group(lease.prompt_id))

    @staticmethod
    def group(prompt_id: str, tokens: tuple[int, ...] = (1, 2, 3)) -> Group:
        """Return a group of one completion."""
        row = sampled_row(tokens, [-0.5] * len(tokens), prompt=[7])
        completion = Completion(index=0, rows=[row], reward=Measured(1.0))
        return Group(prompt=Prompt(id=prompt_id, messages=[]), completions=[completion])

    async def prompt_counts(self) -> dict[str, int]:
        """Return the run's counts, after asserting fed = trained + dropped + dead + outstanding."""
        counts = (await read_status(self.connection)).prompt_counts
        assert counts["fed"] == sum(n for name, n in counts.items() if name != "fed"), counts
        return counts


@pytest.fixture
def run_name() -> str:
    """The name of a run that no other test uses."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def connection(redis_url: str, run_name: str) -> AsyncIterator[RunConnection]:
    """A connection to the test's own run."""
    async with connect(redis_url, run_name, reconnect_s=5.0) as result:
        yield result


@pytest.fixture
def pipe(connection: RunConnection) -> Pipe:
    """Shortcuts on the test's own run."""
    return Pipe(connection)


@pytest.fixture
def pipe_on() -> type[Pipe]:
    """The same shortcuts for a connection that the test makes: `pipe_on(connection)`."""
    return Pipe


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for 64 KiB."""
    yield from skip_without_disk(tmp_path / "disk", "64k")
