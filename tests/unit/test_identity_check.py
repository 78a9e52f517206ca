"""Between two starts: other data, seed or tokenizer are refused by name; other changes are told."""

import json
import os
import shutil
from pathlib import Path

import pytest

from stream.connection.run_identity import RunIdentity, write_identity
from stream.errors import PenstockError, RunMismatchError
from workers.launch.start import print_start, start_lines
from workers.runs.identity import check_folder, flat_settings
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

    def start(self) -> RunIdentity:
        """Do what `penstock run` and then the trainer do to the folder."""
        check = check_folder(self.settings)
        print_start(start_lines(self.settings, check.identity))
        identity = check.identity or RunIdentity(id="a", fixed=check.fixed)
        identity = identity.restart(flat_settings(self.settings))
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


def move(old: str, new: str):
    return lambda p: (p.home / old).rename(p.home / new)


ROWS = r"data\.rows\.{} is {} rows of digest \w+ there and {} rows of digest \w+ here"
REFUSED = {
    "a row edited": (lambda p: p.rows("easy", 6, q2="other?"), ROWS.format("easy", 6, 6)),
    "a row removed": (lambda p: p.rows("easy", 5), ROWS.format("easy", 6, 5)),
    "a row inserted": (lines("easy.jsonl", lambda t: [t[5], *t]), ROWS.format("easy", 6, 7)),
    "two rows swapped": (lines("hard.jsonl", lambda t: [t[1], t[0], t[2]]), ROWS.format("hard", 3, 3)),
    "rows appended": (lambda p: p.rows("hard", 5), ROWS.format("hard", 3, 5)),
    "an answer edited": (swap("hard.jsonl", '"gold": 1', '"gold": 7'), ROWS.format("hard", 3, 3)),
    "the file of another set": (setting("data", "sets", 1, "path", value="easy2.jsonl"), r"data\.sets is .*easy2"),
    "a set removed": (lambda p: p.table["data"]["sets"].pop(), r"data\.sets is"),
    "the seed": (setting("run", "seed", value=4), r"run\.seed is 3 there and 4 here"),
    "shuffling": (setting("data", "shuffle", value=False), r"data\.shuffle is true there and false here"),
    "epochs": (setting("data", "epochs", value=2), r"data\.epochs is 1 there and 2 here"),
    "a set's weight": (setting("data", "sets", 0, "weight", value=5.0), r"data\.sets is .*2\.0.* there and .*5\.0"),
    "the chat template": (swap("model/chat_template.jinja", "{{", "{{-"), r"model\.files\.chat_template\.jinja is"),
    "the tokenizer": (swap("model/tokenizer.json", "[]", "[1]"), r"model\.files\.tokenizer\.json is"),
    "a new template": (lambda p: p.write("model/a.jinja", ""), r"model\.files is .* here"),
    "the run's name": (setting("run", "name", value="yours"), r'run\.name is "mine" there and "yours" here'),
}  # fmt: skip


@pytest.mark.parametrize("edit", REFUSED, ids=lambda name: name.replace(" ", "_"))
def test_an_edit_between_two_starts_is_refused_by_name_and_changes_nothing(project, edit):
    change, message = REFUSED[edit]
    if edit == "the file of another set":
        shutil.copy(project.home / "hard.jsonl", project.home / "easy2.jsonl")
    change(project)
    before = project.contents()
    with pytest.raises(RunMismatchError, match=rf"{message}.*\. Put back what was there, or start a new run: "):
        project.start()
    assert project.contents() == before


TOLD = {
    "a limit": (setting("rollout", "max_tokens", value=999), "rollout.max_tokens from 4096 to 999"),
    "the learning rate": (setting("train", "learning_rate", value=0.1), "train.learning_rate from 1e-6 to 0.1"),
    "the group size": (setting("rollout", "group_size", value=8), "rollout.group_size from 4 to 8"),
    "the estimator": (setting("estimator", "name", value="rloo"), 'estimator.name from "grpo" to "rloo"'),
    "the system message": (setting("data", "system", value="Think."), 'data.system from "Be brief." to "Think."'),
    "the model": (setting("model", "path", value="elsewhere"), 'to "elsewhere"'),
    "the reward's code": (swap("rewards.py", "return", "return 2 *"), "rewards.exact.code changed"),
    "the reward's weight": (setting("rewards", 0, "weight", value=0.5), "rewards.exact.weight from 1.0 to 0.5"),
    "another reward": (
        lambda p: p.table["rewards"].append({"ref": f"{p.home / 'grading.py'}:grade"}),
        "rewards from environments.world rewards.exact to environments.world rewards.exact rewards.grade",
    ),
    "a reward's argument": (setting("rewards", 0, "args", value={"x": 1}), "rewards.exact.args changed"),
    "the environment's code": (swap("kit/world.py", "''", "'!'"), "environments.world.code changed"),
    "a secret argument": (setting("environments", "world", "args", "key", value="hush"), "world.args changed"),
}  # fmt: skip


