"""`penstock run` with a model and data sets by their hub names: downloaded, offline, and with a moved revision."""

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import tomli_w
from pyarrow import parquet as pq

from tests.hub_server import environment, files_of, run_hub
from workers.demo import base_models

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]

SHIPPED = Path(base_models.__file__).parent / "models" / "calculator"
TOKEN = "hf_aVerySecretToken"
CARD = b"""---
configs:
- config_name: main
  data_files: [{split: train, path: main/train-*}, {split: test, path: main/test-*}]
---
"""
GRADE = "def sums(completions, **columns):\n    return [float(index % 2) for index in range(len(completions))]\n"


def parquet(first: int, count: int) -> bytes:
    file, numbers = io.BytesIO(), range(first, first + count)
    questions, answers = [f"What is {n} + 1?" for n in numbers], [str(n + 1) for n in numbers]
    pq.write_table(pa.table({"question": questions, "answer": answers}), file)
    return file.getvalue()


class User:
    """A user's folder, cache and settings."""

    def __init__(self, folder: Path, hub) -> None:
        self.folder, self.hub = folder, hub
        self.table = {
            "run": {"name": "mine", "dashboard": "off"},
            "model": {"path": "demo/calculator"},
            "data": {"path": "demo/sums", "config": "main", "split": "train", "prompt": "question"},
            "eval": {"path": "demo/sums", "config": "main", "split": "test", "every": 100, "group_size": 1},
            "rewards": [{"ref": "grade.py:sums"}],
            "rollout": {"group_size": 2, "max_tokens": 12, "max_tokens_per_turn": 6},
            "engine": {"max_model_len": 256},
            "train": {"batch_size": 2, "max_steps": 2, "learning_rate": 1e-4},
            "filter": {"zero_variance": False},
        }
        (folder / "grade.py").write_text(GRADE)

    def penstock(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        (self.folder / "my.toml").write_text(tomli_w.dumps(self.table))
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        own = environment(self.hub, self.folder / "hf", HF_TOKEN=TOKEN, OMP_NUM_THREADS="1", **variables)
        return subprocess.run(
            [sys.executable, "-m", "penstock", *words],
            cwd=self.folder, env=kept | own, capture_output=True, text=True, timeout=400, check=False,
        )  # fmt: skip


@pytest.fixture
def user(tmp_path):
    with run_hub() as hub:
        hub.model("demo/calculator", needs="private", token=TOKEN)
        hub.dataset("demo/sums")
        yield User(tmp_path, hub)


def test_downloaded_then_offline_then_refused_with_another_revision(user):
    hub = user.hub
    model, data = hub.repos["model", "demo/calculator"], hub.repos["dataset", "demo/sums"]
    first = model.commit(files_of(SHIPPED), "main")
    rows = {"README.md": CARD, "main/train-0.parquet": parquet(1, 8), "main/test-0.parquet": parquet(50, 2)}
    first_data = data.commit(rows, "main")

    begun = user.penstock("run", "my.toml")
    assert begun.returncode == 0, begun.stderr
    assert f"downloading model demo/calculator (main, commit {first[:12]}): 7 files, 890 kB" in begun.stderr
    assert f"downloading data set demo/sums (main, commit {first_data[:12]})" in begun.stderr
    run = user.folder / "runs" / "mine"
    assert f'revision = "main@{first}"' in (run / "run.toml").read_text()
    assert f"demo/calculator main@{first}" in (run / "identity.json").read_text()

    # Both branches move, and the hub is gone: the run goes on with its commits.
    second = model.commit(files_of(SHIPPED) | {"made_from.json": b"{}"}, "main", "v2")
    data.commit(rows | {"main/train-0.parquet": parquet(100, 8)}, "main")
    hub.close()
    user.table["train"]["max_steps"] = 3
    offline = user.penstock("run", "my.toml", HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    assert "resuming run mine at step 2 of 3" in offline.stderr
    assert "downloading" not in offline.stderr
    hub.open()
    hub.requests.clear()
    user.table["train"]["max_steps"] = 4
    moved = user.penstock("run", "my.toml")
    assert moved.returncode == 0, moved.stderr
    assert [request.path for request in hub.requests if "demo" in request.path] == []

    user.table["model"]["revision"] = "v2"
    refused = user.penstock("run", "my.toml")
    assert refused.returncode == 1, refused.stderr
    (line,) = refused.stderr.strip().splitlines()
    assert line == (
        f"error: model.revision: the settings name demo/calculator at v2, commit {second[:12]}, and this run began "
        f'with main, commit {first[:12]}. Set model.revision = "main@{first}", or start a new run: give it another '
        "run.name"
    )
    texts = [file.read_bytes() for file in run.rglob("*") if file.is_file()]
    texts += [each.stderr.encode() + each.stdout.encode() for each in (begun, offline, moved, refused)]
    assert not [text for text in texts if TOKEN.encode() in text]


def test_check_serve_and_eval_take_names_too(user):
    hub = user.hub
    commit = hub.repos["model", "demo/calculator"].commit(files_of(SHIPPED), "main")
    rows = {"README.md": CARD, "main/train-0.parquet": parquet(1, 8), "main/test-0.parquet": parquet(50, 2)}
    hub.repos["dataset", "demo/sums"].commit(rows, "main")
    checked = user.penstock("check", "my.toml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "8 rows of the data" in checked.stdout
    evaluated = user.penstock("eval", "my.toml", "--policy", f"demo/calculator@{commit}", HF_HUB_OFFLINE="1")
    assert evaluated.returncode == 0, evaluated.stderr
    assert "2 prompts" in evaluated.stdout
    user.table["model"]["path"] = "demo/nothing"
    wrong = user.penstock("check", "my.toml")
    assert wrong.returncode == 1
    assert wrong.stdout.count("demo/nothing") == 2  # both meanings, in one finding
    shutil.rmtree(user.folder / "hf")
    assert "model demo/nothing" in user.penstock("serve", "demo/nothing", "--port", "0").stderr
