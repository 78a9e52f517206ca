"""A sandbox that is a container: its commands, its files, and why it ended."""

import secrets
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, Final, Literal

import anyio
from aiodocker.exceptions import DockerError

from envs.contract import ToolError
from envs.sandboxes.contract import (
    DEFAULT_MAX_BYTES,
    ChangedFile,
    ExecResult,
    FailureKind,
    Sandbox,
    SandboxEndedError,
    SandboxFailure,
    SandboxSpec,
)
from envs.sandboxes.engine import Engine, Output
from envs.sandboxes.runner import (
    LIFE_OVER_CODE,
    NO_SETSID_CODE,
    STATE_FOLDER,
    FencedError,
    fence_command,
    parse_reply,
    run_command,
)

SNAPSHOT_LABEL: Final = "penstock.snapshot"
"""Label of a snapshot's image: the name of its sandbox."""
_SNAPSHOTS: Final = "penstock-snapshot"
_REPLY_OVERHEAD: Final = 64 << 10
_NO_VARIABLES: Final[Mapping[str, str]] = MappingProxyType({})
_OWN_CODES: Final = range(1, 126)
"""Exit codes that a first process gives itself; an engine's restart gives others, 0 among them."""
_CPU_SHARES: Final = 1024
"""The engine's default. The fence is noted outside of the sandbox as what is above."""
_NOT_CHANGES: Final = ("/proc", "/sys", "/dev", STATE_FOLDER)
_KINDS: Final[tuple[Literal["modified", "added", "deleted"], ...]] = ("modified", "added", "deleted")
_STAGING: Final = "/.penstock-"
_COPY: Final = """
set -e; from=$1; shift; n=0
for to; do mkdir -p "${to%/*}/"; if [ -d "$from/$n" ]; then mkdir -p "$to"; cp -R "$from/$n/." "$to/"
else cp "$from/$n" "$to"; fi; n=$((n + 1)); done"""


