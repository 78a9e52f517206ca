"""The sandboxes of one episode, owned by the lease on its prompt; and what their failures mean for it."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, TypeVar

import msgspec
import structlog
from anyio.from_thread import BlockingPortal

from envs.call import Failed, Outcome
from envs.sandboxes.contract import (
    DEFAULT_MAX_BYTES,
    ChangedFile,
    EpisodeSandboxes,
    ExecResult,
    FailureKind,
    Sandbox,
    SandboxFailure,
    SandboxSpec,
)
from stream.errors import LeaseLostError
from stream.queue.sandboxes import SandboxRecord
from workers.role import prometheus
from workers.rollout.recorded_calls import RecordedCalls
from workers.rollout.sandbox_host import SandboxHost, SandboxOwner

log = structlog.get_logger()

T = TypeVar("T")

NOT_STARTED: Final = frozenset((FailureKind.CREATE, FailureKind.IMAGE, FailureKind.FULL, FailureKind.UNREACHABLE))
"""Failures before which nothing was sampled, if they happen in `reset`: the prompt is tried again later."""
_FATAL: Final = frozenset((FailureKind.LOST, FailureKind.UNREACHABLE, FailureKind.FENCED))
"""After these an agent's sandbox is not what it was, so the episode cannot go on."""


@contextmanager
def episode_sandboxes(host: SandboxHost, owner: SandboxOwner | None, index: int) -> "Iterator[LeasedSandboxes]":
    """Give an episode its sandboxes. Those that are open at its end are removed in the background.

    Args:
        host: where they are made.
        owner: the lease on the episode's prompt; None: of no run.
        index: position of the completion in its group.
    """
    sandboxes = LeasedSandboxes(host, owner, index)
    try:
        yield sandboxes
    finally:
        sandboxes.leave()


def sandbox_failure(outcome: Outcome) -> SandboxFailure | None:
    """Return the failure of a sandbox that a call raised, alone or in a task group's exception group."""
    error = outcome.error if isinstance(outcome, Failed) else None
    if isinstance(error, BaseExceptionGroup):
        found: BaseException | None = error.subgroup(SandboxFailure)
        while isinstance(found, BaseExceptionGroup):
            found = found.exceptions[0]
        error = found
    return error if isinstance(error, SandboxFailure) else None


class LeasedSandboxes(EpisodeSandboxes):
    """The sandboxes of one episode. Made by `episode_sandboxes`.

    Args:
        host: where they are made.
        owner: the lease that owns them; None: of no run.
        index: position of the completion in its group.

    Attributes:
        calls: ids of its commands.
        agents: names of the open sandboxes of purpose `agent`, in the order in which they were opened.
        failure: why a sandbox of purpose `agent` is lost; None while it is not. The episode cannot go on after it, even
            if its environment catches the exception.
    """

    def __init__(self, host: SandboxHost, owner: SandboxOwner | None, index: int) -> None:
        self.provider, self.network = host.provider, host.settings.network
        self.calls = RecordedCalls()
        self.agents: list[str] = []
        self.failure: SandboxFailure | None = None
        self._host, self._owner, self._index = host, owner, index
        self._open: dict[str, Sandbox] = {}
        self._adopted: list[Sandbox] = []
        self._has_permit = self._is_over = False

    @asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """Wait for the turn of one sandbox to start, and keep it for the first `open` within the context.

        An environment opens its first sandbox in `reset`: the wait for its turn must not count towards that deadline.
        """
        await self._host.starts.acquire_on_behalf_of(self)
        self._has_permit = True
        try:
            yield
        finally:
            if self._has_permit:
                self._has_permit = False
                self._host.starts.release_on_behalf_of(self)

    async def open(self, spec: SandboxSpec, *, purpose: Literal["agent", "verifier", "control"]) -> Sandbox:
        """See `EpisodeSandboxes.open`."""
        if purpose == "agent" and self._adopted:
            return self._adopted.pop(0)
        self.calls.note(f"opens a sandbox of purpose {purpose}")
        if self._is_over:
            raise SandboxFailure(FailureKind.CREATE, "the episode is over: nothing would remove another sandbox")
        borrower = self if self._has_permit else object()
        if borrower is not self:
            await self._host.starts.acquire_on_behalf_of(borrower)
        self._has_permit = False
        try:
            with _counted_failures():
                sandbox = await self._host.create(self._owner, self._index, spec, purpose)
        except LeaseLostError as error:
            raise SandboxFailure(FailureKind.LOST, str(error)) from error
        finally:
            self._host.starts.release_on_behalf_of(borrower)
        return self._watch(sandbox, is_agents=purpose == "agent")

    async def adopt_all(self, names: Sequence[str]) -> bool:
        """Adopt the sandboxes that an earlier attempt had open; `open` returns them in their order.

        Returns:
            False if one of them is gone; then none is adopted.
        """
        place = self._host.place
        records = {} if place is None else await place.records()
        for name in names:
            try:
                self._adopted.append(await self.adopt(name, records.get(name)))
            except SandboxFailure as failure:
                log.info("sandbox.not_adopted", sandbox=name, why=str(failure))
                for sandbox in self._adopted:
                    await self.close(sandbox)
                self._adopted.clear()
                return False
        return bool(names)

    async def adopt(self, name: str, record: SandboxRecord | None) -> Sandbox:
        """Go on with a sandbox that an earlier attempt at this episode has left; its former owner is fenced off.

        Raises:
            SandboxFailure: it is gone, or cannot be reached.
        """
        place, owner, fence = self._host.place, self._owner, 0
        if place is not None and owner is not None and record is not None:
            fence = await place.adopt(owner.stage, owner.lease, name)
        if record is None or not fence:
            raise SandboxFailure(FailureKind.LOST, f"sandbox {name} is gone, or about to be removed")
        try:
            with _counted_failures():
                spec = msgspec.json.decode(record.spec, type=SandboxSpec)
                sandbox = await self.provider.attach(name, spec, fence)
        except BaseException:
            self._host.remove_soon(name)
            raise
        return self._watch(sandbox, is_agents=record.purpose == "agent")

    async def close(self, sandbox: Sandbox) -> None:
        """See `EpisodeSandboxes.close`."""
        self.calls.note("closes a sandbox")
        if self._open.pop(sandbox.name, None) is not None:
            if sandbox.name in self.agents:
                self.agents.remove(sandbox.name)
            prometheus.sandboxes.labels("open").dec()
            await self._host.remove(sandbox.name)

    def leave(self) -> None:
        """Remove in the background what is open, and open nothing more."""
        self._is_over = True
        for name in self._open:
            prometheus.sandboxes.labels("open").dec()
            self._host.remove_soon(name)
        self._open.clear()

    def _watch(self, sandbox: Sandbox, *, is_agents: bool) -> Sandbox:
        watched = _WatchedSandbox(sandbox, self._host.portal, self._note if is_agents else _ignore, self.calls)
        if self._is_over:  # it ended while this sandbox was being made
            self._host.remove_soon(sandbox.name)
            raise SandboxFailure(FailureKind.LOST, "the episode is over")
        self._open[sandbox.name] = watched
        if is_agents:
            self.agents.append(sandbox.name)
        prometheus.sandboxes.labels("open").inc()
        return watched

    def _note(self, failure: SandboxFailure) -> None:
        if self.failure is None and failure.kind in _FATAL:
            self.failure = failure


