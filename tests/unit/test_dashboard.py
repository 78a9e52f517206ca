"""The dashboard's pages: who may see them, what they show, and that nothing from a run can act in a page."""

import json
import math
import shutil
from pathlib import Path

import aiohttp
import anyio.to_thread
import msgspec
import pytest
from msgspec import structs

from stream.errors import PenstockError, SettingsError
from stream.operator.status import RunStatus, StageStatus
from tests.cases.pages import browser, text_of
from tests.cases.run_folders import write_run
from workers.dashboard import app
from workers.dashboard.access import Access
from workers.dashboard.app import serve_dashboard
from workers.dashboard.live_view import StatusReading
from workers.dashboard.run_pages import render_state
from workers.dashboard.templating import load_templates, render, with_query
from workers.dashboard.workers_page import idle_workers, render_workers, started_workers, worker_rows
from workers.runs.catalog import Runs
from workers.runs.evaluations import EvaluationResult, EvaluationStats
from workers.runs.live_run import LiveRun, write_live
from workers.runs.logs import RunLogs
from workers.runs.metrics_file import MAX_POINTS, MetricsFile, make_charts, read_metrics
from workers.runs.warnings import Incident, TrainingWarning, read_incidents, write_warnings

TOKEN = "a token, 7 words long"
STEPS = [
    {"step": n, "reward/mean": n / 10, "rows/valid": 6, "rows/reward:timeout": 2, "valid_fraction": 0.75}
    for n in range(1, 4)
]


@pytest.fixture
def folder(tmp_path) -> Path:
    """A run that was killed: a folder, and no server."""
    path = write_run(tmp_path / "a run")
    (path / "logs").mkdir()
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in STEPS))
    return path


@pytest.mark.parametrize(
    ("ended", "shown"),
    [
        ({"finished": True}, ["badge finished", "trained</span> 7 of 9 prompts", "The run has done its work"]),
        ({"finished": True, "why_untrained": "every group was dropped"}, ["badge finished", "every group was dropped"]),
        ({}, ["badge stopped", "resumes it"]),
        ({"failure": {"message": "the disk <full>"}}, ["badge failed", "the disk &lt;full&gt;", "resumes it"]),
    ],
)
async def test_a_run_that_ended_says_how_instead_of_that_it_has_no_server(folder, ended, shown):
    counts = {"steps": 4, "groups_trained": 7, "groups_dropped": {}, "completion_states": {}, "fed": 9}
    counts |= {"staleness": {"mean": 0.0, "max": 0}, "tokens_per_second": 1.0, "seconds": 90.0}
    summary = counts | {"outstanding": 0, "dead": 2, "duplicates": 0} | ended
    (folder / "summary.json").write_text(json.dumps(summary))
    async with browser(folder) as session:
        page = await text_of(session, "/")
    assert [text for text in [*shown, "2 dead letters"] if text not in page] == []
    assert "no server" not in page


async def test_a_killed_run_opens_from_its_folder_alone(folder):
    async with browser(folder) as session:
        runs = await text_of(session, "/?all")
        assert '<a href="/runs/a%20run">a run</a>' in runs
        assert "killed" in runs
        page = await text_of(session, "/")  # the only run
        assert "No server runs for this run now" in page
        assert "training <output>0.3</output>" in page
        assert [name for name in ("Reward", "Completions", "Off-policy") if f"<h2>{name}</h2>" in page] == [
            "Reward",
            "Completions",
        ]
        charts = json.loads(await text_of(session, "/runs/a%20run/charts.json"))
    assert charts["steps"] == [1, 2, 3]
    valid = next(chart for chart in charts["charts"] if chart["name"] == "valid")
    assert {line["label"]: line["values"] for line in valid["lines"]} == {
        "valid": [0.75] * 3,
        "reward:timeout": [0.25] * 3,
    }


async def test_every_answer_forbids_foreign_scripts_and_frames(folder):
    async with browser(folder) as session:
        for path in ("/", "/nothing", "/static/dashboard.js", "/runs/none"):
            async with session.get(path) as response:
                policy = response.headers["Content-Security-Policy"]
                assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
                assert "unsafe" not in policy
                assert response.headers["X-Content-Type-Options"] == "nosniff"


