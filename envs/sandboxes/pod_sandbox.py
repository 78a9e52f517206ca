"""The sandbox of a Pod: commands by the runner, files by tar, changes by the time of their last change."""

import re
import shlex
import shutil
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

import anyio
from anyio import to_thread

from envs.sandboxes.contract import (
    DEFAULT_MAX_BYTES,
    ChangedFile,
    ExecResult,
    FailureKind,
    ProviderOptions,
    Sandbox,
    SandboxEndedError,
    SandboxFailure,
    SandboxSpec,
)
from envs.sandboxes.pod_api import PodApi, Sink
from envs.sandboxes.pod_manifest import end_of
from envs.sandboxes.pod_snapshots import (
    Baselines,
    Changes,
    Snapshot,
    Snapshots,
    as_arguments,
    find_changes,
    pack,
    repack,
)
from envs.sandboxes.runner import STATE_FOLDER, FencedError, fence_command, parse_reply, run_command
from stream.waiting import Backoff

_BACKOFF: Final = Backoff(0.1, 2.0)
_FENCED: Final = 75
_SWITCH: Final = """
wanted=${1%%:*} group=${1#*:} name=$wanted number=$wanted home=/
[ "$group" != "$1" ] || group=
shift
while IFS=: read -r one _ uid gid _ folder _; do
  if [ "$one" = "$wanted" ] || [ "$uid" = "$wanted" ]; then
    name=$one number=$uid group=${group:-$gid} home=$folder
    break
  fi
done </etc/passwd
export HOME="$home"
[ "$(id -u)" != "$number" ] || exec "$@"
setpriv --reuid "$number" --regid "${group:-$number}" --clear-groups true 2>/dev/null &&
  exec setpriv --reuid "$number" --regid "${group:-$number}" --clear-groups "$@"
exec su -s /bin/sh -c 'exec "$0" "$@"' -- "$name" "$@"
"""
"""Becomes the user $1 (name or number, `:GROUP`) and runs the rest. No `su` that begins a session of its own."""
_MOUNTED: Final = (
    "/proc",
    "/sys",
    "/dev",
    STATE_FOLDER,
    "/etc/hosts",
    "/etc/hostname",
    "/etc/resolv.conf",
    "/run/secrets",
)
_PRUNED: Final = r"\( " + " -o ".join(f"-path {path}" for path in _MOUNTED) + r" \) -prune"
_TOOLS: Final = "setsid tar find stat dd head wc"
_PATH: Final = "PATH=/usr/sbin:/usr/bin:/sbin:/bin:$PATH; export PATH; TZ=UTC; export TZ\n"
_LIST: Final = f"find / -xdev {_PRUNED} -o -print"
_MAX_LIST_BYTES: Final = 64 << 20
_VARIABLE: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)


