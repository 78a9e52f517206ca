"""Several datasets in one run: each position maps to the same row after every restart."""

import json
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream.errors import DataError, SettingsError
from workers.datasets.mix import Dataset, DatasetMix, open_dataset_mix, open_recorded_mix
from workers.datasets.prompts import PromptIndex
from workers.settings.toml_file import dump_settings, parse_settings


@pytest.fixture
def make(tmp_path):
    """Open a mix of JSONL files with the given numbers of rows; keywords are for `[data]`."""

    def make(sets, environments=("first", "second"), **data):
        mix = []
        for name, (rows, keys) in sets.items():
            path = tmp_path / f"{name}.jsonl"
            lines = [json.dumps({"question": f"{name} {i}", "gold": i}) for i in range(rows)]
            path.write_text("".join(line + "\n" for line in lines))
            mix.append({"path": str(path), **keys})
        table = {"model": {"path": "m"}, "data": {"sets": mix, "prompt": "question", **data}}
        settings = parse_settings(table | {"environments": dict.fromkeys(environments, "calculator")})
        return open_dataset_mix(settings)

    return make


def names(mixture, start=0, stop=None):
    prompts, errors = mixture.read_prompts(start, mixture.total_prompts if stop is None else stop)
    assert not errors
    return [prompt.id for prompt in prompts]


def test_without_weights_each_row_is_fed_once_and_datasets_are_spread_evenly(make):
    mixture = make({"long": (8, {}), "short": (4, {})}, shuffle=False)
    fed = names(mixture)
    assert [name.split(":")[0] for name in fed] == ["long", "short", "long"] * 4
    assert len(fed) == len(set(fed)) == 12


def test_the_numbers_of_rows_suffice_to_know_which_prompts_were_fed(make, tmp_path):
    mixture = make({"long": (8, {"weight": 2}), "short": (3, {"weight": 1})}, epochs=2)
    lengths = {"long": (5, 8), "short": (3, 3)}
    mixture = open_dataset_mix(mixture.settings, lengths)
    for file in tmp_path.glob("*.jsonl"):
        file.unlink()
    recorded = open_recorded_mix(mixture.settings, lengths)
    assert recorded.total_prompts == mixture.total_prompts
    for cursor in range(mixture.total_prompts + 1):
        assert recorded.consumed_ids(cursor) == mixture.consumed_ids(cursor)
    assert open_recorded_mix(mixture.settings, {"long": (8,)}) is None


def test_with_weights_smaller_datasets_repeat_until_all_rows_were_fed(make):
    mixture = make({"long": (8, {"weight": 1}), "short": (3, {"weight": 1})}, shuffle=False)
    fed = names(mixture)
    assert [name.split(":")[0] for name in fed] == ["long", "short"] * 8
    assert [name for name in fed if name.startswith("short")] == [
        f"short:{epoch}:{number}" for epoch in range(3) for number in range(3)
    ][:8]


def test_each_dataset_has_its_own_columns_system_message_and_environment(make):
    keys = {"columns": {"answer": "gold"}, "system": "Be brief.", "environment": "second", "name": "maths"}
    mixture = make({"plain": (1, {}), "other": (1, keys)}, shuffle=False, system="Hello.")
    plain, other = mixture.read_prompts(0, 2)[0]
    assert (plain.id, plain.environment, plain.fields) == ("plain:0:0", "first", {"gold": 0})
    assert (other.id, other.environment, other.fields) == ("maths:0:0", "second", {"answer": 0})
    assert [plain.messages[0]["content"], other.messages[0]["content"]] == ["Hello.", "Be brief."]
    assert plain.seed != other.seed


def test_the_order_never_changes(make):
    mixture = make({"a": (4, {"weight": 3}), "b": (3, {"weight": 1})})
    result = " ".join(names(mixture))  # a change would feed resumed runs other rows
    assert result == ("a:0:0 a:0:3 b:0:0 a:0:1 a:0:2 a:1:2 b:0:2 a:1:1 a:1:3 a:1:0 b:0:1 a:2:2")


