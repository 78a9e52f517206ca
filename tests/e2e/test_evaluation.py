"""Evaluation in whole runs of real processes: its results are correct, and training is not disturbed."""

import json
import os
import runpy
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.request import urlopen

import anyio
import msgspec
import pytest

from stream.operator.dead_letters import list_dead_letters
from tests.cases.evaluations import read_evaluations
from tests.e2e.harness import summary_of
from tests.scripted_engine.engine import ScriptedEngine
from tests.soak.evaluation import describe, ended, ledger, run, scripted
from tests.soak.project import ENGINE_PROGRAM, ROLE_PROGRAM
from tests.soak.run import processes
from workers.evaluate.evaluate import evaluate
from workers.runs.find import open_run

pytestmark = [pytest.mark.timeout(150), pytest.mark.usefixtures("preloaded")]

GROUPS, HELD_OUT = 24, 10
ROOT = Path(__file__).parents[2]


def scores(settings):
    """Return the scores by step, overall and by environment, which depend neither on time nor on version numbers."""
    return {line.step: (line.overall, line.environments) for line in read_evaluations(settings.folder)}


def undisturbed(settings):
    """Return the scores that an evaluation with these settings must find: the engine's answers depend on no policy."""
    first, *others = scores(settings).values()
    assert others == [first] * len(others)
    return first


