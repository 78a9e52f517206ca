"""Run the tests that are too long for `make test`, with random examples whose seed is printed and kept.

    python tests/nightly.py                    # all of them: hours (`make test-nightly`)
    python tests/nightly.py --seed 123456      # repeat the examples of an earlier night
    python tests/nightly.py --slice today      # today's slice of the tests below five minutes, as in CI
    python tests/nightly.py --slice 7/30       # one given slice

A whole night runs all tests marked `full`, then the property tests with more examples than `make test` uses, then what
`make test` runs in random order, which shows what one test leaves behind for another, at last on the newest versions of
all dependencies (`tests/newest.py`) and of the agent programs (`tests/agents/newest.py`). Each run adds a line to
`.nightly/runs.jsonl`: the command that repeats it (with its seed), commit, exit codes, failed tests.
"""

import argparse
import atexit
import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / ".nightly" / "runs.jsonl"
SLICES = 30
"""Number of slices of the tests marked `full`: CI runs each test below five minutes once in this many days."""
_NOTHING_COLLECTED = 5
"""pytest's exit code for an empty slice."""
_SHORT = "not full and not gpu and not vllm and not agents and not compose and not sandboxes"
"""What `make test` runs."""
_REAL_PROCESSES = {"PENSTOCK_TEST_REAL_PROCESSES": "1"}
"""Roles are started by new interpreters; `make test` forks them, which is sooner."""


def slice_of(text: str, today: date) -> tuple[int, int]:
    """Parse a slice into (number, count): `today` is the day's own, `K/N` the K-th of N, counted from 0."""
    if text == "today":
        return today.toordinal() % SLICES, SLICES
    result = re.fullmatch(r"(\d+)/(\d+)", text)
    if result is None or int(result[1]) >= int(result[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no slice; write `today`, or K/N with K from 0 to N - 1")
    return int(result[1]), int(result[2])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests, and record the command that repeats them; returns pytest's exit code."""
    parser = argparse.ArgumentParser(description="Run the long tests, with random examples whose seed is kept.")
    parser.add_argument(
        "--seed", type=int, default=secrets.randbelow(2**32), help="of the random examples, and of the random order"
    )
    parser.add_argument("--slice", default="", help="`today` or K/N: a share of the tests marked `full`, nothing else")
    options, more = parser.parse_known_args(arguments)
    again = f"python tests/nightly.py --seed {options.seed}"
    parts = [
        (["-m", "full"], _REAL_PROCESSES),
        (["tests/property"], _REAL_PROCESSES),
        (_in_random_order(options.seed), {}),
    ]
    if options.slice:
        number, count = slice_of(options.slice, datetime.now(UTC).date())
        again += f" --slice {number}/{count}"
        parts = [(["-m", "full", "--slice", f"{number}/{count}"], _REAL_PROCESSES)]
    print(f"to run the same again: {again}", flush=True)
    if not options.slice:
        _start_engine()
    began = datetime.now(UTC)
    codes, failed = [], []
    for part, variables in parts:
        code, result = _run([*part, "--hypothesis-seed", str(options.seed), *more], variables)
        codes.append(0 if code == _NOTHING_COLLECTED else code)
        failed += result
    if not options.slice:
        for script in ("tests/newest.py", "tests/agents/newest.py"):
            codes.append(subprocess.run([sys.executable, script], cwd=ROOT, check=False).returncode)
    seconds = round((datetime.now(UTC) - began).total_seconds())
    record = {"began": began.isoformat(timespec="seconds"), "seconds": seconds, "again": again, "commit": _commit()}
    _keep(record | {"codes": codes, "failed": failed})
    print(f"{len(failed)} failed in {seconds} s; to run the same again: {again}", flush=True)
    return max(codes)


def _start_engine() -> None:
    """Start an engine for the tests of sandboxes, until this process ends; they are skipped if that fails."""
    script = ROOT / "tests" / "sandboxes" / "engine.sh"
    if subprocess.run(["sh", script, "start"], check=False).returncode:
        return
    atexit.register(subprocess.run, ["sh", script, "stop"], check=False)
    lines = subprocess.run(["sh", script, "env"], capture_output=True, text=True, check=True).stdout
    if address := lines.strip().partition("DOCKER_HOST=")[2]:
        os.environ["DOCKER_HOST"] = address


def _in_random_order(seed: int) -> list[str]:
    """Return pytest's arguments for what `make test` runs, without the property tests, in an order of this seed."""
    selected = ["-m", _SHORT, "--ignore", "tests/property", "-n", "4", "--dist", "worksteal"]
    return [*selected, "--random-order-bucket", "global", "--random-order-seed", str(seed)]


def _run(arguments: Sequence[str], variables: Mapping[str, str]) -> tuple[int, list[str]]:
    """Run pytest with these variables set, and pass its output on; returns its exit code and the failed tests."""
    failed = []
    command = [sys.executable, "-m", "pytest", "-rfE", *arguments]
    environment = {**os.environ, "HYPOTHESIS_PROFILE": "nightly", **variables}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if result := re.match(r"(?:FAILED|ERROR) (\S+)", line):
                failed.append(result[1])
    return process.returncode, failed


def _commit() -> str:
    result = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout.strip()


def _keep(record: dict[str, object]) -> None:
    RECORD.parent.mkdir(exist_ok=True)
    with RECORD.open("a") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    sys.exit(main())
