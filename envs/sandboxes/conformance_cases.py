"""The cases of the conformance suite for providers of sandboxes. `envs.sandboxes.conformance` is the command.

Each of `CASES` makes sandboxes of its own, and says what the contract (`envs.sandboxes.contract`) demands if it is not
met. A case whose trait the provider does not have is skipped, with the reason.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import anyio
from anyio import to_thread

from envs.sandboxes.conformance_bench import (
    TIMEOUT_S,
    Bench,
    CaseSkipped,
    conformance_spec,
    expect,
    expect_alive,
    expect_raised,
    sh,
)
from envs.sandboxes.contract import (
    BEGUN_LABEL,
    RUN_LABEL,
    ExecResult,
    FailureKind,
    SandboxEndedError,
    SandboxFailure,
)

GONE_AFTER_S: Final = 30.0
"""Within this time after its client was killed during `create`, a sandbox that `remove` did not find has appeared."""
_TMP: Final = "/tmp"  # noqa: S108  (of a sandbox)
_COMMAND: Final = "envs.sandboxes.conformance"


async def create_twice(bench: Bench) -> None:
    """A repeated `create` returns the sandbox that is there."""
    first = await bench.open()
    await first.write({f"{_TMP}/mark": b"first"})
    second = await bench.open(first.name)
    expect(await second.read(f"{_TMP}/mark", 10) == b"first", "create with the same name returns the same")
    listed = [one.name for one in await bench.provider.list(bench.run_id)]
    expect(listed.count(first.name) == 1, "a repeated create makes no second one", listed)


async def exec_results(bench: Bench) -> None:
    """Codes, both outputs, folder, variables, and arguments that no shell reads."""
    sandbox = await bench.open(spec=conformance_spec(bench.image, env={"FROM_SPEC": "a"}))
    result = await sh(
        sandbox, 'echo "$FROM_SPEC$FROM_CALL"; pwd; echo low >&2; exit 3', cwd="/", env={"FROM_CALL": "b"}
    )
    expect((result.code, result.ended) == (3, "exited"), "an exit code is returned", result)
    expect((result.stdout, result.stderr) == (b"ab\n/\n", b"low\n"), "outputs are kept apart", result)
    result = await sandbox.exec(["echo", "$HOME; exit 1", "it's", ""], timeout_s=TIMEOUT_S)
    expect(result.stdout == b"$HOME; exit 1 it's \n", "arguments arrive unread", result)
    result = await sh(sandbox, "kill -TERM $$")
    expect(result.code == 143, "128 + 15 after SIGTERM", result)
    result = await sandbox.exec(["/no/such/program"], timeout_s=TIMEOUT_S)
    expect(result.code in (126, 127), "a program that does not exist: 127", result)


async def exec_deadline(bench: Bench) -> None:
    """At its deadline a command's whole session is killed."""
    sandbox = await bench.open()
    begun = time.monotonic()
    script = "trap '' TERM HUP INT; (trap '' TERM; sleep 71007) & echo begun; sleep 71007; sleep 71007"
    result = await sh(sandbox, script, timeout_s=1.5)
    expect((result.code, result.ended) == (137, "timeout"), "137 and `timeout` past the deadline", result)
    expect(result.stdout == b"begun\n", "what was written before is kept", result)
    took = time.monotonic() - begun
    expect(took < 15, "the deadline is kept", took)
    look = "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline 2>/dev/null; echo; done"
    left = [line for line in (await sh(sandbox, look)).stdout.split(b"\n") if line.startswith(b"sleep 71007")]
    expect(not left, "no process of the session is left", left)


