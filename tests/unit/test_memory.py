"""How much memory there is: control groups of both versions, nested and in containers; and what swaps."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from stream.operator.memory import MachineMemory, ProcessMemory, read_reports
from tests.unit.test_bottleneck import SWAPPING, status
from workers.dashboard.templating import render
from workers.role import memory_watch
from workers.role.memory import PassMemory, pressure_files, read_memory
from workers.role.memory_watch import MemoryReader
from workers.role.run_metrics import run_metrics
from workers.runs.status import queue_report
from workers.terminal.progress import SupervisorState, format_line, render_table
from workers.terminal.queues import render_queues

GB = 1_000_000_000
MEMINFO = "MemTotal:       24000000 kB\nMemFree:         1000000 kB\nMemAvailable:   20000000 kB\n"


class Machine:
    """A folder with the files of `/proc` and `/sys` that are read."""

    def __init__(self, root: Path, cgroup: str = "0::/") -> None:
        self.root = root
        self.write("proc/meminfo", MEMINFO)
        self.write("proc/self/cgroup", cgroup)
        self.write("proc/vmstat", "pgfault 7\npswpin 0\npswpout 0\n")

    def write(self, name: str, text: object) -> None:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{str(text).rstrip()}\n")

    def group(self, folder: str, limit: object, used: int, caches: int = 0, version: int = 2) -> None:
        """Write the files of a control group."""
        first = ("memory.max", "memory.current", "") if version == 2 else ()
        limit_name, used_name, prefix = first or ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        self.write(f"{folder}/{limit_name}", limit)
        self.write(f"{folder}/{used_name}", used)
        self.write(f"{folder}/memory.stat", f"anon 1\n{prefix}inactive_file {caches}\n{prefix}active_file 0")

    def process(self, pid: int, parent: int, held_kb: int, swapped_kb: int = 0) -> None:
        self.write(f"proc/{pid}/stat", f"{pid} (a (b) c) S {parent} 1 1")
        self.write(
            f"proc/{pid}/status", f"Name:\tx\nRssAnon:\t{held_kb} kB\nRssFile:\t999 kB\nVmSwap:\t{swapped_kb} kB"
        )


def test_without_a_limit_the_machine_s_memory_counts(tmp_path):
    found = read_memory(Machine(tmp_path).root)
    assert (found.total, found.available, found.source) == (24_000_000 << 10, 20_000_000 << 10, "machine")


@pytest.mark.parametrize(
    ("version", "line", "top"),
    [
        (2, "0::/user.slice/run", "sys/fs/cgroup"),
        (2, "0::/user.slice/run", "sys/fs/cgroup/unified"),
        (1, "4:cpu,memory:/user.slice/run", "sys/fs/cgroup/memory"),
    ],
    ids=["version 2", "hybrid", "version 1"],
)
@pytest.mark.parametrize("limited", ["own", "parent"])
def test_the_smallest_limit_of_the_groups_above_a_process_counts(tmp_path, version, line, top, limited):
    machine = Machine(tmp_path, f"9:name=systemd:/\n{line}")
    limits = {"own": 6 * GB, "parent": "max" if version == 2 else 9223372036854771712}
    if limited == "parent":
        limits = {"own": 9 * GB, "parent": 6 * GB}
    machine.group(f"{top}/user.slice", limits["parent"], 3 * GB, 1 * GB, version)
    machine.group(f"{top}/user.slice/run", limits["own"], 3 * GB, 1 * GB, version)
    found = read_memory(tmp_path)
    assert (found.total, found.available, found.source) == (6 * GB, 4 * GB, "cgroup")


def test_a_container_whose_path_is_that_of_the_host_reads_its_own_root(tmp_path):
    machine = Machine(tmp_path, "4:memory:/docker/0123456789")
    machine.group("sys/fs/cgroup/memory", 2 * GB, 3 * GB, version=1)
    assert read_memory(tmp_path).available == 0


def test_a_limit_above_what_the_machine_has_changes_nothing(tmp_path):
    Machine(tmp_path, "0::/").group("sys/fs/cgroup", 999 * GB, GB)
    assert read_memory(tmp_path).source == "machine"


def test_a_limit_of_the_address_space_counts():
    code = "from workers.role.memory import read_memory; print(read_memory().source)"
    command = f"ulimit -v 3000000; exec {sys.executable} -c '{code}'"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "ulimit"


def limited_by_cgroup(limit: int, code: str) -> str:
    """Run Python in a control group of this machine with a limit; skip where that is not permitted."""
    top = next(
        (path for path in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")) if os.access(path, os.W_OK)), None
    )
    if top is None:
        pytest.skip("control groups cannot be made here")
    group = top / f"penstock-test-{os.getpid()}"
    file = "memory.limit_in_bytes" if top.name == "memory" else "memory.max"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")
    try:
        if not (group / file).exists():
            pytest.skip("the memory controller is not switched on here")
        (group / file).write_text(str(limit))
        start = f"echo $$ > {group}/cgroup.procs && exec {sys.executable} -c '{code}'"
        return subprocess.run(["bash", "-c", start], capture_output=True, text=True, check=True).stdout.strip()
    finally:
        group.rmdir()


def test_a_real_control_group_limits_a_process():
    code = "from workers.role.memory import read_memory as r; m = r(); print(m.source, m.total, m.available)"
    source, total, available = limited_by_cgroup(2 << 30, code).split()
    assert (source, int(total)) == ("cgroup", 2 << 30)
    assert 1.5 * (1 << 30) < int(available) <= 2 << 30


def test_pressure_of_the_container_and_of_the_machine_is_read(tmp_path):
    machine = Machine(tmp_path, "0::/run")
    machine.write("proc/pressure/memory", "some avg10=1.50 avg60=0.00 avg300=0.00 total=1\nfull avg10=0.00")
    machine.write("sys/fs/cgroup/run/memory.pressure", "some avg10=40.00 avg60=0.00 avg300=0.00 total=1")
    assert len(pressure_files(tmp_path)) == 2
    assert MemoryReader(tmp_path).read({}).pressure == 0.4


def test_a_kernel_without_pressure_reports_none(tmp_path):
    assert MemoryReader(Machine(tmp_path).root).read({}).pressure is None


def test_a_process_holds_what_its_descendants_do_unless_they_have_names(tmp_path):
    machine = Machine(tmp_path)
    for pid, parent, held in ((10, 1, 100), (11, 10, 200), (12, 11, 400), (13, 10, 800), (99, 1, 1600)):
        machine.process(pid, parent, held, swapped_kb=1)
    found = {each.name: each for each in MemoryReader(tmp_path).read({"supervisor": 10, "train-0": 11}).processes}
    assert found["train-0"] == ProcessMemory(name="train-0", bytes=602 << 10, swapped=2 << 10)
    assert found["supervisor"].bytes == 902 << 10


def test_a_machine_that_swaps_names_the_process_that_holds_most(tmp_path, monkeypatch):
    clock = iter((0.0, 2.0, 4.0))
    monkeypatch.setattr(memory_watch.time, "monotonic", lambda: next(clock))
    machine = Machine(tmp_path)
    machine.process(10, 1, 21_000_000_000 >> 10)
    machine.process(11, 1, 100_000)
    reader, processes = MemoryReader(tmp_path), {"rollout-0": 11, "train-0": 10}
    assert not reader.read(processes).is_short
    machine.write("proc/vmstat", f"pswpin 100\npswpout {(4 << 20) // os.sysconf('SC_PAGE_SIZE')}")
    swapping = reader.read(processes)
    assert swapping.problem == "train-0 holds 21.0 GB of 24.6 GB, the machine swaps"
    assert not reader.read(processes).is_short, "it swapped before, not since"


def test_pressure_without_swapping_is_a_problem_too():
    held = [ProcessMemory(name="engine-0", bytes=3 * GB)]
    found = MachineMemory(host="h", total=4 * GB, available=0, pressure=0.25, processes=held)
    assert found.problem == "engine-0 holds 3.0 GB of 4.0 GB, processes wait for memory 25% of the time"


def test_old_and_unreadable_reports_are_left_out():
    report = '{"host":"h","total":1,"available":1}'
    reports = {"new": f"99000 {report}", "old": f"1000 {report}", "odd": "99000 {", "odder": "x"}
    assert [each.host for each in read_reports(reports, 100_000.0)] == ["h"]


def test_tokens_that_fit_are_the_most_that_fit():
    passes = PassMemory(constant=100.0, per_token=2.0, per_token_and_length=0.5)
    for longest in (1, 8, 100):
        tokens = passes.tokens_in(1000.0, longest)
        assert passes.bytes_of(tokens, longest) <= 1000.0 < passes.bytes_of(tokens + 1, longest)
    assert passes.tokens_in(99.0, 8) == 0


def printed(text):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(text)
    return console.export_text()


PROBLEM = "limited by memory: train-0 holds 21.0 GB of 24.0 GB, the machine swaps"


def test_queues_name_what_limits_the_run_and_what_every_process_holds():
    text = printed(render_queues(queue_report("r", status(memory=SWAPPING))))
    assert PROBLEM in text
    assert "memory train-0 21.0 GB (1.0 GB swapped out), engine-0 2.0 GB   0 kB of 24.0 GB available" in text


def test_a_running_run_names_it_too_as_a_line_and_as_a_table():
    state = SupervisorState(run="r", phase="running", memory=PROBLEM.partition(": ")[2])
    assert PROBLEM in format_line(None, state)
    assert PROBLEM in printed(render_table(status(), state, {}))


def test_metrics_mark_the_role_that_holds_most():
    found = {family.name: family.samples for family in run_metrics(status(memory=SWAPPING))}
    assert {each.labels["role"]: each.value for each in found["penstock_memory_short"]} == {"engine": 0.0, "train": 1.0}
    assert {each.labels["role"]: each.value for each in found["penstock_memory_bytes"]}["train"] == 21 * GB
    calm = {"h": SWAPPING["h"].replace("5000000.0", "0.0")}
    found = {family.name: family.samples for family in run_metrics(status(memory=calm))}
    assert {each.value for each in found["penstock_memory_short"]} == {0.0}


def test_the_dashboard_names_it_above_a_table_of_processes():
    from workers.dashboard.live_view import StatusReading

    values = {
        "rows": [],
        "trainer": None,
        "known": {},
        "idle": {},
        "reading": StatusReading(status=status(memory=SWAPPING)),
    }
    page = render("parts/workers.html", values)
    assert "train-0 holds 21.0 GB of 24.0 GB, the machine swaps" in page
    assert page.index("train-0</th>") < page.index("engine-0</th>")
    assert "1.0 GB" in page
