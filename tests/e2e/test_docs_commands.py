"""Every block of `sh` on the pages works as printed, in the folder of a reader who has a run (`tests/pages.py`).

Not run here: what is marked on the page with the reason, and what another test runs. Names of other machines become
this one, ports become free ones. What a page takes for granted, such as a run that goes on, is in `BEFORE`.
"""

import json
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import tomli_w

from examples.reward_model.make_models import make_reward_model
from tests.cases.ports import free_ports
from tests.e2e.reader import Reader
from tests.pages import PAGES, ROOT, blocks_of
from workers.demo.base_models import write_base_model

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

COMMAND_S = 300.0
STEPS = 45
GOING_ON = "penstock run my.toml --set train.max_steps=100000 --quiet"
SEVERAL = ["rm -r runs/my-run", "redis-server"]
BEFORE = {
    "docs/base-models.md": ["rm -r models/base"],
    "docs/dashboard.md": ["cp -r runs/my-run runs/other"],
    "docs/engines.md": [GOING_ON],
    "docs/evaluation.md": ["penstock serve my-policy --port 8000"],
    "docs/http.md": [
        "penstock serve my.toml --port 8000",
        f"{GOING_ON} --set run.metrics_address=127.0.0.1:9400",
        "penstock dashboard --port 7077",
    ],
    "docs/several-machines.md": [
        *SEVERAL,
        "cp my.toml run.toml",
        "penstock serve run.toml --port 8000",
        "python -u -m http.server 8080",
    ],
    "docs/watching.md": [GOING_ON],
}
"""What the reader of a page has typed before."""
BY_PLACE = """
def by_place(completions, **columns):
    return [float(place % 2) for place in range(len(completions))]
"""
"""Rewards that differ in every group, whatever the model says: a run without differences ends with exit code 5."""
NAMES = {"MODEL_FOLDER": "models/reward", "https://config.internal/": "http://127.0.0.1:8080/"}
HOSTS = r"(?<=//)(?:host|trainer|gpu-?\d?|localhost)(?=:\d)"
PORTS = ("4318", "6379", "7077", "8000", "8080", "8100", "9400")


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A reader's folder: the files that the pages name, and runs that have finished."""
    folder = tmp_path_factory.mktemp("reader") / "home"
    for name in ("envs", "runs"):
        (folder / name).mkdir(parents=True)
    for name in ("models/base", "models/my-policy", "my-policy", "path/to/model"):
        write_base_model("tool-caller", folder / name)
    (folder / "models" / "reward").mkdir()
    make_reward_model(folder / "models" / "reward", seed=2)
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("runs", "__pycache__"))
    pythons = {page: [block.text for block in blocks_of(ROOT / page, "python")] for page in PYTHON_PAGES}
    (folder / "counter.py").write_text(pythons["README.md"][0])
    (folder / "envs" / "till.py").write_text(pythons["docs/environments.md"][0])
    (folder / "rewards.py").write_text("\n".join([*pythons["docs/rewards.md"], BY_PLACE]))
    rows = [{"question": f"Table {i % 9 + 1}: {i} + 2?", "answer": i + 2, "target": i % 5 + 1} for i in range(5000)]
    rows = [row | {"answer": None} if i % 10 == 5 else row for i, row in enumerate(rows)]  # a reward cannot be measured
    write_rows(folder / "prompts.jsonl", rows)
    write_rows(folder / "held_out.jsonl", rows[:4])
    pair = {"prompt": "1 + 2?", "chosen": "It is 3.", "rejected": "It is 4.", "subset": "math-prm"}
    write_rows(folder / "pairs.jsonl", [pair, pair])
    (folder / "my.toml").write_text(tomli_w.dumps(settings("my-run", "counter.py:Counter", STEPS)))
    recipe = settings("", "envs.till:Till", 2) | {"eval": {"path": "held_out.jsonl", "group_size": 2}}
    recipe["rewards"] = [{"ref": "rewards.py:by_place"}]  # the model never solves the task
    (folder / "run.toml").write_text(tomli_w.dumps(recipe))
    (folder / "other.toml").write_text('[[rewards]]\nref = "rewards.py:solved"\n')
    reader = Reader(folder, logs=folder.parent, path=str(Path(sys.executable).parent))
    reader.type("penstock run my.toml --quiet", COMMAND_S)
    for name in ("first", "second", "demo"):
        shutil.copytree(folder / "runs" / "my-run", folder / "runs" / name)
    return folder


PYTHON_PAGES = ("README.md", "docs/environments.md", "docs/rewards.md")


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def settings(name: str, environment: str, steps: int) -> dict[str, object]:
    """Return the settings of a small run."""
    return {
        "run": {"dashboard": "off"} | ({"name": name} if name else {}),
        "model": {"path": "models/my-policy"},
        "data": {"path": "prompts.jsonl", "prompt": "question"},
        "environments": {"task": environment},
        "rewards": [{"ref": "rewards.py:solved"}],
        "rollout": {"group_size": 2, "max_turns": 2, "max_tokens_per_turn": 24, "max_tokens": 96},
        "engine": {"max_model_len": 512},
        "filter": {"zero_variance": False},
        "abort": {"max_invalid_fraction": 1.0},
        "train": {"batch_size": 2, "max_steps": steps, "save_every": 10, "learning_rate": 1e-5},
    }


