"""Which prompts were fed, told from the cursor: the same as the feeder fed."""

import json

import pytest

from workers.commands.prompt_index import PromptIndex
from workers.feed.dataset_mix import open_dataset_mix
from workers.settings.toml_file import parse_settings


@pytest.fixture
def make_roll(tmp_path):
    def make(rows: int, bad: tuple[int, ...] = (), **data):
        path = tmp_path / "some:prompts.jsonl"
        lines = ['{"prompt": 3}' if i in bad else json.dumps({"prompt": f"Say {i}."}) for i in range(rows)]
        path.write_text("".join(line + "\n" for line in lines))
        table = {"model": {"path": "m"}, "data": {"path": str(path), **data}, "rewards": [{"ref": "a:b"}]}
        settings = parse_settings(table)
        mixture = open_dataset_mix(settings)
        return PromptIndex(mixture), mixture

    return make


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("cursor", [0, 1, 6, 7, 8, 13, 14, 20, 21, 99])
def test_it_is_what_the_feeder_fed(make_roll, cursor, shuffle):
    roll, mixture = make_roll(7, bad=(2,), epochs=3, shuffle=shuffle)
    prompts, errors = mixture.read(0, min(cursor, roll.total))
    passed = roll.passed(cursor)
    refused = roll.refused(passed)
    assert passed - refused == {prompt.id for prompt in prompts}
    assert len(refused) == len(errors)


def test_of_an_empty_file_nothing_was_fed(make_roll):
    roll, _ = make_roll(0)
    assert (roll.total, roll.passed(5)) == (0, set())


def test_it_knows_its_own_prompts(make_roll):
    roll, _ = make_roll(7, epochs=2)
    assert all(name in roll for name in roll.passed(14))
    others = ["", "a", "some:prompts:2:0", "some:prompts:0:7", "some:prompts:0:-1", "some:prompts:0:06", "x:0:0", "0:0"]
    assert not [name for name in others if name in roll]


def test_those_that_are_not_asked_for_are_not_read(make_roll, monkeypatch):
    roll, mixture = make_roll(7, bad=(2,))
    source = mixture.parts[0].source
    asked = []
    read = source.rows
    monkeypatch.setattr(source, "rows", lambda numbers: read(asked.append(list(numbers)) or asked[-1]))
    assert roll.refused(["some:prompts:0:2", "some:prompts:0:4", "nobody"]) == {"some:prompts:0:2"}
    assert asked == [[2, 4]]
