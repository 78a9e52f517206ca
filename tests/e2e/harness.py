"""A user's folder and the console script, for tests of whole runs in separate processes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import psutil
import tomli_w

from stream.connection.run_connection import RunConnection, connect
from stream.errors import PenstockError
from stream.operator.status import read_status
from tests.preload.fixtures import pid_of


class Project:
    """A user's folder: prompts, rewards, environments, one TOML file."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.table: dict[str, Any] = {
            "run": {"name": "test", "folder": str(folder / "run"), "dashboard": "off"},
            "model": {"path": str(model)},
            "data": {"path": str(folder / "prompts.jsonl"), "chat_template_kwargs": {"tools": False}},
            "rollout": {"group_size": 4, "max_tokens_per_turn": 6, "max_tokens": 12, "groups_in_flight": 4},
            "engine": {"max_model_len": 256, "max_batch_size": 32},
            "train": {"batch_size": 4, "learning_rate": 1e-4, "save_every": 2},
            "queue": {"lease_s": 3.0},
        }
        self.prompts(10)
        (folder / "rewards.py").write_text(
            "import zlib\n\n\n"
            "def by_chance(completions, **columns):\n"
            "    return [float(zlib.crc32(text.encode()) % 2) for text in completions]\n"
        )
        self.table["rewards"] = [{"ref": str(folder / "rewards.py") + ":by_chance"}]

    @property
    def run_folder(self) -> Path:
        return self.folder / "run"

    def prompts(self, n: int, extra: str = "") -> None:
        rows = [json.dumps({"prompt": f"Say {i}.", "number": i}) for i in range(n)]
        (self.folder / "prompts.jsonl").write_text("\n".join(rows) + "\n" + extra)

    def write(self) -> Path:
        path = self.folder / "run_me.toml"
        path.write_text(tomli_w.dumps(self.table))
        return path

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "penstock", *arguments]

    def run(self, *arguments: str, timeout: float = 150) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments),
            cwd=self.folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ledger(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_folder / "ledger.jsonl").read_text().splitlines()]

    def logs(self) -> str:
        """Return the end of every role's log, for the message of a failing test."""
        parts = [f"== {path.name}\n{path.read_text()[-1500:]}" for path in sorted(self.run_folder.glob("logs/*.log"))]
        return "\n".join(parts)


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def summary_of(result: subprocess.CompletedProcess[str], project: Project) -> dict[str, Any]:
    assert result.returncode == 0, f"{result.stderr[-3000:]}\n{project.logs()}"
    lines = result.stdout.strip().splitlines()
    assert len(lines) == 1, result.stdout
    return json.loads(lines[0])


def finish(process: subprocess.Popen[str], project: Project) -> dict[str, Any]:
    """Wait until a started run exits and return its summary."""
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, f"{err[-2000:]}\n{project.logs()}"
    return json.loads(out)


def stop(process: subprocess.Popen[str]) -> None:
    """End a run that a failing test left running."""
    if process.poll() is None:
        process.terminate()
        process.communicate(timeout=60)


@contextmanager
def running(project: Project) -> Iterator[subprocess.Popen[str]]:
    """Start a run and yield its process; the run is stopped when the context ends."""
    process = project.start("run", str(project.write()), "--json")
    try:
        yield process
    finally:
        stop(process)


def assert_all_trained_once(project: Project, summary: dict[str, Any], prompts: int) -> None:
    """Assert that every prompt was fed and is in the ledger exactly once."""
    assert balanced(summary)
    assert summary["fed"] == summary["groups_trained"] == prompts
    ends = [line["prompt"] for line in project.ledger()]
    assert len(ends) == len(set(ends)) == prompts


def balanced(summary: dict[str, Any]) -> bool:
    ended = summary["groups_trained"] + sum(summary["groups_dropped"].values()) + summary["dead"]
    return summary["fed"] == ended + summary["outstanding"]


def children(pid: int) -> dict[str, int]:
    """Return role -> pid for the processes that the supervisor `pid` started."""
    result = {}
    for child in psutil.Process(pid_of(pid)).children():
        with suppress(psutil.Error):  # it has just ended
            command = child.cmdline()
            if "penstock" in command:
                result[command[command.index("penstock") + 1]] = child.pid
    return result


async def trained(connection: RunConnection) -> int:
    try:
        return (await read_status(connection)).counts.get("trained", 0)
    except PenstockError:  # the roles have not started
        return 0


def wait_for_trained(project, n: int, process: subprocess.Popen[str], within_s: float) -> None:
    async def wait() -> None:
        live = json.loads((project.run_folder / "live.json").read_text())
        async with connect(live["redis"], "test", create=False) as connection:
            with anyio.fail_after(within_s):
                while await trained(connection) < n:
                    assert process.poll() is None, f"{process.stderr.read()}\n{project.logs()}"
                    await anyio.sleep(0.1)

    deadline = time.monotonic() + within_s
    while not (project.run_folder / "live.json").exists():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    anyio.run(wait)
