"""Pushes policy versions to the engines of a run: to all of them concurrently, and later to those that missed one."""

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

import anyio
import structlog
from anyio.abc import ObjectReceiveStream, TaskStatus

from stream.errors import EngineError, EngineRefusedError, EngineUnavailableError
from stream.waiting import Backoff
from workers.engine_api.discovery import EngineDiscovery
from workers.engine_api.engine_queries import EngineAvailability
from workers.settings import Settings
from workers.train.publishing.engine_control import EngineControlClient
from workers.train.publishing.transport import WeightTransport, open_transport

log = structlog.get_logger()
T = TypeVar("T")

UPDATE_TIMEOUT_S = 600.0
"""Timeout of one call that moves weights into an engine."""
_BACKOFF = Backoff(0.1, 2.0)
_POLL_S = 0.1
_TRIES_AFTER_SUCCESS = 5
"""Tries at an engine once another engine has the version; `refresh` comes back to it later."""
_GRACE_S = 5.0
"""A push stops waiting for an engine that takes this much longer than twice the time of the slowest finished one."""


class TargetEngine:
    """One engine that receives weights.

    Args:
        client: of its control routes.
    """

    def __init__(self, client: EngineControlClient) -> None:
        self.url = client.url
        self.client = client
        self.availability = EngineAvailability(client.url)
        self.is_compatible = False
        """It was found able to receive weights by the transport, and no push has failed since."""
        self.is_busy = False
        """A push to it is in progress."""

    @contextmanager
    def pushing(self) -> Iterator[None]:
        """Mark the engine busy for the duration of a push."""
        self.is_busy = True
        try:
            yield
        finally:
            self.is_busy = False