async def test_pages_load_nothing_from_elsewhere_and_have_no_inline_script_or_style(folder):
    async with browser(folder) as session:
        page = await text_of(session, "/")
    assert "://" not in page.replace("http://www.w3.org", "")
    assert "<style" not in page
    assert " style=" not in page
    assert page.count("<script") == page.count('<script src="/static/') > 0


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "", "[::1", "127.0.0.1.evil.example"])
async def test_a_name_that_is_not_this_machines_is_refused_without_a_token(folder, host):
    async with browser(folder, Host=host) as session:
        assert "is not a name of this server" in await text_of(session, "/", 403)


async def test_a_token_is_needed_once_and_leaves_the_address(folder):
    async with browser(folder, Access(token=TOKEN)) as session:
        assert "needs its token" in await text_of(session, "/", 401)
        assert "not the token" in await text_of(session, "/?token=guess", 401)
        async with session.get("/?all", params={"token": TOKEN}, allow_redirects=False) as response:
            assert (response.status, response.headers["Location"]) == (303, "/?all=")
            cookie = response.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        async with session.get("/?all", headers={"Authorization": f"Bearer {TOKEN}"}) as response:
            assert response.status == 200


def test_other_machines_cannot_look_without_a_token():
    for host in ("127.0.0.1", "::1", "localhost"):
        Access(host=host).check()
    Access(host="0.0.0.0", token=TOKEN).check()
    for host in ("0.0.0.0", "::", "10.0.0.7", "trainer"):
        with pytest.raises(SettingsError, match="PENSTOCK_DASHBOARD_TOKEN"):
            Access(host=host).check()
    Access(allow_changes=True, token=TOKEN).check()
    with pytest.raises(SettingsError, match="PENSTOCK_DASHBOARD_TOKEN"):
        Access(allow_changes=True).check()


async def test_dashboards_on_one_machine_keep_their_tokens_apart(folder):
    """A browser sends the cookies of all ports of a machine to each of them."""
    cookies = []
    async with browser(folder, Access(token=TOKEN)) as first, browser(folder, Access(token="another")) as second:
        for session, token in ((first, TOKEN), (second, "another")):
            async with session.get("/", params={"token": token}, allow_redirects=False) as response:
                cookies.append(response.headers["Set-Cookie"].partition(";")[0])
        for session in (first, second):
            async with session.get("/", headers={"Cookie": "; ".join(cookies)}) as response:
                assert response.status == 200


@pytest.mark.parametrize("token", ["", TOKEN])
async def test_nothing_is_changed_unless_that_is_allowed(folder, token):
    async with browser(folder, Access(token=token), Authorization=f"Bearer {token}") as session:
        headers = {"Origin": str(session._base_url).rstrip("/")}
        async with session.post("/runs/a%20run/dead", headers=headers) as response:
            assert response.status == 403
            assert "--allow-changes" in await response.text()


def test_what_a_run_says_is_text_with_visible_control_characters():
    page = render("error.html", {"title": "<script>alert(1)</script>", "text": "a\u202eb\x1b[31m\u2066c\x00"})
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<script>" not in page
    assert r"a\u202eb\x1b[31m\u2066c\x00" in page


def test_a_query_keeps_what_it_has():
    assert with_query("/g", {"step": "3", "end": ""}, prompt="a&b") == "/g?step=3&prompt=a%26b"
    assert with_query("/g", {"step": "3"}, step=None) == "/g"


def test_charts_of_a_long_run_are_means_over_equal_numbers_of_steps():
    charts = make_charts([{"step": n, "reward/mean": float(n % 2)} for n in range(1, 10 * MAX_POINTS + 1)])
    assert (charts.steps_per_point, len(charts.steps), charts.steps[-1]) == (10, MAX_POINTS, 10 * MAX_POINTS)
    assert charts.charts[0].lines[0].values == [0.5] * MAX_POINTS
    assert make_charts([]).charts == []


