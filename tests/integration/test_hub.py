"""Names on a hub: downloaded once, bound to a commit, and each fault of the hub answered in one line."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from tests.cases.hub_client import HubClient
from tests.hub_server import (
    altering,
    changing,
    cutting,
    environment,
    failing,
    files_of,
    redirecting,
    run_hub,
    silent,
    stalling,
)
from workers.demo import base_models

SHIPPED = Path(base_models.__file__).parent / "models" / "calculator"
TOKEN = "hf_aVerySecretToken"
CARD = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files: socratic/*
---
"""


@pytest.fixture(scope="module")
def hub():
    with run_hub() as hub:
        yield hub


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A user's folder, with the cache in it."""
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def client(hub, place):
    client = HubClient(place, environment(hub, place / "hf"))
    yield client
    client.close()


@pytest.fixture(autouse=True)
def no_faults(hub):
    hub.requests.clear()
    yield
    hub.faults.clear()


def parquet(*questions: str) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"question": list(questions), "answer": ["1"] * len(questions)}), file)
    return file.getvalue()


def model_files(**changed: object) -> dict[str, bytes]:
    """Return a model that is too large for git, with other values in its config.json."""
    files = files_of(SHIPPED)
    return files | {"config.json": json.dumps(json.loads(files["config.json"]) | changed).encode()}


def data_files(word: str = "train") -> dict[str, bytes]:
    return {
        "README.md": CARD,
        "main/train-00000-of-00001.parquet": parquet(f"{word} 1", f"{word} 2"),
        "main/test-00000-of-00001.parquet": parquet("test 1"),
        "socratic/train.parquet": parquet("why?"),
    }


def model(name: str, **more: object) -> dict[str, object]:
    return {"model": {"path": name} | more, "data": {"rows": 4, "prompt": ""}, "environments": {"c": "calculator"}}


def data(name: str, **more: object) -> dict[str, object]:
    return model(".") | {"data": {"path": name, "prompt": "question", "shuffle": False} | more}


def cached(place: Path, name: str, kind: str = "model") -> Path:
    return place / "hf" / "hub" / f"{kind}s--{name.replace('/', '--')}"


def test_a_model_is_downloaded_once_and_bound_to_its_commit(hub, client):
    commit = hub.model("a/once").commit(model_files() | {"onnx/model.safetensors": b"x", "flax.msgpack": b"x"}, "main")
    first = client.ask(model("a/once"))
    assert first["error"] == ""
    assert first["recorded"] == {"model.revision": f"a/once main@{commit}"}
    assert sorted(file.name for file in Path(first["folder"]).iterdir()) == sorted(files_of(SHIPPED))
    assert files_of(Path(first["folder"])) == files_of(SHIPPED) | {"config.json": model_files()["config.json"]}
    (begin, end) = first["said"]
    assert begin == f"downloading model a/once (main, commit {commit[:12]}): 7 files, 890 kB"
    assert end.startswith(f"downloaded model a/once (main, commit {commit[:12]}) in ")

    hub.requests.clear()
    again = client.ask(model("a/once"), known=first["recorded"])
    assert (again["folder"], again["recorded"], again["said"]) == (first["folder"], first["recorded"], [])
    assert hub.requests == []


def test_a_moved_branch_changes_nothing_in_a_run_that_has_begun(hub, client, place):
    repo = hub.model("a/moved")
    old = repo.commit(model_files(), "main", "v1")
    known = client.ask(model("a/moved"))["recorded"]
    new = repo.commit(model_files(eos_token_id=5), "main")
    hub.requests.clear()
    assert client.ask(model("a/moved"), known=known)["folder"].endswith(old)
    assert hub.requests == []
    assert client.ask(model("a/moved"))["folder"].endswith(new)  # another run begins with what the branch is now

    shutil.rmtree(cached(place, "a/moved"))
    assert client.ask(model("a/moved"), known=known)["folder"].endswith(old)  # downloaded again, the same commit


