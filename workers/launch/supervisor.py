"""Runs every role of a run on one machine, restarts processes that exit early, and stops all in order.

::

    start      the dashboard (`engines.py`); engines, feed, score xM; when all engines listen: rollout xN,
               train (beside a vLLM, feed and score start then, too)
    restart    each process that exits before the run is done, within a budget (`restarts.py`)
    watch      once a second: progress display, and failure of a run that makes no progress
    end        trainer done     the other roles end by themselves within seconds, else they are stopped
               stopped          feed and rollout, then score, then train, then engines; each drains first
                                (Ctrl-C reaches only the supervisor; `penstock stop` also reaches the roles)
               failed           all roles, then the engines

No process outlives the supervisor: each dies with it and is killed together with its descendants.
"""

import signal
import time
from collections.abc import Collection
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from socket import gethostname

import anyio
import anyio.to_thread
import structlog
from anyio.abc import TaskGroup
from msgspec import Struct, structs
from rich.text import Text

from stream.causes import ErrorCause
from stream.connection.run_connection import RunConnection, connect
from stream.disk_space import allow_waits, end_waits, limit_waits, persist
from stream.errors import PenstockError, RunFailedError, ServerError
from stream.operator.bottleneck import find_bottleneck
from stream.operator.control import read_last_error
from stream.operator.dead_letters import dead_letter_causes
from stream.operator.status import RunStatus, groups_in_flight, read_status
from stream.private_server import private_server
from workers.check.memory import trainer_budget
from workers.launch.children import ChildProcess, ChildProcesses
from workers.launch.engines import DashboardProcess, EngineProcesses
from workers.launch.process import unwrap_single_error
from workers.launch.restarts import RestartLoop, RunEnding
from workers.launch.specs import DASHBOARD, ENGINE, role_specs
from workers.launch.wait_lines import WaitLines
from workers.launch.watch import BottleneckLog, DiskWatch, SampleSchedule, StallDetector, describe_longest
from workers.role import prometheus
from workers.role.context import Readiness
from workers.role.memory_watch import MemoryReports
from workers.runs.folder import replace_last_start
from workers.runs.identity import FolderCheck, begin_run
from workers.runs.live_run import LiveRun, read_live, remove_live, write_live
from workers.runs.warnings import read_warnings, warnings_size
from workers.settings import Settings
from workers.terminal.progress import ProgressDisplay, SupervisorState

log = structlog.get_logger()

_ShutdownOrder = tuple[tuple[str, ...], ...]
"""Roles that are stopped together, one group after the other."""

_RUNNING = "running"
_POLL_S = 1.0
_FINISH_TIMEOUT_S = 5.0
"""Seconds for the roles to notice that the run is done and exit."""
_EXIT_MARGIN_S = 3.0
"""Seconds for a process to exit after its role has drained."""
_ROLES = ("feed", "rollout", "score", "train")
_WITHOUT_ENGINE = ("feed", "score")
"""Roles that request nothing of an engine, so that they can start before it listens."""
_DRAIN_ORDER: _ShutdownOrder = (("feed", "rollout"), ("score",), ("train",), (ENGINE, DASHBOARD))
_FAILURE_ORDER: _ShutdownOrder = (_ROLES, (ENGINE, DASHBOARD))


class RunOutcome(Struct, kw_only=True):
    """Outcome of a supervised run."""

    status: RunStatus | None
    """The run's last status; None if the server was lost."""
    failure: RunFailedError | None
    interrupted: bool
    """A signal or `penstock stop` ended it."""
    killed: list[str]
    """Processes that did not end in time."""
    dead_causes: dict[str, ErrorCause] = {}
    """The newest cause of dead letters, by reason."""


