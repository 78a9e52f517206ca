"""Problems without a file: made by the environment from its seed (`data.rows`), or listed in its `rows()`."""

import json

import pytest

from envs.tools import tool_specs
from stream.errors import DataError, SettingsError
from tests.cases.checks import tried
from workers.datasets.environment_rows import write_evaluation_rows, write_training_rows
from workers.datasets.mix import fixed_rows, open_dataset_mix
from workers.datasets.prompts import read_evaluation_prompts
from workers.settings.toml_file import dump_settings, parse_settings


def settings(data, **environments):
    known = environments or {"first": "guess", "other": "calculator"}
    return parse_settings({"model": {"path": "m"}, "data": data, "environments": known})


def test_each_row_is_an_empty_prompt_with_a_seed_of_its_own():
    mix = open_dataset_mix(settings({"rows": 40, "epochs": 2}))
    prompts, errors = mix.read_prompts(0, mix.total_prompts)
    assert (mix.total_prompts, errors) == (80, [])
    assert {prompt.id for prompt in prompts} == {f"rows:{epoch}:{row}" for epoch in range(2) for row in range(40)}
    assert len({prompt.seed for prompt in prompts}) == 80
    assert {prompt.messages[0]["content"] for prompt in prompts} == {""}
    assert {prompt.environment for prompt in prompts} == {"first"}


def test_sets_of_generated_rows_are_mixed_by_weight():
    sets = [{"rows": 30, "name": "a", "weight": 2, "environment": "first"}]
    sets += [{"rows": 10, "name": "b", "weight": 1, "environment": "other"}]
    found = settings({"sets": sets})
    mix = open_dataset_mix(found)
    prompts, _ = mix.read_prompts(0, 6)
    assert [prompt.environment for prompt in prompts].count("first") == 4
    assert "rows = 30" in dump_settings(found)


def test_a_run_knows_the_number_of_its_rows():
    known = fixed_rows(settings({"rows": 5}), {})
    assert known["data.rows.rows"].startswith("5 rows of digest ")
    assert fixed_rows(settings({"rows": 5}), known) == known
    assert fixed_rows(settings({"rows": 9}), known)["data.rows.rows"].startswith("9 rows of digest ")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"rows": 5, "path": "a.jsonl"}, "several are set"),
        ({"sets": [{"name": "x"}]}, "needs either path, a file, or rows"),
        ({"sets": [{"path": "x.jsonl", "rows": 3}]}, "needs either path, a file, or rows"),
    ],
)
def test_a_data_set_has_one_source(data, message):
    with pytest.raises(SettingsError, match=message):
        settings(data)


def test_without_environments_data_names_a_file():
    with pytest.raises(SettingsError, match=r"data.path names one data set, .* and none is set"):
        parse_settings({"model": {"path": "m"}, "data": {}, "rewards": [{"ref": "math"}]})


def test_rows_need_an_environment():
    with pytest.raises(SettingsError, match=r"data.rows counts problems .* but \[environments\] is empty"):
        parse_settings({"model": {"path": "m"}, "data": {"rows": 5}, "rewards": [{"ref": "math"}]})


SUMS = """
import numpy as np

class Sums:
    def __init__(self, count=3):
        self.count = count

    def rows(self, split="train"):
        first = 0 if split == "train" else 100
        return ({"a": first + i, "gold": np.int64(2 * i)} for i in range(self.count))

    def reset(self, a, **row):
        return f"{a} + {a}?"
"""


@pytest.fixture
def own(tmp_path):
    """Return a function that makes settings with an environment of this code, in a run's folder."""

    def make(code=SUMS, data=None, **more):
        (tmp_path / "world.py").write_text(code)
        kind = code.partition("class ")[2].partition(":")[0].strip()
        table = {"run": {"folder": str(tmp_path / "run")}, "model": {"path": "m"}}
        return parse_settings(
            table | ({"data": data} if data else {}) | {"environments": {"sums": f"{tmp_path}/world.py:{kind}"}} | more
        )

    return make


def test_an_environments_own_rows_are_fed_from_a_file_that_is_written_once(own, tmp_path):
    settings = own()
    write_training_rows(settings)
    (tmp_path / "world.py").unlink()
    write_training_rows(settings)
    prompts, errors = open_dataset_mix(settings).read_prompts(0, 3)
    assert errors == []
    assert {prompt.id for prompt in prompts} == {"sums:0:0", "sums:0:1", "sums:0:2"}
    assert sorted(prompt.fields["gold"] for prompt in prompts) == [0, 2, 4]
    assert {prompt.messages[-1]["content"] for prompt in prompts} == {""}  # `reset` returns the prompt
    assert fixed_rows(settings, {})["data.rows.sums"].startswith("3 rows of digest ")


