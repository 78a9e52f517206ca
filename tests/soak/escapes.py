"""Give answers that were written to escape or to break to everything that judges or runs them.

    python -m tests.soak.escapes --answers 1000 --seed S --json

A finding is: a file outside of the sandboxes that was made, changed or removed; a secret of the worker in what a reward
or a tool says; an answer that is not measured; an answer without the solution that is paid like one with it. The exit
code is 1 if there is any. Needs a machine that makes sandboxes, since some of the answers would otherwise harm it.
"""

import argparse
import hashlib
import importlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio

from envs.sandboxes.bubblewrap import sandbox_problem
from tests.soak.escape_answers import Answers, Attack
from tests.soak.escape_targets import DATASETS, NAMES, Judged, Target, is_paid, open_targets, unmeasured
from workers.role import log_setup as logs

_AT_ONCE = 4
"""Answers that each target gets at the same time."""
_FINDINGS_TOLD = 40
_SEARCHED = ("/tmp", "/dev/shm", "/usr", "/etc", "/", "/dev", "/var/tmp", "/run")
"""Where payloads would leave their files, besides the canary's own folders."""


class Canary:
    """Folders, a variable and a token by which an escape is found."""

    def __init__(self, root: Path) -> None:
        self.token = f"canary-{os.urandom(6).hex()}"
        self.secret, self.variable = f"secret-{os.urandom(12).hex()}", "PENSTOCK_CANARY"
        self.home, self.folder = root / "home", root / "run"
        for folder in (self.home, self.folder):
            (folder / "deeper").mkdir(parents=True)
            for name in ("secret", "deeper/secret"):
                (folder / name).write_text(self.secret)
        self._before = self._tree()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Make the folders the home and the working folder, and the secret a variable of this process."""
        kept, cwd = dict(os.environ), Path.cwd()
        os.environ |= {self.variable: self.secret, "HOME": str(self.home), "TMPDIR": str(self.folder.parent / "tmp")}
        Path(os.environ["TMPDIR"]).mkdir(exist_ok=True)
        os.chdir(self.folder)
        try:
            yield
        finally:
            os.chdir(cwd)
            os.environ.clear()
            os.environ.update(kept)

    def changes(self) -> list[str]:
        """Return the files that were made, changed or removed."""
        after = self._tree()
        changed = [path for path in sorted({*self._before, *after}) if self._before.get(path) != after.get(path)]
        places = [Path(place) for place in _SEARCHED if Path(place).is_dir()]
        found = [str(path) for place in places for path in place.iterdir() if path.name.startswith(self.token)]
        return changed + found

    def leaks(self, text: str) -> bool:
        """Return whether a text holds the secret."""
        return self.secret in text

    def _tree(self) -> dict[str, str]:
        tree = {}
        for path in (each for folder in (self.home, self.folder) for each in folder.rglob("*")):
            content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            tree[str(path)] = f"{path.lstat().st_mode} {content}"
        return tree


class Escapes:
    """Gives answers to targets and counts what became of them."""

    def __init__(self, canary: Canary, seed: int) -> None:
        self.canary = canary
        self.outcomes: dict[str, Counter[str]] = {}
        self.findings: list[dict[str, str]] = []
        self.counted: Counter[str] = Counter()
        self._seed = seed

    async def run(self, answers: int, targets: dict[str, Target]) -> None:
        """Give each target this many answers."""
        async with anyio.create_task_group() as tasks:
            for name, target in targets.items():
                canary = self.canary
                made = Answers(self._seed, canary.token, str(canary.folder), str(canary.home), canary.variable)
                attacks = iter([made.next() for _ in range(answers)])
                for _ in range(_AT_ONCE):
                    tasks.start_soon(self._give, name, target, attacks)

    async def _give(self, name: str, target: Target, attacks: Iterator[Attack]) -> None:
        for attack in attacks:
            judged = await target(attack)
            self._note(name, attack, judged)

    def _note(self, name: str, attack: Attack, judged: Judged) -> None:
        counts = self.outcomes.setdefault(name, Counter())
        missing = unmeasured(judged)
        reason = next((f"measured, {reward.reason}" for reward in judged.rewards if reward.reason), "measured")
        counts["unmeasured" if missing else reason if judged.rewards else "replied"] += 1
        for reward in missing:
            self._find("unmeasured", name, attack, f"{reward.reason}: {reward.detail}")
        if self.canary.leaks(judged.reply):
            self._find("leaked", name, attack, judged.reply)
        if is_paid(judged):
            self._find("paid", name, attack, judged.reply)

    def _find(self, what: str, target: str, attack: Attack, detail: str) -> None:
        self.counted[f"{what} {target}"] += 1
        if self.counted[f"{what} {target}"] * len(self.counted) <= _FINDINGS_TOLD:
            told = {"what": what, "target": target, "kind": attack.kind, "detail": detail[:300]}
            self.findings.append({**told, "answer": ascii(attack.text[:200]), "characters": str(len(attack.text))})


def attack(answers: int, seed: int, names: Sequence[str] = NAMES) -> dict[str, Any]:
    """Give each of the targets this many answers; returns the report."""
    if problem := sandbox_problem():
        raise SystemExit(f"this needs sandboxes, since some answers harm the machine: {problem}")
    if not set(names).isdisjoint(DATASETS):
        importlib.import_module("reasoning_gym")  # before the home is watched: matplotlib makes a cache there
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="penstock-escapes-") as root:
        canary = Canary(Path(root))
        escapes = Escapes(canary, seed)

        async def main() -> None:
            async with open_targets(frozenset(names)) as targets:
                await escapes.run(answers, targets)

        with canary.watched():
            anyio.run(main)
        changes = canary.changes()
    return {
        "answers": answers,
        "seed": seed,
        "targets": len(names),
        "changed_files": changes,
        "counted": dict(sorted(escapes.counted.items())),
        "seconds": round(time.monotonic() - began, 1),
        "outcomes": {name: dict(sorted(counts.items())) for name, counts in sorted(escapes.outcomes.items())},
        "findings": escapes.findings,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, count, print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--answers", type=int, default=1000, help="for each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--targets", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args(arguments)
    logs.configure_logging("escapes", level="critical")
    report = attack(options.answers, options.seed, options.targets)
    print(json.dumps(report, indent=None if options.json else 4), flush=True)
    return 1 if report["counted"] or report["changed_files"] else 0


if __name__ == "__main__":
    sys.exit(main())