def _ignore(_: SandboxFailure) -> None:
    """A verifier's sandbox that is lost is made again."""


class _WatchedSandbox(Sandbox):
    """A sandbox whose failures are counted and noted, and whose commands have ids.

    Args:
        inner: the provider's sandbox; what only that provider has, is passed on.
        portal: to the event loop, for synchronous tools.
        note: gets each failure.
        calls: of the episode.
    """

    def __init__(
        self, inner: Sandbox, portal: BlockingPortal, note: Callable[[SandboxFailure], None], calls: RecordedCalls
    ) -> None:
        self.name, self.spec = inner.name, inner.spec
        self._inner, self._portal, self._note, self._calls = inner, portal, note, calls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy without attributes asks for `_inner`, too
            raise AttributeError(name)
        return getattr(self._inner, name)

    async def exec(
        self,
        command: Sequence[str],
        *,
        id: str = "",  # noqa: A002  (as the contract has it)
        timeout_s: float,
        cwd: str = "",
        env: Mapping[str, str] = MappingProxyType({}),
        user: str = "",
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> ExecResult:
        id = id or self._calls.new_id(self.name, command, cwd, user)  # noqa: A001
        return await self._noted(
            self._inner.exec(command, id=id, timeout_s=timeout_s, cwd=cwd, env=env, user=user, max_bytes=max_bytes)
        )

    async def read(self, path: str, max_bytes: int) -> bytes:
        self._calls.note("reads a file")
        return await self._noted(self._inner.read(path, max_bytes))

    async def write(self, files: Mapping[str, bytes | Path], *, user: str = "") -> None:
        if not self._calls.is_past():
            await self._noted(self._inner.write(files, user=user))

    async def changed_files(self) -> list[ChangedFile]:
        self._calls.note("looks for changed files")
        return await self._noted(self._inner.changed_files())

    async def snapshot(self) -> str:
        self._calls.note("takes a snapshot")
        return await self._noted(self._inner.snapshot())

    def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        cwd: str = "",
        env: Mapping[str, str] = MappingProxyType({}),
        user: str = "",
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> ExecResult:
        name = self._calls.new_id(self.name, command, cwd, user)

        async def call() -> ExecResult:
            return await self.exec(
                command, id=name, timeout_s=timeout_s, cwd=cwd, env=env, user=user, max_bytes=max_bytes
            )

        return self._portal.call(call)

    async def _noted(self, call: Awaitable[T]) -> T:
        with _counted_failures(self._note):
            return await call
        raise AssertionError("unreachable")


@contextmanager
def _counted_failures(note: Callable[[SandboxFailure], None] = _ignore) -> Iterator[None]:
    """Count a failure of a sandbox that the body raises, and pass it to `note`."""
    try:
        yield
    except SandboxFailure as failure:
        prometheus.sandbox_failures.labels(failure.kind).inc()
        note(failure)
        raise
