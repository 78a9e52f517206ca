"""Prometheus metrics of a run and its processes; `/health` and `/ready`; docs/metrics.md."""

import http.client
import math
import os
import re
import runpy
import shutil
import subprocess
from contextlib import closing
from pathlib import Path

import anyio
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from stream.errors import ServerError
from stream.queue.feed import Feed
from stream.records import Completion, Failure, Prompt
from stream.validity import Measured, RewardReason, RolloutReason, Unmeasured
from tests.cases.ports import has_ipv6
from tests.cases.servers import settings_with_metrics
from workers.launch.specs import role_specs
from workers.role import prometheus
from workers.role.context import Readiness
from workers.role.metrics_server import ServerAnswer, serve_metrics
from workers.role.run_metrics import RunMetrics, run_metrics
from workers.settings.toml_file import parse_settings

ROOT = Path(__file__).parents[2]
PAGE = runpy.run_path(str(ROOT / "docs" / "metrics_page.py"))
PROMTOOL = shutil.which(os.environ.get("PROMTOOL", "promtool"))
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is missing: apt-get install prometheus, or name it in $PROMTOOL"
)


def samples(registry):
    """Return the values that were measured, by name and labels."""
    found = [sample for family in registry.collect() for sample in family.samples if not math.isnan(sample.value)]
    return {(sample.name, *sample.labels.values()): sample.value for sample in found}


def change(registry, do):
    """Return what `do` adds to the registry's samples."""
    before = samples(registry)
    do()
    return {key: value - before.get(key, 0) for key, value in samples(registry).items() if value != before.get(key, 0)}


def test_the_page_lists_every_metric_as_the_code_has_it():
    assert "\n".join(PAGE["page"]()) in (ROOT / "docs" / "metrics.md").read_text(), (
        "run `python docs/metrics_page.py` and paste its output"
    )


def test_names_are_unique_and_no_label_can_grow_without_bound():
    families = [(title, family) for title in PAGE["ROLES"] for family in PAGE["families"](title)]
    names = [family.name for _, family in families]
    assert len(names) == len(set(names))
    bounded = {"stage", "outcome", "method", "reason", "error", "end", "activity", "state", "role"}
    assert {label for _, family in families for label in PAGE["labels"](family)} <= bounded


def test_headroom_and_prompts_left_are_what_an_autoscaler_needs():
    registry = CollectorRegistry()
    registry.register(RunMetrics(PAGE["example_status"]))
    found = samples(registry)
    assert found[("penstock_pacing_headroom_groups",)] == 8 - 7
    assert found[("penstock_prompts_left",)] == (20 - 12) + 2
    assert found[("penstock_queue_oldest_age_seconds", "scored")] == 1.5
    assert found[("penstock_dead_letters_total", "data")] == 2
    assert found[("penstock_trainer_lease_held",)] == found[("penstock_run_status_up",)] == 1


@pytest.mark.parametrize("policy", [{}, {"owner": "train-1", "owner_until": "999999999999"}], ids=["none", "expired"])
def test_a_run_whose_trainer_has_not_renewed_its_lease_has_no_trainer(policy):
    status = PAGE["example_status"]()
    status.policy = policy
    (found,) = [family for family in run_metrics(status) if family.name == "penstock_trainer_lease_held"]
    assert found.samples[0].value == 0


def test_what_was_never_measured_is_not_reported_as_zero():
    """An alert on a valid fraction below its floor would fire before the first step."""
    fresh = runpy.run_path(str(ROOT / "workers" / "role" / "prometheus.py"))
    found = samples(fresh["TRAIN"]) | samples(fresh["ROLLOUT"])
    assert ("penstock_steps_total",) in found
    for name in ("valid_ratio", "reward_mean", "last_publication_timestamp_seconds", "engines_healthy"):
        assert (f"penstock_{name}",) not in found


def test_without_an_answer_of_the_server_its_figures_are_missing_not_zero():
    registry = CollectorRegistry()
    registry.register(RunMetrics(lambda: None))
    assert samples(registry) == {("penstock_run_status_up",): 0}


def test_a_group_counts_each_completion_by_its_end():
    group = [
        Completion(index=0, turns=2, tool_calls=1, seconds={"engine": 2.0, "tools": 0.5}),
        Completion(index=1, turns=1, failure=Failure(reason=RolloutReason.ENV_RESET), seconds={"engine": 1.0}),
    ]
    assert change(prometheus.ROLLOUT, lambda: prometheus.count_group(group)) == {
        ("penstock_completions_total", "finished"): 1,
        ("penstock_completions_total", "failed:env_reset"): 1,
        ("penstock_turns_total",): 3,
        ("penstock_tool_calls_total",): 1,
        ("penstock_episode_seconds_total", "engine"): 3,
        ("penstock_episode_seconds_total", "tools"): 0.5,
    }
    group[0].reward, group[1].reward = Measured(1.0), Unmeasured(RewardReason.TIMEOUT)
    assert change(prometheus.SCORE, lambda: prometheus.count_rewards(group)) == {
        ("penstock_rewards_total", "measured"): 1,
        ("penstock_rewards_total", "unmeasured:timeout"): 1,
    }


