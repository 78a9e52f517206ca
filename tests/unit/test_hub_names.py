"""Which names are a hub's, and what a revision with its commit looks like."""

import errno
import subprocess
import sys

import pytest

from stream.errors import DataError, PenstockError, SettingsError
from workers.hub import names
from workers.hub.names import hub_names, recorded_revisions, revision_overrides, try_to_resolve
from workers.settings import hub
from workers.settings.hub import is_hub_name, local_folder, parse_revision
from workers.settings.toml_file import load_settings, parse_settings

COMMIT = "c1899de289a04d12100db370d81485cdf75e47ca"
GSM = {"path": "openai/gsm8k", "config": "main"}


def settings(**tables):
    least = {"model": {"path": "m"}, "data": {"rows": 3, "prompt": ""}, "environments": {"c": "calculator"}}
    return parse_settings(least | tables)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "openai/gsm8k", "a/b", "models/my-policy", "a_b/c.d-e"])
def test_owner_and_name_are_a_hub_name(name):
    assert is_hub_name(name)


@pytest.mark.parametrize(
    "name",
    ["", "m", "/a/b", "./a/b", "../b", "a/b/c", "a/", "data/rows.jsonl", "data/x.parquet", "a b/c", "a/ü", "~/m"],
)
def test_other_paths_are_none(name):
    assert not is_hub_name(name)


def test_what_exists_on_the_disk_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("models/mine")
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert not is_hub_name("models/mine")


@pytest.mark.parametrize(
    ("text", "name", "commit", "written"),
    [
        ("", "main", "", "main"),
        ("v1.0", "v1.0", "", "v1.0"),
        ("refs/pr/3", "refs/pr/3", "", "refs/pr/3"),
        (f"main@{COMMIT}", "main", COMMIT, f"main@{COMMIT}"),
        (COMMIT, COMMIT, COMMIT, COMMIT),
        (COMMIT[:7], COMMIT[:7], "", COMMIT[:7]),
    ],
)
def test_a_revision_has_a_name_and_perhaps_a_commit(text, name, commit, written):
    revision = parse_revision(text)
    assert (revision.name, revision.commit, str(revision)) == (name, commit, written)


@pytest.mark.parametrize("text", ["a b", "main@c1899de", "main@", "a@b@c"])
def test_another_form_of_a_revision_is_refused(text):
    with pytest.raises(SettingsError, match=r"model.revision: .* is refused: write a branch, a tag or a commit"):
        settings(model={"path": "a/b", "revision": text})


def test_each_table_names_its_own_repository():
    table = settings(
        model={"path": "Qwen/Qwen3-0.6B", "revision": f"main@{COMMIT}"},
        data=GSM | {"split": "train"},
        eval=GSM | {"split": "test", "revision": "v1"},
    )
    assert [(each.setting, each.key, each.value) for each in hub_names(table)] == [
        ("model", "model.revision", f"Qwen/Qwen3-0.6B main@{COMMIT}"),
        ("data", "data.revision.gsm8k#train", "openai/gsm8k main"),
        ("eval", "eval.revision", "openai/gsm8k v1"),
    ]
    assert recorded_revisions(table) == {"model.revision": f"Qwen/Qwen3-0.6B main@{COMMIT}"}
    assert table.datasets[0].source == "openai/gsm8k#train"
    assert table.for_evaluation.datasets[0].source == "openai/gsm8k#test"


def test_a_check_tells_of_each_fault_in_the_section_that_has_it(tmp_path):
    known = {"model.revision": f"a/b main@{COMMIT}"}
    _, errors = try_to_resolve(settings(model={"path": "a/other"}), known, print)
    assert list(errors) == ["model"]
    assert "model.path is a/other, and this run began with a/b at main" in str(errors["model"])
    (tmp_path / "rows.jsonl").touch()
    rows = {"path": str(tmp_path / "rows.jsonl"), "prompt": "question", "revision": "v1"}
    _, errors = try_to_resolve(settings(data=rows), {}, print)
    assert list(errors) == ["data"]


def test_a_disk_that_fills_while_a_data_set_is_prepared_is_no_fault_of_the_settings(monkeypatch):
    def prepare(*_: object):
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            raise DataError("openai/gsm8k: datasets cannot read it") from error

    monkeypatch.setattr(names, "download", lambda *_: None)
    monkeypatch.setattr(names, "open_source", prepare)
    with pytest.raises(PenstockError, match="no room on the disk for data set openai/gsm8k") as caught:
        names.download_names(settings(data=GSM | {"prompt": "question", "revision": COMMIT}), print)
    assert not isinstance(caught.value, SettingsError)


def test_overrides_give_a_file_the_same_revisions(tmp_path):
    sets = [{**GSM, "split": "train", "revision": COMMIT, "weight": 1.0}, {"path": "rows.jsonl", "weight": 0.5}]
    bound = settings(model={"path": "a/b", "revision": f"v1@{COMMIT}"}, data={"sets": sets, "prompt": "question"})
    (tmp_path / "run.toml").write_text(
        '[model]\npath = "a/b"\n[data]\nprompt = "question"\n[environments]\nc = "calculator"\n'
        '[[data.sets]]\npath = "other"\n'
    )
    assert load_settings(tmp_path / "run.toml", revision_overrides(bound)) == bound


def test_a_folder_is_found_in_the_cache_by_its_commit_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--a--b" / "snapshots" / COMMIT
    assert local_folder("a/b", COMMIT) == hub.Path("a/b")  # not there yet
    snapshot.mkdir(parents=True)
    assert local_folder("a/b", f"main@{COMMIT}") == snapshot
    assert local_folder("a/b", "main") == hub.Path("a/b")
    assert local_folder("a/b", COMMIT, "dataset") == hub.Path("a/b")
    assert settings(model={"path": "a/b", "revision": COMMIT}).model.folder == snapshot


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"data": {"rows": 3, "prompt": "", "split": "train"}}, "data.split is set, but data.path names no data set"),
        (
            {"data": {"sets": [{"rows": 3, "revision": "v1"}]}},
            r"data.sets\[0\].revision is set, but data.sets\[0\].path",
        ),
        ({"eval": {"rows": 3, "config": "main"}}, "eval.config is set, but eval.path names no data set"),
        ({"data": {"path": "d#train", "split": "test"}}, "data.path names a split after its # and data.split another"),
    ],
)
def test_keys_without_a_data_set_are_refused(tables, message):
    with pytest.raises(SettingsError, match=message):
        settings(**tables)


def test_without_such_a_name_no_library_of_the_hub_is_loaded():
    program = (
        "import sys; from workers.hub.names import resolve_names; from workers.settings.toml_file import "
        "parse_settings\n"
        "table = {'model': {'path': '.'}, 'data': {'path': 'rows.jsonl'}, 'environments': {'c': 'calculator'}}\n"
        "resolve_names(parse_settings(table), {}, print).model.folder\n"
        "print(sorted({'huggingface_hub', 'datasets', 'httpx', 'httpx2'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert out == "[]\n"


def test_a_missing_library_is_named_with_its_extra_and_both_meanings(monkeypatch):
    from workers.hub.names import resolve_names

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(SettingsError) as caught:
        resolve_names(settings(model={"path": "models/mine"}), {}, print)
    text = str(caught.value)
    assert text.startswith("model.path = 'models/mine': there is no such file or folder in /")
    assert text.endswith("reading it needs huggingface_hub: pip install 'penstock[rollout]'")
