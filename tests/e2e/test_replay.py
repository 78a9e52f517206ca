"""`penstock replay` repeats a run whose trainer was killed several times, from its records, bit for bit."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from redis import Redis

from stream.errors import RecordError
from stream.trainer.archive import scan_archive
from stream.trainer.ledger_records import read_contents, read_ledger
from tests.e2e.harness import balanced, children, finish, running, wait_for_trained
from workers.runs.live_run import read_live
from workers.settings.toml_file import load_settings
from workers.train.checkpointing.checkpoint import CheckpointStore
from workers.train.checkpointing.replayer import Replayer

pytestmark = pytest.mark.timeout(280)

LONGEST_S = 60.0


def until(true, process):
    """Poll until `true()` holds, while the run is in progress; events do not show moments between system calls."""
    deadline = time.monotonic() + LONGEST_S
    while not (result := true()):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    return result


class Killer:
    """Kills the trainers of a run in progress."""

    def __init__(self, project, process) -> None:
        self.checkpoints = project.run_folder / "checkpoints"
        self.process = process
        self.project = project
        self.server = Redis.from_url(read_live(project.run_folder).redis)
        self.server_pid = self.server.info("server")["process_id"]

    def trainer(self) -> int:
        return until(lambda: children(self.process.pid).get("train"), self.process)

    def whole(self) -> set[str]:
        return {path.name for path in self.checkpoints.glob("step-*")}

    def half_written(self) -> set[str]:
        return {path.name for path in self.checkpoints.glob(".step-*")}

    def anywhere(self, delay_s: float) -> None:
        """Kill the trainer `delay_s` after the first group that ended since the next new checkpoint."""
        before, ledger = self.whole(), self.project.run_folder / "ledger.jsonl"
        until(lambda: self.whole() - before, self.process)
        size = ledger.stat().st_size
        until(lambda: ledger.stat().st_size > size, self.process)
        time.sleep(delay_s)
        os.kill(self.trainer(), signal.SIGKILL)

    def before_it_acknowledges(self) -> bool:
        """Kill the trainer when a checkpoint is durable and the stopped server has not received its acknowledgement.

        Returns whether that succeeded: commands that the trainer sent before it was killed still reach the server.
        """
        while not self.stopped_in_time():
            os.kill(self.server_pid, signal.SIGCONT)
        os.kill(self.trainer(), signal.SIGKILL)
        newest = CheckpointStore(self.checkpoints).latest()
        os.kill(self.server_pid, signal.SIGCONT)
        ends = read_contents(self.project.run_folder / "ledger.jsonl", newest.progress.ledger_bytes).outcomes
        return any(prompt.decode() in ends for prompt in self.server.hvals("{test}:scored:marked"))

    def stopped_in_time(self) -> bool:
        """Stop the server while a checkpoint is being written, and wait until the checkpoint is complete."""
        before, leftovers = self.whole(), self.half_written()
        until(lambda: self.half_written() - leftovers or self.whole() - before, self.process)
        os.kill(self.server_pid, signal.SIGSTOP)
        stat = Path(f"/proc/{self.server_pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", self.process)
        if self.whole() - before:
            return False  # too late: the trainer has already reached the server
        until(lambda: self.whole() - before, self.process)
        return True


def kill_five_times(project, seed: int) -> dict:
    """Run to the end; kill the trainer five times or more, at least once between checkpoint and acknowledgement."""
    chance, kills, between = random.Random(seed), 0, 0
    with running(project) as process:
        wait_for_trained(project, 1, process, 240)
        killer = Killer(project, process)
        while kills < 5 or not between:
            if kills % 2:
                between += killer.before_it_acknowledges()
            else:
                killer.anywhere(chance.uniform(0.0, 0.3))
            kills += 1
        summary = finish(process, project)
    assert balanced(summary)
    log = (project.run_folder / "logs" / "train-0.log").read_text().splitlines()
    begun = [json.loads(line) for line in log if '"trainer.started"' in line]
    assert len(begun) == kills + 1
    assert sum(line["groups_again"] for line in begun) > 0
    return summary


def replayed(project) -> dict:
    result = project.run("replay", str(project.run_folder), "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def killable(project, prompts: int, **table) -> None:
    project.prompts(prompts)
    project.table |= {"archive": {"keep": "all"}, **table}


@pytest.mark.full
def test_a_run_whose_trainer_was_killed_five_times_is_replayed_bit_for_bit(project):
    killable(project, 140)
    summary = kill_five_times(project, seed=1)
    before = contents(project.run_folder)
    report = replayed(project)
    assert contents(project.run_folder) == before
    assert (report["is_identical"], report["mismatch"], report["notes"]) == (True, None, [])
    assert report["steps"] == summary["steps"] == report["matches"][-1]["step"]
    assert report["groups"] == summary["groups_trained"]
    assert report["dropped"] == sum(summary["groups_dropped"].values())

    line = read_ledger(project.run_folder / "ledger.jsonl")[0][-1].record
    places = {(result.prompt, result.hash): place for result, place in scan_archive(project.run_folder / "groups")}
    place = places[line.prompt, line.hash]
    content = bytearray(place.file.read_bytes())
    content[place.offset + place.size // 2] ^= 1
    place.file.write_bytes(content)
    with pytest.raises(RecordError, match=f"the group of prompt {line.prompt}: damaged"):
        Replayer(load_settings(project.run_folder / "run.toml"), project.run_folder).run()


LONG = {
    "grpo, twice over each batch, with a divergence and a falling rate": {
        "algorithm": {"kl_coefficient": 0.01},
        "train": {"updates_per_batch": 2, "max_steps": 60, "schedule": "cosine", "warmup_steps": 5},
    },
    "gae with its critic": {"estimator": {"name": "gae"}, "filter": {"zero_variance": False}},
    "decoupled, with rejection and a bound on age": {
        "algorithm": {"proximal": "interpolate"},
        "correction": {"weights": "sequence", "reject": {"token_k1": [0.9, 1.1]}},
        "pacing": {"max_staleness": 4, "max_token_age": 2},
        "abort": {"max_invalid_fraction": 1.0},  # a quarter of the completions is too old
    },
    "bfloat16 on disk": {"model": {"dtype": "bfloat16"}},
    "two threads": {"run": {"threads": 2}},
}


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("table", LONG.values(), ids=LONG)
def test_five_estimator_and_loss_combinations_are_replayed_bit_for_bit(project, table):
    for section, keys in table.items():
        project.table.setdefault(section, {}).update(keys)
    killable(project, 140 if "threads" in project.table["run"] else 240)
    project.table["train"]["learning_rate"] = 1e-3
    summary = kill_five_times(project, seed=2)
    report = replayed(project)
    assert report["is_identical"], report
    assert report["steps"] == summary["steps"]
