"""Sandboxes made by bubblewrap (`bwrap`, 0.8 or newer): a program with the system's files, and nothing else.

The program has user, process, IPC, network, mount and host name namespaces of its own: no network, no process but its
own, no environment variable but those given. It reads `/usr`, the interpreter's library and the paths of its
`BubblewrapSpec`, and writes to a folder, a `/tmp` and a `/dev/shm` of its own, which are bounded and end with it. It
dies with the thread that started it. Started by root, it runs as the user nobody where nobody can read what it needs;
else as the namespace's nobody, who owns what root owns among the files that it sees, and can write none of them.

Where bubblewrap is missing or may make no namespaces, `sandbox_problem` says why, and each caller says what it does
instead.
"""

import functools
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

import structlog

from envs.sandboxes.system_calls import system_call_filter

log = structlog.get_logger()

NOBODY: Final = 65534
MIN_VERSION: Final = (0, 8)
WORKDIR: Final = "/sandbox"
"""The folder in which a sandboxed program starts, its home."""
ENVIRONMENT: Final = {"PATH": os.defpath, "HOME": WORKDIR, "LANG": "C.UTF-8"}
"""What a sandboxed process finds as its environment."""
_PROBE_TIMEOUT_S: Final = 20.0
_MAX_LINKS: Final = 10
_SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/nix/store", "/gnu/store")
_MASKED: Final = ("/usr/src", "/usr/local/src")
"""Folders of `/usr` in which images keep an application, and so perhaps a run."""


@dataclass(frozen=True, kw_only=True)
class BubblewrapSpec:
    """What a sandboxed program finds, as plain data."""

    readable: tuple[str, ...] = ()
    """Files and folders of this machine that it may read, at the same place."""
    variables: tuple[tuple[str, str], ...] = ()
    """Environment variables in addition to `ENVIRONMENT`."""
    folder_bytes: int = 64 << 20
    """Size of its working folder, and of its `/tmp`."""
    shm_bytes: int = 16 << 20
    """Size of its `/dev/shm`."""
    writable: tuple[tuple[str, str], ...] = ()
    """Files and folders of this machine that it may write, each with its place inside, below `WORKDIR`. Those that do
    not exist are left out."""
    shares_network: bool = False
    """It has the network of this machine."""
    starts_processes: bool = True
    """It may start processes and threads."""
    texts: tuple[tuple[str, str], ...] = ()
    """Paths of files that it may read, each with its text."""
    is_process_1: bool = False
    """It is the first process of its namespace, which no signal from inside reaches; it has to wait for orphans."""


@dataclass(frozen=True)
class Launch:
    """How to start a sandboxed program. A context: start the program before leaving it."""

    command: list[str]
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for `anyio.open_process` or `subprocess.Popen`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files that the program was given."""
        for descriptor in self.options.get("pass_fds", ()):
            os.close(descriptor)


@functools.cache
def sandbox_problem() -> str:
    """Return why this machine makes no sandboxes; empty if it does. The first call makes one, and blocks meanwhile."""
    program = bubblewrap()
    if program is None:
        return "bubblewrap (bwrap) is not on the PATH: install your distribution's package bubblewrap"
    try:
        version = _run([program, "--version"])
        found = tuple(int(part) for part in version.stdout.split()[-1].split(".")[:2])
        if found < MIN_VERSION:
            return f"{version.stdout.strip()} is too old: 0.8 or newer is needed"
        with launch([sys.executable, "-I", "-S", "-c", ""], BubblewrapSpec(readable=interpreter_paths())) as started:
            made = _run(started.command, started.options)
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        return f"{program}: {error}"
    if made.returncode:
        why = made.stderr.strip().splitlines()[-1:] or [f"exit code {made.returncode}"]
        return f"{why[0]} (containers and some systems forbid user namespaces)"
    return ""


@functools.cache
def warn_without_sandbox(what: str, instead: str) -> None:
    """Log once that something runs without a sandbox, why, and what happens instead; nothing if there are sandboxes."""
    if problem := sandbox_problem():
        log.warning("sandbox.unavailable", what=what, why=problem, instead=instead)


def missing_sandbox(environment_class: type, args: Mapping[str, Any]) -> str:
    """Return what `penstock check` says of an environment that wants a sandbox on a machine without; empty: nothing.

    Such a class has an attribute `without_sandbox`, what its code can then reach. A user who has chosen another
    isolation knows it.
    """
    reached = getattr(environment_class, "without_sandbox", "")
    if not reached or args.get("isolation", "sandbox") != "sandbox" or not (problem := sandbox_problem()):
        return ""
    return f"this machine makes no sandboxes: {problem}; so {reached}"


@functools.cache
def bubblewrap() -> str | None:
    """Return the path of `bwrap`; None if there is none on the PATH."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    found = (Path(folder or ".").absolute() / "bwrap" for folder in folders)
    return next((str(path) for path in found if path.is_file() and os.access(path, os.X_OK)), None)


