"""Start roles one by one, without a supervisor, so that a test decides which of them run, and when they are stopped."""

import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import Process

from stream.codec import decode
from stream.connection.keys import StageName
from stream.connection.run_connection import RunConnection
from stream.queue.entry_scan import read_payload
from stream.queue.feed import Feed
from stream.records import Group, Prompt
from tests.e2e.harness import environment
from tests.preload.fixtures import pid_of


def send(process: Process, number: signal.Signals) -> None:
    """Send a signal to a process that may be exiting at this moment.

    `Process.terminate` polls the process first, which may reap its exit status; a concurrent `wait` then returns 255.
    """
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


class Role:
    """One started role process and its log."""

    def __init__(self, process: Process, log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def pid(self) -> int:
        """The process id of the worker, not of its parent."""
        return pid_of(self.process.pid)

    def suspend(self) -> None:
        """Stop the process with SIGSTOP, as a swapping host or a migrated virtual machine does."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        send(self.process, signal.SIGKILL)

    async def drain(self) -> None:
        """Send SIGTERM and wait until the process has finished its work and exits with 0."""
        send(self.process, signal.SIGTERM)
        assert await self.ended() == 0, self.said()

    async def ended(self, within_s: float = 40) -> int:
        with anyio.fail_after(within_s):
            return await self.process.wait()

    def said(self) -> str:
        return self.log.read_text()

    async def says(self, *words: str, within_s: float = 40) -> None:
        """Wait until one of `words` is in the process's log; fail if the process exits before."""
        with anyio.fail_after(within_s):
            while True:
                text = await anyio.to_thread.run_sync(self.said)
                if any(word in text for word in words):
                    return
                assert self.process.returncode is None, text
                await anyio.sleep(0.05)

    def events(self) -> list[dict[str, Any]]:
        """Return what the process has logged."""
        return [json.loads(line) for line in self.said().splitlines()]

    async def logs(self, event: str, within_s: float = 60, **details: object) -> None:
        """Wait until the process has logged `event` with these details; fail if it exits before."""
        with anyio.fail_after(within_s):
            while not any({"event": event, **details}.items() <= line.items() for line in self.events()):
                assert self.process.returncode is None, self.said()
                await anyio.sleep(0.05)


class Cast:
    """All processes started by one test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.roles: list[Role] = []

    async def start(self, command: Sequence[str], **variables: str) -> Role:
        log = self.folder / f"role-{len(self.roles)}.log"
        with await anyio.to_thread.run_sync(log.open, "wb") as file:
            process = await anyio.open_process(
                command, cwd=self.folder, env=environment() | variables, stdout=file, stderr=subprocess.STDOUT
            )
        self.roles.append(Role(process, log))
        return self.roles[-1]


@asynccontextmanager
async def cast(folder: Path) -> AsyncIterator[Cast]:
    """Yield a `Cast`; processes still running when the block ends are killed."""
    result = Cast(folder)
    try:
        yield result
    finally:
        with anyio.CancelScope(shield=True):
            for role in result.roles:
                if role.process.returncode is None:
                    role.kill()
                await role.process.wait()
                await role.process.aclose()


async def feed(
    connection: RunConnection, *prompt_ids: str, group_size: int = 2, environment: str | None = None
) -> None:
    """Feed prompts of one message, behind earlier prompts."""
    way = Feed(connection, max_queued_prompts=1000)
    before = await way.cursor()
    prompts = [
        Prompt(
            id=each,
            messages=[{"role": "user", "content": f"Say {each}."}],
            is_plain_text=True,
            environment=environment,
            group_size=group_size,
        )
        for each in prompt_ids
    ]
    await way.put(prompts, before, f"{before}{len(prompt_ids)};")


async def until(connection: RunConnection, condition: Callable[[], Awaitable[bool]], within_s: float = 40) -> None:
    """Wait until `condition` holds; it is checked after every change in the run, and at least five times a second."""
    with anyio.fail_after(within_s):
        while not await condition():
            await connection.wait_for_change("$", 0.2)


async def groups_in(connection: RunConnection, stage: StageName) -> list[Group]:
    """Return the groups in a stage's stream, oldest first."""
    entries = await connection.redis.xrange(connection.key(stage))
    return [decode(await read_payload(connection, stage, entry_id.decode()) or b"", Group) for entry_id, _ in entries]


async def waiting(connection: RunConnection) -> int:
    """Count idle workers: clients blocked on the run's wake stream."""
    clients = await connection.redis.client_list()
    return sum(client["cmd"] == "xread" and "b" in client["flags"] for client in clients)