class DockerSandbox(Sandbox):
    """A container.

    Args:
        engine: where it is.
        name: of the container.
        spec: what it was made of.
        folder: in which commands start if nothing else is said.
        fence: with which its commands are made.
        verifies_fence: the engine notes fences, so that a refusal by the runner can be believed or not.
    """

    def __init__(
        self, engine: Engine, name: str, spec: SandboxSpec, folder: str, *, fence: int = 0, verifies_fence: bool
    ) -> None:
        self.name = name
        self.spec = spec
        self._engine = engine
        self._folder = folder
        self._fence = fence
        self._verifies_fence = verifies_fence
        self._ended_because = ""

    async def exec(
        self,
        command: Sequence[str],
        *,
        id: str = "",  # noqa: A002  (a call's id, as everywhere)
        timeout_s: float,
        cwd: str = "",
        env: Mapping[str, str] = _NO_VARIABLES,
        user: str = "",
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> ExecResult:
        """Run a command through the runner; ask again by its id for a result that got lost on the way."""
        folder = cwd or self._folder
        arguments = run_command(id or uuid.uuid4().hex, self._fence, timeout_s, max_bytes, folder, command)
        wait_s = timeout_s + self._engine.call_timeout_s
        answers, give_up_at = 0, anyio.current_time() + wait_s + self._engine.call_timeout_s
        while True:
            output, failure = Output(b"", b""), None
            try:
                with self._engine.request(f"a command in {self.name}", FailureKind.LOST, wait_s):
                    output = await self._engine.run(
                        self.name, arguments, 2 * max_bytes + _REPLY_OVERHEAD, user=user or self.spec.user, env=env
                    )
                if (result := parse_reply(output.stdout, output.stderr)) is not None:
                    return result
            except FencedError:
                await self._refuse()
            except SandboxFailure as error:
                failure = error
            wait_s = self._engine.call_timeout_s
            if not await self._answers(give_up_at):
                continue
            # The engine answers, and the sandbox runs.
            answers += 1
            if answers > 1 and (result := await self._without_reply(output, failure, max_bytes)) is not None:
                return result
            if anyio.current_time() > give_up_at and failure is not None:
                raise failure
            await anyio.sleep(0.1)

    async def _answers(self, give_up_at: float) -> bool:
        """Return whether the sandbox runs; False after a pause if its engine cannot be reached for now.

        Raises:
            SandboxEndedError: it has ended by itself.
            SandboxFailure: it is gone, or its engine has not answered for too long.
        """
        try:
            await self.check_alive()
        except SandboxFailure as error:
            if error.kind != FailureKind.UNREACHABLE or anyio.current_time() > give_up_at:
                raise
            await anyio.sleep(0.5)
            return False
        return True

    async def _without_reply(self, output: Output, failure: SandboxFailure | None, max_bytes: int) -> ExecResult | None:
        """Return the result of a command whose runner gave no reply twice, though engine and sandbox are well.

        Then what runs inside has disturbed the runner. None: the engine may be at fault.

        Raises:
            SandboxEndedError: a command can no longer be ended, and so the sandbox was.
        """
        cause = failure.__cause__ if failure is not None else None
        if failure is None:
            return ExecResult(code=126, stdout=output.stdout[:max_bytes], stderr=output.stderr[:max_bytes])
        if isinstance(cause, TimeoutError):
            await self._end("a command could not be stopped at its deadline")
        if isinstance(cause, DockerError) and (cause.status == 400 or "OCI runtime exec failed" in cause.message):
            return ExecResult(code=126, stderr=cause.message.encode()[:max_bytes])
        return None

    async def check_alive(self) -> None:
        """Return if the container runs.

        Raises:
            SandboxEndedError: it has ended by itself.
            SandboxFailure: kind `lost`, or `unreachable`.
        """
        try:
            with self._engine.request(f"sandbox {self.name}"):
                state = (await self._engine.inspect(self.name))["State"]
        except SandboxFailure as failure:
            if getattr(failure.__cause__, "status", 0) == 404:
                raise SandboxFailure(
                    FailureKind.LOST, f"sandbox {self.name} is gone from the engine at {self._engine.address}"
                ) from failure
            raise
        if state["Status"] not in ("running", "paused"):
            raise self._why_ended(state)

    def _why_ended(self, state: Mapping[str, Any]) -> Exception:
        code = state["ExitCode"]
        if self._ended_because:
            return SandboxEndedError(f"the sandbox has ended: {self._ended_because}")
        if state["OOMKilled"]:
            return SandboxEndedError(f"the sandbox has ended: it used more than {self.spec.memory_mb} MB of memory")
        if state["Status"] == "exited" and code == LIFE_OVER_CODE:
            return SandboxEndedError(f"the sandbox has ended: its {self.spec.max_life_s:g} seconds are over")
        if state["Status"] == "exited" and code == NO_SETSID_CODE:
            return SandboxFailure(FailureKind.IMAGE, f"image {self.spec.image!r} has no setsid, which a sandbox needs")
        if state["Status"] == "exited" and code in _OWN_CODES:
            return SandboxEndedError(f"the sandbox has ended: its first process could not go on (code {code})")
        return SandboxFailure(
            FailureKind.LOST,
            f"sandbox {self.name} was ended from outside, by the engine's restart for example (state "
            f"{state['Status']}, code {code}) at {self._engine.address}",
        )

    async def _refuse(self) -> None:
        """Raise why the runner refuses. Its files may have been changed inside; the engine has a note of its own."""
        if self._verifies_fence:
            with self._engine.request(f"sandbox {self.name}", FailureKind.LOST):
                details = await self._engine.inspect(self.name)
            if details["HostConfig"]["CpuShares"] - _CPU_SHARES <= self._fence:
                await self._end("what ran in it has changed the files by which its commands are started")
        raise SandboxFailure(FailureKind.FENCED, f"sandbox {self.name} has been adopted by another worker")

    async def _end(self, why: str) -> None:
        """End the container, and raise why."""
        self._ended_because = why
        with suppress(SandboxFailure), self._engine.request(f"the end of {self.name}"):
            await self._engine.call(f"containers/{self.name}/kill", "POST")
        raise SandboxEndedError(f"the sandbox has ended: {why}")

    async def end_if_over_disk(self) -> None:
        """End the container if it has written more than it may.

        Raises:
            SandboxEndedError: it has.
            SandboxFailure: it is not known.
        """
        with self._engine.request(f"the size of {self.name}", FailureKind.LOST):
            details = await self._engine.inspect(self.name, size=True)
        if details["State"]["Running"] and details.get("SizeRw", 0) > self.spec.disk_mb << 20:
            await self._end(f"it wrote more than {self.spec.disk_mb} MB")

    async def adopt(self) -> None:
        """Refuse the commands of workers with a smaller fence from now on.

        Raises:
            SandboxEndedError: it has ended by itself.
            SandboxFailure: kind `fenced`: a third worker has adopted it already; or another.
        """
        await self.check_alive()
        if self._verifies_fence:
            with self._engine.request(f"adoption of {self.name}", FailureKind.LOST):
                details = await self._engine.inspect(self.name)
                if details["HostConfig"]["CpuShares"] - _CPU_SHARES > self._fence:
                    raise SandboxFailure(FailureKind.FENCED, f"sandbox {self.name} has been adopted by a third worker")
                shares = {"CpuShares": _CPU_SHARES + self._fence}
                await self._engine.call(f"containers/{self.name}/update", "POST", body=shares)
        with self._engine.request(f"adoption of {self.name}", FailureKind.LOST):
            output = await self._engine.run(self.name, fence_command(self._fence), _REPLY_OVERHEAD)
        with suppress(FencedError):  # if that is true, the next command says it
            parse_reply(output.stdout, output.stderr)

    async def read(self, path: str, max_bytes: int) -> bytes:
        """Return the content of a regular file."""
        with self._engine.request(f"{path} of {self.name}", FailureKind.LOST):
            return await self._engine.read_file(self.name, path, max_bytes)

    async def write(self, files: Mapping[str, bytes | Path], *, user: str = "") -> None:
        """Write files as a user, who can write no more than a command of that user; root's without a command."""
        user = user or self.spec.user
        if user.split(":")[0] in ("", "0", "root"):
            with self._engine.request(f"files of {self.name}", FailureKind.LOST):
                await self._engine.write_files(self.name, files)
            return
        folder = f"{_STAGING}{secrets.token_hex(8)}"
        staged = {f"{folder}/{number}": content for number, content in enumerate(files.values())}
        with self._engine.request(f"files of {self.name}", FailureKind.LOST):
            await self._engine.write_files(self.name, staged, for_all=True)
        paths = [str(PurePosixPath(path)) for path in files]
        copying = ["sh", "-c", _COPY, "sh", folder, *paths]
        copied = await self.exec(copying, timeout_s=self._engine.call_timeout_s, cwd="/", user=user)
        await self.exec(["rm", "-rf", folder], timeout_s=self._engine.call_timeout_s, cwd="/", user="0")
        if copied.code:
            raise ToolError(copied.stderr.decode(errors="replace").strip() or f"not written: code {copied.code}")

    async def changed_files(self) -> list[ChangedFile]:
        """Return what differs from the image, without folders that only hold what does."""
        with self._engine.request(f"changes of {self.name}", FailureKind.LOST):
            changes = await self._engine.call(f"containers/{self.name}/changes") or []
        paths = {change["Path"]: _KINDS[change["Kind"]] for change in changes}
        folders = {str(folder) for path in paths for folder in PurePosixPath(path).parents}
        return [
            ChangedFile(path=path, kind=kind)
            for path, kind in sorted(paths.items())
            if not path.startswith(_STAGING)
            and not any(path == omitted or path.startswith(f"{omitted}/") for omitted in _NOT_CHANGES)
            and not (path in folders and kind == "modified")
            and path != str(PurePosixPath(STATE_FOLDER).parent)
        ]

    async def snapshot(self) -> str:
        """Commit the container to an image with its labels; return the image's id."""
        tag = f"{self.name}-{secrets.token_hex(4)}"
        with self._engine.request(f"snapshot of {self.name}", FailureKind.LOST, self._engine.long_timeout_s):
            made = await self._engine.client.containers.container(self.name).commit(
                repository=_SNAPSHOTS, tag=tag, config={"Labels": {SNAPSHOT_LABEL: self.name}}, pause=True
            )
        return str(made["Id"])
