"""Add corrupt entries to a run of real processes, and check that each becomes one dead letter and has no other effect.

    python tests/fuzz/streams.py --entries 2000 --seed S --json

The run is that of `tests/chaos`: a scripted engine, and a trainer whose learner is the witness. Nothing is killed, so
no role may start a second time. Exits with 1 if one did, if a corrupt entry is not exactly one dead letter, or if a
good prompt does not have its intended end.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from stream.connection.run_connection import RunConnection
from stream.operator.dead_letters import DeadLetter, list_dead_letters
from tests.chaos import project
from tests.chaos.audit import acquitted, audit
from tests.fuzz.litter import Litterer
from workers.launch.supervisor import RunOutcome, Supervisor
from workers.role import log_setup as logs
from workers.runs.find import open_run
from workers.runs.folder import lock_folder, write_settings
from workers.settings import Settings
from workers.terminal.progress import choose_display


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, add entries, audit; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--entries", type=int, default=2000, help="spoilt ones")
    parser.add_argument("--groups", type=int, default=1000, help="prompts fed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=900.0, help="seconds after which the run counts as hanging")
    parser.add_argument("--json", action="store_true", help="print one line of JSON, and no progress")
    options = parser.parse_args(arguments)
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    folder = Path(tempfile.mkdtemp(prefix="penstock-litter-"))
    settings = project.write_project(folder, options.groups, options.seed)
    litterer = Litterer(folder=settings.folder, groups=options.groups, entries=options.entries, seed=options.seed)
    (settings.folder / "logs").mkdir(parents=True)
    log = settings.folder / "logs" / "supervisor.log"
    began = time.monotonic()
    with logs.log_to_file("litter", log):
        outcome = _run(settings, litterer, options.limit, quiet=options.json)
        seconds = round(time.monotonic() - began, 1)
        verdict = audit(settings.folder, options.groups)
        junk = [letter for letter in open_run(settings.folder).call(_letters) if not letter.ends_prompt]
    buried = Counter((letter.stage, letter.payload) for letter in junk)
    restarts = sum('"role.restarted"' in line for line in log.read_text().splitlines())
    report: dict[str, Any] = msgspec.to_builtins(verdict)
    report |= {"strewn": litterer.strewn.total(), "dead_letters_of_junk": len(junk), "restarts": restarts}
    report |= {"by_stage": dict(Counter(stage for stage, _ in litterer.strewn.elements()))}
    report |= {"reasons": dict(Counter(letter.reason for letter in junk)), "seconds": seconds, "seed": options.seed}
    well = outcome is not None and outcome.failure is None and not restarts
    well = well and buried == litterer.strewn and acquitted(verdict, options.groups)
    print(json.dumps(report) if options.json else json.dumps(report, indent=4), flush=True)
    if well:
        shutil.rmtree(folder)
    else:
        print(f"error: {outcome.failure if outcome else 'it hangs'}; the run's folder is {folder}", file=sys.stderr)
    return 0 if well else 1


def _run(settings: Settings, litterer: Litterer, limit_s: float, *, quiet: bool) -> RunOutcome | None:
    """Supervise the run; returns None if it did not finish in time."""
    outcomes: list[RunOutcome] = []

    async def main() -> None:
        with anyio.move_on_after(limit_s):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(litterer.run)
                with choose_display(quiet) as display, project.commands(settings):
                    outcomes.append(await Supervisor(settings, file, display).run())
                tasks.cancel_scope.cancel()

    with lock_folder(settings.folder):
        file = write_settings(settings)
        anyio.run(main)
    return outcomes[0] if outcomes else None


async def _letters(connection: RunConnection) -> list[DeadLetter]:
    return await list_dead_letters(connection, count=1_000_000)


if __name__ == "__main__":
    sys.exit(main())
