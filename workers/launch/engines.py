"""The engines that a run starts itself: `engine.count` processes, each on its own port.

The run's dashboard is a process of the same kind: it may fail without any effect on the run.
"""

from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import structlog

from stream.errors import RunFailedError
from stream.waiting import Backoff
from workers.launch.children import ChildProcess, describe_exit
from workers.launch.specs import ProcessSpec, dashboard_spec, engine_spec
from workers.settings import Settings

log = structlog.get_logger()


class EngineProcesses:
    """The engine processes and their URLs.

    Args:
        settings: settings of the run.
        file: settings file that the engines read.
        log_folder: folder of the engines' logs.
    """

    def __init__(self, settings: Settings, file: Path, log_folder: Path) -> None:
        self._settings = settings
        self._file = file
        self._urls: dict[int, str] = {}
        self.processes = [ChildProcess(self._spec(number, 0), log_folder) for number in range(settings.engine.count)]

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of the engines that have announced one, ordered by engine index."""
        return tuple(url for _, url in sorted(self._urls.items()))

    @property
    def phase(self) -> str:
        """Progress of the start, for the display."""
        count = len(self.processes)
        if count > 1:
            return f"starting {count} engines: {len(self._urls)} listen"
        # vLLM may take minutes to start, so the display names its log.
        hint = f" ({self.processes[0].log_file} tells how far it is)" if self._settings.engine.server == "vllm" else ""
        return f"starting the engine{hint}"

    @property
    def all_listen(self) -> bool:
        """Whether every engine has announced its URL."""
        return len(self._urls) == len(self.processes)

    def listening_callback(self, child: ChildProcess, on_first: Callable[[], None]) -> Callable[[str], None]:
        """Return the callback for the URL that an engine announces.

        The callback fixes the engine's port, so that the URL stays the same after a restart.

        Args:
            child: the engine's process.
            on_first: called after the engine's first announcement.
        """

        def announced(url: str) -> None:
            number, known = child.spec.index, child.spec.index in self._urls
            child.spec = self._spec(number, int(url.rsplit(":", 1)[1].strip("/")))
            log.info("engine.announced", url=url, name=child.spec.name)
            self._urls[number] = url
            if not known:
                on_first()

        return announced

    def _spec(self, number: int, port: int) -> ProcessSpec:
        spec = engine_spec(self._settings, self._file, port)
        devices = self._settings.engine.devices
        environment = {"CUDA_VISIBLE_DEVICES": devices[number]} if devices else {}
        return msgspec.structs.replace(spec, index=number, environment=environment)


_MAX_STARTS = 3
_BACKOFF = Backoff(1.0, 10.0)


class DashboardProcess:
    """Keeps the dashboard of a run running, within limits.

    Args:
        settings: of the run.
        log_folder: folder of its log.
        show: called once with the pages' URL, and with the reason if there are none.
    """

    def __init__(self, settings: Settings, log_folder: Path, show: Callable[[str], None]) -> None:
        self.child = ChildProcess(dashboard_spec(settings), log_folder)
        self._show = show
        self._is_stopping = False

    def stop(self) -> None:
        """Do not start it again."""
        self._is_stopping = True

    async def keep_running(self) -> None:
        """Start the dashboard, and again if it fails; give up after a few times."""
        shown = False

        def announce(url: str) -> None:
            nonlocal shown
            if not shown:
                shown = True
                self._show(f"dashboard {url}")

        try:
            for attempt in range(1, _MAX_STARTS + 1):
                code = await self._run(announce)
                if code == 0 or self._is_stopping:
                    return
                await anyio.sleep(_BACKOFF.delay_s(attempt))
            why = await anyio.to_thread.run_sync(self.child.last_error)
            self._show(f'no dashboard: {why} (run.dashboard = "off" starts none)')
        finally:
            self.child.exited.set()

    async def _run(self, announce: Callable[[str], None]) -> int:
        try:
            code = await self.child.run(announce)
        except RunFailedError as error:
            log.warning("dashboard.failed", why=str(error))
            return 1
        if code and not self._is_stopping:
            log.warning("dashboard.exited", how=describe_exit(code))
        return code
