"""A trainer and a feeder outside the product (`examples/own_trainer`); the trainer's checkpoint proves no loss."""

import json
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from stream.connection.run_connection import connect
from stream.operator.status import read_status
from stream.trainer.ledger_records import read_contents
from tests.e2e.dying_trainer import EXAMPLE, MOMENTS
from tests.e2e.harness import environment
from tests.scripted_engine.engine import ScriptedEngine
from tests.soak import ends, project
from tests.soak.engine import reply
from workers.launch.specs import role_specs
from workers.runs.folder import write_settings

pytestmark = [pytest.mark.timeout(150), pytest.mark.usefixtures("preloaded")]

ROOT = Path(__file__).parents[2]
DYING = Path(__file__).with_name("dying_trainer.py")
TRAINER, FEEDER = EXAMPLE / "trainer.py", EXAMPLE / "feed.py"
LIVES = (("after_commit", 1), ("after_save", 1), ("before_save", 2), ("after_push", 3), ("after_acknowledge", 1))


class Foreign:
    """A run's folder, its server and its engine, for the example's trainer."""

    def __init__(self, settings, file, url, engine) -> None:
        self.settings, self.file, self.url, self.engine = settings, file, url, engine
        self.folder = settings.folder
        self.logs = settings.folder / "logs"

    def trainer(self, *how: object) -> list[str]:
        """Return the trainer's command line."""
        arguments = (self.folder, self.url, self.settings.run.name, self.engine, self.settings.model.path)
        return [sys.executable, *map(str, how), *map(str, arguments)]

    async def run(self, command: list[str]) -> int:
        """Run a process to its end; returns its exit code."""
        async with self.process(command) as process:
            with anyio.fail_after(100):
                return await process.wait()

    @asynccontextmanager
    async def process(self, command):
        """Run a process for as long as the context is open."""
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
        with (self.logs / "all.log").open("ab") as log:
            process = await anyio.open_process(command, env=environment() | paths, stdout=log, stderr=log, cwd=ROOT)
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            with anyio.CancelScope(shield=True):
                await process.aclose()

    def table(self) -> dict[str, int]:
        """Return how often each prompt was trained, from the trainer's checkpoint."""
        table = json.loads((self.folder / "table.json").read_text())["table"]
        return {prompt: updates for prompt, (_, updates) in table.items()}

    def kept(self) -> set[str]:
        """Return the prompts whose outcome the checkpoint holds."""
        length = json.loads((self.folder / "table.json").read_text())["ledger_bytes"]
        return set(read_contents(self.folder / "ledger.jsonl", length).outcomes)

    def audited(self) -> dict:
        """Return the report of `penstock audit`."""
        command = [sys.executable, "-m", "penstock", "audit", str(self.folder), "--redis", self.url, "--json"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
        assert result.returncode == 0, result.stdout + result.stderr
        return json.loads(result.stdout)


def prepare(folder: Path, groups: int):
    settings = project.write_project(folder, groups, seed=1)
    (settings.folder / "logs").mkdir(parents=True)
    return settings, write_settings(settings)


@asynccontextmanager
async def foreign(folder, server, groups, *roles):
    """Start a run with these roles as real processes; its trainer is the example's."""
    server.start()
    settings, file = await anyio.to_thread.run_sync(prepare, folder, groups)
    async with ScriptedEngine(reply, delay_s=0.005) as engine, anyio.create_task_group() as tasks:
        run = Foreign(settings, file, server.url, engine.url)
        for spec in await anyio.to_thread.run_sync(role_specs, settings, file, server.url, (engine.url,)):
            if spec.role in roles:
                tasks.start_soon(run.run, list(spec.command))
        yield run
        tasks.cancel_scope.cancel()


async def test_a_custom_trainer_killed_at_every_boundary_trains_each_prompt_once(tmp_path, make_server):
    """SIGKILL at every boundary, such as between checkpoint and acknowledgement; then the run finishes."""
    groups = 120
    assert {moment for moment, _ in LIVES} == set(MOMENTS)
    async with foreign(tmp_path, make_server(), groups, "feed", "rollout", "score") as run:
        async with connect(run.url, run.settings.run.name) as connection:
            for moment, call in LIVES:
                assert await run.run(run.trainer(DYING, moment, call)) == -signal.SIGKILL, moment
                if moment == "after_save":
                    kept = await anyio.to_thread.run_sync(run.kept)
                    assert kept & set((await connection.read_hash("scored:marked")).values()), "it was not in between"
            assert await run.run(run.trainer(TRAINER)) == 0, (run.logs / "all.log").read_text()[-3000:]
            counts = (await read_status(connection)).prompt_counts
        meant = [row for row in range(groups) if ends.intended(row) != ends.REFUSED]
        assert run.table() == {f"prompts:0:{row}": 1 for row in meant}
        dead = groups - len(meant)
        assert counts == {"fed": groups, "trained": len(meant), "dropped": 0, "dead": dead, "outstanding": 0}
        report = await anyio.to_thread.run_sync(run.audited)
    assert (report["clean"], report["fed"], report["trained"], report["dead"]) == (True, groups, len(meant), dead)
    assert any("no checkpoint" in note for note in report["notes"])


async def test_a_custom_feeder_killed_midway_feeds_each_prompt_once(tmp_path, make_server):
    groups = 60
    async with foreign(tmp_path, make_server(), 0, "rollout", "score") as run:
        feeder = [sys.executable, str(FEEDER), run.url, run.settings.run.name, str(groups)]
        async with run.process(run.trainer(TRAINER)) as trainer, connect(run.url, run.settings.run.name) as connection:
            async with run.process(feeder):
                with anyio.fail_after(60):
                    while not (await connection.read_hash("counts")).get("fed"):
                        await connection.wait_for_change("$", 1.0)
            assert await run.run(feeder) == 0
            with anyio.fail_after(100):
                assert await trainer.wait() == 0, (run.logs / "all.log").read_text()[-3000:]
        assert run.table() == {f"own:0:{number}": 1 for number in range(groups)}
        report = await anyio.to_thread.run_sync(run.audited)
    assert (report["clean"], report["fed"], report["trained"]) == (True, groups, groups)
    assert any("a custom feeder fed this run" in note for note in report["notes"])
