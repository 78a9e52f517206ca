"""The parent's side of one child of a process pool."""

import os
import signal
from collections import deque
from contextlib import suppress

import anyio
import msgspec
from anyio import to_thread
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from envs.call import Failed, Ok, TimedOut
from envs.processes.child_main import HEADER_BYTES, ChildConfig, JobResult, ReadyMessage, encode_frame, frame_length
from envs.processes.isolation import NO_ISOLATION, Isolation
from envs.processes.jobs import Job, JobError, ProcessPoolError

START_TIMEOUT_S = 120.0
"""Time for a child to import the handler."""
_MAX_ATTEMPTS = 2
_EXIT_TIMEOUT_S = 5.0
_PIPE_ERRORS = (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)


class PoolChild:
    """One child process: runs jobs with deadlines, and is killed when one passes its deadline."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None  # noqa: S101  (for mypy: both are pipes)
        assert process.stdout is not None  # noqa: S101
        self._process = process
        self._requests = process.stdin
        self._results = BufferedByteReceiveStream(process.stdout)
        self._jobs_done = 0
        self._ended = False

    @classmethod
    async def start(cls, config: ChildConfig, isolation: Isolation = NO_ISOLATION) -> "PoolChild":
        """Start a child process.

        Args:
            config: what it runs.
            isolation: what it finds.

        Raises:
            ProcessPoolError: the process cannot be started.
        """
        try:
            with anyio.CancelScope(shield=True):  # cancelled half-way, the process would leak
                with await to_thread.run_sync(isolation.launch, config) as start:
                    process = await anyio.open_process(
                        start.command, stderr=None, start_new_session=True, **start.options
                    )
        except OSError as error:
            raise ProcessPoolError(f"a child cannot be started: {error}") from error
        return cls(process)

    @property
    def pid(self) -> int:
        """Process id, also the id of its session."""
        return self._process.pid

    def is_usable(self, max_jobs: int) -> bool:
        """Return whether the child is alive and has run fewer than `max_jobs` jobs."""
        return not self._ended and self._process.returncode is None and self._jobs_done < max_jobs

    async def wait_ready(self) -> None:
        """Wait until the child has loaded the handler.

        Raises:
            ProcessPoolError: it ended, timed out, or the handler cannot be loaded.
        """
        with anyio.move_on_after(START_TIMEOUT_S):
            try:
                ready = msgspec.msgpack.decode(await self._receive(), type=ReadyMessage)
            except _PIPE_ERRORS as error:
                raise ProcessPoolError("a child ended before it was ready") from error
            if ready.error:
                raise ProcessPoolError(f"a child could not load its handler:\n{ready.error.rstrip()}")
            return
        raise ProcessPoolError(f"a child was not ready within {START_TIMEOUT_S:g} s")

    async def run_jobs(self, jobs: deque[Job]) -> bool:
        """Run jobs; finished ones leave the queue, those not started stay in it.

        Returns:
            Whether any job made progress: finished, timed out, or used up an attempt. If none did, the child is at
            fault rather than a job.
        """
        before = _attempts_left(jobs)
        request = msgspec.msgpack.encode([job.payload for job in jobs])
        self._ended = not await self._send(request, jobs[0].timeout_s)
        while jobs and not self._ended:
            await self._receive_result(jobs)
        if self._ended:
            self.kill()
        return _attempts_left(jobs) < before

    async def _send(self, request: bytes, timeout_s: float) -> bool:
        """Send a request; return whether the child read it."""
        with anyio.move_on_after(timeout_s), suppress(*_PIPE_ERRORS):
            await self._requests.send(encode_frame(request))
            return True
        return False

    async def _receive_result(self, jobs: deque[Job]) -> None:
        """Wait for the result of the first job and finish it."""
        job = jobs[0]
        with anyio.move_on_after(job.timeout_s) as scope:
            try:
                result = await self._receive_final(job)
            except _PIPE_ERRORS:
                self._ended = True
                job.attempts += 1
                if job.attempts >= _MAX_ATTEMPTS:
                    message = f"{_MAX_ATTEMPTS} processes ended while they ran it"
                    jobs.popleft().finish(Failed(ProcessPoolError(message), job.interim))
                return
            self._jobs_done += 1
            self._ended = result.is_last
            jobs.popleft().finish(Ok(result.value) if result.error is None else Failed(JobError(result.error)))
        if scope.cancelled_caught:
            self.kill()
            jobs.popleft().finish(TimedOut(job.timeout_s, job.interim))

    async def _receive_final(self, job: Job) -> JobResult:
        """Wait for a job's result; interim ones are kept with the job."""
        while (result := msgspec.msgpack.decode(await self._receive(), type=JobResult)).is_interim:
            job.interim = result.value
        return result

    async def _receive(self) -> bytes:
        return await self._results.receive_exactly(frame_length(await self._results.receive_exactly(HEADER_BYTES)))

    def kill(self) -> None:
        """Kill the child and all processes of its session."""
        self._ended = True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Kill the child and wait until it has exited."""
        self.kill()
        with anyio.CancelScope(shield=True), anyio.move_on_after(_EXIT_TIMEOUT_S), suppress(OSError):
            await self._process.aclose()


def _attempts_left(jobs: deque[Job]) -> int:
    return sum(_MAX_ATTEMPTS - job.attempts for job in jobs)