def test_another_revision_than_the_runs_is_refused_with_both_commits(hub, client):
    repo = hub.model("a/other")
    old = repo.commit(model_files(), "main", "v1")
    known = client.ask(model("a/other"))["recorded"]
    new = repo.commit(model_files(eos_token_id=5), "v2")
    refused = client.ask(model("a/other", revision="v2"), known=known)
    assert refused["kind"] == "RunMismatchError"
    assert refused["error"] == (
        f"model.revision: the settings name a/other at v2, commit {new[:12]}, and this run began with main, commit "
        f'{old[:12]}. Set model.revision = "main@{old}", or start a new run: give it another run.name'
    )
    for same in ("", "main", "v1", old, old[:10], f"main@{old}"):
        assert client.ask(model("a/other", revision=same), known=known)["recorded"] == known, same
    moved = client.ask(model("a/other", revision=f"main@{new}"), known=known)["error"]
    assert new[:12] in moved
    assert old[:12] in moved
    unknown = client.ask(model("a/other", revision="v3"), known=known, offline=True)["error"]
    assert "v3, whose commit is unknown (HF_HUB_OFFLINE is set" in unknown
    assert "began with a/other at main" in client.ask(model("a/once"), known=known)["error"]


def test_a_branch_is_taken_from_the_cache_while_the_hub_cannot_be_asked(hub, client):
    commit = hub.model("a/offline").commit(model_files(), "main")
    client.ask(model("a/offline"))
    hub.requests.clear()
    found = client.ask(model("a/offline"), offline=True)
    assert found["recorded"] == {"model.revision": f"a/offline main@{commit}"}
    assert found["said"] == [f"model a/offline: the hub cannot be asked; the cache has main, commit {commit[:12]}"]
    assert hub.requests == []
    hub.close()
    try:
        assert client.ask(model("a/offline"))["recorded"] == found["recorded"]
    finally:
        hub.open()


def test_a_data_set_is_downloaded_by_configuration_and_read_by_split(hub, client, place):
    repo = hub.dataset("d/sums")
    commit = repo.commit(data_files(), "main")
    found = client.ask(data("d/sums", config="main", split="train"))
    assert found["error"] == ""
    assert found["rows"] == ["train 1", "train 2"]
    assert found["recorded"] == {"data.revision.sums#train": f"d/sums main@{commit}"}
    assert found["said"][0] == f"downloading data set d/sums (main, commit {commit[:12]}): 3 files, 2 kB"
    assert sorted(files_of(cached(place, "d/sums", "dataset") / "snapshots" / commit)) == sorted(
        name for name in data_files() if not name.startswith("socratic")
    )
    hub.requests.clear()
    offline = client.ask(data("d/sums", config="main", split="train"), known=found["recorded"], offline=True)
    assert (offline["rows"], hub.requests) == (found["rows"], [])
    repo.commit(data_files("other"), "main")
    same = client.ask(data("d/sums", config="main", split="train"), known=found["recorded"])
    assert same["rows"] == found["rows"]
    assert client.ask(data("d/sums", config="main", split="train"))["rows"] == ["other 1", "other 2"]
    assert client.ask(data("d/sums", config="main", split="train[1:]"))["rows"] == ["other 2"]
    assert client.ask(data("d/sums", config="socratic"))["rows"] == ["why?"]


def test_several_sets_and_held_out_prompts_have_commits_of_their_own(hub, client):
    first = hub.dataset("d/one").commit(data_files("one"), "main", "v1")
    second = hub.dataset("d/two").commit({"train.jsonl": b'{"question": "two"}\n'}, "main")
    table = data("") | {"eval": {"path": "d/one", "config": "main", "split": "test", "revision": "v1"}}
    sets = [{"path": "d/one", "config": "main", "split": "train"}, {"path": "d/two"}]
    table["data"] = {"sets": sets, "prompt": "question"}
    found = client.ask(table)
    assert found["error"] == ""
    assert found["recorded"] == {
        "data.revision.one#train": f"d/one main@{first}",
        "data.revision.two": f"d/two main@{second}",
        "eval.revision": f"d/one v1@{first}",
    }