@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    weights=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    weighted=st.booleans(),
    epochs=st.integers(1, 3),
    data=st.data(),
)
def test_rows_are_complete_and_shares_hold_at_every_position(sizes, weights, weighted, epochs, data):
    table = {"model": {"path": "m"}, "data": {"path": "p", "epochs": epochs}, "rewards": [{"ref": "a:b"}]}
    settings = parse_settings(table)
    parts = [
        Dataset(settings, [None] * n, f"s{i}", float(weights[i]) if weighted else 0.0) for i, n in enumerate(sizes)
    ]
    mixture = DatasetMix(settings, parts)
    places = list(mixture.sample_indices(0, mixture.total_prompts))
    assert len(places) == len(set(places)) == mixture.total_prompts
    once = {(place.dataset, place.row) for place in places}
    assert once == {(part, number) for part, size in enumerate(sizes) for number in range(size)}
    cursor = data.draw(st.integers(0, mixture.total_prompts))
    assert [
        *mixture.sample_indices(0, cursor),
        *mixture.sample_indices(cursor, mixture.total_prompts),
    ] == places  # resumed in the middle
    assert mixture.consumed_ids(cursor) == {f"s{p.dataset}:{p.epoch}:{p.row}" for p in places[:cursor]}
    assert all(mixture.find_sample(f"s{p.dataset}:{p.epoch}:{p.row}") == p for p in places)
    for part, count in enumerate(mixture.prompt_counts):
        share = count / max(1, mixture.total_prompts)
        assert abs(sum(place.dataset == part for place in places[:cursor]) - share * cursor) <= len(sizes)
        if weighted and sizes[part] and len(sizes) > 1:
            all_weights = sum(weights[i] for i, size in enumerate(sizes) if size)
            assert share * mixture.total_prompts == pytest.approx(
                weights[part] / all_weights * mixture.total_prompts, abs=len(sizes)
            )


def test_consumed_ids_follow_from_the_cursor(make):
    mixture = make({"a": (5, {"weight": 2}), "b": (3, {"weight": 1})}, epochs=2)
    roll = PromptIndex(mixture)
    for cursor in range(mixture.total_prompts + 1):
        assert roll.ids_before(cursor) == set(names(mixture, 0, cursor))
    assert "a:2:0" not in roll
    assert "c:0:0" not in roll


def test_a_fingerprint_follows_the_content_and_the_weights(make):
    first = make({"a": (5, {"weight": 2}), "b": (3, {"weight": 1})}).fingerprint()
    assert make({"a": (5, {"weight": 2}), "b": (3, {"weight": 1})}).fingerprint() == first
    assert make({"a": (5, {"weight": 1}), "b": (3, {"weight": 1})}).fingerprint() != first
    assert make({"a": (5, {"weight": 2}), "b": (4, {"weight": 1})}).fingerprint() != first


def test_a_dataset_without_a_prompt_column_gets_prompts_from_reset(tmp_path):
    path = tmp_path / "worlds.jsonl"
    path.write_text('{"environment": "second"}\n{}\n{"environment": "third"}\n')
    data = {"sets": [{"path": str(path), "environment": "first"}], "prompt": "", "shuffle": False}
    environments = {"zero": "calculator", "first": "calculator", "second": "calculator"}
    mixture = open_dataset_mix(parse_settings({"model": {"path": "m"}, "data": data, "environments": environments}))
    prompts, errors = mixture.read_prompts(0, 3)
    assert [(prompt.environment, prompt.messages) for prompt in prompts] == [
        ("second", [{"role": "user", "content": ""}]),
        ("first", [{"role": "user", "content": ""}]),
    ]
    assert "environment 'third' is unknown; [environments] has: 'first', 'zero', 'second'" in str(errors[0])


def test_a_bad_row_is_reported_with_its_file_and_the_others_are_fed(make, tmp_path):
    mixture = make({"a": (2, {}), "b": (2, {"prompt": "gold"})}, shuffle=False)
    prompts, errors = mixture.read_prompts(0, 4)
    assert [prompt.id for prompt in prompts] == ["a:0:0", "a:0:1"]
    assert all("b.jsonl:" in str(error) for error in errors)
    assert PromptIndex(mixture).invalid_ids(["b:0:0", "b:0:1", "a:0:0"]) == {"b:0:0", "b:0:1"}


@pytest.mark.parametrize(
    ("sets", "error"),
    [
        ({"a": (2, {"name": "x"}), "b": (2, {"name": "x"})}, "two datasets have the name 'x'"),
        ({"a": (2, {"weight": 1}), "b": (200, {"weight": 1e-6})}, "bring the weights nearer"),
    ],
)
def test_an_invalid_mix_is_refused(make, sets, error):
    with pytest.raises(DataError, match=error):
        _ = make(sets).total_prompts


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ({"path": "a", "sets": [{"path": "b"}]}, "several are set"),
        ({"sets": [{"path": "a", "weight": 1}, {"path": "b"}]}, "some have none"),
        ({"sets": [{"path": "a", "environment": "other"}]}, r"data.sets\[0\].environment 'other' is unknown"),
        ({"sets": [{"path": "a", "weight": -1}]}, "weight"),
        ({"sets": [{"path": "a", "heft": 1}]}, "heft"),
    ],
)
def test_contradictory_settings_are_refused(data, error):
    table = {"model": {"path": "m"}, "data": data, "environments": {"first": "calculator"}}
    with pytest.raises(SettingsError, match=error):
        parse_settings(table)


def test_settings_with_a_mix_round_trip(make):
    """A run stores its settings in its folder."""
    settings = make({"a": (1, {"weight": 2}), "b": (1, {"weight": 1, "columns": {"x": "gold"}})}).settings
    assert parse_settings(tomllib.loads(dump_settings(settings))) == settings