class Home(Reader):
    """A reader for whom every machine is this one; its ports are free ones."""

    def __init__(self, folder: Path, **options: object) -> None:
        super().__init__(folder, **options)
        self.ports = dict(zip(PORTS, map(str, free_ports(len(PORTS))), strict=True))
        self.home = folder

    def type_line(self, line: str, timeout_s: float) -> str:
        more = {
            "penstock dashboard": "" if "--port" in line else " --port 0",
            "redis-server": " --port 6379 --save ''",
            "curl": " --fail -sS",
        }
        line += next((words for start, words in more.items() if line.startswith(start)), "")
        for name, meant in NAMES.items():
            line = line.replace(name, meant)
        line = re.sub(HOSTS, "127.0.0.1", line)
        line = re.sub(rf"(?<=[: ])(?:{'|'.join(PORTS)})\b", lambda port: self.ports[port[0]], line)
        if line.startswith(GOING_ON):
            before = self.steps()
            self.leave_running(line).wait_until(lambda: self.steps() > before, COMMAND_S)
            return ""
        return super().type_line(line, timeout_s)

    def steps(self) -> int:
        """Return how many steps my-run has made."""
        metrics = self.home / "runs" / "my-run" / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0


@pytest.fixture
def reader(written, tmp_path) -> Iterator[Home]:
    """A reader with a copy of the folder."""
    folder = tmp_path / "home"
    shutil.copytree(written, folder)
    reader = Home(folder, logs=tmp_path, path=str(Path(sys.executable).parent))
    yield reader
    reader.leave()


class Collector(BaseHTTPRequestHandler):
    """Takes whatever is sent, as an OpenTelemetry collector does."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def collector(reader) -> Iterator[None]:
    with HTTPServer(("127.0.0.1", int(reader.ports["4318"])), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield
        server.shutdown()
        thread.join()


def runnable(page: Path) -> list[str]:
    """Return the blocks of a page that are run here."""
    return [b.text for b in blocks_of(page, "sh") if not (b.reason_not_to_run or b.run_by)]


@pytest.mark.usefixtures("collector")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if runnable(page)], ids=lambda page: str(page.relative_to(ROOT))
)
def test_the_commands_of_a_page_work(reader, page):
    for line in BEFORE.get(str(page.relative_to(ROOT)), []):
        reader.type_line(line, COMMAND_S)
    for text in runnable(page):
        reader.type(text, COMMAND_S)
    for started in reader.background:
        if started.line.startswith("penstock train"):
            started.wait_until(reader.steps, COMMAND_S)


@pytest.mark.parametrize("page", ["docs/records.md", "docs/run-folder.md"])
def test_programs_that_read_a_run_print_its_groups(reader, page):
    for block in blocks_of(ROOT / page, "python"):
        ran = subprocess.run(
            [sys.executable, "-c", block.text], cwd=reader.folder, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        assert len(ran.stdout.splitlines()) >= STEPS


def test_a_run_is_checked_played_started_and_read_from_python(reader):
    code = "\n".join(block.text for block in blocks_of(ROOT / "docs" / "python.md", "python"))
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=reader.folder, capture_output=True, text=True, timeout=COMMAND_S, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert f"True {STEPS + 5}" in ran.stdout.splitlines()
    assert ran.stdout.splitlines()[-1] == "True", "the audit is clean"
    assert (reader.folder / "groups.jsonl").exists()


def test_a_run_is_started_again_with_other_settings_and_other_code(reader):
    block = blocks_of(ROOT / "docs" / "resuming.md", "sh")[0]
    first, changed, edited = (line for line in block.text.splitlines() if line.startswith("penstock"))
    table = tomllib.loads((reader.home / "my.toml").read_text())
    table["train"] |= {"max_steps": STEPS + 4}
    (reader.home / "my.toml").write_text(tomli_w.dumps(table))
    reader.type(first, COMMAND_S)
    printed = reader.type(f"{changed} --set train.max_steps={STEPS + 5}", COMMAND_S)
    assert f"resuming run my-run at step {STEPS + 4}" in printed
    assert "train.learning_rate from 1e-05 to 5e-07" in printed
    with (reader.home / "rewards.py").open("a") as rewards:
        rewards.write("# another version\n")
    with pytest.raises(AssertionError) as refused:
        reader.type(edited, COMMAND_S)
    expected = " ".join(line.strip("# ") for line in block.text.splitlines()[-2:]).replace(".exact.", ".solved.")
    assert expected.removeprefix("error: ") in " ".join(str(refused.value).split())
