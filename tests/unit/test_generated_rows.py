"""`data.rows`: problems that the environment makes from its seed, without a file."""

import pytest

from stream.errors import SettingsError
from workers.feed.dataset_mix import open_dataset_mix
from workers.feed.dataset_rows import pinned_data
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


def test_a_run_knows_its_rows_and_accepts_more_only_when_asked():
    pinned, _ = pinned_data(settings({"rows": 5}), {})
    assert pinned_data(settings({"rows": 5}), pinned) == (pinned, ())
    _, changes = pinned_data(settings({"rows": 9}), pinned, "appended")
    assert [change.name for change in changes] == ["data.rows.rows"]
    with pytest.raises(Exception, match="rows:9 has 9 rows now, and had 5"):
        pinned_data(settings({"rows": 9}), pinned)


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


def test_rows_need_an_environment():
    with pytest.raises(SettingsError, match=r"data.rows counts problems .* but \[environments\] is empty"):
        parse_settings({"model": {"path": "m"}, "data": {"rows": 5}, "rewards": [{"ref": "math"}]})
