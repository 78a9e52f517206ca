"""`agent:NAME`: a program as an environment with its own loop; any one (`command`), or one with a profile.

Each episode has a copy of a folder, an empty home, and a sandbox without a network but for the worker's endpoint
(`envs.sandboxes`). Then a command in the same folder measures the reward, or reward functions do.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import anyio
import msgspec
from anyio import to_thread
from anyio.abc import SocketListener, SocketStream
from msgspec import Struct

from envs.contract import AgentEnvironment, is_messages
from envs.messages import messages_text
from envs.programs import inside
from envs.programs.folder_quota import FolderQuota
from envs.programs.installed import find_program
from envs.programs.outside import OutputTail, bind_for_all, pass_on, remove_folder, serve_connections
from envs.programs.profiles import PROFILES, context_values
from envs.sandboxes.bubblewrap import (
    NOBODY,
    WORKDIR,
    BubblewrapSpec,
    Launch,
    becomes_nobody,
    interpreter_paths,
    launch,
    sandbox_problem,
)
from stream.errors import EnvironmentFailure, ReferenceNotFoundError

PORT: Final = 8000
"""Of the endpoint, as the program sees it: its loopback is its own."""
_FOLDER: Final = f"{WORKDIR}/work"
_SOCKET: Final = f"{WORKDIR}/endpoint.sock"
_GRACE_S: Final = 5.0
"""Between the request to end and the kill."""
_NOT_FOUND: Final = (126, 127)
"""Exit codes of a command that could not be started: nothing was measured then."""
_PLACEHOLDER: Final = re.compile(r"\{(\w+)\}")
_NUMBER: Final = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


T = TypeVar("T")


class ProgramLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of a program."""

    timeout_s: float = 900.0
    """After this it is asked to end, and killed 5 s later; what it did is measured."""
    processes: int = 512
    """Processes and threads at once. No effect for root whose interpreter others cannot read."""
    file_mb: int = 1024
    """Size of each file that it writes."""
    folder_mb: int = 10240
    """What it may add to its folder; a program that adds more is killed, and what it did is measured."""


