"""Keeps the processes of a run running until their work is done or the run ends.

A process that exits is restarted after a delay, within a budget; beyond it the run fails.
"""

import signal
import socket
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

import anyio
import anyio.to_thread
import structlog
from msgspec import Struct

from stream.connection.run_connection import RunConnection
from stream.errors import RunFailedError, ServerError
from stream.operator.control import HeldEntry, release_worker
from stream.operator.status import read_status
from stream.waiting import Backoff
from workers.launch.children import ChildProcess
from workers.launch.death_lines import DeathLines
from workers.launch.specs import ENGINE
from workers.role.exit_codes import ExitCode
from workers.role.prometheus import process_restarts
from workers.settings import QueueSettings

MAX_RESTARTS: Final = 5
"""Restarts of one process within `RESTART_WINDOW_S`, not counting kills from outside, and deaths of workers that held
entries."""
RESTART_WINDOW_S: Final = 600.0
QUICK_EXIT_S = 10.0
MAX_QUICK_EXITS: Final = 3
"""Exits in a row within `QUICK_EXIT_S` of a start, after which a process is not restarted."""
MAX_LOST_IN_A_ROW: Final = 100
"""Prompts that deaths of workers may cost in a row, before the fault is not the prompts' but everywhere."""
_MAX_KILL_BACKOFF: Final = 3
"""After this many kills in a row the delay does not grow any more."""
_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}
"""Exit codes of a process that was killed from outside; other signals are raised by a process's own defects."""
_MAX_BACKOFF: Final = 60.0
"""Longest delay before a restart, as a multiple of the first."""


class Restart(Struct, frozen=True):
    """Restart the process after a delay."""

    delay_s: float


class GiveUp(Struct, frozen=True):
    """Do not restart the process; the run fails."""

    reason: str


class RestartPolicy:
    """Counts the restarts of one process.

    Args:
        queue: settings with the delay before the first restart.
    """

    def __init__(self, queue: QueueSettings) -> None:
        self._backoff = Backoff(queue.retry_delay_s, queue.retry_delay_s * _MAX_BACKOFF)
        self._recent: deque[float] = deque()
        self._quick_exits = 0
        self._quick_kills = 0

    def decide(
        self,
        code: int,
        uptime_s: float,
        now: float | None = None,
        *,
        killed_from_outside: bool = False,
        held_work: bool = False,
    ) -> Restart | GiveUp:
        """Decide whether to restart the process after an unexpected exit.

        Args:
            code: exit code, negative for a signal.
            uptime_s: seconds that the process ran.
            killed_from_outside: see `was_killed_from_outside`. Such an exit is not counted: the process has no defect.
                A run that makes no progress because of it ends after `abort.stall_timeout_s`.
            held_work: a worker held entries when it ended. Such an exit is not counted either: its death is counted for
                the entries (`stream.operator.control`), and each of them has a limit.
            now: monotonic time in seconds; default: the current time.
        """
        if code in (ExitCode.USAGE, ExitCode.PERMANENT):
            return GiveUp("a restart would not help")
        now = time.monotonic() if now is None else now
        if held_work:
            return Restart(self._backoff.delay_s(1))
        # Quick exits in a row indicate a defect of the process. A kill by a signal does not, so it resets the count.
        self._quick_exits = self._quick_exits + 1 if code >= 0 and uptime_s < QUICK_EXIT_S else 0
        if self._quick_exits >= MAX_QUICK_EXITS:
            return GiveUp(f"it ended within {QUICK_EXIT_S:g} s of its start {self._quick_exits} times in a row")
        if code == ExitCode.RECYCLE:
            return Restart(0.0)
        if killed_from_outside:
            self._quick_kills = self._quick_kills + 1 if uptime_s < QUICK_EXIT_S else 1
            return Restart(self._backoff.delay_s(min(self._quick_kills, _MAX_KILL_BACKOFF)))
        while self._recent and now - self._recent[0] > RESTART_WINDOW_S:
            self._recent.popleft()
        if len(self._recent) >= MAX_RESTARTS:
            minutes = RESTART_WINDOW_S / 60
            return GiveUp(f"it was restarted {MAX_RESTARTS} times within {minutes:g} minutes")
        self._recent.append(now)
        return Restart(self._backoff.delay_s(len(self._recent)))