def test_environment_rows_may_have_prompts_and_be_one_of_several_sets(own, tmp_path):
    code = SUMS.replace('{"a"', '{"prompt": "Add.", "a"').replace("def rows(self", "async def rows(self")
    code = code.replace("return ({", "return [{").replace("range(self.count))", "range(self.count)]")
    (tmp_path / "more.jsonl").write_text('{"prompt": "Hi."}\n')
    settings = own(code, {"sets": [{"path": str(tmp_path / "more.jsonl")}, {"environment": "sums"}]})
    write_training_rows(settings)
    prompts, _ = open_dataset_mix(settings).read_prompts(0, 4)
    assert sorted(prompt.messages[-1]["content"] for prompt in prompts) == ["Add.", "Add.", "Add.", "Hi."]


def test_held_out_rows_are_those_of_the_split_eval(own):
    settings = own(eval={"rows": 2})
    write_evaluation_rows(settings)
    prompts, _ = read_evaluation_prompts(settings)
    assert [(prompt.id, prompt.fields["a"]) for prompt in prompts] == [("sums-eval:0:0", 100), ("sums-eval:0:1", 101)]


def test_without_rows_held_out_problems_have_other_seeds_than_training(own):
    code = "class Dice:\n    def reset(self, seed):\n        return str(seed)\n"
    settings = own(code, {"rows": 50}, eval={"rows": 20})
    write_evaluation_rows(settings)
    prompts, _ = read_evaluation_prompts(settings)
    trained, _ = open_dataset_mix(settings).read_prompts(0, 50)
    assert len({prompt.seed for prompt in [*prompts, *trained]}) == 70


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("def rows(self, split", "def other(self, split", r"sums has no method rows\(\); set data.path to a file"),
        ('"gold": np.int64(2 * i)', '"gold": {1, 2}', r"row 0 of rows\(\) has a value that JSON cannot hold: .*set"),
        ('{"a": first + i, "gold": np.int64(2 * i)}', "i", r"row 0 of rows\(\) is int, not a mapping"),
        ("range(self.count)", "range(0)", r"rows\(\) has no rows"),
        ("range(self.count)", "[1 // 0]", r"rows\(\) raised ZeroDivisionError"),
        ("range(self.count)", "iter(int, 1)", r"rows\(\) has more than 1,000,000 rows"),
    ],
)
def test_rows_that_cannot_be_fed_are_answered_with_the_place(own, old, new, message, monkeypatch):
    if "iter" in new:
        monkeypatch.setattr("envs.factory.MAX_ROWS", 10)
        message = message.replace("1,000,000", "10")
    assert old in SUMS
    settings = own(SUMS.replace(old, new))
    with pytest.raises(DataError, match=message) as raised:
        write_training_rows(settings)
    assert raised.value.cause is None or raised.value.cause.file.endswith("world.py")
    assert not (settings.folder / "rows" / "sums.jsonl").exists()


def test_held_out_rows_need_a_parameter_split(own):
    with pytest.raises(DataError, match=r"rows\(\) of environments.sums has no parameter `split`"):
        write_evaluation_rows(
            own(SUMS.replace('self, split="train"', "self").replace("split", '"train"'), eval={"rows": 2})
        )


def test_rows_with_another_parameter_is_a_tool(own, tmp_path):
    class Sheet:
        def reset(self):
            """Start."""

        def rows(self, sheet: str) -> str:
            """Return the rows.

            Args:
                sheet: Its name.
            """
            return json.dumps(sheet)

    class Own(Sheet):
        def rows(self) -> list:
            return []

    assert [tool.name for tool in tool_specs(Sheet())] == ["rows"]
    assert tool_specs(Own()) == []


def test_check_takes_the_first_row(own, tmp_path):
    own(SUMS.replace('{"a"', '{"prompt": "Add.", "a"'))
    trial = tried(f"{tmp_path}/world.py:Sums").trial
    assert (trial.fields, trial.observation) == ({"a": 0, "gold": 0}, "0 + 0?")


def test_check_shows_rows_that_raise(own, tmp_path):
    own(SUMS.replace("range(self.count)", "[1 // 0]"))
    assert "rows() raised ZeroDivisionError" in tried(f"{tmp_path}/world.py:Sums").errors[0]