class RewardCommand(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command that measures the reward."""

    command: list[str]
    """Program and arguments; the last line that it writes is the reward."""
    worst: float = 0.0
    """The reward if it writes no number: the program may have caused that."""
    timeout_s: float = 60.0
    """Its time; after it, the reward is `worst`."""


_DEFAULT_LIMITS: Final = ProgramLimits()


class AgentProgram(AgentEnvironment):
    """Starts a program for each episode. Its requests to the endpoint are the turns.

    `command`, `env`, `files`, `stdin` and `folder` may name `{endpoint}` (the URL for OpenAI's clients), `{base_url}`
    (the same without `/v1`, for Anthropic's), `{key}`, `{folder}`, `{home}`, `{prompt}`, other columns of the row, and
    what `envs.programs.profiles` lists.

    Args:
        command: program and arguments.
        env: environment variables, besides PATH, HOME and LANG.
        folder: copied for each episode; the program starts in the copy. Empty: an empty folder.
        network: `endpoint` for the worker's endpoint alone, `host` for all that this machine reaches.
        readable: files and folders of this machine that the program may read, besides `/usr`.
        limits: of the program.
        files: texts of files that it finds in its home, by their path there.
        stdin: text of its standard input.

    Attributes:
        exit_code: of the program; 128 + the number of a signal; None before.
        timed_out: its time was up.
        over_quota: it added more than `limits.folder_mb` to its folder.
        output: the end of what it wrote.
        connections: to the endpoint.
        elsewhere: hosts that it wanted to reach, if HTTPS_PROXY names the endpoint.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] = MappingProxyType({}),
        folder: str = "",
        network: Literal["endpoint", "host"] = "endpoint",
        readable: Sequence[str] = (),
        limits: ProgramLimits = _DEFAULT_LIMITS,
        files: Mapping[str, str] = MappingProxyType({}),
        stdin: str = "",
    ) -> None:
        if not command or isinstance(command, str):
            raise ReferenceNotFoundError("agent:command: `command` is a list of the program and its arguments")
        if network not in ("endpoint", "host"):
            raise ReferenceNotFoundError(f"agent:command: network is {network!r}; it is 'endpoint' or 'host'")
        if problem := sandbox_problem():
            raise ReferenceNotFoundError(f"agent:command needs sandboxes, and this machine makes none: {problem}")
        self._command, self._env, self._source = tuple(command), dict(env), folder
        self._network, self._readable, self._limits = network, tuple(readable), limits
        self._files, self._stdin = dict(files), stdin
        self._values: dict[str, str] = {}
        self._forget()

    def _forget(self) -> None:
        self.exit_code: int | None = None
        self.timed_out = self.over_quota = False
        self.output = ""
        self.connections = 0
        self.elsewhere: list[str] = []

    async def reset(self, **row: Any) -> None:
        """Copy the folder.

        Raises:
            EnvironmentFailure: there is no such folder.
        """
        await self.close()
        self._forget()
        self._values = {name: str(value) for name, value in row.items() if value is not None}
        if is_messages(row.get("prompt")):
            self._values["prompt"] = messages_text(row["prompt"])
        _homes[self] = await to_thread.run_sync(self._make_folders)

    async def close(self) -> None:
        """Remove the copy."""
        if home := _homes.pop(self, ""):
            await to_thread.run_sync(remove_folder, home)

    async def run_episode(self, endpoint: str, sampling: dict[str, Any]) -> None:
        """Run the program to its end.

        Raises:
            EnvironmentFailure: it ended without a request to the endpoint.
        """
        self._values |= context_values(sampling)
        if self._network == "host":
            await self._ask(endpoint, endpoint.removesuffix("/v1"), 0)
            return
        url = urlsplit(endpoint)

        async def serve(client: SocketStream) -> None:
            self.connections += 1
            await pass_on(client, str(url.hostname), url.port or 80, self.elsewhere)

        bound = await to_thread.run_sync(bind_for_all, f"{_homes[self]}/endpoint.sock")
        async with anyio.create_task_group() as tasks, await SocketListener.from_socket(bound) as listener:
            tasks.start_soon(serve_connections, listener, serve)
            base_url = f"http://127.0.0.1:{PORT}{url.path.removesuffix('/v1')}"
            await self._ask(f"{base_url}/v1", base_url, PORT)
            tasks.cancel_scope.cancel()
        if not self.connections:
            how = "was still running" if self.timed_out else f"ended with exit code {self.exit_code}"
            raise EnvironmentFailure(
                f"{self._command[0]} {how} and had not asked for a turn; the end of what it wrote: "
                f"{self.output.strip()[-500:] or 'nothing'}"
            )

    async def _ask(self, endpoint: str, base_url: str, port: int) -> None:
        key = base_url.rpartition("/")[2]
        self._values |= {"endpoint": endpoint, "base_url": base_url, "key": key, "folder": _FOLDER, "home": WORKDIR}
        await self._run(self._filled(self._command), port=port, timeout_s=self._limits.timeout_s)

    def _make_folders(self) -> str:
        source = Path(self._filled((self._source,))[0]) if self._source else None
        for name in _PLACEHOLDER.findall(self._source):
            if Path(self._values.get(name, "")).name != self._values.get(name):
                raise EnvironmentFailure(
                    f"agent:command: the column {name} names no folder: {self._values.get(name)!r}"
                )
        if source is not None and not source.is_dir():
            raise EnvironmentFailure(f"agent:command: {source} is no folder")
        home = Path(tempfile.mkdtemp(prefix="penstock-agent-"))
        home.chmod(0o711)
        if source is None:
            (home / "work").mkdir()
        else:
            shutil.copytree(source, home / "work", symlinks=True)
        self._give(home / "work", *(home / "work").rglob("*"))
        return str(home)

    def _give(self, *paths: Path) -> None:
        """Give files to the user as whom the program runs."""
        if becomes_nobody(self._spec().readable):
            for path in paths:
                os.chown(path, NOBODY, NOBODY, follow_symlinks=False)

    def _filled(self, texts: Sequence[str]) -> list[str]:
        """Return texts with the values of their placeholders; a name without a value stays."""
        return [_PLACEHOLDER.sub(lambda found: self._values.get(found[1], found[0]), text) for text in texts]

    def _spec(self) -> BubblewrapSpec:
        own = (*interpreter_paths(), inside.__file__)
        return BubblewrapSpec(
            readable=(*own, *self._readable),
            variables=tuple(zip(self._env, self._filled([*self._env.values()]), strict=True)),
            writable=((f"{_homes.get(self)}/work", _FOLDER), (f"{_homes.get(self)}/endpoint.sock", _SOCKET)),
            shares_network=self._network == "host",
        )

    def _prepare(self, command: Sequence[str], port: int) -> Launch:
        order: dict[str, Any] = {
            "command": list(command),
            "folder": _FOLDER,
            "socket": _SOCKET,
            "port": port,
            "grace_s": _GRACE_S,
            "stdin": self._filled((self._stdin,))[0],
        }
        order |= {"processes": self._limits.processes, "file_bytes": self._limits.file_mb << 20}
        interpreter = os.path.realpath(sys.executable)
        files = {f"{WORKDIR}/{path}": self._filled((text,))[0].encode() for path, text in self._files.items()}
        return launch([interpreter, "-I", "-S", inside.__file__, json.dumps(order)], self._spec(), files)

    async def _run(self, command: Sequence[str], *, port: int, timeout_s: float) -> None:
        """Run a command in the sandbox until it ends, or its time is up."""
        with await to_thread.run_sync(self._prepare, command, port) as prepared:
            process = await anyio.open_process(
                prepared.command, stderr=subprocess.STDOUT, start_new_session=True, **prepared.options
            )
        tail = OutputTail()
        quota = FolderQuota(f"{_homes[self]}/work", self._limits.folder_mb << 20)
        try:
            with anyio.move_on_after(timeout_s) as scope:
                async with quota.watch(process):
                    await tail.read(process)
                    await process.wait()  # to kill one that has just ended would lose its exit code
            self.timed_out = scope.cancelled_caught
            if self.timed_out and process.stdin is not None:
                await process.stdin.aclose()
                with anyio.move_on_after(_GRACE_S + 1):
                    await tail.read(process)
                    await process.wait()
        finally:
            with anyio.CancelScope(shield=True):
                if process.returncode is None:
                    process.kill()  # its sandbox ends with it
                code = await process.wait()
                await process.aclose()
            self.exit_code = code if code >= 0 else 128 - code
            self.output, self.over_quota = tail.data.decode("utf-8", "replace"), quota.is_exceeded
            if self.over_quota:
                self.output += (
                    f"\n[killed: it added more than limits.folder_mb = {self._limits.folder_mb} to its folder]"
                )


_homes: WeakKeyDictionary[AgentProgram, str] = WeakKeyDictionary()
"""The folder of each episode. Not an attribute: it is no part of the task, and a snapshot has none."""


class MeasuredAgentProgram(AgentProgram):
    """An agent whose reward a command measures, in the same folder, after the program has ended.

    Files of the source folder that the command names are copied anew before, so that the program cannot change them.

    Attributes:
        reward_command: what measures it.
    """

    reward_command: "RewardCommand"

    async def get_reward(self) -> float:
        """Run the command; `worst` if it writes no number.

        Raises:
            EnvironmentFailure: it could not be started.
        """
        number, _ = await self.measure()
        return self.reward_command.worst if number is None else number

    async def measure(self) -> tuple[float | None, str]:
        """Run the command; returns its number, None if it wrote none, and the end of what it wrote.

        Raises:
            EnvironmentFailure: it could not be started.
        """
        command = self._filled(self.reward_command.command)
        await to_thread.run_sync(self._restore, command)
        ended = self.exit_code, self.timed_out, self.over_quota, self.output
        await self._run(command, port=0, timeout_s=self.reward_command.timeout_s)
        code, timed_out, printed = self.exit_code, self.timed_out, self.output
        self.exit_code, self.timed_out, self.over_quota, self.output = ended
        if code in _NOT_FOUND:
            raise EnvironmentFailure(f"agent:command: {command[0]} cannot be started: {printed.strip()[-500:]}")
        last = printed.strip().rpartition("\n")[2].strip()
        is_number = not timed_out and _NUMBER.fullmatch(last) and math.isfinite(float(last))
        return (float(last) if is_number else None), printed

    def _restore(self, command: Sequence[str]) -> None:
        if not self._source:
            return
        source, work = Path(self._filled((self._source,))[0]), Path(_homes[self]) / "work"
        for name in command:
            original, copy = source / name, work / name
            if Path(name).name == name and original.is_file():
                if copy.is_dir() and not copy.is_symlink():
                    shutil.rmtree(copy)
                copy.unlink(missing_ok=True)
                shutil.copy2(original, copy)
                self._give(copy)


def agent_program(
    name: str,
    command: Sequence[str] | str = (),
    reward: Mapping[str, Any] | None = None,
    env: Mapping[str, str] = MappingProxyType({}),
    folder: str = "",
    network: Literal["endpoint", "host"] = "endpoint",
    readable: Sequence[str] = (),
    limits: Mapping[str, Any] = MappingProxyType({}),
) -> AgentProgram:
    """Make an agent, with a reward of its own if a command measures one.

    Args:
        name: `command` for any program, or the name of a profile (`envs.programs.profiles`).
        command: as of `AgentProgram`. With a profile it may be left out, or be the place of the program as text.
        reward: fields of `RewardCommand`.
        env: as of `AgentProgram`; added to the profile's.
        folder: as of `AgentProgram`.
        network: as of `AgentProgram`.
        readable: as of `AgentProgram`; added to the profile's.
        limits: fields of `ProgramLimits`.

    Raises:
        ReferenceNotFoundError: an argument is wrong, or the program is not installed.
    """
    bounds = _table(limits, ProgramLimits, "limits")
    files: Mapping[str, str] = {}
    stdin = ""
    if profile := PROFILES.get(name):
        place = command if isinstance(command, str) else ""
        found = find_program(f"agent:{name}", profile.executable, profile.install, place)
        command = list(command) if command and not place else [profile.executable, *profile.arguments]
        command = [found.path if command[0] == profile.executable else command[0], *command[1:]]
        env = {"PATH": found.search_path, **profile.env, **env}
        readable, files, stdin = (*found.readable, *readable), profile.files, profile.stdin
    if reward is None:
        return AgentProgram(command, env, folder, network, readable, bounds, files, stdin)
    made = MeasuredAgentProgram(command, env, folder, network, readable, bounds, files, stdin)
    made.reward_command = _table(reward, RewardCommand, "reward")
    return made


def _table(given: Mapping[str, Any], kind: type[T], name: str) -> T:
    try:
        return msgspec.convert(dict(given), kind)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise ReferenceNotFoundError(f"agent:command: {name}: {error}") from error
