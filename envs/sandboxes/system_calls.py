"""A seccomp filter for sandboxes: system calls that memory limits do not see, or that reach into other processes.

RLIMIT_AS and the sizes of `/tmp` and `/dev/shm` bound a program's memory only as long as it cannot put memory
elsewhere: into unnamed files (`memfd_create`) and System V segments. Where a program may start no process, RLIMIT_NPROC
would do for an ordinary user, but it never holds for root.
"""

import errno
import platform
import struct
from typing import Final

_NUMBERS: Final = {  # system call: x86_64, aarch64 (None: does not exist there)
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}
_STARTING: Final = {"fork": (57, None), "vfork": (58, None), "clone": (56, 220), "clone3": (435, 435)}
_ARCHITECTURES: Final = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7), "arm64": (1, 0xC00000B7)}

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # BPF: load a word, compare, return
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET = 0, 4  # in struct seccomp_data
_X32 = 0x40000000  # numbers from here on are x86_64's second set of calls


def system_call_filter(*, starts_processes: bool) -> bytes | None:
    """Return a BPF program in which denied calls fail with EPERM; None on a machine whose calls are not known here.

    Args:
        starts_processes: the program may start processes and threads; else that fails with EAGAIN, as at a limit.
    """
    if platform.machine() not in _ARCHITECTURES:
        return None
    column, architecture = _ARCHITECTURES[platform.machine()]
    denied: list[tuple[int | None, int]] = [(numbers[column], errno.EPERM) for numbers in _NUMBERS.values()]
    if not starts_processes:
        denied += [(numbers[column], errno.EAGAIN) for numbers in _STARTING.values()]
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),  # a call of another architecture, whose numbers mean other calls
        (_LOAD, 0, 0, _NUMBER_OFFSET),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
    ]
    for number, code in denied:
        if number is not None:
            program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | code)]
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