def test_the_reward_is_drawn_with_its_parts_if_it_has_several():
    row = {"step": 1, "reward/mean": 1.5, "reward/part/env.served/mean": 1.0, "reward/part/env.served/std": 0.0}

    assert drawn(row) == {"reward": {"training": [1.5]}}
    both = row | {"reward/part/env.clean/mean": 0.5}
    assert drawn(both)["parts"] == {"env.served": [1.0], "env.clean": [0.5]}


def drawn(*rows, evaluations=()) -> dict[str, dict[str, list[float | None]]]:
    charts = make_charts(list(rows), evaluations).charts
    return {chart.name: {line.label: line.values for line in chart.lines} for chart in charts}


def test_shares_are_drawn_of_what_a_step_counts_and_nothing_of_what_it_did_not_measure():
    row = {"step": 1, "tools/calls": 4, "tools/errors": 1, "truncated/length": 2, "rows/valid": 6, "rows/failed:x": 2}
    row |= {
        "truncated/length_mean": 70.0,
        "correction/k3_kl": 0.1,
        "kl/k3": 0.2,
        "reference/kl": math.nan,
        "loss": -1.0,
    }
    assert drawn(row) == {
        "loss": {"": [-1.0]},
        "truncated": {"length": [0.25]},
        "tools": {"": [0.25]},
        "valid": {"failed:x": [0.25]},
        "kl": {"to engine": [0.1], "in batch": [0.2]},
    }


def test_a_reason_that_a_step_does_not_name_did_not_occur():
    found = drawn(
        {"step": 1, "rows/valid": 1, "rows/failed:x": 1}, {"step": 2, "rows/valid": 2}, {"step": 3, "loss": 1.0}
    )
    assert found["valid"] == {"failed:x": [0.5, 0.0, None]}


def test_of_many_lines_the_largest_are_drawn_in_the_order_in_which_they_first_occur():
    row = {"step": 1} | {f"logged/{n}": float(n) for n in range(9)}
    (chart,) = make_charts([row]).charts
    assert ([line.label for line in chart.lines], chart.omitted) == (["3", "4", "5", "6", "7", "8"], 3)


def evaluation(step: int, mean: float) -> EvaluationResult:
    score = EvaluationStats(
        prompts=1, n=1, valid=1, invalid={}, mixed=0, mean_valid=mean, mean_all=mean, pass_at={"1": {"valid": mean}}
    )
    return EvaluationResult(version=step, step=step, time=1.0, seconds=1.0, overall=score)


def test_evaluations_are_drawn_at_the_step_that_was_measured_the_final_one_too(folder):
    found = [evaluation(0, 0.1), evaluation(3, 0.9)]
    assert drawn(*STEPS, evaluations=found)["reward"] == {
        "training": [None, 0.1, 0.2, 0.3],
        "held out": [0.1, None, None, 0.9],
    }
    file = MetricsFile(folder / "metrics.jsonl")
    assert file.charts().steps == [1, 2, 3]
    (folder / "eval.jsonl").write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in found) + b'{"ver')
    assert file.charts().steps == [0, 1, 2, 3]


def test_runs_of_one_name_have_addresses_of_their_own(folder, tmp_path):
    other = tmp_path / "other" / folder.name
    other.mkdir(parents=True)
    (other / "run.toml").write_text((folder / "run.toml").read_text())
    catalog = Runs([str(folder), str(other)])
    assert [run.key for run in catalog.all()] == ["a run", "a run~2"]
    assert catalog.find("a run~2").folder == other
    with pytest.raises(PenstockError, match="is neither a run's folder"):
        Runs(["no-such-run"])


def test_the_list_of_runs_shows_the_last_whole_step_of_a_killed_run(folder):
    (run,) = Runs([str(folder)]).all()
    assert (run.state().step, run.state().reward) == (3, 0.3)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"text": "%b"}\n{"step": 4, "reward/mean": 0.4}\n' % (b"x" * 70_000))
        file.write(b'{"step": null}\n[1]\nnull\n{"step": "x"}\n{"text": "\xff"}\n{"step": 5, "rew')
    assert (run.state().step, run.state().reward) == (4, 0.4)
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")][:4] == [1, 2, 3, 4]
    (folder / "metrics.jsonl").unlink()
    assert (run.state().step, run.state().reward) == (0, None)