def launch(program: Sequence[str], spec: BubblewrapSpec, files: Mapping[str, bytes] = MappingProxyType({})) -> Launch:
    """Prepare the start of a sandboxed program, which dies with the thread that starts it. Blocks: it reads folders.

    Args:
        program: absolute path and arguments, as seen inside.
        spec: what it finds.
        files: contents of files that it finds, by absolute path, in folders that it can write.
    """
    switch, options = _user(spec.readable)
    command = [*switch, bubblewrap() or "bwrap", *_namespaces(spec)]
    for folder in (WORKDIR, "/tmp"):  # noqa: S108  (paths that are shown may lie below it)
        command += ["--size", str(spec.folder_bytes), "--tmpfs", folder]
    descriptors = []
    for path in [*_SYSTEM, *_not_yet_shown(spec.readable)]:
        command += _shown(path)
    for outside, within in spec.writable:
        command += ["--bind-try", outside, within]
    for path, text in spec.texts:
        descriptors.append(_memory_file(text.encode()))
        command += ["--ro-bind-data", str(descriptors[-1]), path]
    command += ["--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev"]
    command += ["--size", str(spec.shm_bytes), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]  # noqa: S108
    for path, content in files.items():
        descriptors.append(_memory_file(content))
        command += ["--file", str(descriptors[-1]), path]
    filtered = system_call_filter(starts_processes=spec.starts_processes)
    if filtered is not None:
        descriptors.append(_memory_file(filtered))
        command += ["--seccomp", str(descriptors[-1])]
    for path in ("/", *_masked()):
        command += ["--remount-ro", path]
    command += ["--chdir", WORKDIR, "--", *program]
    return Launch(command, {"env": dict(ENVIRONMENT), "pass_fds": descriptors, **options})


def _namespaces(spec: BubblewrapSpec) -> list[str]:
    """Return the options for namespaces and the environment.

    The first environment of `bwrap` can be read inside, in /proc, so it holds nothing else either.
    """
    own = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--clearenv"]
    if spec.shares_network:
        own += ["--share-net", "--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf"]
        own += ["--ro-bind-try", "/etc/hosts", "/etc/hosts", "--ro-bind-try", "/etc/ssl", "/etc/ssl"]
    for name, value in (*ENVIRONMENT.items(), *spec.variables):
        own += ["--setenv", name, value]
    if spec.is_process_1:
        own.append("--as-pid-1")
    return [*own, "--uid", str(NOBODY), "--gid", str(NOBODY), "--cap-drop", "ALL", "--hostname", "sandbox"]


def _not_yet_shown(readable: Sequence[str]) -> list[str]:
    """Return paths once, without those in a folder that is shown: a link there could not be made a second time."""
    folders = [path for path in readable if Path(path).is_dir() and not Path(path).is_symlink()]
    return [
        path
        for path in dict.fromkeys(readable)
        if _is_below(path, _MASKED)
        or not (_is_system(path) or _is_below(path, [folder for folder in folders if folder != path]))
    ]


def _shown(path: str) -> list[str]:
    """Return the options that show a file, folder or link of this machine, unwritable; none if it does not exist."""
    if Path(path).is_symlink():
        return ["--symlink", str(Path(path).readlink()), path]
    if not Path(path).exists():
        return []
    masked = [option for each in _masked() if _is_below(each, (path,)) for option in ("--tmpfs", each)]
    return ["--ro-bind", path, path, *masked]