class Supervisor:
    """Runs one run to its end.

    Args:
        settings: settings of the run.
        file: settings file that the roles read; with `check`, the run's `run.toml`, which the start writes.
        display: shows progress.
        check: what the run's folder must have in common with its server; None: nothing is compared.
    """

    def __init__(
        self,
        settings: Settings,
        file: Path,
        display: ProgressDisplay,
        check: FolderCheck | None = None,
    ) -> None:
        self._settings = settings
        self._file = file
        self._display = display
        self._check = check
        self._log_folder = settings.folder / "logs"
        self._children = ChildProcesses(settings.queue.shutdown_timeout_s + _EXIT_MARGIN_S)
        self._ending = RunEnding()
        self._alarm = partial(self._show, style="yellow")
        self._disk = DiskWatch(settings.folder, self._alarm)
        self._memory = MemoryReports(gethostname(), self._children.process_ids, self._alarm)
        self._started_at = time.monotonic()
        self._phase = "starting"
        self._server_gone = False
        self._warnings_read = 0
        """Bytes of the trainer's warnings that were there before, or that were printed."""
        self._waits = WaitLines()
        self._blocking_shown: set[str] = set()
        """Code that blocks a worker, as it was printed."""
        self._signals = 0
        self._has_started = False
        """Whether a role or an engine may have been started."""

    async def run(self) -> RunOutcome:
        """Run to the end. No child process is left when this returns.

        Raises:
            ServerError: no Redis server can be started or reached.
            RunMismatchError: the server has another run of this name.
        """
        allow_waits()
        limit_waits(self._settings.abort.stall_timeout_s)
        await anyio.Path(self._log_folder).mkdir(parents=True, exist_ok=True)
        self._warnings_read = await anyio.to_thread.run_sync(warnings_size, self._settings.folder)
        self._trainer_memory = await anyio.to_thread.run_sync(trainer_budget, self._settings)
        outcome = None
        with unwrap_single_error():
            async with anyio.create_task_group() as tasks:
                starting = anyio.CancelScope()
                tasks.start_soon(self._watch_signals, starting)
                tasks.start_soon(self._disk.run)
                with starting:
                    outcome = await self._run_on_server()
                tasks.cancel_scope.cancel()
        return outcome or RunOutcome(status=_empty_status(), failure=None, interrupted=True, killed=[])

    async def _run_on_server(self) -> RunOutcome:
        if url := self._settings.run.redis:
            return await self._run_connected(url)
        async with private_server(self._settings.folder / "redis", fsync=self._settings.queue.fsync) as url:
            return await self._run_connected(url)

    async def _run_connected(self, url: str) -> RunOutcome:
        settings, queue = self._settings, self._settings.queue
        data, limit_s = None if settings.run.redis else settings.folder / "redis", queue.reconnect_timeout_s
        async with connect(url, settings.run.name, reconnect_s=limit_s, server_data=data) as connection:
            if self._check is not None:
                await begin_run(connection, settings, self._check)
                await anyio.to_thread.run_sync(replace_last_start, settings)
            restart_loop = RestartLoop(connection, queue, self._ending, self._show)
            await restart_loop.reopen()
            self._has_started = True
            try:
                async with self._serve_metrics(), anyio.create_task_group() as tasks:
                    tasks.start_soon(self._watch, connection, restart_loop)
                    tasks.start_soon(self._watch_stop_command, connection)
                    tasks.start_soon(self._memory.run, connection)
                    dashboard = self._start_dashboard(tasks)
                    await self._start_engines(tasks, restart_loop, url)
                    await self._ending.requested.wait()
                    end_waits()
                    restart_loop.stop()
                    if dashboard is not None:
                        dashboard.stop()
                    await self._shut_down()
                    tasks.cancel_scope.cancel()
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(remove_live, settings.folder)
            status = await self._refresh(connection, restart_loop)
            await self._show_warnings()
            return RunOutcome(
                status=status or (None if self._server_gone else _empty_status()),
                failure=self._ending.failure,
                interrupted=self._ending.interrupted,
                killed=self._children.killed,
                dead_causes=await dead_letter_causes(connection) if status and status.dead else {},
            )

    def _serve_metrics(self) -> AbstractAsyncContextManager[str]:
        if not self._settings.run.metrics_address:
            return nullcontext("")
        from workers.role.metrics_server import serve_metrics

        for role in (*_ROLES, ENGINE):
            prometheus.processes.labels(role).set_function(partial(self._children.count_running, role))
        readiness = Readiness()
        readiness.find_problem = lambda: "" if self._phase == _RUNNING else f"the run is {self._phase}"
        return serve_metrics("supervisor", self._settings, readiness)

    def _start_dashboard(self, tasks: TaskGroup) -> DashboardProcess | None:
        """Start the run's dashboard, unless it is switched off."""
        if self._settings.run.dashboard == "off":
            return None
        dashboard = DashboardProcess(self._settings, self._log_folder, self._show)
        self._children.add(dashboard.child)
        tasks.start_soon(dashboard.keep_running)
        return dashboard

    def _show(self, text: str, style: str = "") -> None:
        self._display.print_lines([Text(text, style)])

    async def _start_engines(self, tasks: TaskGroup, restart_loop: RestartLoop, url: str) -> None:
        """Start the run's own engines, if it has any, and then the roles."""
        if engines := self._settings.engine.urls:
            await self._start_roles(tasks, restart_loop, url, engines)
            return
        own = EngineProcesses(self._settings, self._file, self._log_folder)
        self._phase = own.phase
        await self._write_live_run(url, ())
        # A vLLM takes minutes to start, longer than a feeder that waits for the trainer of a resumed run may.
        early = _WITHOUT_ENGINE if self._settings.engine.server == "local" else ()

        def on_first_listening() -> None:
            self._phase = own.phase
            if own.all_listen and not restart_loop.is_stopping:
                others = tuple(role for role in _ROLES if role not in early)
                tasks.start_soon(self._start_roles, tasks, restart_loop, url, own.urls, others)

        self._launch_roles(tasks, restart_loop, url, (), early)
        for child in own.processes:
            self._children.add(child)
            tasks.start_soon(restart_loop.keep_running, child, own.listening_callback(child, on_first_listening))

    async def _start_roles(
        self,
        tasks: TaskGroup,
        restart_loop: RestartLoop,
        url: str,
        engines: tuple[str, ...],
        roles: Collection[str] = _ROLES,
    ) -> None:
        await self._write_live_run(url, engines)
        self._phase = _RUNNING
        self._launch_roles(tasks, restart_loop, url, engines, roles)

    def _launch_roles(
        self, tasks: TaskGroup, loop: RestartLoop, url: str, engines: tuple[str, ...], roles: Collection[str]
    ) -> None:
        for spec in role_specs(self._settings, self._file, url, engines, self._trainer_memory):
            if spec.role in roles:
                child = ChildProcess(spec, self._log_folder, self._settings.hang_timeout_s)
                self._children.add(child)
                tasks.start_soon(loop.keep_running, child)

    async def _write_live_run(self, url: str, engines: tuple[str, ...]) -> None:
        def write() -> None:
            write_live(self._settings.folder, LiveRun.of_this_process(self._settings.run.name, url, engines))

        await anyio.to_thread.run_sync(persist, self._settings.folder, write)

    async def _write_phase(self) -> None:
        """Tell dashboards and `penstock runs` that the run ends; a full disk must not delay that."""
        how = self._phase.partition(";")[0].removeprefix("stopping: ")

        def write() -> None:
            with suppress(OSError, PenstockError):
                if live := read_live(self._settings.folder):
                    write_live(self._settings.folder, structs.replace(live, stopping=how))

        await anyio.to_thread.run_sync(write)

    async def _watch(self, connection: RunConnection, restart_loop: RestartLoop) -> None:
        """Show progress once a second, and fail a run that makes no progress."""
        detector: StallDetector | None = None
        samples, bottlenecks = SampleSchedule(), BottleneckLog()
        while True:
            status = await self._refresh(connection, restart_loop)
            if status is not None and self._phase == _RUNNING:
                bottlenecks.observe(find_bottleneck(status, groups_in_flight(status)))
            await self._show_warnings()
            await self._show_blocking_code()
            self._waits.tell(self._show, self._children.running_calls(), groups_in_flight(status) if status else ())
            await self._show_sample(connection, status, samples)
            if self._phase == _RUNNING and detector is None:  # starting engines have their own timeout
                detector = StallDetector(self._settings.abort.stall_timeout_s)
            if detector and not self._ending.requested.is_set() and (alarm := detector.observe(status)):
                self._ending.fail(await self._stalled(connection, status, alarm))
            await self._children.trim_logs()
            await anyio.sleep(_POLL_S)

    async def _stalled(self, connection: RunConnection, status: RunStatus | None, alarm: str) -> RunFailedError:
        """Return the error of a run without progress: what it waits for, what blocks a worker, or the last error."""
        alarm += self._waits.longest
        if self._disk.problems:
            return RunFailedError("; ".join([alarm, *map(str, self._disk.problems)]))
        blocked = await self._children.blocking_code(self._settings.abort.stall_timeout_s)
        if blocked is not None:
            return RunFailedError(f"{alarm}; {blocked.headline}", blocked)
        last = await read_last_error(connection)
        if status is not None:
            alarm += describe_longest(groups_in_flight(status), time.time())
        return RunFailedError(f"{alarm}; {last}", last.cause) if last else RunFailedError(alarm)

    async def _show_warnings(self) -> None:
        """Print the trainer's new warnings and notes."""
        read = partial(read_warnings, self._settings.folder, self._warnings_read)
        found, self._warnings_read = await anyio.to_thread.run_sync(read)
        for each in found:
            self._show(each.text) if each.is_note else self._alarm(f"warning at step {each.step}: {each.text}")

    async def _show_blocking_code(self) -> None:
        """Print, once each, which code blocks the event loop of a worker, before leases expire."""
        causes = await self._children.new_blocking_codes(self._settings.queue.lease_s)
        for headline in {cause.headline for cause in causes} - self._blocking_shown:
            self._blocking_shown.add(headline)
            self._alarm(f"warning: {headline}")

    async def _show_sample(self, connection: RunConnection, status: RunStatus | None, samples: SampleSchedule) -> None:
        """Print one sampled completion if it is due; a server that does not answer is reported elsewhere."""
        if status is None or self._ending.requested.is_set() or not self._display.width:
            return
        try:
            self._display.print_lines(await samples.next_sample(connection, status, self._display.width))
        except PenstockError as error:
            log.debug("sample.failed", why=str(error))

    async def _refresh(self, connection: RunConnection, restart_loop: RestartLoop) -> RunStatus | None:
        """Read, show and return the run's status; None before the run has begun. A lost server fails the run."""
        status = None
        try:
            status = await read_status(connection, with_in_flight=True)
            connection.observe_stop(int(status.meta.get("stop", 0)))
        except ServerError as error:
            self._server_gone = True
            if not restart_loop.is_stopping:
                self._ending.fail(RunFailedError(str(error)))
        except PenstockError as error:
            log.debug("run_status.failed", why=str(error))
        self._disk.status = status
        state = SupervisorState(
            run=connection.run,
            phase=self._phase,
            seconds=time.monotonic() - self._started_at,
            restarts=dict(restart_loop.restarts),
            memory=self._memory.problem,
            disk=[str(problem) for problem in self._disk.problems],
        )
        self._display.show(status, state)
        return status

    async def _watch_stop_command(self, connection: RunConnection) -> None:
        """Drain when `penstock stop` is called, like at the first signal."""
        await connection.stopping.wait()
        self._ending.interrupt()

    async def _watch_signals(self, starting: anyio.CancelScope) -> None:
        """Drain at the first signal, kill all processes at each further one; before they start, end at once."""
        # nohup makes the process ignore SIGHUP; then a closed terminal does not stop the run.
        hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, *hangup) as signals:
            async for received in signals:
                self._signals += 1
                log.info("signal.received", signal=received.name, count=self._signals)
                if not self._has_started:
                    starting.cancel()
                elif self._signals == 1:
                    self._ending.interrupt()
                else:
                    self._children.kill()

    async def _shut_down(self) -> None:
        """Stop every process, in an order that depends on why the run ends."""
        order = _FAILURE_ORDER
        if self._ending.failure is not None:
            self._phase = "stopping: a role failed"
        elif self._ending.interrupted:
            self._phase = "draining; Ctrl-C again kills" if self._signals else "draining, as `penstock stop` asked"
            order = _DRAIN_ORDER
        else:
            self._phase = "finishing"
        await self._write_phase()
        if self._phase == "finishing":
            with anyio.move_on_after(_FINISH_TIMEOUT_S):
                await self._children.wait_exited(_ROLES)
        for roles in order:
            await self._children.stop(roles)
        self._phase = "ended"


def _empty_status() -> RunStatus:
    """Return the status of a run that was stopped before it began."""
    return RunStatus(now_ms=0.0, stages={}, unfinished=0, outstanding=0, dead=0, counts={})