async def test_a_run_whose_folder_has_any_name_opens(folder):
    strange = folder.rename(folder.with_name("l\u00e4uft #1? 100%41"))
    async with browser(strange) as session:
        page = await text_of(session, "/")  # the only run
        address = "/runs/l%C3%A4uft%20%231%3F%20100%2541"
        assert f'href="{address}/groups"' in page
        await text_of(session, f"{address}/groups")


async def test_what_fails_unexpectedly_says_so_and_the_rest_is_shown(folder, monkeypatch):
    async def fail(*_):
        raise ZeroDivisionError("a figure of the run")

    monkeypatch.setitem(app._PARTS, "pipeline", fail)
    monkeypatch.setitem(app._PAGES, "/runs/{run}/timeline", fail)
    async with browser(folder) as session:
        page = await text_of(session, "/")
        assert "This part cannot be shown: ZeroDivisionError: a figure of the run" in page
        assert "3 points" in page
        async with session.get("/runs/a%20run/timeline") as response:
            assert response.status == 500
            assert "default-src" in response.headers["Content-Security-Policy"]
            assert "ZeroDivisionError: a figure of the run" in await response.text()
        await text_of(session, "/runs/a%20run/groups")


def test_a_run_that_was_removed_leaves_the_list(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    kept = folder.rename(tmp_path / "runs" / "a run")
    catalog = Runs()
    assert [run.key for run in catalog.all()] == ["a run"]
    shutil.rmtree(kept)
    assert catalog.all() == []
    assert catalog.find("a run") is None


async def test_warnings_and_restarts_of_a_run_are_on_its_page_the_newest_first(folder):
    warning = TrainingWarning(name="reward_tie", text="all <equal>", step=2, time=20.0)
    write_warnings(folder, [warning])
    events = [
        {
            "event": "role.restarted",
            "name": "rollout-0",
            "code": -9,
            "after_s": 1.0,
            "timestamp": "1970-01-01T00:00:30Z",
        },
        {"event": "role.started", "name": "rollout-0", "timestamp": "1970-01-01T00:00:31Z"},
    ]
    lines = [json.dumps({"level": "warning", **event}) for event in events]
    (folder / "logs" / "supervisor.log").write_text("\n".join([*lines, '{"half']))
    assert await anyio.to_thread.run_sync(read_incidents, folder, 9) == [
        Incident(time=30.0, what="rollout-0 restarted", text="code -9, after_s 1.0"),
        Incident(time=20.0, what="reward_tie at step 2", text="all <equal>"),
    ]
    async with browser(folder) as session:
        page = await text_of(session, "/")
    assert page.index("rollout-0 restarted") < page.index("all &lt;equal&gt;")


async def test_the_logs_of_a_run_are_shown_from_their_ends_by_process(folder):
    long = "x" * 2000
    (folder / "logs" / "rollout-0.log").write_text("".join(f"line {n} {long}\n" for n in range(1000)))
    (folder / "logs" / "train-0.log").write_text("<b>a library says\n")
    async with browser(folder) as session:
        every = await text_of(session, "/runs/a%20run/logs")
        one = await text_of(session, "/runs/a%20run/logs?role=train-0")
        none = await text_of(session, "/runs/a%20run/logs?role=../run")
    assert [text in every for text in ("line 999 ", "line 899 ", "line 0 ", "&lt;b&gt;a library says")] == [
        True,
        True,
        False,
        True,
    ]
    assert "line 999" not in one
    assert "a library says" in one
    assert "has no log of &#39;../run&#39;; it has rollout-0, train-0" in none
    logs = await anyio.to_thread.run_sync(RunLogs, folder, "rollout")
    assert [line.text[:8] for line in await anyio.to_thread.run_sync(logs.last_lines, 2)] == ["line 998", "line 999"]


async def test_settings_are_shown_without_secrets(folder):
    text = (folder / "run.toml").read_text().replace('"r"', '"r"\nredis = "redis://me:sesame@h:1/0"')
    text += 'args = {judge_api_key = "sesame", max_tokens = 7, url = "https://me:sesame@judge/x?token=sesame"}\n'
    (folder / "run.toml").write_text(text)
    async with browser(folder) as session:
        page = await text_of(session, "/runs/a%20run/settings")
    assert "sesame" not in page
    assert [
        text
        for text in ("redis://h:1/0", "(hidden)", "max_tokens = 7", "https://judge/x", "learning_rate", "group_size")
        if text not in page
    ] == []


async def test_ticked_runs_are_drawn_over_each_other(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "metrics.jsonl").write_text(
        '{"step": 2, "reward/mean": 0.7, "loss": 1.0}\n{"step": 9, "reward/mean": 0.9}\n'
    )
    catalog = await anyio.to_thread.run_sync(Runs, [str(folder), str(other)])
    async with serve_dashboard(catalog, Access(), 0) as url, aiohttp.ClientSession(url) as session:
        runs = await text_of(session, "/")
        assert 'name="run" value="a run"' in runs
        page = await text_of(session, "/compare?run=a%20run&run=other")
        charts = json.loads(await text_of(session, "/compare/charts.json?run=a%20run&run=other"))
        await text_of(session, "/compare?run=other", 400)
        await text_of(session, "/compare?run=other&run=none", 404)
    assert "a run <output>0.3</output>" in page
    assert "other <output>0.9</output>" in page
    assert charts["steps"] == [1, 2, 3, 9]
    shown = {chart["title"]: {line["label"]: line["values"] for line in chart["lines"]} for chart in charts["charts"]}
    assert shown["Reward: training"] == {"a run": [0.1, 0.2, 0.3, None], "other": [None, 0.7, None, 0.9]}
    assert shown["Loss"] == {"other": [None, 1.0, None, None]}
    assert len({chart["name"] for chart in charts["charts"]}) == len(charts["charts"])


def goes_on(folder: Path, stopping: str = "") -> None:
    """Let this process supervise the run."""
    load_templates()
    live = LiveRun.of_this_process("r", "unix:///nowhere.sock")
    write_live(folder, structs.replace(live, stopping=stopping))


async def test_a_run_that_stops_says_so_on_every_page(folder):
    await anyio.to_thread.run_sync(goes_on, folder, "draining")
    (run,) = await anyio.to_thread.run_sync(lambda: Runs([str(folder)]).all())
    state = await anyio.to_thread.run_sync(run.state)
    assert (state.state, state.detail) == ("stopping", "draining")
    status = RunStatus(now_ms=0, stages={}, unfinished=0, outstanding=0, dead=1, counts={}, policy={"version": "3"})
    status.stages |= {name: stage() for name in ("prompts", "groups", "scored")}
    reading = StatusReading(status=status, stopping="draining")
    shown = await render_state(run, reading, None)
    assert "stopping: draining</span>" in shown
    assert ">running<" not in shown
    assert "1 dead letter</a>" in shown
    assert "The run stops (draining)" in await render_workers(run, reading, None)
    assert "No trainer holds this run now" in await render_workers(run, StatusReading(status=status), None)


def stage(**held: int) -> StageStatus:
    zeros = {"depth": 0, "claimed": 0, "delayed": 0, "marked": 0, "lag": 0, "oldest_age_ms": 0.0, "rate": 0.0}
    return StageStatus(**zeros, consumers=held)


async def test_idle_workers_of_a_run_that_goes_on_are_counted(folder):
    with (folder / "run.toml").open("a") as file:
        file.write("[rollout]\nworkers = 2\n")
    (run,) = await anyio.to_thread.run_sync(lambda: Runs([str(folder)]).all())
    assert await anyio.to_thread.run_sync(started_workers, run) == {}
    await anyio.to_thread.run_sync(goes_on, folder)
    known = await anyio.to_thread.run_sync(started_workers, run)
    assert known == {"rollout": 2, "score": 1}
    status = RunStatus(now_ms=0, stages={"prompts": stage()}, unfinished=0, outstanding=0, dead=0, counts={})
    status.stages["prompts"] = stage(**{"rollout-vm-1-ab": 2})
    assert idle_workers(worker_rows(status), known) == {"rollout": 1, "score": 1}
    shown = await render_workers(run, StatusReading(status=status), None)
    assert "idle: 1 of 2 rollout workers, 1 of 1 score worker<" in shown
