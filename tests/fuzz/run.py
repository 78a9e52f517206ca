"""Corrupt records in many ways, and check that decoders and workers handle them.

    python tests/fuzz/run.py --records 1000000 --seed S --json

A record with altered bytes must be refused; one with a recomputed checksum must be refused too, or be a record that a
worker can process. Any other result is printed with the bytes, and the exit code is 1.
"""

import argparse
import base64
import json
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import anyio

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from stream.codec import decode, encode
from stream.errors import NewerSchemaError, RecordError
from stream.records import SCHEMA, Group, Prompt
from tests.fuzz.junk import BYTES, HEADER, TREES, seal, spoil_tree
from tests.fuzz.samples import Samples
from tests.fuzz.workers import Workers, workers
from workers.role import log_setup as logs

_POOL = 200
"""Records of each kind that are corrupted before new ones are made."""
_FAILURES_TOLD = 20


class Fuzz:
    """Counts the results by kind of corruption."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.outcomes: dict[str, Counter[str]] = {}
        self.failures: list[dict[str, str]] = []
        self._pool: list[tuple[str, bytes]] = []

    async def run(self, records: int, crew: Workers) -> None:
        """Corrupt this many records, with each way in turn."""
        ways = [(way.__name__, way, False) for way in BYTES] + [
            (way.__name__, way, True) for way in (*BYTES[:-1], *TREES)
        ]
        for number in range(records):
            if number % (_POOL * len(ways)) == 0:
                await self._refill(crew)
            name, way, sealed = ways[number % len(ways)]
            (prompt_id, payload), (_, other) = self.chance.choice(self._pool), self.chance.choice(self._pool)
            if not sealed:
                altered = way(payload, other, self.chance)
                if altered not in (payload, other):
                    self._note(name, altered, self._is_refused(altered))
            else:
                body = payload[HEADER:]
                spoilt = (
                    spoil_tree(body, way, self.chance) if way in TREES else way(payload, other, self.chance)[HEADER:]
                )
                newer = self.chance.random() < 0.01
                await self._give(f"sealed {name}", seal(spoilt, SCHEMA + newer), prompt_id, crew)

    async def _refill(self, crew: Workers) -> None:
        """Make new records; unaltered, each must be accepted."""
        samples = Samples(self.chance)
        made = [record for _ in range(_POOL) for record in (samples.prompt(), samples.group())]
        self._pool = []
        for record in made:
            prompt_id = record.id if isinstance(record, Prompt) else record.prompt.id
            self._pool.append((prompt_id, encode(record)))
            await self._give("as they were", self._pool[-1][1], prompt_id, crew)

    def _is_refused(self, payload: bytes) -> str:
        for kind in (Prompt, Group):
            try:
                decode(payload, kind)
            except NewerSchemaError:
                return "taken for a newer record"
            except RecordError:
                continue
            except BaseException:  # any exception is a finding
                return f"raised: {traceback.format_exc(limit=-3)}"
            return f"taken for a {kind.__name__}"
        return "refused"

    async def _give(self, name: str, payload: bytes, prompt_id: str, crew: Workers) -> None:
        try:
            result = await crew.take(payload, prompt_id)
        except Exception:  # any exception is a finding
            self._note(name, payload, f"raised: {traceback.format_exc(limit=-4)}")
            return
        for worker, outcome in result.items():
            self._note(name, payload, f"{worker}: {outcome}")

    def _note(self, name: str, payload: bytes, outcome: str) -> None:
        wrong = outcome.startswith(("raised", "taken"))
        self.outcomes.setdefault(name, Counter())["wrong" if wrong else outcome] += 1
        if wrong and len(self.failures) < _FAILURES_TOLD:
            self.failures.append({"way": name, "found": outcome, "payload": base64.b64encode(payload).decode()})


def fuzz(records: int, seed: int) -> dict[str, Any]:
    """Corrupt this many records; returns the report."""
    result = Fuzz(seed)

    async def main() -> None:
        with tempfile.TemporaryDirectory(prefix="penstock-fuzz-") as folder:
            async with workers(Path(folder)) as crew:
                await result.run(records, crew)

    began = time.monotonic()
    anyio.run(main)
    return {
        "records": records,
        "seed": seed,
        "wrong": sum(counts["wrong"] for counts in result.outcomes.values()),
        "seconds": round(time.monotonic() - began, 1),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "outcomes": {name: dict(sorted(counts.items())) for name, counts in sorted(result.outcomes.items())},
        "failures": result.failures,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, count, print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args(arguments)
    logs.configure_logging("fuzz", level="critical")
    report = fuzz(options.records, options.seed)
    print(json.dumps(report) if options.json else json.dumps(report, indent=4), flush=True)
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
