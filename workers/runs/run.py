"""One run, and everything that can be read of it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack

from stream.errors import PenstockError, ServerError
from stream.operator.status import RunStatus, read_status
from stream.waiting import run_in_daemon_thread
from workers.runs.folder import disk_problems, file_state, lock_folder
from workers.runs.live_run import read_live
from workers.settings import Settings
from workers.settings.secrets import REDIS, read_secret
from workers.settings.toml_file import load_settings

if TYPE_CHECKING:  # a command that reads one status does not load a Redis client, nor what reads archives
    from stream.connection.run_connection import RunConnection
    from stream.operator.audit import AuditReport
    from stream.operator.sandboxes import SandboxScan
    from workers.runs.engines import EngineReport
    from workers.runs.export import ExportReport, Format
    from workers.runs.groups import ArchivedRunGroups, CompletionView, RunGroup
    from workers.runs.selection import CompletionFilter, Conditions, Matches, Selection
    from workers.runs.state import RunState
    from workers.runs.status import Activity, QueueReport
    from workers.runs.summary import RunSummary
    from workers.runs.trace import Trace

_RECONNECT_S: Final = 10.0
_LOOK_S: Final = 2.0

T = TypeVar("T")


class NoServerError(PenstockError):
    """The run has no server at present; its folder can be read all the same."""


class Run:
    """A run, running, stopped, killed or finished. Made by `open_run`.

    Its methods read, and change nothing. Those that ask the server start the private server of a run that is stopped,
    for the time of the call. They block; `connect` is for code that waits with `await`.

    Args:
        name: of the run.
        folder: of the run; None: only its server is known.
        redis: URL of its server; empty: its files, or `PENSTOCK_REDIS`, name it.
        file: a settings file, for a run whose folder has none.
        key: a name that is unique among the runs of one catalog.
    """

    def __init__(
        self, name: str, folder: Path | None = None, redis: str = "", file: Path | None = None, key: str = ""
    ) -> None:
        self.name = name
        self.folder = folder
        self.key = key or (folder.name if folder else name)
        self._redis = redis
        self._file = file
        self._settings: tuple[str, Settings] | None = None
        """The state of the settings file, and the settings that were read from it."""

    def __repr__(self) -> str:
        return f"Run({self.name!r}, folder={str(self.folder)!r})"

    def _repr_html_(self) -> str:
        from workers.runs.html import html_facts

        state = self.state()
        facts = {"state": state.state, "detail": state.detail, "step": state.step, "reward": state.reward}
        return html_facts(f"run {self.name}", facts | {"folder": state.folder})

    @property
    def settings(self) -> Settings | None:
        """The settings of the run's last start; None if only its server is known. Blocks on files."""
        saved = self.file("run.toml")
        file = saved if saved.is_file() else self._file
        if file is None:
            return None
        state = f"{file} {file_state(file)}"
        if self._settings is None or self._settings[0] != state:
            self._settings = state, load_settings(file)
        return self._settings[1]

    @property
    def url(self) -> str:
        """URL of its server; empty: its private server is stopped, or it has not begun. Blocks on files."""
        if self._redis or self.folder is None:
            return self._redis
        live, settings = read_live(self.folder), self.settings
        url = live.redis if live else settings.run.redis if settings else ""
        return url or ("" if self.has_private_server else read_secret(REDIS))

    @property
    def has_private_server(self) -> bool:
        """Whether the data of its own server are in its folder."""
        return self.file("redis").is_dir()

    @property
    def has_named_server(self) -> bool:
        """Whether its server was named to this process: then no supervisor on this machine says how it is."""
        return bool(self._redis or read_secret(REDIS))

    def file(self, *parts: str) -> Path:
        """Return the path of a file in the run's folder; it does not exist if only the server is known."""
        return (self.folder or Path("/nonexistent")).joinpath(*parts)

    def files(self, use: str) -> tuple[Settings, Path]:
        """Return settings and folder, for a use that needs the run's files.

        Raises:
            PenstockError: only its server is known; names the use.
        """
        settings = self.settings
        if settings is None or self.folder is None:
            raise PenstockError(
                f"{use} of run {self.name!r} reads its files: give its folder or its settings file instead"
            )
        return settings, self.folder

    @asynccontextmanager
    async def connect(self, *, start_server: bool = True) -> "AsyncIterator[RunConnection]":
        """Connect to the run's server, without creating keys.

        Args:
            start_server: start a private server that is stopped; the folder's lock prevents a start of the run
                meanwhile. False, for screens that are drawn again: a server that does not answer is given up after
                two seconds.

        Raises:
            NoServerError: the private server is stopped and is not to be started, or the run has not begun.
            PenstockError: the server does not answer.
        """
        import anyio.to_thread

        from stream.connection.run_connection import connect

        async with AsyncExitStack() as stack:
            url = await anyio.to_thread.run_sync(self._find_server, start_server)
            if not url:
                from stream.private_server import private_server  # only here: most runs that are looked at run

                folder = self.file("redis").parent
                settings = await anyio.to_thread.run_sync(lambda: self.settings)
                fsync = settings.queue.fsync if settings else "everysec"
                await anyio.to_thread.run_sync(stack.enter_context, lock_folder(folder))
                url = await stack.enter_async_context(private_server(folder / "redis", fsync=fsync))
            reconnect_s = _RECONNECT_S if start_server else _LOOK_S
            connection = await stack.enter_async_context(connect(url, self.name, reconnect_s=reconnect_s, create=False))
            with connection.explained_refusals():
                yield connection

    def _find_server(self, start_server: bool) -> str:
        """Return the URL of the server; empty: its private server is to be started. Blocks on files."""
        if url := self.url:
            return url
        if not self.has_private_server:
            raise NoServerError(f"the run in {self.folder} has not begun: there is no server, and no server's data")
        if not start_server:
            raise NoServerError("the run's private server does not run; figures come from the run's folder")
        return ""

    def call(self, main: "Callable[[RunConnection], Awaitable[T]]") -> T:
        """Call a function with a connection to the run's server, and return its result."""

        async def there() -> T:
            async with self.connect() as connection:
                return await main(connection)

        return run_in_daemon_thread(there)

    def state(self) -> "RunState":
        """Return what its folder says: running, stopped, killed or finished, its last step and the last reward."""
        from workers.runs.state import read_state

        return read_state(self.folder, self.key, has_named_server=self.has_named_server)

    def read_status(self) -> RunStatus:
        """Return the raw status of the run, with the reports of workers.

        Raises:
            PenstockError: the server does not answer, or has no such run.
        """
        try:
            return self.call(partial(read_status, with_in_flight=True))
        except ServerError as error:
            problems = disk_problems(self.folder, None)
            raise ServerError("; ".join([*map(str, problems), str(error)])) from error

    def status(self) -> "QueueReport":
        """Return where the run's prompts are, and what limits it."""
        from workers.runs.status import queue_report

        status = self.read_status()
        return queue_report(self.name, status, list(map(str, disk_problems(self.folder, status))))

    def in_flight(self) -> "list[Activity]":
        """Return what each completion is doing now, the longest unchanged first."""
        from workers.runs.status import activities

        return activities(self.read_status())

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of each step, in order; empty before the first."""
        from workers.runs.metrics_file import read_metrics

        return read_metrics(self.file("metrics.jsonl"))

    def summary(self) -> "RunSummary | None":
        """Return how the run's last start ended; None if it goes on, was killed, or has not begun."""
        from workers.runs.summary import read_summary

        return read_summary(self.file())

    def groups(
        self, wanted: "CompletionFilter | None" = None, *, count: int = 20, **conditions: "Unpack[Conditions]"
    ) -> "Matches[RunGroup]":
        """Return the newest groups with a completion that matches, those without an outcome first.

        Args:
            wanted: the filter; None: one that is made of `conditions`.
            count: the most groups.
            conditions: such as `reward="..0.2"`; see `Conditions`.

        Raises:
            SettingsError: a condition cannot be read.
            PenstockError: only the run's server is known.
        """
        from workers.runs.selection import CompletionFilter, Matches

        wanted = wanted or CompletionFilter.parse(**conditions)
        groups: list[RunGroup] = []

        def offer(group: "RunGroup") -> bool:
            if wanted.matches_group(group):
                groups.append(group)
            return len(groups) < count

        archived, notes = self._search(wanted, offer, lambda: bool(groups))
        return Matches(groups, archived, wanted, notes)

    def completions(
        self,
        wanted: "CompletionFilter | None" = None,
        chosen: "Selection | None" = None,
        *,
        evaluated: bool = False,
        **conditions: "Unpack[Conditions]",
    ) -> "Matches[CompletionView]":
        """Return completions that match, with what the trainer did with each of their tokens.

        Args:
            wanted: the filter; None: one that is made of `conditions`.
            chosen: which of them; None: the newest three.
            evaluated: those of held-out prompts, by the step whose weights were evaluated, instead of the training's.
            conditions: such as `reward="..0.2"`; see `Conditions`.

        Raises:
            SettingsError: a condition cannot be read.
            PenstockError: only the run's server is known.
        """
        from workers.runs.selection import CompletionFilter, Matches, Selection

        wanted, selection = wanted or CompletionFilter.parse(**conditions), chosen or Selection("newest", 3)

        def offer(group: "RunGroup") -> bool:
            for view in filter(wanted.matches, group.completions):
                selection.offer(view)
            return not selection.is_complete

        if evaluated:
            archived, notes = self._search_evaluations(wanted, offer), list[str]()
        else:
            archived, notes = self._search(wanted, offer, lambda: bool(selection.offered))
        views = [archived.with_trained_tokens(view) for view in selection.result()]
        return Matches(views, archived, wanted, notes, 0 if selection.is_complete else selection.offered)

    def export(
        self,
        path: str | Path = "",
        format_: "Format | None" = None,
        wanted: "CompletionFilter | None" = None,
        **conditions: "Unpack[Conditions]",
    ) -> "ExportReport":
        """Write archived completions with tokens, masks and advantages to a file.

        Args:
            path: the file; `-`: stdout, as JSON lines; empty: `groups.jsonl` or `groups.parquet` in the run's folder.
            format_: None: as the file's name ends.
            wanted: which completions; None: those that meet `conditions`.
            conditions: such as `step="3..7"`; see `Conditions`.

        Raises:
            SettingsError: the format is unknown, or a condition cannot be read.
            PenstockError: nothing matches, or the file exists.
        """
        from workers.runs.export import export_completions
        from workers.runs.selection import CompletionFilter

        _, folder = self.files("an export")
        return export_completions(folder, str(path), format_, wanted or CompletionFilter.parse(**conditions))

    def audit(self) -> "AuditReport":
        """Account for every prompt that was fed; without a server, by the run's files alone.

        Raises:
            PenstockError: the run has neither a server nor files, or its prompt file is missing.
        """
        from workers.runs.audit import RunFiles, audit_on_server, audit_without_server

        settings, folder = self.files("an audit")
        if not self.url and not self.has_private_server:
            if not self.file("ledger.jsonl").exists():
                raise PenstockError(f"the run in {folder} has not begun: there is neither a server nor a ledger")
            return audit_without_server(RunFiles.open(settings, folder), f"{folder / 'redis'} does not exist")
        try:
            return self.call(partial(audit_on_server, settings, folder))
        except ServerError as error:
            return audit_without_server(RunFiles.open(settings, folder), str(error))

    def sandboxes(self) -> "SandboxScan":
        """Return the run's sandboxes that are not known to be gone, and how many began and ended, by its server."""
        from stream.operator.sandboxes import scan_sandboxes

        return self.call(scan_sandboxes)

    def engines(self) -> "list[EngineReport]":
        """Return the engines of the run, and whether each answers this machine."""
        from workers.runs.engines import read_engine_reports

        return run_in_daemon_thread(partial(read_engine_reports, self.settings, self.folder))

    def trace(self, step: str = "", count: int = 1000) -> "Trace":
        """Return where the newest archived groups spent their time.

        Args:
            step: only groups that these steps ended, `N` or `N..M`; empty: of all steps.
            count: the most groups.

        Raises:
            PenstockError: the run has no archived group of these steps.
        """
        from workers.runs.selection import NumberRange
        from workers.runs.trace import read_trace

        _, folder = self.files("tracing")
        return read_trace(folder, NumberRange.parse(step, "step") if step else None, count)

    def _search_evaluations(
        self, wanted: "CompletionFilter", offer: "Callable[[RunGroup], bool]"
    ) -> "ArchivedRunGroups":
        """Offer the groups of evaluations as long as `offer` wants more, the last evaluation first."""
        from workers.runs.evaluations import evaluated_steps, read_groups
        from workers.runs.groups import ArchivedRunGroups, evaluated_group

        _, folder = self.files("looking at evaluations")
        archived = ArchivedRunGroups(folder)
        for step in filter(wanted.has_step, evaluated_steps(folder)):
            for group in read_groups(folder, step):
                if not offer(evaluated_group(group, step)):
                    return archived
        return archived

    def _search(
        self, wanted: "CompletionFilter", offer: "Callable[[RunGroup], bool]", has_match: Callable[[], bool]
    ) -> "tuple[ArchivedRunGroups, list[str]]":
        """Offer groups while `offer` wants more, first those without an outcome. Returns archive and notes."""
        from workers.runs.groups import ArchivedRunGroups, RunGroup, unfinished_views

        settings, folder = self.files("looking at groups")
        archived = ArchivedRunGroups(folder)
        notes = ["archive.keep = 'none' keeps no group"] if settings.archive.keep == "none" else []
        is_running, may_be_unfinished, wants_more = bool(self.url), wanted.steps is None, True

        async def offer_unfinished(connection: "RunConnection") -> None:
            from stream.operator.unfinished_groups import unfinished_groups

            nonlocal wants_more
            async for _, group in unfinished_groups(connection):
                wants_more = offer(RunGroup(unfinished_views(group)))
                if not wants_more:
                    return

        def ask_server() -> None:
            try:
                self.call(offer_unfinished)
            except PenstockError as error:
                notes.append(f"unfinished groups could not be read: {error}")

        if is_running and may_be_unfinished:
            ask_server()
        for group in archived.groups(wanted.steps) if wants_more else ():
            if not offer(group):
                break
        if not is_running and may_be_unfinished and not has_match() and self.has_private_server:
            ask_server()  # what a killed run left on its private server
        return archived, notes + archived.damaged[:3]
