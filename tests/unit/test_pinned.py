"""Whoever edits data, settings, rewards, environment code or the model between two starts is told by name."""

import json
import os
import shutil
from pathlib import Path

import pytest

from stream.connection.run_identity import RunIdentity, read_identity, write_identity
from stream.errors import PenstockError, RunMismatchError
from workers.datasets.fingerprint import dataset_lengths
from workers.datasets.mix import open_dataset_mix
from workers.run.identity_check import NOTHING, Accept, check_folder
from workers.run.run_start import print_start, start_lines
from workers.runs.folder import write_settings
from workers.settings import Settings
from workers.settings.toml_file import parse_settings

REWARDS = "import grading\ndef exact(completions, answer): return grading.grade(completions, answer)\n"
WORLD = "from kit.tools import Tool\nclass World:\n    def reset(self): return ''\n"


class Project:
    """A user's folder: data, settings, reward functions, an environment of a package, a model."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.table = {
            "run": {"name": "mine", "folder": str(home / "run"), "seed": 3},
            "model": {"path": str(home / "model")},
            "data": {"sets": [{"path": str(home / "easy.jsonl"), "weight": 2.0}]}
            | {"prompt": "question", "columns": {"answer": "gold"}, "system": "Be brief."},
            "environments": {"world": {"ref": "kit.world:World", "args": {"key": "secret", "size": 3}}},
            "rewards": [{"ref": f"{home / 'rewards.py'}:exact", "weight": 1.0}],
            "rollout": {"group_size": 4, "workers": 1},
        }
        self.table["data"]["sets"].append({"path": str(home / "hard.jsonl"), "weight": 1.0})
        self.rows("easy", 6)
        self.rows("hard", 3)
        self.write("rewards.py", REWARDS)
        self.write("grading.py", "def grade(completions, answer): return 1.0\n")
        self.write("kit/__init__.py", "")
        self.write("kit/world.py", WORLD)
        self.write("kit/tools.py", "class Tool: pass\n")
        self.write("unrelated.py", "x = 1\n")
        for name, text in {
            "config.json": "{}",
            "tokenizer.json": "[]",
            "chat_template.jinja": "{{ messages }}",
        }.items():
            self.write(f"model/{name}", text)
        (home / "model" / "model.safetensors").write_bytes(bytes(300_000))

    def write(self, name: str, text: str) -> None:
        (self.home / name).parent.mkdir(parents=True, exist_ok=True)
        (self.home / name).write_text(text)

    def rows(self, name: str, count: int, **changed: str) -> None:
        lines = [{"question": changed.get(f"q{i}", f"{name} {i}?"), "gold": i} for i in range(count)]
        self.write(f"{name}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))

    def set(self, *path: str | int, value: object) -> None:
        *parents, key = path
        table = self.table
        for parent in parents:
            table = table.setdefault(parent, {}) if isinstance(table, dict) else table[parent]
        table[key] = value

    @property
    def settings(self) -> Settings:
        return parse_settings(json.loads(json.dumps(self.table)))

    def start(self, accept: Accept = NOTHING) -> RunIdentity:
        """Do what `penstock run` does to the folder before it starts the first process."""
        check = check_folder(self.settings, accept)
        print_start(start_lines(self.settings, check))
        identity = check.updated(check.identity or RunIdentity.create())
        write_settings(self.settings)
        write_identity(self.settings.folder, identity)
        return identity

    def contents(self) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in sorted((self.home / "run").iterdir())}


@pytest.fixture
def project(tmp_path, monkeypatch) -> Project:
    monkeypatch.chdir(tmp_path)
    made = Project(tmp_path)
    made.settings.folder.mkdir()
    made.start()
    return made


def swap(name: str, old: str, new: str):
    return lambda p: p.write(name, (p.home / name).read_text().replace(old, new))


def setting(*path: str | int, value: object):
    return lambda p: p.set(*path, value=value)


def lines(name: str, change):
    def edit(p: Project) -> None:
        file = p.home / name
        file.write_text("".join(change(file.read_text().splitlines(keepends=True))))

    return edit


def weights(at: int):
    def edit(p: Project) -> None:
        with (p.home / "model" / "model.safetensors").open("r+b") as file:
            file.seek(at)
            file.write(b"\1")

    return edit


def move(old: str, new: str):
    return lambda p: (p.home / old).rename(p.home / new)


REFUSED = {
    # data
    "a row edited": (lambda p: p.rows("easy", 6, q2="other?"), "first 6 rows of .*easy.jsonl are not those"),
    "a row removed": (lambda p: p.rows("easy", 5), "easy.jsonl has 5 rows now, and had 6"),
    "a row inserted": (lines("easy.jsonl", lambda t: [t[5], *t]), "first 6 rows of .*easy.jsonl are not those"),
    "two rows swapped": (lines("hard.jsonl", lambda t: [t[1], t[0], t[2]]), "first 3 rows of .*hard.jsonl"),
    "rows appended": (lambda p: p.rows("hard", 5), "hard.jsonl has 5 rows now, and had 3: 2 .* --accept-data appended"),
    "an answer edited": (swap("hard.jsonl", '"gold": 1', '"gold": 7'), "first 3 rows of .*hard.jsonl"),
    "the file of another set": (setting("data", "sets", 1, "path", value="easy2.jsonl"), "data.sets is"),
    "a set removed": (lambda p: p.table["data"]["sets"].pop(), "data.sets is"),
    # what data mean
    "the seed": (setting("run", "seed", value=4), r"run\.seed is 3 there and 4 here"),
    "shuffling": (setting("data", "shuffle", value=False), r"data\.shuffle is True there and False here"),
    "epochs": (setting("data", "epochs", value=2), r"data\.epochs is 1 there and 2 here"),
    "a set's weight": (setting("data", "sets", 0, "weight", value=5.0), r"data\.sets\.easy\.weight is 2.0"),
    "the prompt column": (setting("data", "prompt", value="gold"), r"data\.prompt is 'question'"),
    "a renamed column": (setting("data", "columns", value={"truth": "gold"}), r"data\.columns is"),
    "the system message": (setting("data", "system", value="Think."), r"data\.system .*--accept-change data\.system"),
    "template arguments": (setting("data", "chat_template_kwargs", "a", value=1), r"data\.chat_template_kwargs is"),
    # how groups are sampled and trained
    "the group size": (setting("rollout", "group_size", value=8), r"rollout\.group_size is 4 there and 8 here"),
    "the temperature": (setting("rollout", "temperature", value=0.7), r"rollout\.temperature is 1.0"),
    "a stop word": (setting("rollout", "sampling", "stop", value=["."]), r"rollout\.sampling\.stop is"),
    "the estimator": (setting("estimator", "name", value="rloo"), r"estimator\.name is 'grpo' there and 'rloo' here"),
    "an option of the loss": (setting("loss", value={"name": "clipped", "clip_low": 0.1}), r"loss\.clip_low is"),
    "the KL coefficient": (setting("algorithm", "kl_coefficient", value=0.01), r"algorithm\.kl_coefficient is"),
    "a filter": (setting("filter", "zero_variance", value=False), r"filter\.zero_variance is"),
    "the correction": (setting("correction", "preset", value="decoupled_geo_rs"), r"correction\.preset is"),
    # rewards and environments
    "the reward's code": (swap("rewards.py", "return", "return 2 *"), r"rewards\.exact\.code: changed rewards\.py"),
    "code that it imports": (swap("grading.py", "1.0", "0.0"), r"rewards\.exact\.code: changed grading\.py"),
    "the reward's weight": (setting("rewards", 0, "weight", value=0.5), r"rewards\.exact\.weight is 1.0"),
    "another reward": (
        lambda p: p.table["rewards"].append({"ref": f"{p.home / 'grading.py'}:grade"}),
        r"rewards is \['exact'\] there and \['exact', 'grade'\] here",
    ),
    "another function": (
        setting("rewards", 0, value={"ref": "grading.py:grade", "name": "exact"}),
        r"rewards\.exact\.ref is 'rewards.py:exact' there and 'grading.py:grade' here",
    ),
    "a reward's argument": (setting("rewards", 0, "args", value={"x": 1}), r"rewards\.exact\.args: changed x \(new\)"),
    "the environment's code": (swap("kit/world.py", "''", "'!'"), r"environments\.world\.code: changed kit/world\.py"),
    "its package": (swap("kit/tools.py", "pass", "x = 1"), r"environments\.world\.code: changed kit/tools\.py"),
    "an argument": (setting("environments", "world", "args", "key", value="hush"), r"world\.args: changed key\."),
    "another environment": (setting("environments", "b", value="kit.world:World"), r"environments is \['world'\]"),
    "the default environment": (
        lambda p: p.set("environments", value={"a": "kit.world:World"} | p.table["environments"]),
        r"environments\.default is 'world' there and 'a' here",
    ),
    # the model
    "the chat template": (swap("model/chat_template.jinja", "{{", "{{-"), r"model\.files: changed chat_template"),
    "the tokenizer": (swap("model/tokenizer.json", "[]", "[1]"), r"model\.files: changed tokenizer\.json"),
    "the weights": (weights(0), r"model\.weights: changed model\.safetensors"),
    "the tool format": (setting("model", "tool_format", value="hermes"), r"model\.tool_format is 'auto'"),
    "the run's name": (setting("run", "name", value="yours"), r"run\.name is 'mine' there and 'yours' here"),
}  # fmt: skip


@pytest.mark.parametrize("edit", REFUSED, ids=lambda name: name.replace(" ", "_"))
def test_an_edit_between_two_starts_is_refused_by_name_and_changes_nothing(project, edit):
    change, message = REFUSED[edit]
    if edit == "the file of another set":
        shutil.copy(project.home / "hard.jsonl", project.home / "easy2.jsonl")
    change(project)
    before = project.contents()
    with pytest.raises(RunMismatchError, match=message) as refused:
        project.start()
    assert "secret" not in str(refused.value)
    assert "hush" not in str(refused.value)
    assert project.contents() == before


FREE = {
    "a limit": (setting("rollout", "max_tokens", value=999), "rollout.max_tokens from 4096 to 999"),
    "workers": (setting("rollout", "workers", value=3), "rollout.workers from 1 to 3"),
    "the learning rate": (setting("train", "learning_rate", value=0.1), "train.learning_rate from 1e-06 to 0.1"),
    "a reward's deadline": (setting("rewards", 0, "timeout_s", value=9), "rewards.exact.timeout_s from 0.0 to 9"),
    "the server": (setting("run", "redis", value="redis://:pw@host"), "run.redis from 'the URL' to 'redis://host'"),
}


@pytest.mark.parametrize("edit", FREE, ids=lambda name: name.replace(" ", "_"))
def test_a_setting_that_may_change_is_told_and_accepted(project, edit, capsys):
    change, message = FREE[edit]
    change(project)
    project.start()
    assert f"at step 0; {message}" in capsys.readouterr().err


def test_what_changes_no_meaning_is_not_refused(project, capsys):
    project.write("unrelated.py", "x = 2\n")
    project.set("rewards", 0, "ref", value="./rewards.py:exact")
    lines("easy.jsonl", lambda text: [*text, "\n"])(project)
    os.utime(project.home / "rewards.py", (1, 1))
    move("hard.jsonl", "x/hard.jsonl")(project) if (project.home / "x").mkdir() is None else None
    project.set("data", "sets", 1, "path", value=str(project.home / "x" / "hard.jsonl"))
    project.start()
    assert capsys.readouterr().err == "resuming run mine at step 0\n"


def reorder(line: str) -> str:
    return json.dumps(dict(reversed(json.loads(line).items())), separators=(",", ":"), ensure_ascii=True) + "\n"


SAME_ROWS = {
    "the last line without its end": lines("easy.jsonl", lambda t: [*t[:-1], t[-1].rstrip("\n")]),
    "lines that end as on Windows": lines("easy.jsonl", lambda t: [line.replace("\n", "\r\n") for line in t]),
    "blank lines": lines("easy.jsonl", lambda t: ["\n", *t[:2], " \n", *t[2:]]),
    "other spaces and another order of keys": lines("easy.jsonl", lambda t: map(reorder, t)),
    "other spellings of the same text": lines(
        "easy.jsonl", lambda t: [line.replace("easy", "\\u0065\\u0061sy") for line in t]
    ),
    "a mark of the encoding": lambda p: (p.home / "easy.jsonl").write_bytes(
        b"\xef\xbb\xbf" + (p.home / "easy.jsonl").read_bytes()
    ),
}


@pytest.mark.parametrize("edit", SAME_ROWS, ids=lambda name: name.replace(" ", "_"))
def test_the_same_rows_in_other_bytes_are_the_same_data(project, edit):
    before = project.start()
    SAME_ROWS[edit](project)
    after = project.start()
    assert after.pinned == before.pinned
    assert after.changes == ()
    assert after.files != before.files


def test_rows_are_not_read_while_the_bytes_of_their_files_are_those_of_the_last_start(project, monkeypatch):
    before = project.start()
    monkeypatch.setattr("workers.datasets.fingerprint.open_dataset_mix", None)
    assert project.start() == before


def test_known_bytes_do_not_stand_for_rows_that_the_run_does_not_know(project):
    before = project.start()
    project.rows("easy", 8)
    longer = project.start(Accept(data="appended"))
    known = RunIdentity(id=before.id, pinned=before.pinned, files=longer.files)  # the bytes of now, the rows of then
    write_identity(project.settings.folder, known)
    with pytest.raises(RunMismatchError, match="2 were added at the end"):
        project.start()


OTHER_ROWS = {
    "a number as a text": ('"gold": 1', '"gold": "1"'),
    "a whole number with a fraction": ('"gold": 1', '"gold": 1.0'),
    "nothing in place of a number": ('"gold": 1', '"gold": null'),
    "a column less": (', "gold": 1', ""),
    "a line that is not JSON": ('"gold": 1}', '"gold": 1'),
}


@pytest.mark.parametrize("edit", OTHER_ROWS, ids=lambda name: name.replace(" ", "_"))
def test_rows_that_mean_something_else_are_refused(project, edit):
    swap("hard.jsonl", *OTHER_ROWS[edit])(project)
    with pytest.raises(RunMismatchError, match=r"first 3 rows of .*hard\.jsonl"):
        project.start()


def test_accepted_changes_are_recorded_in_order_and_others_still_refused(project):
    swap("grading.py", "1.0", "0.0")(project)
    project.set("rollout", "group_size", value=8)
    with pytest.raises(RunMismatchError, match=r"--accept-change rewards\.exact\.code --accept-change rollout\.group"):
        project.start()
    with pytest.raises(RunMismatchError, match=r"rollout\.group_size is 4") as refused:
        project.start(Accept(("rewards",)))
    assert "code" not in str(refused.value)
    project.start(Accept(("rewards", "rollout.group_size")))
    project.start()
    changes = read_identity(project.settings.folder).changes
    assert [(change.name, change.before, change.after) for change in changes][1] == ("rollout.group_size", "4", "8")
    assert changes[0].name == "rewards.exact.code"


def test_a_change_that_would_break_the_bookkeeping_cannot_be_accepted(project):
    project.set("run", "seed", value=4)
    with pytest.raises(RunMismatchError, match=r"run\.seed is 3") as refused:
        project.start(Accept(("run", "run.seed"), "appended"))
    assert "--accept-change" not in str(refused.value)


def fed(project: Project) -> list[str]:
    lengths = dataset_lengths(read_identity(project.settings.folder).pinned)
    mix = open_dataset_mix(project.settings, lengths)
    prompts, errors = mix.read_prompts(0, mix.total_prompts)
    assert not errors
    assert {prompt.id for prompt in prompts} == mix.consumed_ids(mix.total_prompts)
    assert all(mix.find_sample(prompt.id) for prompt in prompts)
    return [prompt.id for prompt in prompts]


def test_appended_rows_are_fed_after_all_earlier_ones_whose_order_stays(project):
    project.set(
        "data", "sets", value=[{"path": str(project.home / "easy.jsonl")}, {"path": str(project.home / "hard.jsonl")}]
    )
    shutil.rmtree(project.settings.folder)
    project.settings.folder.mkdir()
    project.start()
    before = fed(project)
    for easy, hard in ((8, 3), (8, 7)):
        project.rows("easy", easy)
        project.rows("hard", hard)
        with pytest.raises(RunMismatchError, match="--accept-data appended"):
            project.start()
        project.start(Accept(data="appended"))
        after = fed(project)
        assert after[: len(before)] == before
        assert len(after) == len(set(after)) == easy + hard
        before = after
    project.rows("easy", 7)
    with pytest.raises(RunMismatchError, match=r"easy\.jsonl has 7 rows now, and had 8"):
        project.start(Accept(data="appended"))


def test_an_edited_row_is_refused_even_where_appended_ones_are_accepted(project):
    project.rows("easy", 8, q0="other?")
    with pytest.raises(RunMismatchError, match="first 6 rows"):
        project.start(Accept(data="appended"))


@pytest.mark.parametrize("table", ["parquet", "folder"])
def test_rows_of_tables_are_compared_by_content(tmp_path, table):
    pytest.importorskip("pyarrow")
    datasets = pytest.importorskip("datasets")

    def write(values):
        found = datasets.Dataset.from_dict({"prompt": [f"{v}?" for v in values], "n": values})
        path = tmp_path / ("rows.parquet" if table == "parquet" else "rows")
        if table == "parquet":
            found.to_parquet(str(path))
        else:
            shutil.rmtree(path, ignore_errors=True)
            found.save_to_disk(str(path))
        return str(path)

    folder = tmp_path / "run"
    folder.mkdir()

    def start(values, accept=NOTHING):
        settings = parse_settings(
            {"run": {"folder": str(folder)}, "model": {"path": "m"}, "data": {"path": write(values)}}
            | {"rewards": [{"ref": "a:b"}]}
        )
        check = check_folder(settings, accept)
        write_identity(folder, check.updated(check.identity or RunIdentity.create()))

    start([1, 2, 3])
    start([1, 2, 3])
    with pytest.raises(RunMismatchError, match="first 3 rows"):
        start([1, 2, 4])
    with pytest.raises(RunMismatchError, match="1 were added"):
        start([1, 2, 3, 4])
    start([1, 2, 3, 4], Accept(data="appended"))
    start([1, 2, 3, 4])


@pytest.fixture
def saved(tmp_path):
    """Save four rows in one of several ways, and return the settings of a run that reads them."""
    datasets = pytest.importorskip("datasets")
    pq = pytest.importorskip("pyarrow.parquet")

    def save(**options) -> Settings:
        rows = datasets.Dataset.from_dict({"prompt": [f"{v}?" for v in range(4)], "n": [[v, None] for v in range(4)]})
        if options:
            path = tmp_path / "rows.parquet"
            pq.write_table(rows.data.table, path, **options)
        else:
            path = tmp_path / "rows"
            if not path.exists():
                rows.save_to_disk(str(path))
        run = {"folder": str(tmp_path / "run"), "name": "r"}
        return parse_settings(
            {"run": run, "model": {"path": "m"}, "data": {"path": str(path)}, "rewards": [{"ref": "a:b"}]}
        )

    (tmp_path / "run").mkdir()
    return save


def test_a_parquet_file_saved_with_another_codec_holds_the_same_rows(saved):
    first = check_folder(saved(compression="snappy"), NOTHING)
    write_identity(saved(compression="snappy").folder, first.updated(RunIdentity.create()))
    for options in ({"compression": "zstd"}, {"row_group_size": 1}, {"use_dictionary": False, "compression": "none"}):
        again = check_folder(saved(**options), NOTHING)
        assert again.files != first.files
        assert again.pinned == first.pinned


def test_jsonl_in_place_of_parquet_holds_the_same_rows(saved, tmp_path):
    settings = saved(compression="snappy")
    first = check_folder(settings, NOTHING)
    write_identity(settings.folder, first.updated(RunIdentity.create()))
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"n": [v, None], "prompt": f"{v}?"}) + "\n" for v in range(4))
    )
    table = {"run": {"folder": str(settings.folder), "name": "r"}, "data": {"path": str(tmp_path / "rows.jsonl")}}
    again = check_folder(parse_settings(table | {"model": {"path": "m"}, "rewards": [{"ref": "a:b"}]}), NOTHING)
    assert again.pinned == first.pinned


def test_a_file_that_is_put_into_the_folder_of_a_data_set_changes_no_row(saved, tmp_path):
    first = check_folder(saved(), NOTHING)
    write_identity(saved().folder, first.updated(RunIdentity.create()))
    (tmp_path / "rows" / "README.md").write_text("about these rows")
    again = check_folder(saved(), NOTHING)
    assert again.files != first.files
    assert again.pinned == first.pinned


def test_a_row_of_a_table_that_cannot_be_read_is_compared_like_the_others(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def pinned(*seconds: int) -> dict[str, str]:
        table = {"prompt": pa.array(["a?", "b?"]), "when": pa.array(seconds, pa.timestamp("s"))}
        pq.write_table(pa.table(table), tmp_path / "rows.parquet")
        data = {"path": str(tmp_path / "rows.parquet")}
        run = {"folder": str(tmp_path / "run"), "name": "r"}
        settings = parse_settings({"run": run, "model": {"path": "m"}, "data": data, "rewards": [{"ref": "a:b"}]})
        return check_folder(settings, NOTHING).pinned

    assert pinned(1, 1 << 45) == pinned(1, 1 << 45)
    assert pinned(1, 1 << 45) != pinned(2, 1 << 45)


def test_a_damaged_identity_is_named_with_its_remedy(project):
    file = project.settings.folder / "identity.json"
    text = file.read_bytes()
    for damaged in (b"", text[:-9], text.replace(b'"4"', b'"5"'), b"\xff" + text[1:]):
        file.write_bytes(damaged)
        with pytest.raises(PenstockError, match=r"identity\.json is damaged .* remove it"):
            project.start()
    file.unlink()
    project.start()
    file.unlink()
    project.set("rollout", "group_size", value=8)
    with pytest.raises(RunMismatchError, match=r"rollout\.group_size is 4 there"):
        project.start()
