"""A prompt index derives the prompts that were fed from the feeder's cursor."""

import json

import pytest

from workers.datasets.mix import open_dataset_mix
from workers.datasets.prompts import PromptIndex
from workers.settings.toml_file import parse_settings


@pytest.fixture
def make_index(tmp_path):
    def make(rows: int, bad: tuple[int, ...] = (), **data):
        path = tmp_path / "some:prompts.jsonl"
        lines = ['{"prompt": 3}' if i in bad else json.dumps({"prompt": f"Say {i}."}) for i in range(rows)]
        path.write_text("".join(line + "\n" for line in lines))
        table = {"model": {"path": "m"}, "data": {"path": str(path), **data}, "rewards": [{"ref": "a:b"}]}
        dataset_mix = open_dataset_mix(parse_settings(table))
        return PromptIndex(dataset_mix), dataset_mix

    return make


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("cursor", [0, 1, 6, 7, 8, 13, 14, 20, 21, 99])
def test_ids_before_a_cursor_are_the_ids_that_were_fed(make_index, cursor, shuffle):
    index, dataset_mix = make_index(7, bad=(2,), epochs=3, shuffle=shuffle)
    prompts, errors = dataset_mix.read_prompts(0, min(cursor, index.total_prompts))
    before = index.ids_before(cursor)
    invalid = index.invalid_ids(before)
    assert before - invalid == {prompt.id for prompt in prompts}
    assert len(invalid) == len(errors)


def test_an_empty_file_has_no_prompts(make_index):
    index, _ = make_index(0)
    assert (index.total_prompts, index.ids_before(5)) == (0, set())


def test_an_index_contains_its_own_prompts_only(make_index):
    index, _ = make_index(7, epochs=2)
    assert all(name in index for name in index.ids_before(14))
    others = ["", "a", "some:prompts:2:0", "some:prompts:0:7", "some:prompts:0:-1", "some:prompts:0:06", "x:0:0", "0:0"]
    assert not [name for name in others if name in index]


def test_only_the_requested_rows_are_read(make_index, monkeypatch):
    index, dataset_mix = make_index(7, bad=(2,))
    source = dataset_mix.datasets[0].source
    requested = []
    read = source.read_rows
    monkeypatch.setattr(source, "read_rows", lambda numbers: read(requested.append(list(numbers)) or requested[-1]))
    assert index.invalid_ids(["some:prompts:0:2", "some:prompts:0:4", "nobody"]) == {"some:prompts:0:2"}
    assert requested == [[2, 4]]
