"""The sbatch file under a real Slurm, on nodes that are namespaces of this machine. Needs root, and Slurm installed."""

import json
import shutil
import sys
import time
from pathlib import Path
from statistics import mean

import pytest

from tests.e2e.harness import environment
from tests.slurm.cluster import Cluster, missing, slurm_cluster
from workers.demo.prepare import prepare_run

ROOT = Path(__file__).parents[2]
STEPS = 24

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is installed"),
]


@pytest.fixture
def cluster(tmp_path):
    with slurm_cluster(tmp_path, 3) as cluster:
        cluster.environment |= environment()
        cluster.environment["PATH"] = f"{Path(sys.executable).parent}:{cluster.environment['PATH']}"
        shutil.copy(ROOT / "examples" / "slurm" / "penstock.sbatch", tmp_path)
        yield cluster


def prepare(folder: Path, steps: int, **changes: str) -> None:
    """Write the demo's run into `runs/demo`, with lines of its settings replaced."""
    prepare_run(folder / "runs" / "demo", 1, steps)
    file = folder / "runs" / "demo" / "run.toml"
    text = file.read_text()
    for before, after in changes.items():
        assert text.count(f"\n{before} = ") == 1, before
        text = "\n".join(
            f"{before} = {after}" if line.startswith(f"{before} = ") else line for line in text.splitlines()
        )
    file.write_text(text + "\n")


def submit(cluster: Cluster, *options: str) -> str:
    output = cluster.run("sbatch", "--parsable", *options, "penstock.sbatch", "runs/demo/run.toml")
    return output.strip()


def metrics(cluster: Cluster) -> list[dict]:
    file = cluster.folder / "runs/demo/metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def log(cluster: Cluster, job: str) -> str:
    file = cluster.folder / f"penstock-{job}.log"
    return file.read_text()[-6000:] if file.exists() else "no log"


def wait_for_step(cluster: Cluster, job: str, step: int, within_s: float = 300) -> None:
    deadline = time.monotonic() + within_s
    while len(metrics(cluster)) < step:
        assert cluster.state(job) in {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"}, log(cluster, job)
        assert time.monotonic() < deadline, log(cluster, job)
        time.sleep(0.5)


def wait_for_state(cluster: Cluster, job: str, *states: str, within_s: float = 300) -> None:
    deadline = time.monotonic() + within_s
    while (state := cluster.state(job)) not in states:
        assert time.monotonic() < deadline, f"{state}: {log(cluster, job)}"
        time.sleep(0.5)


def audit(cluster: Cluster) -> dict:
    output = cluster.run("penstock", "audit", "runs/demo/run.toml", "--json", check=False)
    report = json.loads(output)
    assert not report["lost"], output
    assert not report["twice"], output
    return report


def test_a_run_is_queued_again_loses_a_node_learns_and_loses_no_prompt(cluster):
    prepare(cluster.folder, STEPS, save_every="4", lease_s="5.0")
    job = submit(cluster, "--nodes=3")
    wait_for_step(cluster, job, 5)
    queues = json.loads(cluster.run("penstock", "queues", "runs/demo", "--json"))  # the server is found by `live.json`
    assert queues["run"] == "demo"

    cluster.run("scancel", "--batch", "--signal=USR1", job)  # as before the time limit
    wait_for_state(cluster, job, "PENDING")
    stopped = len(metrics(cluster))
    assert max(cluster.folder.glob("runs/demo/checkpoints/*")).name.endswith(str(stopped))
    assert not (cluster.folder / "runs/demo/live.json").exists()
    wait_for_step(cluster, job, stopped + 3)

    n3 = cluster.nodes[2]
    n3.power_off()
    wait_for_state(cluster, job, "PENDING", "COMPLETING")
    cluster.start_node(n3)
    wait_for_state(cluster, job, "COMPLETED", within_s=600)
    assert "Restarts=2" in cluster.run("scontrol", "show", "job", job)

    assert audit(cluster)["fed"] == STEPS * 16
    rewards = [line["reward/mean"] for line in metrics(cluster)]
    print(rewards)
    assert mean(rewards[-4:]) - mean(rewards[:4]) >= 0.15


def test_two_nodes_train_a_run_that_was_cancelled_and_goes_on_with_other_nodes(cluster):
    steps = 8
    prepare(cluster.folder, steps, save_every="2", lease_s="5.0", ranks="2")
    job = submit(cluster, "--nodes=3", "--export=ALL,TRAIN_NODES=2")
    wait_for_step(cluster, job, 3)
    cluster.run("scancel", job)
    wait_for_state(cluster, job, "CANCELLED")
    job = submit(cluster, "--nodes=2", "--export=ALL,TRAIN_NODES=2")
    wait_for_state(cluster, job, "COMPLETED", "FAILED", within_s=600)
    assert cluster.state(job) == "COMPLETED", log(cluster, job)
    assert audit(cluster)["fed"] == steps * 16


def test_wrong_settings_end_the_job_before_anything_starts(cluster):
    prepare(cluster.folder, 2, learning_rate='"high"')
    job = submit(cluster)
    wait_for_state(cluster, job, "FAILED")
    assert "learning_rate" in log(cluster, job)
    assert not (cluster.folder / "runs/demo/redis").exists()
