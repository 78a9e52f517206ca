"""The dashboard in a real browser, on a run in which a tool hangs, a prompt is hostile, and an entry dies.

Needs Chromium with its driver (Debian: `apt-get install chromium chromium-driver`), Selenium (`pip install selenium`)
and, for axe-core, npm. `PENSTOCK_SCREENSHOTS=FOLDER` keeps a picture of every page.
"""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import pytest
import tomli_w

from stream.connection.run_connection import connect
from stream.operator.status import read_status
from stream.queue.stage import RetryPolicy, Stage
from stream.records import Group, Prompt
from tests.cases.agent_completion import agent_completion, trained_agent
from tests.cases.run_folders import ArchivedRun
from tests.e2e.browser import Browser
from tests.e2e.harness import environment
from workers.demo.base_models import write_base_model
from workers.runs.groups import ArchivedRunGroups

HOSTILE = "<script>document.title='hacked'</script>\u202e\u2066\x1b[2J\x1b]0;hacked\x07"
ENVIRONMENT = '''
import os, time
from pathlib import Path
from envs.builtin.calculator import Calculator, exact_answer

HANG = Path(__file__).with_name("hang")


class Slow(Calculator):
    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The number to add to it.
        """
        if HANG.exists() and not HANG.read_text():
            HANG.write_text(str(time.time()))
        while HANG.exists():
            time.sleep(0.05)
        return super().add(a, b)


def sometimes(completions, environments=None, problem=None, **columns):
    return [None if "hack" in text else float(len(str(done)) % 2) for text, done in zip(problem, completions)]
'''


@pytest.fixture(scope="module")
def axe() -> str:
    """The source of axe-core; empty if it cannot be had."""
    folder = Path(__file__).parents[2] / ".cache" / "axe-core"
    file = folder / "package" / "axe.min.js"
    if not file.exists() and shutil.which("npm"):
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", "--silent", "axe-core@4.14.1"]
        if subprocess.run(command, cwd=folder, check=False, capture_output=True, timeout=120).returncode == 0:
            shutil.unpack_archive(folder / "axe-core-4.14.1.tgz", folder, filter="data")
    return file.read_text() if file.exists() else ""


@pytest.fixture
def project(tmp_path) -> Path:
    """A run's settings: the shipped base model, a calculator whose `add` can hang, a first prompt that is hostile."""
    write_base_model("calculator", tmp_path / "model")
    (tmp_path / "slow.py").write_text(ENVIRONMENT)
    rows = []
    for number in range(3000):
        text = f"Start with {number}, plus 5, then plus 7."
        text = f"{HOSTILE}{text}" if number == 0 else text
        rows.append({"prompt": [{"role": "user", "content": text}], "problem": text, "answer": number + 12})
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    table = {
        "run": {"name": "seen", "folder": str(tmp_path / "seen")},
        "model": {"path": str(tmp_path / "model")},
        "data": {"path": str(tmp_path / "prompts.jsonl"), "shuffle": False, "chat_template_kwargs": {"tools": False}},
        "environments": {"slow": f"{tmp_path / 'slow.py'}:Slow"},
        "rewards": [{"ref": f"{tmp_path / 'slow.py'}:sometimes"}],
        "rollout": {"group_size": 4, "max_tokens_per_turn": 48, "max_tokens": 160, "call_timeout_s": 120.0},
        "engine": {"max_model_len": 384},
        "train": {"batch_size": 4, "learning_rate": 1e-4, "save_every": 2},
        "filter": {"zero_variance": False, "min_valid_rows": 1},
        "abort": {"max_invalid_fraction": 1.0},
    }
    (tmp_path / "run.toml").write_text(tomli_w.dumps(table))
    return tmp_path


def penstock(project: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "penstock", *arguments]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=True, env=environment())
    return json.loads(done.stdout)


async def let_one_die(project: Path) -> str:
    """Claim a prompt as a worker would, and give it up because of its content. Returns its id."""
    live = json.loads((project / "seen" / "live.json").read_text())
    async with connect(live["redis"], "seen", create=False) as connection:
        stage = Stage(connection, "prompts", "a-failing-worker", RetryPolicy(data_attempts=1))
        (lease,) = (await stage.claim(1)).leases
        await stage.release(lease, "data", f"its image does not decode {HOSTILE}")
        assert (await read_status(connection)).dead == 1
        return lease.prompt_id