class WeightPublisher:
    """Pushes policy versions to the engines of a run.

    Args:
        discovery: the run's engines; read at every call.
        transport: how weights reach them.
        retry_timeout_s: how long to keep trying one engine.
        update_timeout_s: timeout of one call that moves weights.
        stopping: once it is set, an engine that fails is not tried again.
    """

    def __init__(
        self,
        discovery: EngineDiscovery,
        transport: WeightTransport,
        *,
        retry_timeout_s: float,
        update_timeout_s: float,
        stopping: anyio.Event | None = None,
    ) -> None:
        self._stopping = stopping or anyio.Event()
        self._discovery = discovery
        self._transport = transport
        self._retry_timeout_s = retry_timeout_s
        self._update_timeout_s = update_timeout_s
        self._targets: dict[str, TargetEngine] = {}
        self._latest_version = -1
        """The version pushed last."""

    async def push(
        self, path: Path, version: int, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Push a version to every engine concurrently.

        Engines that are busy with an older version or unreachable are left to `refresh`, unless there are no others.

        Args:
            path: a folder in Hugging Face form.
            version: its policy version.
            task_status: started when the version may be announced: every engine was tried, or some engines have it and
                the push no longer waits for the rest. Pushes to the rest continue until this call returns.

        Raises:
            EngineRefusedError: every engine of the run refused; repeating the push cannot help.
            EngineUnavailableError: no engine received the version.
        """
        absolute = Path(await anyio.Path(path).absolute())
        await self._transport.prepare(absolute)
        self._latest_version = version
        targets = await self._wait_for_targets()
        failures: dict[str, EngineError] = {}
        any_success = anyio.Event()
        finish, finished = anyio.create_memory_object_stream[str](len(targets))

        async def push_to(target: TargetEngine) -> None:
            try:
                with target.pushing():
                    await self._push_with_retry(target, absolute, version, any_success)
                any_success.set()
            except EngineError as error:
                failures[target.url] = error
                log.warning("engine.push_failed", url=target.url, version=version, why=str(error))
            finish.send_nowait(target.url)

        with finish, finished:
            async with anyio.create_task_group() as tasks:
                for target in targets:
                    tasks.start_soon(push_to, target)
                await _wait_until_finished(finished, {target.url for target in targets}, failures, version)
                if len(failures) < len(targets):
                    task_status.started()
        if len(failures) == len(targets):
            raise self._push_error(version, failures)

    async def engine_versions(self) -> dict[str, int | None]:
        """Return the policy version of each engine by URL; None for one without a version.

        Engines that are busy, or were unreachable at the last request, count as None without a request.
        """
        targets = self._current_targets()
        askable = [target for target in targets if not target.is_busy and target.availability.is_available]
        answers = await _ask_all(askable, lambda client: client.weight_version())
        return {target.url: answers.get(target.url) for target in targets}

    async def outdated_engines(self, version: int) -> list[TargetEngine]:
        """Return reachable engines that do not serve `version`: new, restarted, missed by a push, or paused.

        Engines with a push in progress are excluded; if that push installs another version, a later call returns them.
        """

        async def is_outdated(client: EngineControlClient) -> bool:
            return await client.weight_version() != version or await client.is_paused()

        targets = self._idle_targets()
        answers = await _ask_all(targets, is_outdated)
        return [target for target in targets if answers.get(target.url)]

    async def refresh(
        self,
        targets: list[TargetEngine],
        path: Path,
        version: int,
        *,
        task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Push a version to these engines only; `task_status` starts as soon as they are marked busy."""
        absolute = Path(await anyio.Path(path).absolute())
        await self._transport.prepare(absolute)
        limit_tries = anyio.Event()
        limit_tries.set()

        async def push_to(target: TargetEngine, *, task_status: TaskStatus[None]) -> None:
            with target.pushing():
                task_status.started()
                try:
                    await self._push_with_retry(target, absolute, version, limit_tries)
                except EngineError as error:
                    log.warning("engine.push_failed", url=target.url, version=version, why=str(error))
                else:
                    log.info("engine.refreshed", url=target.url, version=version)

        async with anyio.create_task_group() as tasks:
            for target in targets:
                await tasks.start(push_to, target)
            task_status.started()

    async def any_healthy(self) -> bool:
        """Whether at least one engine answers."""
        return any([await target.client.is_healthy() for target in self._current_targets()])

    def _current_targets(self) -> list[TargetEngine]:
        """Return the engines that the run has now."""
        self._targets = {
            url: self._targets.get(url) or TargetEngine(EngineControlClient(url, self._update_timeout_s))
            for url in self._discovery.urls
        }
        return list(self._targets.values())

    def _idle_targets(self) -> list[TargetEngine]:
        return [target for target in self._current_targets() if not target.is_busy]

    async def _wait_for_targets(self) -> list[TargetEngine]:
        """Return the idle engines that were reachable last time, or all idle ones; waits for a first one."""
        deadline = anyio.current_time() + self._retry_timeout_s
        while not (idle := self._idle_targets()):
            if anyio.current_time() > deadline or self._stopping.is_set():
                if busy := ", ".join(sorted(url for url, target in self._targets.items() if target.is_busy)):
                    problem = f"{busy} did not finish an older version within {self._retry_timeout_s:g} s"
                else:
                    problem = f"{self._discovery.empty_reason}; waited {self._retry_timeout_s:g} s"
                raise EngineUnavailableError(problem)
            await anyio.sleep(_POLL_S)
        return [target for target in idle if target.availability.is_available] or idle

    async def _push_with_retry(self, target: TargetEngine, path: Path, version: int, limit_tries: anyio.Event) -> None:
        """Push to one engine, with retries until the timeout.

        Args:
            target: the engine.
            path: absolute path of the folder.
            version: its policy version.
            limit_tries: once set, gives up after `_TRIES_AFTER_SUCCESS` tries, or as soon as there is a newer version.
        """
        deadline, tries, sent = anyio.current_time() + self._retry_timeout_s, 0, False
        while True:
            try:
                # vLLM takes seconds to report how it was started, so this is asked once, and again after a failure.
                if not target.is_compatible:
                    await self._transport.check(target.client)
                    target.is_compatible = True
                sent = True
                await self._transport.send(target.client, path, version)
            except EngineError as error:
                tries += 1
                target.is_compatible = False
                target.availability.log_waiting("push", error)
                refused = isinstance(error, EngineRefusedError)
                out_of_tries = tries >= _TRIES_AFTER_SUCCESS or version < self._latest_version
                delay_s = _BACKOFF.delay_s(tries)
                is_last = (limit_tries.is_set() and out_of_tries) or anyio.current_time() + delay_s > deadline
                if refused or is_last or self._stopping.is_set():
                    if sent:
                        await self._transport.abort(target.client, error)
                    raise (EngineRefusedError if refused else EngineError)(str(error)) from error
                with anyio.move_on_after(delay_s):
                    await self._stopping.wait()
            else:
                target.availability.log_recovered("push")
                return

    def _push_error(self, version: int, failures: Mapping[str, EngineError]) -> EngineError:
        """Return the error for a version that no engine received."""
        reasons = "; ".join(f"{url}: {error}".replace(f"{url}: {url}", url) for url, error in failures.items())
        all_refused = all(isinstance(error, EngineRefusedError) for error in failures.values())
        all_tried = failures.keys() >= {target.url for target in self._current_targets()}
        if all_refused and all_tried:
            return EngineRefusedError(f"no engine took version {version}: {reasons}")
        when = "before the stop" if self._stopping.is_set() else f"within {self._retry_timeout_s:g} s"
        return EngineUnavailableError(f"no engine took version {version} {when}: {reasons}")


async def _ask_all(targets: Iterable[TargetEngine], ask: Callable[[EngineControlClient], Awaitable[T]]) -> dict[str, T]:
    """Ask engines concurrently. Returns the answers by URL, without those of engines that do not answer."""
    answers: dict[str, T] = {}

    async def ask_one(target: TargetEngine) -> None:
        try:
            answers[target.url] = await ask(target.client)
            target.availability.mark_available()
        except EngineError as error:
            target.availability.mark_unavailable(error)

    async with anyio.create_task_group() as tasks:
        for target in targets:
            tasks.start_soon(ask_one, target)
    return answers


async def _wait_until_finished(
    finished: ObjectReceiveStream[str], urls: set[str], failures: Mapping[str, EngineError], version: int
) -> None:
    """Wait for the pushes to these engines, but not for engines that take far longer than the slowest success."""
    started, timeout_s = anyio.current_time(), math.inf
    while urls:
        with anyio.move_on_after(timeout_s) as wait:
            url = await finished.receive()
            urls.remove(url)
            if url not in failures:
                timeout_s = anyio.current_time() - started + _GRACE_S
        if wait.cancelled_caught:
            log.warning("engine.push_timed_out", urls=sorted(urls), version=version, after_s=round(timeout_s, 1))
            return


@asynccontextmanager
async def open_publisher(
    settings: Settings, discovery: EngineDiscovery, stopping: anyio.Event | None = None
) -> AsyncIterator[WeightPublisher]:
    """Yield the publisher of a run.

    Args:
        settings: of the run.
        discovery: its engines.
        stopping: once it is set, an engine that fails is not tried again.

    Raises:
        SettingsError: this machine lacks something that the transport needs.
    """
    async with open_transport(settings) as transport:
        yield WeightPublisher(
            discovery,
            transport,
            retry_timeout_s=settings.engine_wait_s,
            update_timeout_s=UPDATE_TIMEOUT_S,
            stopping=stopping,
        )
