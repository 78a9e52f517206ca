"""The parent's hand on a child: started, given jobs, killed."""

import os
import signal
import sys
from collections import deque
from contextlib import suppress

import anyio
import msgspec
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from envs.call import Failed, Ok, TimedOut
from envs.processes.child_main import HEADER_BYTES, ChildConfig, JobResult, ReadyMessage, encode_frame, frame_length
from envs.processes.jobs import Job, JobError, ProcessPoolError

START_TIMEOUT_S = 120.0
"""For a child to import what it needs."""
_MAX_ATTEMPTS = 2
_EXIT_TIMEOUT_S = 5.0
# The path is the parent's, entry by entry: a folder of the user's must not hide a module of ours in the child alone.
_PROGRAM = "import sys; sys.path[:] = sys.argv[2:]; from envs.processes.child_main import main; main()"
_PIPE_ERRORS = (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)


class ChildProcess:
    """One child process; gets jobs, gives answers, is killed."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None  # noqa: S101  (for mypy: both are pipes)
        assert process.stdout is not None  # noqa: S101
        self._process = process
        self._requests = process.stdin
        self._results = BufferedByteReceiveStream(process.stdout)
        self._jobs_done = 0
        self._ended = False

    @classmethod
    async def start(cls, spec: ChildConfig) -> "ChildProcess":
        """Start one.

        Raises:
            ProcessPoolError: the machine does not let us.
        """
        command = [sys.executable, "-c", _PROGRAM, msgspec.json.encode(spec).decode(), *sys.path]
        try:
            with anyio.CancelScope(shield=True):  # cut off half-way it would be a process that nobody knows
                process = await anyio.open_process(command, stderr=None, start_new_session=True)
        except OSError as error:
            raise ProcessPoolError(f"a child cannot be started: {error}") from error
        return cls(process)

    @property
    def pid(self) -> int:
        """Process id, and that of its session."""
        return self._process.pid

    def is_usable(self, max_jobs: int) -> bool:
        """Whether it may be given further jobs."""
        return not self._ended and self._process.returncode is None and self._jobs_done < max_jobs

    async def wait_ready(self) -> None:
        """Wait until it is ready.

        Raises:
            ProcessPoolError: it is not, and why.
        """
        with anyio.move_on_after(START_TIMEOUT_S):
            try:
                hello = msgspec.msgpack.decode(await self._receive(), type=ReadyMessage)
            except _PIPE_ERRORS as error:
                raise ProcessPoolError("a child ended before it was ready") from error
            if hello.error:
                raise ProcessPoolError(f"a child could not prepare itself:\n{hello.error.rstrip()}")
            return
        raise ProcessPoolError(f"a child was not ready within {START_TIMEOUT_S:g} s")

    async def run_jobs(self, jobs: deque[Job]) -> bool:
        """Let it do jobs; those that are done leave the queue, those that it could not begin remain.

        Returns:
            Whether a job is nearer to its end: answered, killed, or one try poorer. Where none is, the child is to
            blame, and not the job that it ended under.
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
        """Whether it was there to read a request."""
        with anyio.move_on_after(timeout_s), suppress(*_PIPE_ERRORS):
            await self._requests.send(encode_frame(request))
            return True
        return False

    async def _receive_result(self, jobs: deque[Job]) -> None:
        """Wait for the answer to the first of the jobs."""
        job = jobs[0]
        with anyio.move_on_after(job.timeout_s) as scope:
            try:
                answer = msgspec.msgpack.decode(await self._receive(), type=JobResult)
            except _PIPE_ERRORS:
                self._ended = True
                job.attempts += 1
                if job.attempts >= _MAX_ATTEMPTS:
                    jobs.popleft().finish(Failed(ProcessPoolError("the process ended under it, twice")))
                return
            self._jobs_done += 1
            self._ended = answer.is_last
            jobs.popleft().finish(Ok(answer.result) if answer.error is None else Failed(JobError(answer.error)))
        if scope.cancelled_caught:
            self.kill()
            jobs.popleft().finish(TimedOut(job.timeout_s))

    async def _receive(self) -> bytes:
        return await self._results.receive_exactly(frame_length(await self._results.receive_exactly(HEADER_BYTES)))

    def kill(self) -> None:
        """End it, and what it has started in its session."""
        self._ended = True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Kill it, and see that it is gone."""
        self.kill()
        with anyio.CancelScope(shield=True), anyio.move_on_after(_EXIT_TIMEOUT_S), suppress(OSError):
            await self._process.aclose()


def _attempts_left(jobs: deque[Job]) -> int:
    return sum(_MAX_ATTEMPTS - job.attempts for job in jobs)
