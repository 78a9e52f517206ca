"""`penstock audit` of one run: in progress, killed in the middle, finished, and after its server's data is lost."""

import json
import shutil

import pytest

from tests.e2e.harness import running, summary_of, wait_for_trained

pytestmark = [pytest.mark.timeout(280), pytest.mark.usefixtures("preloaded")]

PROMPTS = 60


def audited(project, code: int = 0) -> dict:
    result = project.run("audit", str(project.run_folder), "--json")
    assert result.returncode == code, result.stdout + result.stderr
    report = json.loads(result.stdout)
    parts = report["trained"] + report["dead"] + len(report["lost"]) + len(report["twice"])
    assert report["fed"] == parts + sum(report["dropped"].values()) + sum(report["outstanding"].values())
    assert report["clean"] is (code == 0)
    return report


def test_a_run_is_audited_while_it_runs_after_a_kill_finished_and_without_its_server(project):
    project.prompts(PROMPTS, extra='{"number": 0}\n')  # the last row has no prompt: never fed, never missing
    project.table["filter"] = {"zero_variance": False}
    with running(project) as process:
        wait_for_trained(project, 12, process, 120)
        live = audited(project)
        process.kill()
        process.communicate(timeout=60)
    assert live["trained"] >= 12
    assert live["notes"] == []

    killed = audited(project)
    assert (killed["fed"], killed["notes"]) == (PROMPTS, [])
    assert killed["trained"] >= live["trained"]
    assert sum(killed["outstanding"].values()) == PROMPTS - killed["trained"] > 0

    summary_of(project.run("run", str(project.run_folder / "run.toml"), "--json"), project)
    finished = audited(project)
    assert finished["fed"] == finished["trained"] == PROMPTS
    assert (finished["unsaved"], finished["foreign_entries"], finished["notes"]) == (0, 0, [])

    ledger = project.run_folder / "ledger.jsonl"
    first, *rest = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join([*rest, rest[0]]))
    tampered = audited(project, code=1)
    assert [each["prompt"] for each in tampered["lost"]] == [json.loads(first)["prompt"]]
    assert [each["prompt"] for each in tampered["twice"]] == [json.loads(rest[0])["prompt"]]

    ledger.write_text("".join([first, *rest]))
    shutil.rmtree(project.run_folder / "redis")
    alone = audited(project)
    assert alone["fed"] == alone["trained"] == PROMPTS
    assert "the server was not audited" in alone["notes"][0]