def test_a_state_that_the_last_step_did_not_have_is_no_longer_reported():
    step = {"step_seconds": 2.0, "seconds": 1.0, "tokens_per_second": 5.0, "tokens/sampled": 10, "valid_fraction": 0.75}
    prometheus.count_step(step | {"rows/valid": 3, "rows/reward:timeout": 1})
    assert samples(prometheus.TRAIN)[("penstock_step_completions_ratio", "reward:timeout")] == 0.25
    prometheus.count_step(step | {"rows/valid": 4})
    found = samples(prometheus.TRAIN)
    assert ("penstock_step_completions_ratio", "reward:timeout") not in found
    assert found[("penstock_step_completions_ratio", "valid")] == 1
    assert found[("penstock_valid_ratio",)] == 0.75
    prometheus.count_step({name: value for name, value in step.items() if name != "valid_fraction"})
    assert ("penstock_valid_ratio",) not in samples(prometheus.TRAIN)


def get(url, page):
    with closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=5)) as connection:
        connection.request("GET", page)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


async def fetch(url, page):
    return await anyio.to_thread.run_sync(get, url, page)


class Server:
    """Stands for a connection to the run's server."""

    answers = False

    async def ping(self) -> bool:
        return self.answers


async def test_the_pages_say_when_a_role_is_alive_and_ready(monkeypatch):
    monkeypatch.setattr("workers.role.metrics_server._MAX_AGE_S", 0.0)
    readiness, server = Readiness(), Server()
    async with serve_metrics("rollout", settings_with_metrics("127.0.0.1:0"), readiness, server) as url:
        assert await fetch(url, "/health") == (200, "ok\n")
        assert await fetch(url, "/ready") == (503, "the role is starting\n")
        readiness.find_problem = lambda: "no engine answers"
        assert await fetch(url, "/ready") == (503, "no engine answers\n")
        readiness.mark_ready()
        assert await fetch(url, "/ready") == (503, "the Redis server does not answer\n")
        server.answers = True
        assert await fetch(url, "/ready") == (200, "ok\n")
        status, text = await fetch(url, "/metrics")
        assert status == 200
        assert re.search(r'penstock_info{role="rollout",run="r",version="[^"]+"} 1.0', text)
        assert "process_resident_memory_bytes" in text
        assert "penstock_turns_total" in text
        assert "penstock_steps_total" not in text
        assert (await fetch(url, "/"))[0] == 404


async def test_the_feeder_reports_the_run(connection):
    await Feed(connection, 1000).put([Prompt(id="d:0:0", messages=[])], "", "1")
    async with serve_metrics("feed", settings_with_metrics("127.0.0.1:0"), Readiness(), connection) as url:
        _, text = await fetch(url, "/metrics")
    assert "penstock_run_status_up 1.0" in text
    assert "penstock_prompts_fed_total 1.0" in text


async def test_a_taken_port_does_not_end_the_role():
    async with serve_metrics("feed", settings_with_metrics("127.0.0.1:0"), Readiness()) as url:
        taken = settings_with_metrics(url.removeprefix("http://"))
        async with serve_metrics("feed", taken, Readiness()) as second:
            assert second == ""


async def test_many_scrapes_a_second_read_the_server_once():
    reads = []

    async def read():
        reads.append(1)
        return len(reads)

    answer = ServerAnswer(read)
    assert [await answer.refresh() for _ in range(20)] == [1] * 20


async def test_a_server_that_does_not_answer_leaves_no_old_figures(monkeypatch):
    monkeypatch.setattr("workers.role.metrics_server._MAX_AGE_S", 0.0)
    monkeypatch.setattr("workers.role.metrics_server._ANSWER_TIMEOUT_S", 0.01)
    states = ["answers", "is gone", "hangs"]

    async def read():
        match states.pop(0):
            case "answers":
                return 3
            case "hangs":
                await anyio.sleep_forever()
        raise ServerError("gone")

    answer = ServerAnswer(read)
    assert [await answer.refresh() for _ in range(3)] == [3, None, None]
    assert answer.value is None


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("", ["", "", "", "", ""]),
        ("0.0.0.0:9464", [f"0.0.0.0:{port}" for port in range(9465, 9470)]),
        ("127.0.0.1:0", ["127.0.0.1:0"] * 5),
    ],
)
def test_each_process_of_a_run_has_a_port_of_its_own(address, expected, tmp_path):
    settings = parse_settings(
        {
            "run": {"name": "r", "metrics_address": address},
            "model": {"path": str(tmp_path)},
            "data": {"path": "p.jsonl"},
            "rollout": {"workers": 2},
            "rewards": [{"ref": "math"}],
        }
    )
    commands = [spec.command for spec in role_specs(settings, tmp_path / "run.toml", "redis://r", ())]
    found = [next((word for word in command if word.startswith("run.metrics")), "") for command in commands]
    assert found == [f'run.metrics_address="{each}"' if each else "" for each in expected]


@needs_promtool
def test_promtool_finds_no_fault_in_names_types_and_texts():
    registry = CollectorRegistry()
    for title in PAGE["ROLES"]:
        for part in PAGE["ROLES"][title]:
            registry.register(part)
    registry.register(RunMetrics(PAGE["example_status"]))
    check = subprocess.run(
        [PROMTOOL, "check", "metrics"], input=generate_latest(registry), capture_output=True, check=False
    )
    assert (check.returncode, check.stdout, check.stderr) == (0, b"", b"")


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no address of IPv6")
async def test_metrics_are_served_at_an_address_of_ipv6():
    async with serve_metrics("feed", settings_with_metrics("[::1]:0"), Readiness()) as url:
        assert url.startswith("http://[::1]:")
        assert (await fetch(url, "/metrics"))[0] == 200