def _masked() -> list[str]:
    return [path for path in _MASKED if Path(path).is_dir()]


def shows(spec: BubblewrapSpec, path: str) -> bool:
    """Return whether a sandbox shows a path, or something below it."""
    above = any(shown.startswith(f"{path}/") for shown in spec.readable)
    return bool(path) and (above or _is_system(path) or _is_below(path, spec.readable))


def _is_system(path: str) -> bool:
    """Return whether every sandbox shows a path."""
    return _is_below(path, _SYSTEM) and not _is_below(path, _MASKED)


def _is_below(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def _memory_file(content: bytes) -> int:
    """Return a descriptor from which a child reads a content."""
    descriptor = os.memfd_create("sandbox")
    remaining = memoryview(content)
    while remaining:
        remaining = remaining[os.write(descriptor, remaining) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _user(readable: tuple[str, ...]) -> tuple[list[str], dict[str, Any]]:
    """Return the beginning of a command that runs as nobody, and options for where no program does it.

    A program is asked first: uvloop starts no process as another user.
    """
    if not becomes_nobody(readable):
        return [], {}
    if (setpriv := shutil.which("setpriv")) is not None:
        return [setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"], {}
    return [], {"user": NOBODY, "group": NOBODY, "extra_groups": []}


@functools.cache
def becomes_nobody(readable: tuple[str, ...]) -> bool:
    """Return whether this process is root, and the user nobody can read these paths.

    The kernel counts no processes of root. So root gives its programs to nobody, if nobody can reach what they need.
    """
    return os.geteuid() == 0 and all(is_open_to_all(Path(path)) for path in readable if Path(path).exists())


def is_open_to_all(path: Path) -> bool:
    """Return whether every user of this machine can read a path that exists."""
    real = path.resolve()
    needed = stat.S_IROTH | (stat.S_IXOTH if real.is_dir() else 0)
    readable = real.stat().st_mode & needed == needed
    folders = {*path.absolute().parents, *real.parents}
    return readable and all(folder.stat().st_mode & stat.S_IXOTH for folder in folders)


@functools.cache
def interpreter_paths(interpreter: str = sys.executable) -> tuple[str, ...]:
    """Return what an interpreter needs besides the system's files: its links, its program and its standard library."""
    links: list[str] = []
    path = interpreter
    while Path(path).is_symlink() and len(links) < _MAX_LINKS:
        links.append(path)
        path = os.path.normpath(Path(path).parent / Path(path).readlink())
    script = "import sys; print(sys.base_prefix); print(sys.base_exec_prefix)"
    if interpreter == sys.executable:
        prefixes = [sys.base_prefix, sys.base_exec_prefix]
        links += [str(file) for file in (Path(sys.prefix) / "pyvenv.cfg",) if file.exists()]
    else:
        try:
            prefixes = _run([interpreter, "-I", "-S", "-c", script]).stdout.splitlines()[:2]
        except (OSError, subprocess.TimeoutExpired):
            prefixes = []  # starting it will fail, and say why
    libraries = [f"{prefix}/{name}" for prefix in prefixes for name in ("lib", sys.platlibdir)]
    found = dict.fromkeys([*links, path, os.path.realpath(interpreter), *libraries])
    return tuple(each for each in found if not _is_system(each) and os.path.lexists(each))


@functools.cache
def import_paths(packages: tuple[str, ...] = ("stream", "envs")) -> tuple[str, ...]:
    """Return what a sandboxed child needs to import these packages of ours and everything that is installed."""
    root = Path(__file__).resolve().parents[2]
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    installed |= {entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")}
    ours = [str(root / name) for name in packages if str(root) not in installed]
    found = (*interpreter_paths(), *sorted(installed), *ours)
    return tuple(path for path in found if not _is_system(path) and os.path.lexists(path))


def _run(command: Sequence[str], options: Mapping[str, Any] = MappingProxyType({})) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603  (bubblewrap, or the configured interpreter)
        command,
        **options,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_PROBE_TIMEOUT_S,
        check=False,
    )