async def exec_repeated(bench: Bench) -> None:
    """A repeated id starts nothing, and has the first one's result."""
    sandbox = await bench.open()
    results: list[ExecResult] = []

    async def call() -> None:
        script = "echo effect >>/tmp/effects; sleep 1; echo done; exit 5"
        results.append(await sh(sandbox, script, id="call-1"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        await anyio.sleep(0.2)
        tasks.start_soon(call)
    await call()
    effects = await sandbox.read(f"{_TMP}/effects", 100)
    expect(effects == b"effect\n", "an id has its effect once", effects)
    ends = [(result.code, result.stdout) for result in results]
    expect(ends == [(5, b"done\n")] * 3, "each repetition has the same result", ends)


async def output_bound(bench: Bench) -> None:
    """Of long output beginning and end remain; endless output harms nothing."""
    sandbox = await bench.open()
    script = "echo begin; head -c 3000000 /dev/zero | tr '\\0' x; echo; echo end"
    result = await sh(sandbox, script, max_bytes=4000)
    expect(result.truncated, "long output is marked as truncated", len(result.stdout))
    expect(len(result.stdout) <= 4400, "`max_bytes` holds, but for a line about what is left out", len(result.stdout))
    kept = result.stdout.startswith(b"begin\n") and result.stdout.endswith(b"end\n")
    expect(kept, "beginning and end remain", result.stdout[:20] + result.stdout[-20:])
    result = await sh(sandbox, "while :; do echo endless; done", timeout_s=2, max_bytes=4000)
    expect(result.ended == "timeout" and len(result.stdout) <= 4400, "endless output ends", result.ended)
    await expect_alive(sandbox, "endless output")


async def read_refuses(bench: Bench) -> None:
    """`read` returns regular files, and neither links nor what is larger than asked for."""
    sandbox = await bench.open()
    await sh(
        sandbox, "cd /tmp; echo text >file; ln -s file link; ln -s /proc/self/environ other; mkfifo pipe; mkdir dir"
    )
    expect(await sandbox.read(f"{_TMP}/file", 5) == b"text\n", "a regular file is read")
    await expect_raised([FileNotFoundError], sandbox.read(f"{_TMP}/none", 5), "a missing file is FileNotFoundError")
    for name, why in (("link", "a link"), ("other", "a link"), ("pipe", "a pipe"), ("dir", "a folder")):
        await expect_raised([ValueError], sandbox.read(f"{_TMP}/{name}", 100), f"{why} is ValueError")
    await expect_raised([ValueError], sandbox.read(f"{_TMP}/file", 4), "more than `max_bytes` is ValueError")


async def write_files(bench: Bench) -> None:
    """`write` makes folders, keeps permission bits, and overwrites."""
    sandbox = await bench.open()
    folder = await to_thread.run_sync(_make_tool)
    try:
        files: dict[str, bytes | Path] = {f"{_TMP}/a/b/c.bin": bytes(range(256)) * 300, f"{_TMP}/tool": folder / "tool"}
        await sandbox.write(files)
        await sandbox.write({f"{_TMP}/one.sh": folder / "tool" / "deep" / "run.sh"})
    finally:
        await to_thread.run_sync(shutil.rmtree, folder)
    content = await sandbox.read(f"{_TMP}/a/b/c.bin", 1 << 20)
    expect(content == bytes(range(256)) * 300, "content is unchanged", len(content))
    result = await sh(sandbox, f"{_TMP}/tool/deep/run.sh; {_TMP}/one.sh")
    expect(result.stdout == b"ran\nran\n", "a file of this machine keeps its permission bits", result)
    await sandbox.write({f"{_TMP}/a/b/c.bin": b"new"})
    expect(await sandbox.read(f"{_TMP}/a/b/c.bin", 10) == b"new", "a file is overwritten")


def _make_tool() -> Path:
    """Return a folder of this machine with a program in a folder."""
    folder = Path(tempfile.mkdtemp())
    path = folder / "tool" / "deep" / "run.sh"
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\necho ran\n")
    path.chmod(0o755)
    return folder


async def changed_files(bench: Bench) -> None:
    """Files that were added are listed, sorted, without those of the system."""
    sandbox = await bench.open()
    await sandbox.write({f"{_TMP}/new/b": b"x", f"{_TMP}/new/a": b"x"})
    changed = await sandbox.changed_files()
    paths = [one.path for one in changed]
    expect({f"{_TMP}/new/a", f"{_TMP}/new/b"} <= set(paths), "an added file is listed", paths[:20])
    expect(paths == sorted(paths), "the list is sorted", paths[:20])
    system = [path for path in paths if path.startswith(("/proc/", "/sys/", "/dev/"))]
    expect(not system, "nothing of the system is listed", system[:5])
    added = {one.kind for one in changed if one.path.startswith(f"{_TMP}/new/")}
    expect(added == {"added"}, "it is listed as added", added)


async def snapshots(bench: Bench) -> None:
    """A sandbox made from a snapshot has the files; `remove` takes the snapshot with it."""
    first = await bench.open()
    await first.write({f"{_TMP}/kept": b"kept"})
    try:
        image = await first.snapshot()
    except NotImplementedError as error:
        raise CaseSkipped("it has no snapshots") from error
    await first.write({f"{_TMP}/kept": b"later"})
    second = await bench.open(spec=conformance_spec(image))
    expect(await second.read(f"{_TMP}/kept", 10) == b"kept", "a snapshot's files are in a new sandbox")
    await bench.provider.remove(second.name)
    await bench.provider.remove(first.name)
    left = await bench.provider.list(bench.run_id)
    expect(not left, "a snapshot is removed with its sandbox", left)


async def fence(bench: Bench) -> None:
    """After another worker attached, the former one's calls are refused."""
    if not bench.provider.survives_worker:
        raise CaseSkipped("its sandboxes end with their worker")
    first = await bench.open()
    await sh(first, "echo kept >/tmp/kept", id="call-1")
    second = await bench.provider.attach(first.name, first.spec, 2)
    expect((await sh(second, "cat /tmp/kept")).stdout == b"kept\n", "another worker attaches to a living one")
    again = await sh(second, "echo twice >/tmp/kept", id="call-1")
    expect(again.code == 0, "the result of a call by the former worker can be asked for", again)
    expect(await second.read(f"{_TMP}/kept", 10) == b"kept\n", "a call of the former worker is not made again")
    error = await expect_raised([SandboxFailure], sh(first, "true"), "the former worker is refused")
    expect(getattr(error, "kind", "") == FailureKind.FENCED, "it is refused with kind `fenced`", error)


async def remove_twice(bench: Bench) -> None:
    """`remove` says whether a sandbox was there, and can be repeated."""
    sandbox = await bench.open()
    expect(await bench.provider.remove(sandbox.name) is True, "remove of a living one returns True")
    expect(await bench.provider.remove(sandbox.name) is False, "a second remove returns False")
    expect(await bench.provider.remove(bench.new_name()) is False, "one that never was: False")
    expect(await bench.find(sandbox.name) is None, "a removed one is not listed")
    error = await expect_raised([SandboxFailure], sh(sandbox, "true"), "a removed one takes no command")
    expect(getattr(error, "kind", "") == FailureKind.LOST, "its kind is `lost`", error)


async def list_by_label(bench: Bench) -> None:
    """`list` has the sandboxes of a run, with the time at which they began."""
    first, other = await bench.open(), bench.new_name()
    second_run = f"{bench.run_id}-b"
    labels = {RUN_LABEL: second_run, BEGUN_LABEL: "1700000000.5"}
    await bench.provider.create(other, conformance_spec(bench.image), labels)
    names = [one.name for one in await bench.provider.list(bench.run_id)]
    expect(names == [first.name], "a run's list has its own sandboxes alone", names)
    (listed,) = await bench.provider.list(second_run)
    expect((listed.run_id, listed.begun) == (second_run, 1700000000.5), "the labels are listed", listed)
    expect(listed.state == "running", "a living one is `running`", listed)
    everything = {one.name for one in await bench.provider.list()}
    expect({first.name, other} <= everything, "without a run, all are listed", len(everything))


async def max_life(bench: Bench) -> None:
    """A sandbox ends by itself after `max_life_s`."""
    sandbox = await bench.open(spec=conformance_spec(bench.image, max_life_s=3.0))
    await sh(sandbox, "sleep 100 & echo begun")
    await anyio.sleep(3)
    with anyio.move_on_after(TIMEOUT_S):
        while (listed := await bench.find(sandbox.name)) is not None and listed.state == "running":  # noqa: ASYNC110
            await anyio.sleep(0.5)
    expect(listed is None or listed.state == "ended", "it ends after `max_life_s`", listed)
    await expect_raised([SandboxFailure, SandboxEndedError], sh(sandbox, "true"), "it takes no command then")


async def unkillable(bench: Bench) -> None:
    """What runs in a sandbox cannot end it."""
    bench.need("processes")
    sandbox = await bench.open()
    await sh(sandbox, "kill -9 1; kill -TERM 1; kill -STOP 1; echo begun")
    await expect_alive(sandbox, "kill -9 1")
    await sh(sandbox, "kill -9 -1")
    await expect_alive(sandbox, "kill -9 -1")


async def limits(bench: Bench) -> None:
    """More processes, memory or disk than the spec has is the command's failure, or the sandbox's own end."""
    scripts = {
        "pids": ("i=0; while [ $i -lt 200 ]; do sleep 4 & i=$((i+1)); done; wait", 3.0),
        "memory": ("x=0123456789abcdef; while :; do x=$x$x; done", TIMEOUT_S),
        "disk": ("head -c 200000000 /dev/zero >/tmp/large || exit 1; sleep 90", 120.0),
    }
    if not bench.provider.isolates & scripts.keys():
        raise CaseSkipped("it has no limits")
    for trait, (script, timeout_s) in scripts.items():
        if trait not in bench.provider.isolates:
            continue
        sandbox = await bench.open()
        with suppress(SandboxEndedError):  # the limit is the whole sandbox's: it ends by what ran in it
            result = await sh(sandbox, script, timeout_s=timeout_s)
            expect(result.code != 0, f"more {trait} than the limit is a failure", result)
            in_time = trait == "pids" or result.ended == "exited"
            expect(in_time, f"{trait}: its limit is met before the command's deadline", result)
            await anyio.sleep(4 if trait == "pids" else 0)  # until then a command may fail
            await expect_alive(sandbox, f"more {trait} than its limit")
        await bench.provider.remove(sandbox.name)


async def own_world(bench: Bench) -> None:
    """Neither this process's variables nor, without a network, an interface is in reach."""
    bench.need("network")
    os.environ["PENSTOCK_CONFORMANCE_CANARY"] = "canary"
    sandbox = await bench.open()
    script = "cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'; cat /proc/net/dev"
    seen = (await sh(sandbox, script)).stdout.decode(errors="replace")
    expect("PENSTOCK_CONFORMANCE_CANARY" not in seen, "this process's variables cannot be read")
    devices = [line.split(":")[0].strip() for line in seen.splitlines() if ":" in line and "=" not in line]
    expect(set(devices) <= {"lo"}, "there is no interface but the loopback", devices)


async def client_killed(bench: Bench) -> None:
    """After a client's death during `create`, repeated `remove` by name leaves nothing, and nothing appears later."""
    names = [bench.new_name() for _ in range(4)]
    await to_thread.run_sync(_kill_creators, bench, names)
    begun = time.monotonic()
    quiet_since = begun
    while time.monotonic() - begun < GONE_AFTER_S and time.monotonic() - quiet_since < GONE_AFTER_S / 3:
        if any([await bench.provider.remove(name) for name in names]):
            quiet_since = time.monotonic()
        if not bench.provider.survives_worker:
            break
        await anyio.sleep(1)
    left = [one for one in await bench.provider.list(bench.run_id) if one.name in names]
    expect(not left, "nothing of a killed client is left", left)


def _kill_creators(bench: Bench, names: Sequence[str]) -> None:
    """Start clients that create sandboxes, and kill each of them at another moment."""
    options = bench.provider.options
    for number, name in enumerate(names):
        command = [sys.executable, "-m", _COMMAND, bench.reference, "--image", bench.image, "--create", name]
        command += ["--run-id", bench.run_id, "--address", options.address, "--runtime", options.runtime]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as client:  # noqa: S603  (this suite)
            assert client.stdout is not None  # noqa: S101  (a pipe)
            client.stdout.readline()  # it is about to create
            with suppress(subprocess.TimeoutExpired):
                client.wait(0.02 * 4**number)  # 0.02 s, 0.08 s, 0.32 s, 1.28 s
            client.kill()


CASES: Final[dict[str, Callable[[Bench], Awaitable[None]]]] = {
    case.__name__: case
    for case in (
        create_twice,
        exec_results,
        exec_deadline,
        exec_repeated,
        output_bound,
        read_refuses,
        write_files,
        changed_files,
        snapshots,
        fence,
        remove_twice,
        list_by_label,
        max_life,
        unkillable,
        limits,
        own_world,
        client_killed,
    )
}
"""Each case by its name."""
