"""Whole runs with a served reward model: several scorers, and a scorer that is stopped while it works."""

import json
import signal
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
import tomli_w

from examples.reward_model.make_models import make_reward_model
from stream.codec import decode
from stream.records import Group
from stream.trainer.archive import scan_archive
from stream.validity import Measured
from tests.e2e.harness import balanced, environment
from tests.reward_server import reward_server
from workers.local_engine.pooling.classifier import ReferenceClassifier
from workers.role.exit_codes import ExitCode

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "reward_model"

pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("preloaded")]


@contextmanager
def served(model: Path, *options: str):
    """Run `penstock serve` as a process; yields its URL and asserts that it exits cleanly."""
    command = [sys.executable, "-m", "penstock", "serve", str(model), "--port", "0", *options]
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=model
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("listening on http://"), line
        yield line.split()[-1]
    finally:
        process.terminate()
        with process.stdout:
            assert process.wait(30) == 0


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    make_reward_model(folder, seed=2)
    return folder


def archived(folder: Path) -> list[Group]:
    return [decode(place.read_payload(), Group) for _, place in scan_archive(folder / "groups")]


@pytest.mark.full
def test_the_reward_model_example_runs_unchanged(tmp_path, random_model, reward_folder):
    """Columns of OpenMathInstruct-2, a policy and a reward model in bfloat16, batches of 32, two scorers."""
    text = (EXAMPLE / "run.toml").read_text()
    with served(reward_folder, "--dtype", "bfloat16", "--set", "engine.max_model_len=500") as url:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
            assert json.load(answer)["data"][0]["max_model_len"] == 500
        for there, here in {
            "http://127.0.0.1:8100": url,
            "runs/models/policy": str(random_model),
            'path = "prompts.jsonl"': f'path = "{EXAMPLE / "prompts.jsonl"}"',
            'name = "reward_model"': f'name = "reward_model"\nfolder = "{tmp_path / "run"}"',
        }.items():
            assert text.count(there) >= 1
            text = text.replace(there, here)
        (tmp_path / "run.toml").write_text(text)
        result = subprocess.run(
            [sys.executable, "-m", "penstock", "run", "run.toml", "--json"],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        again = subprocess.run(
            [sys.executable, "-m", "penstock", "rescore", "run", "--rewards", "run.toml", "--json"],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    logs = {path.name: path.read_text() for path in (tmp_path / "run" / "logs").glob("*.log")}
    assert result.returncode == 0, f"{result.stderr[-3000:]}\n{ {name: log[-1500:] for name, log in logs.items()} }"
    summary = json.loads(result.stdout)
    assert balanced(summary)
    assert (summary["fed"], summary["groups_trained"], summary["steps"]) == (32, 32, 8)
    assert summary["completion_states"] == {"valid": 32 * 8}
    events = [json.loads(line) for name in ("score-0.log", "score-1.log") for line in logs[name].splitlines()]
    lines = [event for event in events if event["event"] == "reward_model.served"]
    assert sum(event["scored"] for event in lines) == 32 * 8
    assert all(event["errors"] == {} for event in lines)
    groups = archived(tmp_path / "run")
    assert {tuple(sorted(group.prompt.fields)) for group in groups} == {
        ("expected_answer", "generated_solution", "problem_source")
    }
    plain = ReferenceClassifier(reward_folder)
    for group in groups[:4]:
        for completion in group.completions:
            expected = plain.score([*group.prompt.messages, *completion.messages])
            assert completion.reward.value == pytest.approx(expected, abs=0.2)  # it is served in bfloat16
    assert again.returncode == 0, again.stderr[-2000:]
    rescored = json.loads(again.stdout)
    assert (rescored["groups"], rescored["validity"]) == (32, {"measured": 32 * 8})
    assert rescored["environments"][0]["correlation"] > 0.99  # the same model with other batches


async def test_a_scorer_finishes_pending_requests_after_sigterm(tmp_path, redis_url, run_name, pipe):
    groups = ("a", "b", "c")
    await pipe.rolled_out(*groups)
    async with reward_server(lambda _: 3.5) as server:
        server.together = len(groups) + 1  # all answers wait until the test releases them
        table = {
            "run": {"name": run_name, "folder": str(tmp_path)},
            "model": {"path": "none"},
            "data": {"path": "none"},
            "rewards": [{"ref": "reward_model", "args": {"urls": [server.url]}}],
        }
        (tmp_path / "run.toml").write_text(tomli_w.dumps(table))
        command = [sys.executable, "-m", "penstock", "score", "run.toml", "--redis", redis_url]
        with anyio.fail_after(60):
            process = await anyio.open_process(command, cwd=tmp_path, env=environment())
            while server.under_way < len(groups):
                assert process.returncode is None
                await anyio.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            while b"drain.started" not in (await process.stderr.receive()):
                pass
            server.release.set()
            assert await process.wait() == 0
            await process.aclose()
    leases = (await pipe.stage("scored", "t").claim(10)).leases
    result = {lease.prompt_id: [c.reward for c in lease.group().completions] for lease in leases}
    assert result == {name: [Measured(3.5)] for name in groups}


async def test_a_scorer_refuses_a_server_that_applies_an_activation_with_the_remedy(tmp_path, redis_url, pipe):
    async with reward_server() as server:
        server.applies_activation = True
        table = {
            "run": {"name": pipe.connection.run, "folder": str(tmp_path)},
            "model": {"path": "none"},
            "data": {"path": "none"},
            "rewards": [{"ref": "reward_model", "args": {"urls": [server.url]}}],
        }
        (tmp_path / "run.toml").write_text(tomli_w.dumps(table))
        command = [sys.executable, "-m", "penstock", "score", "run.toml", "--redis", redis_url]
        with anyio.fail_after(60):
            result = await anyio.run_process(command, cwd=tmp_path, env=environment(), check=False)
    assert result.returncode == ExitCode.PERMANENT
    assert "passed an activation" in result.stderr.decode().splitlines()[-1]