@pytest.mark.parametrize("edit", TOLD, ids=lambda name: name.replace(" ", "_"))
def test_every_other_change_is_told_and_kept_in_the_folder(project, edit, capsys):
    change, message = TOLD[edit]
    change(project)
    identity = project.start()
    told = capsys.readouterr().err
    assert told.startswith("resuming run mine at step 0; ")
    assert message in told
    [kept] = identity.changes
    assert kept.name in told
    assert project.start().changes == identity.changes
    assert "hush" not in (project.settings.folder / "identity.json").read_text()
    assert capsys.readouterr().err == "resuming run mine at step 0\n"


def test_what_changes_no_meaning_is_not_refused(project):
    project.write("unrelated.py", "x = 2\n")
    project.set("rewards", 0, "ref", value="./rewards.py:exact")
    lines("easy.jsonl", lambda text: [*text, "\n"])(project)
    os.utime(project.home / "rewards.py", (1, 1))
    move("hard.jsonl", "x/hard.jsonl")(project) if (project.home / "x").mkdir() is None else None
    project.set("data", "sets", 1, "path", value=str(project.home / "x" / "hard.jsonl"))
    changes = project.start().changes
    assert [change.name for change in changes] == ["data.sets.1.path", "rewards.exact.ref"]


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
    assert after == before


def test_rows_are_not_read_while_the_bytes_of_their_files_are_those_of_the_last_start(project, monkeypatch):
    before = project.start()
    monkeypatch.setattr("workers.datasets.mix.open_dataset_mix", None)
    assert project.start() == before


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
    with pytest.raises(RunMismatchError, match=ROWS.format("hard", 3, 3)):
        project.start()


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

    def start(values):
        settings = parse_settings(
            {"run": {"folder": str(folder)}, "model": {"path": "m"}, "data": {"path": write(values)}}
            | {"rewards": [{"ref": "a:b"}]}
        )
        check = check_folder(settings)
        write_identity(folder, check.identity or RunIdentity(id="a", fixed=check.fixed))

    start([1, 2, 3])
    start([1, 2, 3])
    with pytest.raises(RunMismatchError, match=ROWS.format("rows", 3, 3)):
        start([1, 2, 4])
    with pytest.raises(RunMismatchError, match=ROWS.format("rows", 3, 4)):
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


def rows_of(settings: Settings) -> str:
    return check_folder(settings).fixed["data.rows.rows"]


def test_a_parquet_file_saved_with_another_codec_holds_the_same_rows(saved):
    first = check_folder(saved(compression="snappy")).fixed
    for options in ({"compression": "zstd"}, {"row_group_size": 1}, {"use_dictionary": False, "compression": "none"}):
        again = check_folder(saved(**options)).fixed
        assert again["data.files.rows"] != first["data.files.rows"]
        assert again["data.rows.rows"] == first["data.rows.rows"]


def test_jsonl_in_place_of_parquet_holds_the_same_rows(saved, tmp_path):
    first = rows_of(saved(compression="snappy"))
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"n": [v, None], "prompt": f"{v}?"}) + "\n" for v in range(4))
    )
    table = {"run": {"folder": str(tmp_path / "run"), "name": "r"}, "data": {"path": str(tmp_path / "rows.jsonl")}}
    assert rows_of(parse_settings(table | {"model": {"path": "m"}, "rewards": [{"ref": "a:b"}]})) == first


def test_a_file_that_is_put_into_the_folder_of_a_data_set_changes_no_row(saved, tmp_path):
    first = rows_of(saved())
    (tmp_path / "rows" / "README.md").write_text("about these rows")
    assert rows_of(saved()) == first


def test_a_row_of_a_table_that_cannot_be_read_is_compared_like_the_others(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def rows(*seconds: int) -> str:
        table = {"prompt": pa.array(["a?", "b?"]), "when": pa.array(seconds, pa.timestamp("s"))}
        pq.write_table(pa.table(table), tmp_path / "rows.parquet")
        data = {"path": str(tmp_path / "rows.parquet")}
        run = {"folder": str(tmp_path / "run"), "name": "r"}
        settings = parse_settings({"run": run, "model": {"path": "m"}, "data": data, "rewards": [{"ref": "a:b"}]})
        return rows_of(settings)

    assert rows(1, 1 << 45) == rows(1, 1 << 45)
    assert rows(1, 1 << 45) != rows(2, 1 << 45)


def test_a_damaged_identity_is_named_with_its_remedy(project):
    file = project.settings.folder / "identity.json"
    text = file.read_bytes()
    for damaged in (b"", text[:-9], b"\xff" + text[1:], b"[]"):
        file.write_bytes(damaged)
        with pytest.raises(PenstockError, match=r"identity\.json is damaged .* remove it"):
            project.start()
