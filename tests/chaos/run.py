"""Kill processes of a run at random, and check from its weights whether anything was lost or trained twice.

    python tests/chaos/run.py --kills 100 --seed S --json
    python tests/chaos/run.py --kills 100 --server-kills 10 --fsync everysec --seed S --json

Every role is a real process under the project's own supervisor, on a private Redis; the engine is scripted, and the
trainer trains a witness (`witness.py`). Prints where the prompts ended; exits with 1 if one was lost or trained twice,
or the run did not finish. Linux only: processes are found through /proc.
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

from tests.chaos import project
from tests.chaos.audit import acquitted, audit
from tests.chaos.kills import RoleKiller
from tests.chaos.recount import recount
from tests.chaos.schedule import schedule
from workers.launch.supervisor import RunOutcome, Supervisor
from workers.role import log_setup as logs
from workers.runs.folder import lock_folder, write_settings
from workers.settings import Settings
from workers.terminal.progress import choose_display


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, kill, audit; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--server-kills", type=int, default=0, help="of the Redis server, beside those")
    parser.add_argument("--fsync", choices=["always", "everysec"], default="everysec", help="the server's appendfsync")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--groups", type=int, default=2000, help="prompts fed")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds after which the run counts as hanging")
    parser.add_argument(
        "--folder", type=Path, help="a new folder, which stays; else a temporary one, which stays on failure"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON, and no progress")
    options = parser.parse_args(arguments)
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    folder = options.folder or Path(tempfile.mkdtemp(prefix="penstock-chaos-"))
    settings = project.write_project(folder.resolve(), options.groups, options.seed, options.fsync)
    blows = schedule(options.kills, options.seed, options.server_kills)
    role_killer = RoleKiller(folder=settings.folder, groups=options.groups, fsync=options.fsync, blows=blows)
    (settings.folder / "logs").mkdir(parents=True)
    began = time.monotonic()
    with logs.log_to_file("chaos", settings.folder / "logs" / "supervisor.log"):
        outcome = _run(settings, role_killer, options.limit, quiet=options.json)
        seconds = round(time.monotonic() - began, 1)
        verdict = audit(settings.folder, options.groups)
    report: dict[str, Any] = msgspec.to_builtins(verdict)
    report |= {"kills": dict(sorted(role_killer.killed.items())), "between": role_killer.between}
    report |= {"fsync": options.fsync, "caught": dict(role_killer.caught), "again": _again(settings.folder)}
    report |= {"looks": role_killer.looks, "unbalanced": role_killer.unbalanced[:5]}
    report |= {"recount": recount(settings.folder, options.groups), "seconds": seconds, "seed": options.seed}
    well = _complain(outcome, role_killer) and acquitted(verdict, options.groups)
    well = well and not role_killer.unbalanced and not any(report["recount"][name] for name in ("lost", "twice"))
    print(json.dumps(report) if options.json else json.dumps(report, indent=4), flush=True)
    if not well:
        print(f"error: the run's folder is {folder}", file=sys.stderr)
    elif options.folder is None:
        shutil.rmtree(folder)
    return 0 if well else 1


def _run(settings: Settings, role_killer: RoleKiller, limit_s: float, *, quiet: bool) -> RunOutcome | None:
    """Supervise the run, with kills; returns None if it did not finish in time."""
    outcomes: list[RunOutcome] = []

    async def main() -> None:
        with anyio.move_on_after(limit_s):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(role_killer.run)
                with choose_display(quiet) as display, project.commands(settings):
                    outcomes.append(await Supervisor(settings, file, display).run())
                tasks.cancel_scope.cancel()

    with lock_folder(settings.folder):
        file = write_settings(settings)
        anyio.run(main)
    return outcomes[0] if outcomes else None


def _again(folder: Path) -> dict[str, int]:
    """Count the groups trained again for lack of a checkpoint, and sampled again after worker or server died."""
    begun = [line for line in (folder / "logs" / "train-0.log").read_text().splitlines() if '"trainer.started"' in line]
    asked = Counter((folder / project.ASKED).read_text().split())
    return {
        "trained": sum(json.loads(line)["groups_again"] for line in begun),
        "sampled": sum(times > project.GROUP_SIZE for times in asked.values()),
    }


def _complain(outcome: RunOutcome | None, role_killer: RoleKiller) -> bool:
    """Print the failures of the run; returns True if there are none."""
    why = ""
    if outcome is None:
        why = "the run did not come to its end in time"
    elif outcome.failure is not None:
        why = str(outcome.failure)
    elif outcome.interrupted:
        why = "somebody stopped the run"
    elif not role_killer.kept:
        why = "the run came to its end before everybody was killed who was to be; feed more with --groups"
    if why:
        print(f"error: {why}", file=sys.stderr, flush=True)
    return not why


if __name__ == "__main__":
    sys.exit(main())
