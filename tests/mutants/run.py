"""Apply small faults to a copy of the tree, one at a time, and see that the tests named for each of them fail.

    python tests/mutants/run.py                          # all of them, about 20 minutes on one core
    python tests/mutants/run.py --room stream --jobs 2   # one file of this folder
    python tests/mutants/run.py --name settle_without_lease

Each `tests/mutants/ROOM.toml` holds `[[mutant]]` tables:

    name     unique over all rooms
    file     of the product, from the root of the repository
    before   text that stands in it exactly once
    after    the fault
    why      what would go wrong
    tests    files or node ids of pytest; one failing test is enough

Verdicts: `caught`; `SURVIVED` (the tests pass with the fault: a test is missing); `does not apply` (`before` does not
stand in the file once); `fails unchanged` (the tests fail without the fault as well); `broken` (nothing was tested: the
tests cannot be collected, or ran out of time). The exit code is 0 if all are caught, else 1.

The checkout is never changed: every job works in a copy of its own.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[2]
ROOMS = Path(__file__).resolve().parent
TIME_LIMIT_S = 300
CAUGHT, SURVIVED = "caught", "SURVIVED"
_PASSED, _FAILED = 0, 1
"""Exit codes of pytest; all others mean that nothing was tested."""


@dataclass(frozen=True)
class Mutant:
    """One fault, and the tests that must notice it."""

    room: str
    name: str
    file: str
    before: str
    after: str
    why: str
    tests: tuple[str, ...]

    def problem(self, root: Path = ROOT) -> str:
        """Why it cannot be used on this tree; empty if it can."""
        path = root / self.file
        if not path.is_file():
            return f"there is no file {self.file}"
        result = path.read_text().count(self.before)
        if result != 1:
            return f"`before` stands {result} times in {self.file}"
        if self.before == self.after:
            return "`after` equals `before`"
        missing = [test for test in self.tests if not (root / test.partition("::")[0]).exists()]
        if missing or not self.tests:
            return f"there is no test {missing[0]}" if missing else "it names no tests"
        return ""


@dataclass(frozen=True)
class Result:
    """What became of one mutant."""

    room: str
    name: str
    verdict: str
    seconds: float
    by: str
    """The test that failed, or what is wrong."""


def load(folder: Path = ROOMS) -> list[Mutant]:
    """All mutants, in the order of the files and in them."""
    results = []
    for file in sorted(folder.glob("*.toml")):
        for table in tomllib.loads(file.read_text()).get("mutant", []):
            results.append(Mutant(room=file.stem, **table | {"tests": tuple(table["tests"])}))
    return results


class Copies:
    """Copies of the tree, one for each job."""

    def __init__(self, folder: Path, count: int) -> None:
        self._free: SimpleQueue[Path] = SimpleQueue()
        self._changes = 0
        for number in range(count):
            self._free.put(_copy(folder / str(number)))

    @contextmanager
    def one(self) -> Iterator[Path]:
        """A copy for as long as the block lasts."""
        copy = self._free.get()
        try:
            yield copy
        finally:
            self._free.put(copy)

    @contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[Path]:
        """A copy with the fault in it."""
        with self.one() as copy:
            path = copy / mutant.file
            text = path.read_text()
            try:
                self._write(path, text.replace(mutant.before, mutant.after))
                yield copy
            finally:
                self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        """Write a file under a time stamp of its own: Python compiles a module again if its time or size changed."""
        path.write_text(text)
        self._changes += 1
        stamp = time.time() + self._changes
        os.utime(path, (stamp, stamp))


def _copy(target: Path) -> Path:
    """What git knows of, and what it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source = ROOT / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    return target


def run_tests(copy: Path, tests: Sequence[str], *, stop_at_first: bool) -> tuple[int, list[str], str]:
    """pytest's exit code (None past the time limit), the tests that failed, and the end of what it said."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--no-header", "-p", "no:cacheprovider", "--tb=no"]
    environment = {**os.environ, "PYTHONPATH": str(copy), "HYPOTHESIS_PROFILE": "ci", "PYTHONUNBUFFERED": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    process = subprocess.Popen(
        [*command, *(["-x"] if stop_at_first else []), *tests],
        cwd=copy,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    code: int | None = None
    try:
        output, _ = process.communicate(timeout=TIME_LIMIT_S * (1 if stop_at_first else 10))
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whatever the tests left behind
        process.wait()
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    if code is None and failed:  # a fault may keep pytest from ending after its summary, such as a thread that hangs
        code = _FAILED
    return (-1, [], f"no end within {TIME_LIMIT_S} s") if code is None else (code, failed, output[-600:])


def check_unchanged(copies: Copies, mutants: Sequence[Mutant]) -> dict[str, str]:
    """Run the tests of all mutants once on the unchanged tree; returns those that fail, each with a reason."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    with copies.one() as copy:
        code, failed, output = run_tests(copy, tests, stop_at_first=False)
    if code == _PASSED:
        return {}
    if code != _FAILED:
        return dict.fromkeys(tests, output)
    return {
        test: name for name in failed for test in tests if name == test or name.startswith((f"{test}::", f"{test}/"))
    }


def judge(copies: Copies, mutant: Mutant, failing: dict[str, str]) -> Result:
    """Apply one mutant and run its tests."""
    began = time.monotonic()

    def result(verdict: str, by: str) -> Result:
        return Result(mutant.room, mutant.name, verdict, round(time.monotonic() - began, 1), by)

    if problem := mutant.problem():
        return result("does not apply", problem)
    for test in mutant.tests:
        if test in failing:
            return result("fails unchanged", failing[test])
    with copies.mutated(mutant) as copy:
        code, failed, output = run_tests(copy, mutant.tests, stop_at_first=True)
    if code == _FAILED:
        return result(CAUGHT, failed[0] if failed else output)
    if code == _PASSED:
        return result(SURVIVED, mutant.why)
    return result("broken", output)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests of each mutant, print each verdict, and return whether all were caught."""
    parser = argparse.ArgumentParser(description="Apply small faults, one at a time, and see that tests notice them.")
    parser.add_argument(
        "--room", action="append", default=[], help="a file of this folder without its .toml; repeatable"
    )
    parser.add_argument("--name", action="append", default=[], help="of a mutant; repeatable")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at the same time")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    options = parser.parse_args(arguments)
    mutants = [
        mutant
        for mutant in load()
        if (not options.room or mutant.room in options.room) and (not options.name or mutant.name in options.name)
    ]
    if options.list:
        for mutant in mutants:
            print(f"{mutant.room:<18} {mutant.name:<48} {mutant.why}")
        return 0
    if not mutants:
        parser.error("no mutant has that room and name")
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(options.jobs) as threads:
        copies = Copies(Path(folder), options.jobs)
        usable = [mutant for mutant in mutants if not mutant.problem()]
        print(f"{len(mutants)} mutants; first the tests of {len(usable)} of them, unchanged", flush=True)
        failing = check_unchanged(copies, usable) if usable else {}
        results = []
        for result in threads.map(lambda mutant: judge(copies, mutant, failing), mutants):
            results.append(result)
            print(f"{result.verdict:<16} {result.room}/{result.name} ({result.seconds:g} s) {result.by}", flush=True)
    counts = {
        verdict: sum(each.verdict == verdict for each in results) for verdict in {each.verdict for each in results}
    }
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n")
    return 0 if all(each.verdict == CAUGHT for each in results) else 1


if __name__ == "__main__":
    sys.exit(main())
