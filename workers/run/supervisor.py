"""`penstock run`: keeps every role of a run going on one machine, and ends them in order.

::

    start    engines, and when all listen: feed, rollout xN, score xM, train
    keep     what dies is started again, within its budget; exit code 2 is for good, 3 (worn out) takes none of it
    watch    one look a second: progress, and an alarm when the run stands still
    end      trainer done       the rest go home by themselves, then are asked to
             asked to stop      feed and rollout, score, train, engine: each drains, then the next
                                (by Ctrl-C; by `penstock stop`, of which the roles hear by themselves)
             failed for good    all at once, the engine last

Whatever happens, no process stays behind: each child is tethered to this one, and killed with all it has started.
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import anyio
import structlog
from anyio.abc import TaskGroup
from msgspec import Struct

from stream.connection.run_connection import RunConnection, connect
from stream.errors import PenstockError, RunFailedError, ServerError
from stream.operator.run_status import RunStatus, read_status
from stream.server_process import private_server
from workers.run import run_info as live
from workers.run.child_process import ChildProcess, describe_exit
from workers.run.child_processes import ChildProcesses
from workers.run.engine_processes import EngineProcesses
from workers.run.process_launcher import ProcessLauncher
from workers.run.progress_display import ProgressDisplay, SupervisorState
from workers.run.restart_policy import RestartPolicy, StallDetector
from workers.run.role_specs import ENGINE, MakeEngineSpec, MakeRoleSpecs, engine_spec, role_specs
from workers.runtime.exit_codes import ExitCode
from workers.settings import Settings

log = structlog.get_logger()

_ShutdownOrder = tuple[tuple[str, ...], ...]

_RUNNING = "running"
_POLL_S = 1.0
_FINISH_TIMEOUT_S = 5.0
"""Time to see that the run has finished, and leave unasked."""
_EXIT_MARGIN_S = 3.0
"""Beyond the grace time: for a process to end once its role has."""
_ROLES = ("feed", "rollout", "score", "train")
_DRAIN_ORDER: _ShutdownOrder = (("feed", "rollout"), ("score",), ("train",), (ENGINE,))
_FAILURE_ORDER: _ShutdownOrder = (_ROLES, (ENGINE,))


class RunOutcome(Struct, kw_only=True):
    """How it ended."""

    view: RunStatus | None
    """The last look; None where the server was gone."""
    failure: RunFailedError | None
    interrupted: bool
    """Somebody asked it to stop."""
    killed: list[str]
    """Processes that had to be."""


class Supervisor:
    """Runs one run to its end.

    Args:
        settings: of the run.
        file: the settings file that the roles read.
        display: where progress is shown.
        make_roles: the command lines of all roles but the engine.
        make_engine: the command line of an engine of the run's own, on a port.
    """

    def __init__(
        self,
        settings: Settings,
        file: Path,
        display: ProgressDisplay,
        make_roles: MakeRoleSpecs = role_specs,
        make_engine: MakeEngineSpec = engine_spec,
    ) -> None:
        self._settings = settings
        self._file = file
        self._display = display
        self._make_roles = make_roles
        self._make_engine = make_engine
        self._logs = settings.folder / "logs"
        self._launcher = ProcessLauncher()
        self._children = ChildProcesses(settings.queue.shutdown_timeout_s + _EXIT_MARGIN_S)
        self._restarts: Counter[str] = Counter()
        self._began = time.monotonic()
        self._phase = "starting"
        self._over = anyio.Event()
        self._stopping = anyio.Event()
        self._reopened = anyio.Event()
        self._failure: RunFailedError | None = None
        self._server_gone = False
        self._signals = 0
        self._interrupted = False
        self._link: RunConnection

    async def run(self) -> RunOutcome:
        """Run it to its end; every process is gone when this returns.

        Raises:
            ServerError: there is no server to run on.
        """
        await anyio.Path(self._logs).mkdir(parents=True, exist_ok=True)
        with self._launcher:
            return await self._run_with_server()

    async def _run_with_server(self) -> RunOutcome:
        async with anyio.create_task_group() as listening:
            listening.start_soon(self._watch_signals)
            url = self._settings.run.redis
            if url:
                outcome = await self._run_on(url)
            else:
                fsync = self._settings.queue.fsync
                async with private_server(self._settings.folder / "redis", fsync=fsync) as url:
                    outcome = await self._run_on(url)
            listening.cancel_scope.cancel()
        return outcome

    async def _run_on(self, url: str) -> RunOutcome:
        name, queue = self._settings.run.name, self._settings.queue
        async with connect(url, name, reconnect_s=queue.reconnect_timeout_s) as self._link:
            await self._reopen()
            for spec in self._make_roles(self._settings, self._file, url, ()):
                self._launcher.preload(spec.modules)
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._watch)
                    tasks.start_soon(self._watch_stop_command)
                    await self._start(tasks, url)
                    await self._over.wait()
                    await self._shut_down()
                    tasks.cancel_scope.cancel()
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(live.remove_run_info, self._settings.folder)
            return RunOutcome(
                view=await self._refresh() or (None if self._server_gone else _empty_status()),
                failure=self._failure,
                interrupted=self._interrupted,
                killed=self._children.killed,
            )

    async def _start(self, tasks: TaskGroup, url: str) -> None:
        """Start everything, the engines first where they are ours."""

        async def start(engines: tuple[str, ...]) -> None:
            await self._announce(url, engines)
            self._phase = _RUNNING
            for spec in self._make_roles(self._settings, self._file, url, engines):
                child = ChildProcess(spec, self._logs, self._launcher)
                self._children.add(child)
                tasks.start_soon(self._keep_running, child)

        engine = self._settings.engine
        if engine.urls:
            return await start(engine.urls)
        own = EngineProcesses(self._settings, self._file, self._logs, self._launcher, self._make_engine)
        self._phase = own.phase
        await self._announce(url, ())

        def one_listens() -> None:
            self._phase = own.phase
            if own.all_listen and not self._stopping.is_set():
                tasks.start_soon(start, own.urls)

        for child in own.processes:
            self._children.add(child)
            tasks.start_soon(self._keep_running, child, own.listening_callback(child, one_listens))
        return None

    async def _announce(self, url: str, engines: tuple[str, ...]) -> None:
        here = live.RunInfo(run=self._settings.run.name, redis=url, engines=engines, pid=os.getpid())
        await anyio.to_thread.run_sync(live.write_run_info, self._settings.folder, here)

    async def _keep_running(self, child: ChildProcess, announced: Callable[[str], None] | None = None) -> None:
        """Keep one role going until it has done its work, the run stops, or its budget is exhausted."""
        restarts = RestartPolicy(self._settings.queue)
        try:
            while not self._stopping.is_set():
                began = time.monotonic()
                log.info("role.started", name=child.spec.name, command=" ".join(child.spec.command))
                code = await child.run(announced)
                log.info("role.exited", name=child.spec.name, code=code)
                if self._stopping.is_set():
                    return
                if code == 0 and await self._is_done(child.spec.role):
                    await self._reopened.wait()
                elif await self._asked_to_stop():
                    return
                else:
                    await self._prepare_restart(child, code, restarts, time.monotonic() - began)
        except RunFailedError as error:
            self._fail(error)
        except ServerError as error:
            self._fail(RunFailedError(str(error)))
        finally:
            child.exited.set()

    async def _prepare_restart(self, child: ChildProcess, code: int, restarts: RestartPolicy, lived_s: float) -> None:
        """Wait until a process that ended may be started again.

        Raises:
            RunFailedError: it may not.
        """
        name = child.spec.name
        unfit = code in (ExitCode.USAGE, ExitCode.PERMANENT) or (
            code > 0 and child.spec.role == ENGINE and not child.has_listened
        )
        verdict = "that is for good" if unfit else restarts.decide(code, lived_s)
        if isinstance(verdict, str):
            words = await anyio.to_thread.run_sync(child.last_error)
            raise RunFailedError(f"{name} {describe_exit(code)}, and {verdict}: {words} (its log is {child.log_file})")
        if code == ExitCode.RECYCLE:
            log.warning("worker.recycled", name=name, why=await anyio.to_thread.run_sync(child.last_error))
        else:
            self._restarts[name] += 1
            log.warning("role.restarted", name=name, code=code, after_s=round(verdict, 2))
        with anyio.move_on_after(verdict):
            await self._stopping.wait()
        if child.spec.role == "train":
            await self._reopen()

    async def _is_done(self, role: str) -> bool:
        """Whether a role that left in peace has done its work, and was not merely sent away by somebody."""
        finished = bool((await self._link.read_hash("meta")).get("finished"))
        if role == "train" and finished:
            self._over.set()
        return finished

    async def _asked_to_stop(self) -> bool:
        """Whether somebody said `penstock stop`; a role may hear of it, and leave, before we do."""
        await self._link.poll_stop()
        return self._link.stopping.is_set()

    async def _watch_stop_command(self) -> None:
        """`penstock stop` asks for a drain, as the first signal does."""
        await self._link.stopping.wait()
        self._interrupt()

    def _interrupt(self) -> None:
        self._interrupted = self._interrupted or not self._over.is_set()
        self._over.set()

    async def _reopen(self) -> None:
        """A trainer is about to start: whatever the last one said, the run goes on, and those who went home return."""
        meta = self._link.key("meta")
        await self._link.with_retry(lambda: cast("Awaitable[Any]", self._link.redis.hdel(meta, "finished")))
        self._reopened.set()
        self._reopened = anyio.Event()

    def _fail(self, error: RunFailedError) -> None:
        if self._failure is None and not self._stopping.is_set():
            log.error("run.failed", error=str(error))
            self._failure = error
        self._over.set()

    async def _watch(self) -> None:
        """Look once a second: show it, and fail the run when it stands still."""
        alarm: StallDetector | None = None
        while True:
            view = await self._refresh()
            if self._phase == _RUNNING:  # engines that start have a deadline of their own
                alarm = alarm or StallDetector(self._settings.abort.stall_timeout_s)
            if alarm and not self._over.is_set() and (stalled := alarm.observe(view)):
                self._fail(RunFailedError(stalled))
            await self._children.trim_logs()
            await anyio.sleep(_POLL_S)

    async def _refresh(self) -> RunStatus | None:
        """Look at the run and show it; None before it has begun, or when the server is gone, which fails the run."""
        view = None
        try:
            view = await read_status(self._link)
            self._link.observe_stop(int(view.meta.get("stop", 0)))
        except ServerError as error:
            self._server_gone = True
            self._fail(RunFailedError(str(error)))
        except PenstockError as error:
            log.debug("run_status.failed", why=str(error))
        seconds = time.monotonic() - self._began
        restarts = dict(self._restarts)
        self._display.show(
            view, SupervisorState(run=self._link.run, phase=self._phase, seconds=seconds, restarts=restarts)
        )
        return view

    async def _watch_signals(self) -> None:
        """The first signal asks for a drain, the second one kills."""
        # Under nohup a terminal that closes is no reason to stop.
        hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, *hangup) as signals:
            async for received in signals:
                self._signals += 1
                log.info("signal.received", signal=received.name, count=self._signals)
                if self._signals == 1:
                    self._interrupt()
                    continue
                self._children.kill()

    async def _shut_down(self) -> None:
        """End every process."""
        self._stopping.set()
        self._reopened.set()
        waves = _FAILURE_ORDER
        if self._failure is not None:
            self._phase = "stopping: a role failed"
        elif self._interrupted:
            self._phase = "draining; Ctrl-C again kills" if self._signals else "draining, as `penstock stop` asked"
            waves = _DRAIN_ORDER
        else:
            self._phase = "finishing"
            with anyio.move_on_after(_FINISH_TIMEOUT_S):
                await self._children.wait_exited(_ROLES)
        for wave in waves:
            await self._children.stop(wave)
        self._phase = "ended"


def _empty_status() -> RunStatus:
    """A run that was stopped before it had begun."""
    return RunStatus(now_ms=0.0, stages={}, unfinished=0, outstanding=0, dead=0, counts={})