@pytest.fixture
def run(project):
    """The run, and its output."""
    out = project / "out"
    with out.open("w") as log:
        command = [sys.executable, "-m", "penstock", "run", "run.toml", "--no-check"]  # a reward is None on purpose
        process = subprocess.Popen(command, cwd=project, stderr=log, stdout=log, env=environment())
        yield process, out
        (project / "hang").unlink(missing_ok=True)
        stop(process)


@pytest.fixture
def page(project, browser, run):
    """Address of the run in a dashboard that may change it; the browser has its token."""
    wait_for_line(run[1], "new run seen")
    command = [sys.executable, "-m", "penstock", "dashboard", "seen", "--allow-changes", "--port", "0"]
    process = subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, text=True, env=environment())
    address = process.stdout.readline().split()[-1]
    browser.open(address)
    yield f"{address.partition('/?token=')[0]}/runs/seen"
    stop(process)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_run_is_seen_and_repaired_in_the_browser(project, browser, axe, run, page):
    process, out = run
    own = wait_for_line(out, "dashboard http://").split()[-1]
    assert "seen" in browser.open(own)
    look(project, browser, page)
    pages(browser, page, axe)
    process.terminate()
    process.wait(60)
    text = browser.open(page)
    assert "stopped" in text
    assert "Everything here comes from the run's folder" in text
    assert "Side by side" in browser.open(f"{page}/group?id=prompts:0:0")
    severe = [entry["message"] for entry in browser.driver.get_log("browser") if entry["level"] == "SEVERE"]
    assert [message for message in severe if "favicon" not in message] == []
    if not axe:
        pytest.skip("all but axe-core: it could not be had from npm")


@pytest.fixture
def agents(tmp_path, browser):
    """Address of a finished run whose agent branched."""
    write_base_model("calculator", tmp_path / "model")
    made = ArchivedRun(tmp_path / "agents")
    settings = made.path / "run.toml"
    settings.write_text(settings.read_text().replace('[model]\npath = "none"', f'[model]\npath = "{tmp_path}/model"'))
    group = Group(prompt=Prompt(id="birds", messages=[]), completions=[agent_completion()])
    made.end(group, done=[trained_agent()])
    command = [sys.executable, "-m", "penstock", "dashboard", str(made.path), "--port", "0"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=environment())
    yield f"{process.stdout.readline().split()[-1].rstrip('/')}/runs/agents"
    stop(process)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_tree_of_an_agents_branches_leads_to_messages_and_tokens(browser, axe, agents):
    browser.show(1440, "light")
    browser.open(f"{agents}/group?id=birds")
    browser.find("a[href='#c0-b3']").click()
    assert browser.find("section.branch:target h4").text.startswith("sub search 2, after turn 1 of sub search 1")
    browser.find("a[aria-label='Tokens of row 4, sub search 2']").click()
    browser.wait(lambda: browser.find("[aria-describedby] > span"))
    assert browser.find("#tokens-0 [aria-current]").text == "row 4 sub search 2"
    assert "no loss: another answer was continued" in browser.text
    check_page(browser, axe, "branches", f"{agents}/group?id=birds")
    check_page(browser, axe, "branch-tokens", f"{agents}/group?id=birds&tokens=0&row=4")
    if not axe:
        pytest.skip("all but axe-core: it could not be had from npm")