class PodSandbox(Sandbox):
    """A sandbox that is a Pod.

    Args:
        api: of its cluster.
        name: of the Pod.
        spec: what it was made of.
        image: of its container; `spec.image` may be a snapshot.
        fence: of this owner.
        options: deadlines.
        kept: paths of images, and snapshots.
    """

    def __init__(
        self,
        api: PodApi,
        name: str,
        spec: SandboxSpec,
        image: str,
        fence: int,
        options: ProviderOptions,
        *,
        kept: tuple[Baselines, Snapshots],
    ) -> None:
        self.name, self.spec = name, spec
        self._api, self._image, self._fence, self._options = api, image, fence, options
        self._baselines, self._snapshots = kept
        self._begun = ""
        """The time of the Pod's start by its node's clock, as `stat` prints the time of a file's last change."""
        self._last_changes: list[ChangedFile] = []

    async def begin(self) -> None:
        """Wait for the runner, and refuse calls of smaller fences; list a new image's paths.

        Raises:
            SandboxFailure: the image lacks a tool.
        """
        is_new_image = self._image not in self._baselines
        script = f"""{_PATH}for tool in {_TOOLS}; do command -v "$tool" >/dev/null || {{ echo "$tool"; exit 5; }}; done
{shlex.join(fence_command(self._fence))} || exit 6
stat -c %z {STATE_FOLDER}/runner || exit 6
[ -d {STATE_FOLDER}/calls ] || [ -d {STATE_FOLDER}/filled ] || {_LIST if is_new_image else ":"}"""
        code, output, stderr = await self._shell(script, self._options.create_timeout_s, max_bytes=_MAX_LIST_BYTES)
        if code == 5:
            message = f"the image {self._image} has no {output.decode().strip()}: a Pod's image needs sh {_TOOLS}"
            raise SandboxFailure(FailureKind.IMAGE, message)
        reply, _, rest = output.partition(b"\n")
        if reply.startswith(b"fenced"):
            raise self._refused()
        if code == 6:
            raise SandboxFailure(FailureKind.CREATE, f"Pod {self.name}: {stderr.decode(errors='replace')[-300:]}")
        begun, _, listing = rest.partition(b"\n")
        self._begun = begun.decode(errors="replace")
        if listing:
            await to_thread.run_sync(self._baselines.add, self._image, listing)

    async def fill(self, snapshot: Snapshot) -> None:
        """Put a snapshot's files into this Pod, once. What `tar` cannot restore, such as a device, is left out."""
        once = f"{_PATH}[ ! -e {STATE_FOLDER}/filled ] || exit 0\n"
        for part in as_arguments(one.path for one in snapshot.changes if one.kind == "deleted"):
            await self._checked(f'{once}eval "set -- $(head -c {len(part)})"; rm -rf -- "$@" || :', part)
        size = (await anyio.Path(snapshot.archive).stat()).st_size
        await self._checked(f"{once}head -c {size} | tar -xpf - -C / || :", snapshot.archive)
        await self._checked(f"mkdir -p {STATE_FOLDER}/filled")

    async def exec(
        self,
        command: Sequence[str],
        *,
        id: str = "",  # noqa: A002
        timeout_s: float,
        cwd: str = "",
        env: Mapping[str, str] = MappingProxyType({}),
        user: str = "",
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> ExecResult:
        """Run a command by the runner. A cut connection is made again, and asks for the result of the same call."""
        if wrong := [name for name in env if not _VARIABLE.fullmatch(name)]:
            raise ValueError(f"{wrong[0]!r} is no name of an environment variable")
        user = user or self.spec.user
        words = ["/bin/sh", "-c", _SWITCH, "sh", user, *command] if user else list(command)
        folder = cwd or self.spec.workdir or "."
        start = run_command(id or uuid.uuid4().hex, self._fence, timeout_s, max_bytes, folder, words)
        lines = [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
        script = "\n".join([*lines, shlex.join(start)])
        results: list[ExecResult] = []

        def is_whole(output: bytes, stderr: bytes) -> bool:
            result = parse_reply(output, stderr)
            results[:] = [result] if result else []
            return bool(results)

        deadline_s = timeout_s + self._options.call_timeout_s
        try:
            await self._shell(script, deadline_s, max_bytes=max_bytes + 4096, is_whole=is_whole)
        except FencedError as error:
            raise self._refused() from error
        return results[0]

    async def read(self, path: str, max_bytes: int) -> bytes:
        """Read a file of the Pod with the Pod's own tools."""
        script = f"""{_PATH}p={shlex.quote(path)}
[ ! -h "$p" ] || exit 41
[ -e "$p" ] || exit 40
[ -f "$p" ] || exit 41
head -c {max_bytes + 1} <"$p\""""
        code, output, stderr = await self._shell(script, self._options.call_timeout_s, max_bytes=max_bytes + 1)
        if code == 40:
            raise FileNotFoundError(f"{path} is not in the sandbox")
        if code == 41:
            raise ValueError(f"{path} is no regular file")
        if code:
            raise ValueError(f"{path} cannot be read: {stderr.decode(errors='replace')[-300:]}")
        if len(output) > max_bytes:
            raise ValueError(f"{path} has more than {max_bytes} bytes")
        return output

    async def write(self, files: Mapping[str, bytes | Path], *, user: str = "") -> None:
        """Write files by an archive."""
        folder = await to_thread.run_sync(self._snapshots.folder)
        archive = folder / "files.tar"
        try:
            size = await to_thread.run_sync(pack, archive, files)
            owner = user or self.spec.user
            words = shlex.join([owner.replace("::", ":"), *files])
            script = f"{self._fence_check}{_PATH}head -c {size} | tar -xof - -C / || exit\n"
            await self._checked(script + (f"chown -R {words}" if owner else ":"), archive)
        finally:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(shutil.rmtree, folder, True)

    async def changed_files(self) -> list[ChangedFile]:
        """Return where the files differ from the image's, or differed in the last snapshot.

        The snapshot's are known by what is in its archive. Later ones are listed by the Pod's own tools, which the
        policy may have replaced. A path is `modified` if the image had it, which is known if a Pod of this worker
        listed the image's paths before anything ran in it; else every one is.
        """
        now = await to_thread.run_sync(self._files, await self._changes())
        found = {one.path: one for one in (*now, *self._last_changes)}
        return [found[path] for path in sorted(found)]

    async def snapshot(self) -> str:
        """Take the changed files into an archive of this worker. The Pod's processes are stopped meanwhile."""
        folder = await to_thread.run_sync(self._snapshots.folder)
        left = self.spec.disk_mb << 20
        parts: list[Path] = []
        await self._checked("kill -STOP -1 2>/dev/null; kill -CONT $$")
        try:
            changes = await self._changes()
            for part in as_arguments(sorted(changes.newer)):
                parts.append(folder / f"{len(parts)}.tar")
                script = f'{_PATH}eval "set -- $(head -c {len(part)})"; tar -cf - --no-recursion -- "$@"'
                left -= await self._download(script, part, parts[-1], left)
        finally:
            with anyio.CancelScope(shield=True):
                await self._checked("kill -CONT -1 2>/dev/null; :")
        archive = folder / "all.tar"
        held = await to_thread.run_sync(repack, parts, archive)
        self._last_changes = await to_thread.run_sync(self._files, Changes(held, changes.deleted))
        for one in parts:
            await anyio.Path(one).unlink()
        return self._snapshots.add(Snapshot(self.name, self._image, archive, tuple(self._last_changes)))

    async def _changes(self) -> Changes:
        """List the files that changed since the Pod's start, by the Pod's own tools."""
        script = f"""{_PATH}now=$(date +%s)
since=$(( (now - $(date -d {shlex.quote(self._begun[:19])} +%s)) / 60 + 2 ))
find / -xdev {_PRUNED} -o -cmin -$since -exec stat -c '%z|%F|%n' {{}} +
echo
{_LIST if self._image in self._baselines else ":"}"""
        _, output, _ = await self._shell(script, self._options.create_timeout_s, max_bytes=_MAX_LIST_BYTES)
        return await to_thread.run_sync(self._read_changes, output)

    def _read_changes(self, listing: bytes) -> Changes:
        return find_changes(listing, self._begun, self._baselines.paths(self._image))

    def _files(self, changes: Changes) -> list[ChangedFile]:
        return changes.files(self._baselines.paths(self._image))

    @property
    def _fence_check(self) -> str:
        return f'for seen in {STATE_FOLDER}/fence/*; do [ "${{seen##*/}}" -le {self._fence} ] || exit {_FENCED}; done\n'

    def _refused(self) -> SandboxFailure:
        return SandboxFailure(FailureKind.FENCED, f"another worker has adopted the sandbox {self.name}")

    async def _checked(self, script: str, stdin: bytes | Path = b"") -> None:
        """Run a script that has to succeed."""
        code, _, stderr = await self._shell(script, self._options.create_timeout_s, stdin=stdin)
        if code == _FENCED:
            raise self._refused()
        if code:
            why = stderr.decode(errors="replace").strip()[-300:] or f"exit code {code}"
            raise SandboxEndedError(f"the sandbox's files cannot be written: {why}")

    async def _download(self, script: str, stdin: bytes, target: Path, max_bytes: int) -> int:
        """Run a script and keep what it prints in a file; returns how much it was."""
        size = 0

        async def attempt() -> Sink:
            nonlocal size
            size = 0
            await to_thread.run_sync(target.write_bytes, b"")

            async def keep(data: bytes) -> None:
                nonlocal size
                size += len(data)
                if size > max_bytes:
                    raise SandboxEndedError(f"the sandbox has more files than its {self.spec.disk_mb} MB")
                await to_thread.run_sync(_append, target, data)

            return keep

        await self._attempts(script, self._options.create_timeout_s, stdin, attempt, lambda _: True)
        return size

    async def _shell(
        self,
        script: str,
        deadline_s: float,
        *,
        stdin: bytes | Path = b"",
        max_bytes: int = 1 << 16,
        is_whole: Callable[[bytes, bytes], bool] = lambda *_: True,
    ) -> tuple[int, bytes, bytes]:
        """Run a script of ours; returns its code and outputs."""
        output = bytearray()

        async def attempt() -> Sink:
            output.clear()

            async def keep(data: bytes) -> None:
                output.extend(data[: max_bytes - len(output)])

            return keep

        code, stderr = await self._attempts(
            script, deadline_s, stdin, attempt, lambda stderr: is_whole(bytes(output), stderr)
        )
        return code, bytes(output), stderr

    async def _attempts(
        self,
        script: str,
        deadline_s: float,
        stdin: bytes | Path,
        attempt: Callable[[], Awaitable[Sink]],
        is_whole: Callable[[bytes], bool],
    ) -> tuple[int, bytes]:
        """Run a script until its output is whole; each attempt begins anew. Every script may run more than once."""
        problem = "no answer"
        with anyio.move_on_after(deadline_s):
            for count in range(1, 10_000):
                result = await self._api.run(self.name, script, stdin, await attempt())
                if result.code is not None and is_whole(result.stderr):
                    return result.code, result.stderr
                problem = result.problem
                if (ended := end_of(await self._api.get(self.name), self.name)) is not None:
                    raise ended
                await anyio.sleep(_BACKOFF.delay_s(count))
        message = f"Pod {self.name} runs, but no command in it within {deadline_s:g} s: {problem}"
        raise SandboxFailure(FailureKind.UNREACHABLE, message)


def _append(target: Path, data: bytes) -> None:
    with target.open("ab") as file:
        file.write(data)
