"""`penstock run` with a trainer of two ranks: one rank is killed, a stop is requested, a file is invalid."""

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch

from stream.trainer.ledger_records import LedgerRecord, read_ledger
from stream.trainer.trained_tokens import read_trained_tokens
from tests.e2e.harness import assert_all_trained_once, balanced, children, finish, running, wait_for_trained
from tests.preload.client import ADDRESS
from tests.preload.fixtures import pid_of
from tests.ranks_on_a_ledger import Job, work
from workers.role.exit_codes import ExitCode
from workers.train.checkpointing.checkpoint import CheckpointStore
from workers.train.model.policy_folder import load_policy
from workers.train.step.learner import Learner

pytestmark = [pytest.mark.timeout(280), pytest.mark.usefixtures("preloaded")]

WITHIN_S = 40.0
"""Limit from the end of one rank to the end of all: torchrun waits half a minute for ranks that hang."""


@pytest.fixture
def shared(project):
    project.table["train"]["ranks"] = 2
    project.table["filter"] = {"zero_variance": False}
    project.table["archive"] = {"keep": "all"}
    return project


def ranks_of(launcher: int) -> list[int]:
    """Return the process ids of the ranks, rank 0 first."""
    return [pid_of(child.pid) for child in psutil.Process(launcher).children()]


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids)


def until_gone(pids: list[int], within_s: float = WITHIN_S) -> None:
    deadline = time.monotonic() + within_s
    while not gone(pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)


def said(project, event: str) -> list[dict]:
    lines = (project.run_folder / "logs" / "train-0.log").read_text().splitlines()
    return [json.loads(line) for line in lines if f'"event": "{event}"' in line]


def assert_whole(project, summary: dict, prompts: int, trainers: int) -> None:
    """Assert that nothing was lost or trained twice by `trainers` consecutive trainers."""
    assert_all_trained_once(project, summary, prompts)
    begun = said(project, "trainer.started")
    assert len(begun) == trainers
    assert begun[1]["step"] > 0
    audit = project.run("audit", str(project.run_folder), "--json")
    assert audit.returncode == 0, audit.stdout
    trained = [line.record for line in read_ledger(project.run_folder / "ledger.jsonl")[0]]
    assert [each.prompt for each in trained if not has_trained_tokens(project, each)] == []


def has_trained_tokens(project, record: LedgerRecord) -> bool:
    """Whether what the step did with each token is there, each completion once."""
    completions = read_trained_tokens(project.run_folder, record) or []
    masks = [sum(sum(row.loss_mask) if row.loss_mask else 0 for row in each.rows) for each in completions]
    whole = all(
        not each.loss_tokens or mask in (0, each.loss_tokens) for each, mask in zip(completions, masks, strict=True)
    )
    return (
        whole and len(completions) == project.table["rollout"]["group_size"] and all(each.rows for each in completions)
    )


@pytest.mark.full
def test_killing_a_rank_or_the_launcher_loses_nothing_and_trains_nothing_twice(shared):
    prompts = 48
    shared.prompts(prompts)
    with running(shared) as process:
        wait_for_trained(shared, 12, process, 120)
        ranks = ranks_of(children(process.pid)["train"])
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        until_gone(ranks)
        wait_for_trained(shared, 28, process, 120)
        launcher = children(process.pid)["train"]
        ranks = ranks_of(launcher)
        os.kill(launcher, signal.SIGKILL)
        until_gone(ranks)
        summary = finish(process, shared)
    assert_whole(shared, summary, prompts, trainers=3)

    # One process arrives at the same policy from the ledger of both.
    kept = CheckpointStore(shared.run_folder / "checkpoints").latest()
    job = Job(settings=str(shared.run_folder / "run.toml"), dtype="float32")
    ended = work(job, lambda settings, dtype: Learner(settings, dtype=dtype))
    for name, parameter in load_policy(kept.model).named_parameters():
        assert torch.allclose(ended[f"weight.{name}"], parameter, rtol=0, atol=1e-5), name


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("which", [1, 0], ids=["one that follows", "the first"])
def test_a_hanging_rank_ends_all_ranks_and_nothing_is_lost(shared, monkeypatch, which):
    monkeypatch.delenv(ADDRESS, raising=False)  # a stopped fork would not end with the process that it stands for
    patience_s, prompts = 45, 40
    monkeypatch.setenv("PENSTOCK_RANKS_TIMEOUT_S", str(patience_s))
    shared.prompts(prompts)
    with running(shared) as process:
        wait_for_trained(shared, 12, process, 120)
        ranks = ranks_of(children(process.pid)["train"])
        os.kill(ranks[which], signal.SIGSTOP)
        until_gone(ranks, patience_s + WITHIN_S)
        summary = finish(process, shared)
    assert_whole(shared, summary, prompts, trainers=2)


def test_an_invalid_rank_timeout_is_reported_once(shared, redis_url, monkeypatch):
    monkeypatch.setenv("PENSTOCK_RANKS_TIMEOUT_S", "soon")
    shared.table["run"]["redis"] = redis_url
    result = shared.run("train", str(shared.write()), timeout=100)
    assert result.returncode == ExitCode.USAGE
    assert "PENSTOCK_RANKS_TIMEOUT_S is 'soon'" in result.stderr


@pytest.mark.full
@pytest.mark.parametrize("sections", [{}, {"lora": {"rank": 4}}], ids=["whole", "adapter"])
def test_the_same_number_of_ranks_replays_a_run_bit_for_bit(shared, sections):
    shared.prompts(16)
    shared.table |= sections
    with running(shared) as process:
        finish(process, shared)
    again = shared.run("replay", str(shared.run_folder))
    assert again.returncode == 0, again.stderr
    assert "equal bit for bit after 4 steps: 16 groups" in again.stdout
    kept = shared.run_folder / "run.toml"
    kept.write_text(kept.read_text().replace("learning_rate = 0.0001", "learning_rate = 0.0002"))
    otherwise = shared.run("replay", str(shared.run_folder))
    assert otherwise.returncode == 1, otherwise.stderr
    assert "different: step 2: step-000002: " in otherwise.stdout


@pytest.mark.full
def test_all_ranks_exit_with_0_after_a_stop_request(shared):
    shared.prompts(400)
    with running(shared) as process:
        wait_for_trained(shared, 8, process, 120)
        launcher = children(process.pid)["train"]
        ranks = ranks_of(launcher)
        process.send_signal(signal.SIGTERM)
        summary = finish(process, shared)
    assert gone([launcher, *ranks])
    assert balanced(summary)
    assert [event["rank"] for event in said(shared, "rank.left")] == [1]
    assert not said(shared, "rank.lost")
    assert not said(shared, "ranks.failed")
    log = (shared.run_folder / "logs" / "supervisor.log").read_text().splitlines()
    exits = [json.loads(line) for line in log if '"role.exited"' in line]
    assert [event["code"] for event in exits if event["name"] == "train-0"] == [0]


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"run": {"redis": "redis://127.0.0.1:1"}}, ExitCode.FAILURE, "127.0.0.1:1"),
        ({"train": {"schedule": "linear"}}, ExitCode.PERMANENT, "the number of steps is unknown; set train.max_steps"),
    ],
    ids=["no server", "found out by the learner"],
)
def test_the_exit_code_is_that_of_rank_0(shared, redis_url, change, code, words):
    shared.table["run"]["redis"] = redis_url
    shared.table["queue"]["reconnect_timeout_s"] = 1.0
    for section, keys in change.items():
        shared.table[section].update(keys)
    result = shared.run("train", str(shared.write()), timeout=100)
    assert result.returncode == code, result.stderr
    assert words in result.stderr