class FutileDeaths:
    """Notices that a role loses prompt after prompt to deaths of its workers and completes none: it is broken."""

    def __init__(self) -> None:
        self._completed = -1
        self._lost = 0

    def observe(self, completed: int, lost: int) -> bool:
        """Return whether `MAX_LOST_IN_A_ROW` prompts were lost since the last one was completed.

        Args:
            completed: groups that have passed the role so far.
            lost: prompts that have just become dead letters because their workers died.
        """
        if completed != self._completed:
            self._completed, self._lost = completed, 0
        self._lost += lost
        return self._lost >= MAX_LOST_IN_A_ROW


def was_killed_from_outside(code: int, oom_kills_before: int) -> bool:
    """Return whether the process was killed from outside: by an operator, a scheduler, a chaos test.

    The kernel, too, kills with SIGKILL, when memory is exhausted; that is the process's own doing.

    Args:
        code: exit code, negative for a signal.
        oom_kills_before: `count_oom_kills` at the start of the process.
    """
    return code in _OUTSIDE and count_oom_kills() == oom_kills_before


def count_oom_kills() -> int:
    """Return how many processes the kernel of this machine has killed for lack of memory; 0 where it does not tell."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


class RunEnding:
    """Records the first reason to end a run: its work is done, an operator stopped it, or it failed."""

    def __init__(self) -> None:
        self.requested = anyio.Event()
        """Set by the first reason."""
        self.failure: RunFailedError | None = None
        self.interrupted = False
        """A signal or `penstock stop` came before any other reason."""

    def finish(self) -> None:
        """End the run because its work is done."""
        self.requested.set()

    def interrupt(self) -> None:
        """End the run because an operator stopped it."""
        self.interrupted = self.interrupted or not self.requested.is_set()
        self.requested.set()

    def fail(self, error: RunFailedError) -> None:
        """End the run because of an error. Later errors are ignored: they follow from the first."""
        if self.failure is None:
            log.error("run.failed", error=str(error))
            self.failure = error
        self.requested.set()


log = structlog.get_logger()

_WORKERS = ("rollout", "score", "train")
"""Roles that claim entries."""
_RELEASE_TIMEOUT_S = 5.0
"""Seconds to give back a killed worker's entries; a server that is down returns them when their leases expire."""