def look(project: Path, browser: Browser, page: str) -> None:
    """Follow the questions that an operator has."""
    browser.show(1440, "light")
    browser.open(page)
    browser.wait(lambda: browser.find("#status-id"))
    browser.wait(lambda: re.search(r"step ([3-9]|\d\d)", browser.text.replace("\n", " ")))

    # the numbers equal `penstock queues --json` for the same status
    def same_snapshot() -> bool:
        report = penstock(project, "queues", "seen", "--json")
        shown = browser.driver.execute_script(
            "return [document.querySelector('#status-id').innerText, Object.fromEntries("
            "[...document.querySelectorAll('[data-figure]')].map((e) => [e.dataset.figure, e.innerText]))]"
        )
        if shown[0] != report["status_id"]:
            return False
        for name, stage in report["stages"].items():
            assert shown[1][f"{name}-depth"] == f"{stage['depth']:,}"
            assert shown[1][f"{name}-claimed"] == f"{stage['claimed']:,}"
        for name in ("fed", "trained", "dropped", "dead", "outstanding"):
            assert shown[1][name] == f"{report[name]:,}"
        return True

    penstock_control(project, "pause")
    browser.wait(same_snapshot)
    penstock_control(project, "resume")

    # a completion whose tool hangs appears within 3 s, with the tool's name
    browser.open(f"{page}/in-flight")
    (project / "hang").touch()
    hangs_since = float(browser.wait((project / "hang").read_text))
    browser.wait(lambda: "tool add" in browser.text)
    assert time.time() - hangs_since < 3
    browser.pictures("in-flight-hanging")
    (project / "hang").unlink()

    # a group is found by reason and opened; the hostile prompt is text
    browser.open(f"{page}/groups?end=reward:missing&step=1..")
    browser.wait(lambda: browser.find("tbody a"))
    browser.driver.refresh()
    assert browser.find("input[name=end]").get_property("value") == "reward:missing"
    assert browser.find("input[name=step]").get_property("value") == "1.."
    browser.find("tbody a").click()
    text = browser.wait(lambda: browser.text if "Side by side" in browser.text else "")
    assert "prompts:0:0" in text
    assert r"<script>document.title='hacked'</script>\u202e\u2066\x1b[2J\x1b]0;hacked\x07" in text
    assert "hacked" not in browser.driver.title
    browser.find("article a.button").click()
    browser.wait(lambda: browser.find("[aria-describedby] > span"))
    for color in ("difference", "mask", "version"):
        browser.find(f"a[href*='color={color}']").click()
        browser.wait(lambda color=color: f"color={color}" in browser.driver.current_url)
        assert browser.find("[aria-describedby] > span")  # what is shown stays in the address, too
        browser.pictures(f"group-tokens-{color}")
    browser.find("[aria-describedby] > span").click()
    assert "token 0, id" in browser.find(".token-facts").text
    browser.find("[id^=snapshot] button").click()
    browser.wait(lambda: browser.find("dl.attributes"))  # the calculator has no render: its attributes are open
    browser.pictures("group-snapshot")

    # a dead letter is retried and then trained
    prompt = anyio.run(let_one_die, project)
    browser.open(f"{page}/dead")
    assert r"its image does not decode <script>" in browser.text
    browser.pictures("dead-one")
    browser.find("button[aria-label^='Retry prompts']").click()
    browser.wait(lambda: "retried 1 dead letter" in browser.text)
    archived = lambda: {found.group.prompt.id for found in ArchivedRunGroups(project / "seen").completions()}  # noqa: E731
    browser.wait(lambda: prompt in archived())


def pages(browser: Browser, page: str, axe: str) -> None:
    """Check every page in both colors and widths: nothing is cut off, and axe-core finds no violation."""
    paths = {"run": "", "in-flight": "/in-flight", "groups": "/groups", "group": "/group?id=prompts:0:0"}
    paths["tokens"] = "/group?id=prompts:0:0&tokens=0,1,2,3&color=mask"
    paths |= {"timeline": "/timeline", "workers": "/workers", "dead": "/dead", "runs": "/../../?all"}
    paths |= {name: f"/{name}" for name in ("evaluations", "logs", "settings")}
    for name, path in paths.items():
        check_page(browser, axe, name, f"{page}{path}")


def check_page(browser: Browser, axe: str, name: str, url: str) -> None:
    """Check a page in both colors and widths."""
    for width in (1440, 390):
        for theme in ("light", "dark"):
            browser.show(width, theme)
            browser.open(url)
            time.sleep(0.3)
            assert browser.driver.execute_script("return document.documentElement.scrollWidth") <= width, url
            browser.picture(f"{name}-{theme}-{width}")
            if axe:
                assert violations(browser, axe) == [], f"{url}, {theme}, {width}"


def violations(browser: Browser, axe: str) -> list[Any]:
    browser.driver.execute_script(axe)
    found = browser.driver.execute_async_script(
        "const done = arguments[arguments.length - 1];"
        "const runOnly = ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice'];"
        "axe.run(document, {runOnly}).then(done)"
    )
    return [(each["id"], [node["target"] for node in each["nodes"]]) for each in found["violations"]]


def penstock_control(project: Path, command: str) -> None:
    words = [sys.executable, "-m", "penstock", command, "seen"]
    subprocess.run(words, cwd=project, check=True, capture_output=True, env=environment())


def stop(process: subprocess.Popen[Any]) -> None:
    with process:  # closes its output
        process.terminate()
        process.wait(60)


def wait_for_line(path: Path, start: str, seconds: float = 120) -> str:
    deadline = time.monotonic() + seconds
    while True:
        found = [line for line in path.read_text().splitlines() if line.startswith(start)]
        if found:
            return found[0]
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.1)