def test_what_is_on_the_disk_takes_precedence(hub, client, place):
    hub.model("mine/policy").commit(model_files(), "main")
    shutil.copytree(SHIPPED, place / "mine" / "policy")
    found = client.ask(model("mine/policy"))
    assert (found["folder"], found["recorded"], hub.requests) == ("mine/policy", {}, [])
    refused = client.ask(model("mine/policy", revision="v1"))["error"]
    assert "model.revision is for a name on a hub" in refused
    assert "'mine/policy' is on this disk" in refused


def test_a_private_model_needs_a_token_which_stays_with_the_hub(hub, client):
    hub.model("a/private", needs="private", token=TOKEN).commit(model_files(), "main")
    refused = client.ask(model("a/private"))["error"]
    assert "has no model a/private that may be read" in refused
    assert "if it is private, set HF_TOKEN" in refused
    hub.requests.clear()
    found = client.ask(model("a/private"), token=TOKEN)
    assert found["error"] == ""
    assert TOKEN not in json.dumps(found)
    tokens = {request.token for request in hub.requests if request.path.startswith("/a/private/")}
    assert tokens == {TOKEN}
    assert {request.token for request in hub.requests if request.path.count("/") == 1} == {""}  # the storage's


FAULTS = {
    "gated, without a token": (
        lambda hub: hub.model("f/gated", needs="gated").commit(model_files(), "main"),
        model("f/gated"),
        ["f/gated is gated", "accept its conditions at http://127.0.0.1", "set HF_TOKEN"],
    ),
    "gated, and the account may not": (
        lambda hub: hub.dataset("f/gate", needs="gated", token="other").commit(data_files(), "main"),
        data("f/gate", split="train"),
        ["data set f/gate is gated", "may not read it", "/datasets/f/gate"],
    ),
    "refused": (
        lambda hub: hub.model("f/refused", needs="refused").commit(model_files(), "main"),
        model("f/refused"),
        ["refuses access to model f/refused (HTTP 403)", "HF_TOKEN"],
    ),
    "unknown repository": (
        lambda _: None,
        model("f/nothing"),
        ["model.path = 'f/nothing': there is no such file or folder in /", "and http://127.0.0.1", "has no model f/n"],
    ),
    "unknown data set": (lambda _: None, data("f/nothing"), ["data.path = 'f/nothing'", "no data set f/nothing"]),
    "unknown revision": (
        lambda hub: hub.model("f/revision").commit(model_files(), "main"),
        model("f/revision", revision="v9"),
        ["model.revision = 'v9': f/revision has no such branch, tag or commit"],
    ),
    "unknown configuration": (
        lambda hub: hub.dataset("f/config").commit(data_files(), "main"),
        data("f/config", config="extra"),
        ["f/config: name one of its configurations", "there are: main, socratic"],
    ),
    "no configuration is named": (
        lambda hub: hub.dataset("f/config2").commit(data_files(), "main"),
        data("f/config2"),
        ["name one of its configurations", "there are: main, socratic"],
    ),
    "unknown split": (
        lambda hub: hub.dataset("f/split").commit(data_files(), "main"),
        data("f/split", config="main", split="dev"),
        ["data.path = f/split: no split 'dev'", "there are: train, test"],
    ),
    "no split is named": (
        lambda hub: hub.dataset("f/split2").commit(data_files(), "main"),
        data("f/split2", config="main"),
        ["data.path = f/split2: several splits", 'split = "train"', "there are: train, test"],
    ),
    "no split of the held-out prompts is named": (
        lambda hub: hub.dataset("f/split3").commit(data_files(), "main"),
        model(".") | {"eval": {"path": "f/split3", "config": "main"}},
        ["eval.path = f/split3: several splits", "there are: train, test"],
    ),
    "no data files": (
        lambda hub: hub.dataset("f/empty").commit({"README.md": b"nothing"}, "main"),
        data("f/empty"),
        ["f/empty: datasets cannot read it", "data files"],
    ),
    "only a pickle": (
        lambda hub: hub.model("f/pickle").commit({"config.json": b"{}", "pytorch_model.bin": b"x"}, "main"),
        model("f/pickle"),
        ["no safetensors, only pytorch_model.bin, a pickle", "save_pretrained(FOLDER)", "set model.path to FOLDER"],
    ),
    "only an adapter": (
        lambda hub: hub.model("f/lora").commit(
            {"adapter_config.json": b"{}", "adapter_model.safetensors": b""}, "main"
        ),
        model("f/lora"),
        ["f/lora has no config.json", "a LoRA adapter", "merge it"],
    ),
    "code of its own": (
        lambda hub: hub.model("f/code").commit(
            model_files(model_type="odd", auto_map={"AutoModel": "modeling_odd.Odd"}), "main"
        ),
        model("f/code"),
        ["no architecture 'odd'", "modeling_odd.py", "trust_remote_code=True", "Penstock never does"],
    ),
    "a name that no hub has": (
        lambda _: None,
        model("f/a--b"),
        ["model.path = 'f/a--b': there is no such file", "f/a--b"],
    ),
    "no such form of a revision": (
        lambda hub: hub.model("f/form").commit(model_files(), "main"),
        model("f/form", revision="refs/pr/1"),
        ["'refs/pr/1': f/form has no such branch"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_name_is_answered_in_one_line(hub, client, fault):
    prepare, table, words = FAULTS[fault]
    prepare(hub)
    token = TOKEN if fault == "gated, and the account may not" else ""
    answer = client.ask(table, token=token)
    for word in words:
        assert word in answer["error"]
    assert "\n" not in answer["error"]
    assert answer["kind"] == "SettingsError"
    assert TOKEN not in json.dumps(answer)


def with_a_wrong_byte(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


ON_THE_WAY = {
    "5xx": ("GET /api/models/w/", failing(503), ["answered with HTTP 503 for model w/", "try again later"]),
    "5xx of the storage": (r"GET /[0-9a-f]{64}$", failing(500), ["answered with HTTP 500", "what is complete is kept"]),
    "too many requests": ("GET /api/models/w/", failing(429), ["HTTP 429", "wait some minutes"]),
    "redirect to a dead host": (
        "HEAD .*safetensors",
        redirecting("http://127.0.0.1:1/gone"),
        ["could not be downloaded", "refused", "check the network, HTTPS_PROXY and HF_ENDPOINT"],
    ),
    "longer than announced": (
        "HEAD .*safetensors",
        changing(X_Linked_Size="875000"),
        [
            "a file of model w/longer-than-announced came damaged from http://127.0.0.1",
            "875456 bytes instead of 875000",
        ],
    ),
    "shorter than announced": (
        r"GET /[0-9a-f]{64}$",
        altering(lambda data: data[:5000]),
        ["came damaged", "was thrown away: it has 5000 bytes instead of 875456. Start again"],
    ),
    "wrong weights": (
        r"GET /[0-9a-f]{64}$",
        altering(with_a_wrong_byte),
        ["model.safetensors of model w/wrong-weights came damaged", "thrown away: the hub has another checksum for it"],
    ),
    "a wrong tokenizer": (
        "GET .*tokenizer.json",
        altering(with_a_wrong_byte),
        ["tokenizer.json of model w/a-wrong-tokenizer came damaged", "the hub has another checksum for it"],
    ),
    "a login page": (
        "GET /api",
        altering(lambda _: b"<html>Welcome to our network"),
        ["gave an answer for model w/a-login-page that is no JSON", "no proxy or login page answers in its place"],
    ),
    "a proxy that wants a password": (
        "GET /api",
        failing(407),
        ["the proxy wants a user and a password (HTTP 407)", "set HTTPS_PROXY", "USER:PASSWORD@HOST"],
    ),
    "without an ETag": ("HEAD .*tokenizer.json", changing(ETag=None), ["ETag", "HF_ENDPOINT names a hub"]),
    "no hub at all": ("GET /api", failing(404), ["HTTP 404", "check HF_ENDPOINT"]),
    "always cut": (r"GET /[0-9a-f]{64}$", cutting(0), ["could not be downloaded", "what is complete is kept"]),
}


@pytest.mark.parametrize("fault", ON_THE_WAY)
def test_a_fault_on_the_way_is_answered_in_one_line_and_the_next_start_goes_on(hub, client, place, fault):
    pattern, answer_wrongly, words = ON_THE_WAY[fault]
    name = f"w/{fault.replace(' ', '-')}"
    commit = hub.model(name).commit(model_files(), "main")
    hub.faults[pattern] = answer_wrongly
    answer = client.ask(model(name))
    for word in words:
        assert word in answer["error"]
    assert "\n" not in answer["error"]
    assert answer["kind"] == "PenstockError"
    weights = cached(place, name) / "snapshots" / commit / "model.safetensors"
    assert "lacks files of model w/" in client.ask(model(name), offline=True)["error"]
    hub.faults.clear()
    hub.requests.clear()
    assert client.ask(model(name))["error"] == ""
    assert weights.read_bytes() == model_files()["model.safetensors"]


def test_files_of_a_data_set_that_came_damaged_are_thrown_away(hub, client, place):
    commit = hub.dataset("w/data").commit({"README.md": b"A card.", "train.parquet": parquet("why?")}, "main")
    snapshot = cached(place, "w/data", "dataset") / "snapshots" / commit
    for name in ("README.md", "train.parquet"):
        hub.faults = {f"GET .*{name}": altering(with_a_wrong_byte)}
        answer = client.ask(data("w/data"))
        assert answer["kind"] == "PenstockError"
        assert f"{name} of data set w/data came damaged" in answer["error"]
        assert not (snapshot / name).exists()
    hub.faults.clear()
    assert client.ask(data("w/data"))["rows"] == ["why?"]


def test_a_damaged_file_is_downloaded_again_for_every_commit_that_has_it(hub, client, place):
    repo = hub.model("w/both")
    first = repo.commit(model_files(), "v1")
    second = repo.commit(model_files() | {"new.txt": b"new"}, "v2")
    assert client.ask(model("w/both", revision="v1"))["error"] == ""
    weights = cached(place, "w/both") / "snapshots" / first / "model.safetensors"
    weights.resolve().write_bytes(with_a_wrong_byte(weights.read_bytes()))  # as another program may have left it
    assert "came damaged" in client.ask(model("w/both", revision="v2"))["error"]
    for revision, commit in (("v2", second), ("v1", first)):
        assert client.ask(model("w/both", revision=revision))["folder"].endswith(commit)
        assert weights.read_bytes() == model_files()["model.safetensors"]


def test_a_proxy_is_named_without_its_password(hub, place):
    hub.model("n/proxy").commit(model_files(), "main")
    proxy = {"http_proxy": "http://me:secret@127.0.0.1:1", "no_proxy": ""}
    client = HubClient(place, environment(hub, place / "hf", **proxy))
    answer = client.ask(model("n/proxy"))["error"]
    client.close()
    assert f"could not be downloaded from {hub.url} through the proxy http://127.0.0.1:1 (" in answer
    assert "secret" not in answer


def test_no_network(hub, client):
    hub.close()
    try:
        answer = client.ask(model("n/network"))
    finally:
        hub.open()
    assert "model n/network could not be downloaded from http://127.0.0.1" in answer["error"]
    assert "refused" in answer["error"]
    assert "If model.path was meant as a folder: there is none in /" in answer["error"]
    assert "\n" not in answer["error"]


def test_a_hub_that_accepts_requests_and_never_answers(hub, client):
    release = threading.Event()
    commit = hub.model("n/silent").commit(model_files(), "main")
    hub.faults["GET /api"] = silent(release)
    answer = client.ask(model("n/silent"), answer_within_s=0.3)["error"]
    assert "model n/silent could not be downloaded from http://127.0.0.1" in answer
    assert "timed out" in answer
    hub.faults.clear()
    assert client.ask(model("n/silent"))["error"] == ""
    hub.faults["GET /api"] = silent(release)
    found = client.ask(model("n/silent"), answer_within_s=0.3)
    release.set()
    assert found["said"] == [f"model n/silent: the hub cannot be asked; the cache has main, commit {commit[:12]}"]


def test_offline_without_the_files(client):
    answer = client.ask(model("n/offline"), offline=True)["error"]
    assert answer.startswith("HF_HUB_OFFLINE is set, and ")
    assert "lacks files of model n/offline at main: unset it" in answer


def test_no_room_on_the_disk(hub, client, place):
    hub.model("n/room").commit(model_files(), "main")
    answer = client.ask(model("n/room"), free=500_000)["error"]
    assert "no room for model n/room: 890 kB are to be downloaded" in answer
    assert "500 kB free; make room, or set HF_HOME" in answer
    assert not (cached(place, "n/room") / "blobs").exists()
    assert client.ask(model("n/room"))["error"] == ""


def test_a_download_that_is_cut_goes_on_where_it_was(hub, client):
    hub.model("c/cut").commit(model_files(), "main")
    hub.faults[r"GET /[0-9a-f]{64}$"] = cutting(300_000, times=1)
    found = client.ask(model("c/cut"))
    assert (Path(found["folder"]) / "model.safetensors").read_bytes() == model_files()["model.safetensors"]
    assert "bytes=300000-" in [request.range for request in hub.requests]


def test_ctrl_c_ends_a_download_that_stalls(hub, place):
    hub.model("c/interrupted").commit(model_files(), "main")
    release = threading.Event()
    hub.faults[r"GET /[0-9a-f]{64}$"] = stalling(300_000, release)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    with subprocess.Popen(
        # A shell's background job ignores the signal, and so would its children.
        ["env", "--default-signal=INT", sys.executable, "-m", "penstock", "serve", "c/interrupted", "--port", "0"],
        cwd=place, env=variables | environment(hub, place / "hf"), stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            deadline = time.monotonic() + 40
            while not any(re.fullmatch("/[0-9a-f]{64}", request.path) for request in hub.requests):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=25)  # the library's threads end after a minute
        finally:
            process.kill()
            release.set()
    assert process.returncode == 130
    assert said.splitlines()[-1] == "interrupted"


def test_a_start_that_is_killed_leaves_nothing_that_is_taken_for_whole(hub, place):
    commit = hub.model("c/killed").commit(model_files(), "main")
    release = threading.Event()
    hub.faults[r"GET /[0-9a-f]{64}$"] = stalling(300_000, release)
    first = HubClient(place, environment(hub, place / "hf"))
    first.begin(model("c/killed"))
    snapshot = cached(place, "c/killed") / "snapshots" / commit
    deadline = time.monotonic() + 20
    whole = [snapshot / name for name in model_files() if name != "model.safetensors"]  # files come side by side
    while not (
        all(path.exists() for path in whole)
        and [path.stat().st_size for path in (snapshot.parents[1] / "blobs").glob("*.incomplete")] == [300_000]
    ):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    first.kill()
    release.set()
    hub.faults.clear()
    assert not (snapshot / "model.safetensors").exists()
    hub.requests.clear()
    second = HubClient(place, environment(hub, place / "hf"))
    assert "lacks files" in second.ask(model("c/killed"), offline=True)["error"]
    assert second.ask(model("c/killed"))["error"] == ""
    second.close()
    assert (snapshot / "model.safetensors").read_bytes() == model_files()["model.safetensors"]
    assert [request.path for request in hub.requests if request.path.endswith("/tokenizer.json")] == []  # it was whole