class RestartLoop:
    """Restarts processes that end before the run does.

    Args:
        connection: connection to the run.
        queue: settings with the restart budget.
        ending: notified when the trainer is done, and when a process cannot be kept running.
        show: prints a line for people.
    """

    def __init__(
        self,
        connection: RunConnection,
        queue: QueueSettings,
        ending: RunEnding,
        show: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.restarts: Counter[str] = Counter()
        """Restarts after a failure, by process."""
        self._connection = connection
        self._queue = queue
        self._ending = ending
        self._deaths = DeathLines(show)
        self._futile_deaths: dict[str, FutileDeaths] = {}
        """By role."""
        self._stopping = anyio.Event()
        self._reopened = anyio.Event()

    @property
    def is_stopping(self) -> bool:
        """Whether restarts have ended."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Start no further process."""
        self._stopping.set()
        self._reopened.set()

    async def keep_running(self, child: ChildProcess, on_listening: Callable[[str], None] | None = None) -> None:
        """Run a process until its work is done or the run ends; one that cannot be kept running fails the run.

        Args:
            child: the process.
            on_listening: called with a server's URL after each start; None for a process that does not listen.
        """
        policy = RestartPolicy(self._queue)
        try:
            while not self._stopping.is_set():
                started_at, oom_kills = time.monotonic(), await anyio.to_thread.run_sync(count_oom_kills)
                log.info("role.started", name=child.spec.name, command=" ".join(child.spec.command))
                code = await child.run(on_listening)
                log.info("role.exited", name=child.spec.name, code=code)
                if self._stopping.is_set():
                    return
                if code == ExitCode.SUCCESS and await self._has_finished(child.spec.role):
                    await self._reopened.wait()
                elif await self._stop_requested():
                    return
                else:
                    killed = await anyio.to_thread.run_sync(was_killed_from_outside, code, oom_kills)
                    killed = killed and not child.was_hanging
                    if child.was_hanging:
                        log.warning("role.hanging", name=child.spec.name, call=child.hanging_call)
                    held = await self._release_work(child, code, killed_from_outside=killed)
                    uptime_s = time.monotonic() - started_at
                    decision = policy.decide(code, uptime_s, killed_from_outside=killed, held_work=bool(held))
                    await self._prepare_restart(child, code, decision)
        except (RunFailedError, ServerError) as error:
            if not self._stopping.is_set():
                self._ending.fail(error if isinstance(error, RunFailedError) else RunFailedError(str(error)))
        finally:
            child.exited.set()

    async def reopen(self) -> None:
        """Declare the run unfinished, because a trainer is about to start, and restart finished roles."""
        connection = self._connection
        meta = connection.key("meta")
        await connection.with_retry(lambda: cast("Awaitable[Any]", connection.redis.hdel(meta, "finished")))
        self._reopened.set()
        self._reopened = anyio.Event()

    async def _release_work(self, child: ChildProcess, code: int, *, killed_from_outside: bool) -> list[HeldEntry]:
        """Give back what a worker held when it ended. Returns those entries for which its death is counted.

        No death of a trainer counts for its groups: it cannot work on one of them alone.

        Raises:
            RunFailedError: prompt after prompt is lost like this, and none is completed.
        """
        if child.spec.role not in _WORKERS or child.last_pid is None:
            return []
        cause = None if killed_from_outside else await anyio.to_thread.run_sync(child.last_cause)
        how = f"the last one, {child.spec.name}, {child.describe_end(code)}"
        held: list[HeldEntry] = []
        with anyio.move_on_after(_RELEASE_TIMEOUT_S):
            held = await release_worker(
                *(self._connection, socket.gethostname(), child.last_pid, self._queue.max_attempts),
                f"{how}\n{cause.render()}" if cause else how,
            )
        log.info("worker.released", name=child.spec.name, entries=len(held))
        if child.spec.role == "train":
            return []
        if (lost := sum(entry.is_dead for entry in held)) and await self._is_futile(child.spec.role, lost):
            raise RunFailedError(
                f"the last {MAX_LOST_IN_A_ROW} prompts became dead letters because their workers died, and none was "
                f"completed meanwhile: {how} (its log is {child.log_file})",
                cause,
            )
        self._deaths.tell(child.spec.name, child.describe_end(code), held)
        return held

    async def _is_futile(self, role: str, lost: int) -> bool:
        """Return whether a role has lost very many prompts and completed none."""
        status = await read_status(self._connection)
        passed = {"rollout": ("groups", "scored"), "score": ("scored",)}[role]
        ended = status.prompt_counts["trained"] + status.prompt_counts["dropped"]
        completed = ended + sum(status.stages[stage].depth - status.stages[stage].marked for stage in passed)
        return self._futile_deaths.setdefault(role, FutileDeaths()).observe(completed, lost)

    async def _prepare_restart(self, child: ChildProcess, code: int, decision: Restart | GiveUp) -> None:
        """Wait until a process may be restarted.

        Raises:
            RunFailedError: the process may not be restarted.
        """
        name = child.spec.name
        if code > 0 and child.spec.role == ENGINE and not child.has_listened:
            decision = GiveUp("it has never listened")
        if isinstance(decision, GiveUp):
            last_error = await anyio.to_thread.run_sync(child.last_error)
            raise RunFailedError(
                f"{name} {child.describe_end(code)}, and {decision.reason}: {last_error} (its log is {child.log_file})",
                await anyio.to_thread.run_sync(child.last_cause),
            )
        if code == ExitCode.RECYCLE:
            log.warning("worker.recycled", name=name, why=await anyio.to_thread.run_sync(child.last_error))
        else:
            self.restarts[name] += 1
            process_restarts.labels(child.spec.role).inc()
            log.warning("role.restarted", name=name, code=code, after_s=round(decision.delay_s, 2))
        with anyio.move_on_after(decision.delay_s):
            await self._stopping.wait()
        if child.spec.role == "train":
            await self.reopen()

    async def _has_finished(self, role: str) -> bool:
        """Return whether the run's work is done, so that a role that exited with success needs no restart.

        If the role is the trainer and the work is done, also request the end of the run.
        """
        has_finished = bool((await self._connection.read_hash("meta")).get("finished"))
        if role == "train" and has_finished:
            self._ending.finish()
        return has_finished

    async def _stop_requested(self) -> bool:
        """Return whether `penstock stop` was called. A role may react to it before the supervisor does."""
        await self._connection.poll_stop()
        return self._connection.stopping.is_set()
