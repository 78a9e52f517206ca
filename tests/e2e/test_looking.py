"""Looking at a run changes nothing of it: the ledger is the same, and no consumer appears that is no worker."""

import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from contextlib import contextmanager, suppress

import anyio
import pytest
from redis.exceptions import ResponseError

from stream.connection.keys import CONSUMER_GROUP, RESERVED_CONSUMERS, STAGES
from stream.operator.control import pause, resume
from tests.e2e.harness import environment, stop
from tests.e2e.test_metrics import free_ports
from tests.soak.evaluation import describe, ended, ledger, run

pytestmark = [pytest.mark.full, pytest.mark.timeout(300), pytest.mark.usefixtures("preloaded")]

GROUPS = 48
PAGES = (
    "",
    "/in-flight",
    "/groups",
    "/timeline",
    "/workers",
    "/engines",
    "/dead",
    "/logs",
    "/settings",
    "/evaluations",
    "/charts.json",
)
ONCE = (("queues", "--in-flight", "--json"), ("groups", "--json"), ("show",), ("queues", "--json"), ("audit", "--json"))
FOREVER = {
    "watch": ("queues", "--watch", "--json"),
    "watch in flight": ("queues", "--watch", "--in-flight", "--json"),
}
KINDS = {*FOREVER, *map(" ".join, ONCE), "pages", "metrics", "events"}
PROCESSES = 6


class Viewers:
    """Commands and pages that look at a run, each again and again, from when its server has the run.

    Attributes:
        looks: how often each has seen something.
        begin: set this when the server has the run.
    """

    def __init__(self, settings):
        self.looks = Counter()
        self.begin = threading.Event()
        self._folder = settings.folder
        self._metrics_port = settings.run.metrics_port
        self._pages = ""
        """Address of the run's pages, once the dashboard listens."""
        self._over = threading.Event()

    @contextmanager
    def looking(self):
        """Look while the context is open."""
        loops = (self._follow, self._call, self._load, self._stream)
        threads = [threading.Thread(target=self._when_begun, args=(loop,)) for loop in loops]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            self.begin.set()
            for thread in threads:
                thread.join(60)

    def unseen(self, before):
        """Return the kinds of viewers that have not looked since."""
        return {kind for kind in KINDS if self.looks[kind] <= before[kind]}

    def _when_begun(self, loop):
        self.begin.wait()
        if not self._over.is_set():
            loop()

    def _command(self, *arguments):
        return [sys.executable, "-m", "penstock", *arguments, str(self._folder)]

    def _follow(self):
        """The dashboard, and commands that print a line each second."""
        dashboard = subprocess.Popen(
            self._command("dashboard", "--port", "0"), stdout=subprocess.PIPE, env=environment(), text=True
        )
        self._pages = f"{dashboard.stdout.readline().split()[-1]}/runs/{self._folder.name}"
        followers = {
            name: subprocess.Popen(self._command(*each), stdout=subprocess.PIPE, env=environment(), text=True)
            for name, each in FOREVER.items()
        }
        threads = [threading.Thread(target=self._count_lines, args=pair) for pair in followers.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)  # each ends with the run
        stop(dashboard)

    def _count_lines(self, name, process):
        with process:
            for _ in process.stdout:
                self.looks[name] += 1

    def _call(self):
        while not self._over.is_set():
            for each in ONCE:
                done = subprocess.run(self._command(*each), capture_output=True, env=environment(), check=False)
                self.looks[" ".join(each)] += done.returncode == 0

    def _load(self):
        while not self._over.wait(0.05):
            for page in PAGES if self._pages else ():
                self._read(self._pages + page, "pages")
            for port in range(self._metrics_port, self._metrics_port + PROCESSES):
                self._read(f"http://127.0.0.1:{port}/metrics", "metrics")

    def _stream(self):
        while not self._over.wait(0.1):
            url = f"{self._pages}/events?parts=state,pipeline"
            with suppress(OSError, ValueError), urllib.request.urlopen(url, timeout=3) as stream:
                for line in stream:
                    self.looks["events"] += line.startswith(b"event:")
                    if self._over.is_set():
                        return

    def _read(self, url, name):
        with suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
            self.looks[name] += bool(answer.read())


class PausedInTheMiddle:
    """Pauses the run once, until every viewer has looked again, and compares what is pending before and after."""

    def __init__(self, viewers):
        self.consumers = set()
        self.pending = []
        self._viewers = viewers
        self._is_paused = False

    async def __call__(self, status, connection):
        self._viewers.begin.set()
        await self._note_consumers(connection)
        if self._is_paused or status.counts.get("trained", 0) < GROUPS // 4:
            return
        self._is_paused = True
        await pause(connection, "test")
        seen = None
        with anyio.move_on_after(150):
            self.pending.append(await self._wait_settled(connection))
            seen = Counter(self._viewers.looks)
            while self._viewers.unseen(seen):
                await anyio.sleep(0.1)
            self.pending.append(await self._note_consumers(connection))
        assert seen is not None, "what was begun before the pause has not ended"
        assert not self._viewers.unseen(seen), "these have not looked again"
        await resume(connection, "test")

    async def _wait_settled(self, connection):
        """Return what is pending once that has not changed for a while: what was begun before the pause has ended."""
        readings = []
        while len(readings) < 4 or any(each != readings[-1] for each in readings[-4:]):
            await anyio.sleep(1.5)
            readings.append(await self._note_consumers(connection))
        return readings[-1]

    async def _note_consumers(self, connection):
        """Return the pending entries by consumer, of every stage."""
        pending = {}
        for stage in STAGES:
            with suppress(ResponseError):  # a stream that is not there yet
                for each in await connection.redis.xinfo_consumers(connection.key(stage), CONSUMER_GROUP):
                    pending[stage, each["name"].decode()] = each["pending"]
        self.consumers.update(name for _, name in pending)
        return pending


def test_the_ledger_is_the_same_line_by_line_whether_or_not_somebody_looks(tmp_path):
    port = free_ports(PROCESSES)
    address = {"metrics_address": f"127.0.0.1:{port}"}
    looked_at = describe(tmp_path / "a", groups=GROUPS, held_out=2, evaluate=False, run=address)
    viewers = Viewers(looked_at)
    paused = PausedInTheMiddle(viewers)
    with viewers.looking():
        ended(looked_at, run(looked_at, meddle=paused, limit_s=250))
    alone = describe(tmp_path / "b", groups=GROUPS, held_out=2, evaluate=False)
    ended(alone, run(alone))
    assert ledger(looked_at) == ledger(alone)
    assert len(ledger(alone)) == GROUPS
    before, after = paused.pending
    assert before == after
    roles = {name.partition("-")[0] for name in paused.consumers - set(RESERVED_CONSUMERS)}
    assert roles == {"rollout", "score", "train"}
