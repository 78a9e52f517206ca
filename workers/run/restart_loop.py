"""Keeps the processes of a run running until their work is done or the run ends."""

import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, cast

import anyio
import anyio.to_thread
import structlog

from stream.connection.run_connection import RunConnection
from stream.errors import RunFailedError, ServerError
from stream.operator.control import HeldEntry, release_worker
from stream.operator.status import read_status
from workers.role.exit_codes import ExitCode
from workers.role.prometheus import process_restarts
from workers.run.child_processes import ChildProcess
from workers.run.death_lines import DeathLines
from workers.run.restart_policy import (
    MAX_LOST_IN_A_ROW,
    FutileDeaths,
    GiveUp,
    Restart,
    RestartPolicy,
    count_oom_kills,
    was_killed_from_outside,
)
from workers.run.role_specs import ENGINE
from workers.run.run_ending import RunEnding
from workers.settings import Queue

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
        self, connection: RunConnection, queue: Queue, ending: RunEnding, show: Callable[[str], None] = lambda _: None
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
        ended = status.balance["trained"] + status.balance["dropped"]
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
