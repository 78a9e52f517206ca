"""Set resource limits, then run another program: `python -I -S resource_limits.py LIMITS PROGRAM...`, LIMITS as JSON.

Runs by path, without this project's packages. Standard output is a pipe to the parent and carries one message:
`begun` right before the program starts, or the error that prevented it. The program writes both of its output streams
to standard error, a file.
"""

import ctypes
import json
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_LIMITS = {
    "cpu_s": resource.RLIMIT_CPU,
    "memory_bytes": resource.RLIMIT_AS,
    "file_bytes": resource.RLIMIT_FSIZE,
    "processes": getattr(resource, "RLIMIT_NPROC", None),
    "files": resource.RLIMIT_NOFILE,
    "core": resource.RLIMIT_CORE,
}


def set_limit(resource_id: int, soft: int, hard: int) -> None:
    """Set a resource limit of this process; a stricter existing limit is kept."""
    _, most = resource.getrlimit(resource_id)
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(resource_id, (soft, hard))


def main(limits: dict[str, int], program: list[str]) -> None:
    """Set the limits, drop root privileges, die with the parent, and execute the program."""
    parent = os.getppid()
    report = os.dup(1)  # closed when the program starts
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        user = limits.pop("user", None)
        if user is not None:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        for name, value in limits.items():
            kind = _LIMITS[name]
            if kind is not None:
                set_limit(kind, value, value + (name == "cpu_s"))  # SIGXCPU comes one second before SIGKILL
        if sys.platform == "linux":
            kernel = ctypes.CDLL(None, use_errno=True)
            kernel.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            kernel.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
        environment = {"PATH": os.defpath, "HOME": os.curdir, "LANG": "C.UTF-8"}
        if not os.access(program[0], os.X_OK):
            raise PermissionError(f"{program[0]} cannot be executed")  # noqa: TRY301
        os.write(report, b"begun\n")
        os.execve(program[0], program, environment)  # noqa: S606  (a fixed argument list, no shell)
    except BaseException as error:  # noqa: BLE001  (reported to the parent)
        os.write(report, f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
