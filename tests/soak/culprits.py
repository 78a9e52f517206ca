"""Runs with one culprit each: user code that kills or stops its process at some prompts, or a full disk.

    python -m tests.soak.culprits --runs 60 --seed S
    python -m tests.soak.culprits --runs 4 --seed S --only tool --parallel 2

Each run is a whole `penstock run` at default settings, except sizes, with the demo's model and tools. Of each is
checked that it ends by itself, that its last lines name the culprit, that only the culprit's rows are lost, and that a
second start ends at once. Prints one line per run, and the median time from the fault until the terminal names the
culprit; exits with 1 if a check failed. A full disk needs the right to mount one (root, Linux).

    reward       a reward function sends SIGKILL to its own process
    environment  `reset` of an environment does so
    tool         a tool computes a huge power, and never releases Python's interpreter lock
    disk-server  the disk of the private server is full for a while
    disk-run     the disk of the run's folder, without the server's
    disk-both    one disk with both
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.cases.disks import BALLAST, fill, small_disk
from tests.e2e.harness import Project, balanced
from workers.demo.base_models import write_base_model
from workers.demo.task import training_rows

KINDS = ("reward", "environment", "tool", "disk-server", "disk-run", "disk-both")
ROWS = {"reward": 24, "environment": 24, "tool": 16}
DISK_ROWS = 96
DISK_SIZE = "96m"
_LAST_LINES = 14
_SECOND_START_S = 60.0
_NAME_WITHIN_S = 60.0
"""A full disk that is not named within this time is emptied nevertheless, so that the run goes on."""
_CODE = """
import os, signal, time, zlib
from envs.builtin.calculator import Calculator

KIND, ROWS, MARK = {kind!r}, {rows!r}, {mark!r}

def strike(kind, number):
    if kind == KIND and number in ROWS:
        with open(MARK, "a") as file:
            file.write(f"{{time.time()}}\\n")
        if kind == "tool":
            9 ** int("9") ** 9
        os.kill(os.getpid(), signal.SIGKILL)

class Culprit(Calculator):
    def reset(self, number, **row):
        super().reset(**row)
        self.number = number
        strike("environment", number)

    def _record_call(self, *call):
        strike("tool", self.number)
        return super()._record_call(*call)

def culprit(completions, number, **columns):
    strike("reward", number[0])
    return [float(zlib.crc32(str(text).encode()) % 2) for text in completions]
