"""Folder of a run with evaluation; its engine's answers depend only on prompt, completion and turn.

The learner is the chaos runs' witness, so no sample depends on the training.
"""

import json
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import anyio

from stream.connection.run_connection import RunConnection, connect
from stream.errors import PenstockError
from stream.operator.status import RunStatus, read_status
from tests.base_models.demo_model import make_tokenizer
from workers.launch.specs import COMMANDS, ENGINE
from workers.launch.supervisor import RunOutcome, Supervisor
from workers.role import log_setup as logs
from workers.runs.folder import lock_folder, write_settings
from workers.runs.live_run import read_live
from workers.settings import Settings
from workers.settings.toml_file import parse_settings
from workers.terminal.progress import SilentDisplay

HERE = Path(__file__).parent
REWARDS = """\
import zlib


def by_chance(completions, number, **columns):
    drawn = [zlib.crc32(f"{row}:{text}".encode()) for text, row in zip(completions, number)]
    return [None if each % 11 == 0 else each % 3 / 2 for each in drawn]
"""
"""About one reward in eleven is unmeasured."""


def describe(
    folder: Path, *, groups: int, held_out: int, evaluate: bool = True, **sections: dict[str, Any]
) -> Settings:
    """Write model, prompts and rewards; returns the settings of a run on them, with `sections` added to the table."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        (folder / "model").mkdir()
        make_tokenizer().save_pretrained(folder / "model")
        (folder / "model" / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    for name, first, count in (("prompts", 0, groups), ("held_out", 1000, held_out)):
        rows = [
            json.dumps({"prompt": f"Say {number}.", "number": number, "environment": ("sums", "others")[number % 2]})
            for number in range(first, first + count)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "rewards.py").write_text(REWARDS)
    table: dict[str, Any] = {
        "run": {"name": "evaluated", "folder": str(folder / "run"), "dashboard": "off"},
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "prompts.jsonl"), "chat_template_kwargs": {"tools": False}},
        "environments": {"sums": "calculator", "others": "calculator"},
        "rewards": [{"ref": f"{folder / 'rewards.py'}:by_chance"}],
        "rollout": {"workers": 2, "groups_in_flight": 4, "group_size": 3, "max_tokens": 200, "max_tokens_per_turn": 80},
        "train": {"batch_size": 4, "save_every": 2},
        "pacing": {"max_staleness": 0},
        "queue": {"lease_s": 2.0, "max_attempts": 100},
        "abort": {"max_invalid_fraction": 1.0, "stall_timeout_s": 80.0},
    }
    if evaluate:
        table["eval"] = {"path": str(folder / "held_out.jsonl"), "every": 2, "group_size": 4}
    for name, section in sections.items():
        table[name] = table.get(name, {}) | section
    return parse_settings(table)


def commands(settings: Settings, *options: str) -> AbstractContextManager[Any]:
    """Start a witness as the trainer, and the scripted engine with these options, while the context is open."""
    engine = (str(HERE / "engine.py"), "--model", settings.model.path, *options)
    return patch.dict(COMMANDS, {"train": (str(HERE / "trainer.py"),), ENGINE: engine})


@dataclass
class Watched:
    """A run and its statuses over time."""

    outcome: RunOutcome | None = None
    looks: list[RunStatus] = field(default_factory=list)


def run(settings: Settings, *options: str, meddle: Any = None, limit_s: float = 100.0) -> Watched:
    """Supervise the run to its end, and read its status after every event.

    Args:
        settings: settings of the run.
        options: options of the engine.
        meddle: called with each status and the connection; may kill processes.
        limit_s: seconds after which the run is abandoned; the outcome is None then.
    """
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    watched = Watched()
    (settings.folder / "logs").mkdir(parents=True, exist_ok=True)

    async def main() -> None:
        with anyio.move_on_after(limit_s):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_watch, settings, watched, meddle)
                with commands(settings, *options):
                    watched.outcome = await Supervisor(settings, file, SilentDisplay()).run()
                tasks.cancel_scope.cancel()

    with lock_folder(settings.folder), logs.log_to_file("eval", settings.folder / "logs" / "supervisor.log"):
        file = write_settings(settings)
        anyio.run(main)
    return watched


async def _watch(settings: Settings, watched: Watched, meddle: Any) -> None:
    while (live := await anyio.to_thread.run_sync(read_live, settings.folder)) is None or not live.engines:
        await anyio.sleep(0.02)
    async with connect(live.redis, live.run, create=False) as connection:
        after = "0-0"
        while True:
            after = await connection.wait_for_change(after, 0.2)
            await _look(connection, watched, meddle)


async def _look(connection: RunConnection, watched: Watched, meddle: Any) -> None:
    try:
        status = await read_status(connection)
    except PenstockError:  # no role has started
        return
    watched.looks.append(status)
    if meddle is not None:
        await meddle(status, connection)


def ended(settings: Settings, watched: Watched) -> RunStatus:
    """Assert that the run finished with nothing left over; returns the last status."""
    log = "\n".join(
        f"== {path.name}\n{path.read_text()[-1500:]}" for path in sorted(settings.folder.glob("logs/*.log"))
    )
    assert watched.outcome is not None, f"the run did not come to its end in time\n{log}"
    assert watched.outcome.failure is None, log
    status = watched.outcome.status
    assert status is not None
    assert (status.unfinished, status.outstanding) == (0, 0)
    return status


def ledger(settings: Settings) -> list[dict[str, Any]]:
    """Return the ledger's records, sorted by step and prompt."""
    lines = [json.loads(line) for line in (settings.folder / "ledger.jsonl").read_text().splitlines()]
    return sorted(lines, key=lambda line: (line["step"], line["prompt"]))
