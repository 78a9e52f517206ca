"""Damage files of a stopped run's folder at random, resume the run, and check that nothing was lost.

    python -m tests.soak.damaged_folder --faults 500 --seed S

A fault flips a byte, truncates or removes a file, fills its end with zeros, or puts an older version in its place. Then
the run either ends as it would have without the fault, or is refused with a message that names the place, and its
records are as the fault left them. Prints one line per failure and a summary; exits with 1 if there was a failure.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
import msgspec

from stream.errors import PenstockError
from stream.operator.control import stop
from tests.preload.fixtures import is_used, start_fork_server
from tests.soak.audit import acquitted, audit
from tests.soak.ends import intended
from tests.soak.project import commands, write_project
from tests.soak.recount import recount
from tests.soak.run import connected, wait_ended
from workers.launch.start import raise_for_failure, supervise
from workers.settings import Settings
from workers.settings.toml_file import load_settings

KINDS = ("flip", "truncate", "remove", "older", "zero")
RECORDS = ("ledger.jsonl", "checkpoints", "metrics.jsonl", "groups")
"""What a refused run must not have changed."""


@dataclass
class Fault:
    """One fault in one file."""

    kind: str
    file: Path
    at: float
    """Where in the file, as a fraction of its length."""

    def apply(self, folder: Path, older: Path) -> bool:
        """Damage the file; returns False if that changes nothing."""
        path = folder / self.file
        content = path.read_bytes()
        place = int(self.at * len(content))
        match self.kind:
            case "flip" if content:
                path.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
            case "truncate" if content:
                path.write_bytes(content[:place])
            case "zero" if content.rstrip(b"\0")[place:]:
                path.write_bytes(content[:place] + bytes(len(content) - place))
            case "remove":
                path.unlink()
            case "older" if (older / self.file).is_file() and (older / self.file).read_bytes() != content:
                shutil.copy(older / self.file, path)
            case _:
                return False
        return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Make a run, then apply the faults one by one; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--groups", type=int, default=100, help="prompts of the run")
    parser.add_argument("--together", type=int, default=1, help="how many files are damaged at once")
    parser.add_argument("--only", nargs="+", default=[""], help="damage only files whose path contains one of these")
    parser.add_argument("--every-file", action="store_true", help="flip one byte in every file instead")
    options = parser.parse_args(arguments)
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    if is_used():  # trainer and engine import torch, which takes longer than the rest of a short run
        sys.executable = start_fork_server()
    home = Path(tempfile.mkdtemp(prefix="penstock-faults-")).resolve()
    settings = write_project(home, options.groups, options.seed)
    folder, older, newer = settings.folder, home / "older", home / "newer"
    for stage, fraction in ((older, 0.3), (newer, 0.6)):
        resume(settings, int(fraction * options.groups))
        shutil.copytree(folder, stage, symlinks=True)
    chance, results = random.Random(options.seed), Counter[str]()
    files = sorted(path.relative_to(newer) for path in newer.rglob("*") if path.is_file())
    files = [file for file in files if any(word in str(file) for word in options.only)]
    trials = [[Fault("flip", file, chance.random())] for file in files if (newer / file).stat().st_size]
    if not options.every_file:
        trials = [
            [Fault(chance.choice(KINDS), file, chance.random()) for file in chance.sample(files, options.together)]
            for _ in range(3 * options.faults)
        ]
    began = time.monotonic()
    for faults in trials:
        if not options.every_file and results.total() == options.faults:
            break
        shutil.rmtree(folder)
        shutil.copytree(newer, folder, symlinks=True)
        if all(fault.apply(folder, older) for fault in faults):
            result = judge(settings, folder, options.groups)
            results[result.partition(":")[0]] += 1
            if result.startswith("FAILED"):
                shutil.copytree(folder, home / f"failed-{results['FAILED']}", symlinks=True)
                print(f"{result}: {faults}", flush=True)
            elif result.startswith("refused"):
                print(f"{result[:300]}: {faults}", flush=True)
    report = {"seed": options.seed, "seconds": round(time.monotonic() - began, 1), **results}
    print(json.dumps(report), flush=True)
    if not results["FAILED"]:
        shutil.rmtree(home)
    return 1 if results["FAILED"] else 0


def judge(settings: Settings, folder: Path, groups: int) -> str:
    """Resume the run; returns `resumed`, `refused: WHY`, or `FAILED: WHY`."""
    before = _records(folder)
    try:
        failure = resume(settings)
    except (PenstockError, OSError) as error:
        failure = error if isinstance(error, PenstockError) else RuntimeError(f"{type(error).__name__}: {error}")
    if failure is not None:
        text = " ".join(str(failure).split())
        if str(folder) not in text and folder.name not in text:
            return f"FAILED: the message names no place: {text}"
        if _records(folder) != before:
            changed = before.keys() | _records(folder).keys()
            return f"FAILED: it was refused after {len(changed)} files were changed: {text}"
        return f"refused: {text}"
    verdict, second = audit(folder, groups), recount(folder, groups)
    ends = Counter(intended(row).partition(":")[0] for row in range(groups))
    found = {"trained": verdict.trained, "dropped": sum(verdict.dropped.values()), "dead": verdict.dead}
    if found == ends:  # a dead letter of a server that is rebuilt is one of the stage `prompts`, whatever it was
        verdict = msgspec.structs.replace(verdict, astray=0)
    if not acquitted(verdict, groups) or second["lost"] or second["twice"]:
        return f"FAILED: {verdict} {second}"
    return "resumed"


def resume(settings: Settings, stop_at: int | None = None) -> PenstockError | None:
    """Run to the end, or until `stop_at` prompts have ended; returns why the run failed.

    Raises:
        PenstockError: the run was refused before it began.
    """
    if stop_at is not None:
        threading.Thread(target=anyio.run, args=(_stop_at, settings.folder, stop_at), daemon=True).start()
    stored = settings.folder / "run.toml"
    current = load_settings(stored) if stored.exists() else settings
    with commands(current):
        result = supervise(current, quiet=True)
    try:
        if stop_at is None:
            raise_for_failure(result, current)
    except PenstockError as error:
        return error
    if stop_at is None and result.outcome.interrupted:
        return PenstockError(f"{settings.folder}: the run was interrupted")
    return result.outcome.failure


async def _stop_at(folder: Path, prompts: int) -> None:
    async with connected(folder) as connection:
        await wait_ended(connection, prompts)
        await stop(connection, "damage")


def _records(folder: Path) -> dict[str, str]:
    paths = [path for name in RECORDS for path in (folder / name, *(folder / name).rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


if __name__ == "__main__":
    sys.exit(main())