"""


@dataclass(kw_only=True)
class Case:
    """One run."""

    number: int
    kind: str
    rows: list[int]
    """Of user code: the rows at which it strikes."""
    seed: int
    problems: list[str] = field(default_factory=list)
    named_s: float | None = None
    """From the first fault until the terminal named the culprit."""
    seconds: float = 0.0
    second_s: float = 0.0
    dead: int = 0

    @property
    def line(self) -> str:
        """The result in one line."""
        named = "not named" if self.named_s is None else f"named after {self.named_s:.1f} s"
        rows = f" rows {','.join(map(str, self.rows))}" if self.rows else ""
        verdict = "ok" if not self.problems else "FAILED: " + "; ".join(self.problems)
        return (
            f"{self.number:3} {self.kind}{rows}: {named}, {self.dead} dead letters, ended after {self.seconds:.0f} s, "
            f"second start {self.second_s:.1f} s: {verdict}"
        )


class Terminal:
    """What a run prints, line by line as it comes."""

    def __init__(self, process: subprocess.Popen[str], needles: Sequence[tuple[str, ...]]) -> None:
        self.lines: list[str] = []
        self.named_at: float | None = None
        """Unix time at which a line first had all texts of one of the needles."""
        self.named = threading.Event()
        self._process = process
        self._needles = needles
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def end(self, within_s: float) -> bool:
        """Wait until the process has ended; False if it did not, and was killed."""
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return False
        finally:
            self._thread.join()
        return True

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip("\n"))
            if not self.named.is_set() and self.names(line):
                self.named_at = time.time()
                self.named.set()

    def names(self, line: str) -> bool:
        """Whether a line names the culprit."""
        return any(all(text in line for text in needle) for needle in self._needles)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the runs; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", metavar="KIND", help=f"one of {', '.join(KINDS)}; or `disk`")
    parser.add_argument("--parallel", type=int, default=1, help="runs at the same time")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds after which a run counts as hanging")
    parser.add_argument("--keep", action="store_true", help="keep the folders of runs that failed a check")
    options = parser.parse_args(arguments)
    kinds = [kind for kind in KINDS if kind.startswith(options.only or "")]
    if not kinds:
        parser.error(f"--only {options.only}: the kinds are {', '.join(KINDS)}")
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    chance = random.Random(options.seed)
    cases = [draw(number, kinds[number % len(kinds)], chance) for number in range(options.runs)]

    def make(case: Case) -> Case:
        folder = Path(tempfile.mkdtemp(prefix=f"penstock-culprit-{case.number}-")).resolve()
        judge(case, folder, options.limit)
        print(f"{case.line}{f' ({folder})' if case.problems and options.keep else ''}", flush=True)
        if not (case.problems and options.keep):
            shutil.rmtree(folder)
        return case

    with ThreadPoolExecutor(options.parallel) as pool:
        list(pool.map(make, cases))
    report: dict[str, object] = {"seed": options.seed, "runs": len(cases)}
    report["failed"] = sum(bool(case.problems) for case in cases)
    for kind in kinds:
        times = [case.named_s for case in cases if case.kind == kind and case.named_s is not None]
        report[kind] = {"named": len(times), "median_s": round(statistics.median(times), 1) if times else None}
    every = [case.named_s for case in cases if case.named_s is not None]
    report["median_s"] = round(statistics.median(every), 1) if every else None
    print(json.dumps(report), flush=True)
    return 1 if report["failed"] else 0


def draw(number: int, kind: str, chance: random.Random) -> Case:
    """Draw the rows at which user code strikes; a hang costs a minute each time, so only one row does."""
    most = {"reward": 6, "environment": 6, "tool": 1}.get(kind, 0)
    rows = sorted(chance.sample(range(ROWS[kind]), chance.randint(1, most))) if most else []
    return Case(number=number, kind=kind, rows=rows, seed=chance.randrange(1 << 30))


def judge(case: Case, folder: Path, limit_s: float) -> None:
    """Make one run and check it."""
    project, began = write_project(case, folder), time.monotonic()
    source = "reward function culprit" if case.kind == "reward" else "environment culprit"
    with ExitStack() as disks:
        disk = mount(case, project.run_folder, disks)
        needles = [(f"prompts:0:{row}", source) for row in case.rows] or [("disk", str(disk))]
        terminal = start(project, needles, "run", str(project.write()), "--no-check")
        fault_at = None
        if disk is not None:
            _wait_for_ledger(project, terminal)
            fault_at = time.time()
            fill(disk)
            terminal.named.wait(_NAME_WITHIN_S)
            (disk / BALLAST).unlink()
        if not terminal.end(limit_s):
            case.problems.append(f"it did not end within {limit_s:g} s")
        case.seconds = time.monotonic() - began
        with suppress(FileNotFoundError):
            fault_at = fault_at or float((folder / "mark").read_text().split()[0])
        if terminal.named_at is not None and fault_at is not None:
            case.named_s = max(0.0, terminal.named_at - fault_at)
        _check(case, project, terminal)


def _check(case: Case, project: Project, terminal: Terminal) -> None:
    """Check the run's ends, its last lines, and a second start."""
    is_disk = not case.rows
    summary_file = project.run_folder / "summary.json"
    if not summary_file.exists():
        case.problems.append(f"no summary: {' | '.join(terminal.lines[-3:])}")
        return
    summary = json.loads(summary_file.read_text())
    rows = ROWS.get(case.kind, DISK_ROWS)
    if summary["fed"] != rows or summary["outstanding"] or not balanced(summary):
        why = (summary.get("failure") or {}).get("message", "")
        case.problems.append(f"{summary['fed']} fed, {summary['outstanding']} outstanding: {why[:200]}")
    listed = project.run("dead", "list", str(project.run_folder), "--json").stdout
    dead = {int(letter["prompt_id"].rpartition(":")[2]) for letter in json.loads(listed or "[]")}
    case.dead = len(dead)
    if dead - set(case.rows):
        case.problems.append(f"rows {sorted(dead - set(case.rows))} are lost, too")
    if case.kind in {"reward", "environment"} and dead != set(case.rows):
        case.problems.append(f"rows {sorted(set(case.rows) - dead)} did not become dead letters")
    if not terminal.named.is_set():
        case.problems.append("the terminal does not name the culprit")
    if not is_disk and dead and not any(map(terminal.names, terminal.lines[-_LAST_LINES:])):
        case.problems.append("the last lines do not name the culprit")
    began = time.monotonic()
    again = start(project, [("has finished",)], "run", str(project.run_folder))
    ended = again.end(_SECOND_START_S)
    case.second_s = time.monotonic() - began
    if not ended or not again.named.is_set():
        case.problems.append(f"the second start: {' | '.join(again.lines[-3:])}")


def write_project(case: Case, folder: Path) -> Project:
    """Write prompts, model, user code and settings: the defaults, except sizes."""
    write_base_model("calculator", folder / "model")
    project = Project(folder, folder / "model")
    rows = ROWS.get(case.kind, DISK_ROWS)
    lines = [json.dumps(row | {"number": i}) for i, row in enumerate(training_rows(rows, case.seed))]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    code = _CODE.format(kind=case.kind, rows=set(case.rows), mark=str(folder / "mark"))
    (folder / "culprit.py").write_text(code)
    del project.table["queue"]
    project.table["run"]["seed"] = case.seed
    project.table["environments"] = {"culprit": f"{folder / 'culprit.py'}:Culprit"}
    project.table["rewards"] = [{"ref": f"{folder / 'culprit.py'}:culprit"}]
    project.table["rollout"] = {"group_size": 4, "max_turns": 4, "max_tokens_per_turn": 40, "max_tokens": 256}
    project.table["engine"] = {"max_model_len": 384}
    project.table["train"] = {"batch_size": 4, "learning_rate": 1e-4}
    return project


def start(project: Project, needles: Sequence[tuple[str, ...]], *arguments: str) -> Terminal:
    """Start a command whose output is one stream, as in a terminal."""
    process = subprocess.Popen(
        project.command(*arguments), cwd=project.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return Terminal(process, needles)


def mount(case: Case, run_folder: Path, disks: ExitStack) -> Path | None:
    """Mount small disks in memory for the run; returns the folder on the one that is to be full, if any is."""
    if not case.kind.startswith("disk"):
        return None
    server = run_folder / "redis"
    folders = {"disk-server": [server], "disk-run": [run_folder, server], "disk-both": [run_folder]}[case.kind]
    for folder in folders:
        disks.enter_context(small_disk(folder, DISK_SIZE))
    return folders[0]


def _wait_for_ledger(project: Project, terminal: Terminal) -> None:
    """Wait until a group was trained, or the run ended."""
    ledger = project.run_folder / "ledger.jsonl"
    while not (ledger.exists() and ledger.stat().st_size) and terminal.is_running:
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