def clean(settings):
    report = open_run(settings.folder).audit()
    assert report.clean, (report.lost, report.twice)
    assert report.foreign_entries == 0
    return report


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run that evaluates every second version, without disturbances."""
    settings = describe(tmp_path_factory.mktemp("with") / "a", groups=GROUPS, held_out=HELD_OUT)
    return settings, ended(settings, run(settings))


def test_evaluation_does_not_change_the_ledger(tmp_path, finished):
    settings, status = finished
    without = describe(tmp_path / "a", groups=GROUPS, held_out=HELD_OUT, evaluate=False)
    assert ended(without, run(without)).evaluation is None
    assert ledger(settings) == ledger(without)
    assert len(ledger(settings)) == GROUPS
    assert sum(line["outcome"] == "trained" for line in ledger(settings)) >= GROUPS // 2
    assert status.counts == {"fed": GROUPS} | {
        end: sum(line["outcome"] == end for line in ledger(without))
        for end in {line["outcome"] for line in ledger(without)}
    }
    clean(settings)


def test_the_first_every_nth_and_the_last_version_are_evaluated_without_mixing_versions(finished):
    settings, status = finished
    lines = read_evaluations(settings.folder)
    steps = int(status.policy["step"])
    assert [line.step for line in lines] == sorted({*range(0, steps + 1, 2), steps})
    assert [line.version for line in lines] == [line.step for line in lines], "a version to a step"
    for line in lines:
        assert line.overall.mixed == 0
        assert line.overall.n == line.overall.valid + sum(line.overall.invalid.values()) == 4 * HELD_OUT
        assert sum(score.n for score in line.environments.values()) == line.overall.n
        assert line.environments.keys() == {"sums", "others"}
    assert lines[0].overall.invalid.keys() == {"reward:missing"}
    assert status.evaluation.result["step"] == steps
    report = [json.loads(line) for line in (settings.folder / "metrics.jsonl").read_text().splitlines()]
    shown = [step["eval/version"] for step in report if "eval/version" in step]
    assert shown
    table = runpy.run_path(str(ROOT / "docs" / "metrics_table.py"))
    assert table["undocumented"]({key for step in report for key in step if key.startswith("eval/")}) == []
    assert shown == [line.version for line in lines][: len(shown)], "each in the first step after it was over"


async def test_the_scores_equal_those_of_the_eval_command(finished):
    settings, _ = finished
    reply = await anyio.to_thread.run_sync(scripted, Path(settings.model.path))
    async with ScriptedEngine(reply, version="7") as engine:
        alone = await evaluate(settings, None, engine.url)
        assert not engine.pushes, "an engine is taken as it is"
    assert alone.version == 7
    assert (alone.overall, alone.environments) == await anyio.to_thread.run_sync(undisturbed, settings)


def one_blow(role):
    """Return a callback that sends SIGKILL to one process of a role during an evaluation after the first."""
    struck = []

    async def meddle(status, _link):
        now = status.evaluation
        if not struck and now is not None and now.is_running and now.step > 0 and now.results and now.unfinished:
            os.kill(min(processes()[role]), signal.SIGKILL)
            struck.append(now.version)

    return meddle, struck


@pytest.mark.full
@pytest.mark.parametrize("role", ["rollout", "train", "score", "server"])
def test_kills_during_an_evaluation_lose_nothing_and_count_nothing_twice(tmp_path, role, finished):
    settings = describe(tmp_path / "a", groups=GROUPS, held_out=HELD_OUT)
    meddle, struck = one_blow(role)
    ended(settings, run(settings, "--delay", "0.1", meddle=meddle))
    assert struck, "nobody was killed"
    assert undisturbed(settings) == undisturbed(finished[0])
    assert list(scores(settings)) == list(scores(finished[0]))
    assert len(read_evaluations(settings.folder)) == len(scores(settings)), "a line to a step"
    assert clean(settings).fed == GROUPS
    contents = [{(line["prompt"], line["outcome"]) for line in ledger(each)} for each in (settings, finished[0])]
    assert contents[0] == contents[1]


@pytest.mark.full
def test_publication_waits_until_the_evaluation_is_sampled(tmp_path):
    """Training alone would finish much earlier: without the wait, every evaluation but the last would mix versions."""
    settings = describe(tmp_path / "a", groups=40, held_out=4, pacing={"max_staleness": 3}, eval={"every": 1})
    watched = run(settings, "--delay", "0.2")
    ended(settings, watched)
    lines = read_evaluations(settings.folder)
    assert len(lines) > 5
    assert [line.overall.mixed for line in lines] == [0] * len(lines)
    for status in watched.looks:  # a version is evaluated while it is the published one
        if status.evaluation and status.evaluation.is_running and status.evaluation.stages["eval:prompts"].depth:
            assert status.version == status.evaluation.version


@contextmanager
def engines(settings, count, *options):
    """Start engines outside the run; yields their URLs."""
    command = [sys.executable, ENGINE_PROGRAM, "--port", "0", "--evaluated", settings.model.path, *options]
    with ExitStack() as stack:
        urls = []
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            urls.append(process.stdout.readline().split()[-1])
        yield urls


@pytest.mark.full
def test_with_several_engines_an_evaluation_has_one_version(tmp_path):
    table = {"pacing": {"max_staleness": 3}, "eval": {"every": 1}}
    settings = describe(tmp_path / "a", groups=24, held_out=8, **table)
    with engines(settings, 2, "--delay", "0.1") as urls:
        settings = describe(tmp_path / "a", groups=24, held_out=8, **table, engine={"urls": urls})
        ended(settings, run(settings))
        asked = [json.load(urlopen(f"{url}/weight_info"))["weight_version"] for url in urls]
    lines = read_evaluations(settings.folder)
    assert asked == [str(lines[-1].version)] * 2
    assert len(lines) > 3
    assert [line.overall.mixed for line in lines] == [0] * len(lines)
    undisturbed(settings)


@pytest.mark.full
def test_a_stalled_evaluation_delays_publication_for_a_bounded_time_and_its_rest_is_missing(tmp_path):
    settings = describe(tmp_path / "a", groups=24, held_out=4, eval={"every": 2, "group_size": 2})
    ended(settings, run(settings, "--delay", "1.5", train=(ROLE_PROGRAM, "train", "--trainer-wait", "0.3")))
    lines = read_evaluations(settings.folder)
    assert lines[0].overall.mixed + lines[0].overall.invalid.get("missing", 0) > 0
    for line in lines:
        assert line.overall.n == line.overall.valid + sum(line.overall.invalid.values()) + line.overall.mixed
    assert sum(line["outcome"] == "trained" for line in ledger(settings)) > 0
    clean(settings)


def user(text):
    return [{"role": "user", "content": text}]


@pytest.mark.full
def test_a_dead_evaluation_prompt_counts_as_invalid_and_does_not_end_the_run(tmp_path):
    settings = describe(tmp_path / "a", groups=8, held_out=4)
    path = settings.folder.parent / "held_out.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    no_arguments = [{"function": {"name": "add"}}]  # the chat template cannot render it
    rows[1]["prompt"] = [{"role": "assistant", "content": "", "tool_calls": no_arguments}, *user(rows[1]["prompt"])]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    results = []

    async def meddle(status, connection):
        if status.dead and not results:
            results.extend(await list_dead_letters(connection))

    status = ended(settings, run(settings, meddle=meddle))
    line = read_evaluations(settings.folder)[0]
    assert line.overall.invalid["dead"] == 4
    assert line.overall.n == 16
    assert results[0].stage == "eval:prompts"
    assert status.prompt_counts["dead"] == 0
    assert clean(settings).dead == 0


@pytest.mark.full
def test_greedy_scores_of_the_eval_command_equal_those_of_the_run(project):
    held_out = project.folder / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({"prompt": f"Tell me of {i}."}) + "\n" for i in range(12)))
    project.table["eval"] = {"path": str(held_out), "every": 2, "group_size": 1, "temperature": 0.0}
    summary_of(project.run("run", str(project.write()), "--json"), project)
    lines = read_evaluations(project.run_folder)
    assert lines[0].step == 0
    assert lines[-1].step > 0
    assert all(line.overall.valid == 12 for line in lines)
    for policy, line in ((project.table["model"]["path"], lines[0]), (str(project.run_folder), lines[-1])):
        result = project.run("eval", str(project.write()), "--policy", policy, "--json")
        assert result.returncode == 0, result.stderr
        alone = json.loads(result.stdout)
        assert alone["overall"] == msgspec.to_builtins(line.overall)
    shown = project.run("eval", str(project.write()), "--policy", str(project.run_folder))
    assert f"{lines[-1].overall.mean_valid:.3f}" in shown.stdout.splitlines()[-1]
