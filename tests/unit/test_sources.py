import re
import subprocess
import sys

import msgspec
import pytest

from stream.errors import DataError, PenstockError
from workers.datasets.sources import default_dataset_name, epoch_order, open_source
from workers.settings import DataSettings

LINES = [{"prompt": "a", "answer": 1}, {"prompt": [{"role": "user", "content": "b"}], "answer": None}, {"prompt": "c"}]


def jsonl(path, lines):
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else msgspec.json.encode(line) for line in lines))
    return open_source(DataSettings(path=str(path)))


def all_rows(source):
    return dict(source.read_rows(range(len(source))))


def test_jsonl_rows_are_read_by_index_in_any_order(tmp_path):
    source = jsonl(tmp_path / "train.jsonl", LINES)
    assert len(source) == 3
    assert list(source.read_rows([2, 0, 2])) == [(2, LINES[2]), (0, LINES[0]), (2, LINES[2])]


def test_blank_lines_are_not_rows_but_count_in_line_numbers(tmp_path):
    source = jsonl(tmp_path / "train.jsonl", [b"", LINES[0], b"  \t", b"", b"oops", LINES[2], b""])
    rows = all_rows(source)
    assert [rows[0], rows[2]] == [LINES[0], LINES[2]]
    assert f"{tmp_path / 'train.jsonl'}:5: not JSON" in str(rows[1])


def test_windows_line_ends_and_a_byte_order_mark_are_accepted(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert all_rows(open_source(DataSettings(path=str(path)))) == {0: {"prompt": "a"}, 1: {"prompt": "b"}}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"prompt": ', "not JSON"),
        (b'{"prompt": "\xff"}', "not JSON"),
        (b'["prompt"]', "a JSON list"),
        (b"3", "a JSON int"),
        (b'{"question": "a"}', "no column 'prompt'"),
        (b'{"prompt": null}', "no column 'prompt'"),
        (b'{"prompt": ""}', "empty"),
        (b'{"prompt": " \\n"}', "empty"),
        (b'{"prompt": []}', "empty"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_line_is_an_error_and_the_others_are_read(tmp_path, line, why):
    rows = all_rows(jsonl(tmp_path / "train.jsonl", [LINES[0], line, LINES[2]]))
    assert (rows[0], rows[2]) == (LINES[0], LINES[2])
    assert isinstance(rows[1], DataError)
    assert f"{tmp_path / 'train.jsonl'}:2: " in str(rows[1])
    assert why in str(rows[1])


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ('[{"prompt": "a"},\n{"prompt": "b"}]\n', "each line must hold one whole row"),
        ('{\n  "prompt": "a"\n}\n', "each line must hold one whole row"),
        ('{"prompt": "a"},\n', "leave out the comma"),
        ('{"prompt": "a"}\n'.encode("utf-16"), "save the file as UTF-8"),
    ],
)
def test_json_that_is_not_jsonl_is_an_error_with_the_remedy(tmp_path, text, remedy):
    file = tmp_path / "train.jsonl"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    [(_, error)] = open_source(DataSettings(path=str(file))).read_rows([0])
    assert isinstance(error, DataError)
    assert remedy in str(error)


def test_an_empty_file_has_no_rows(tmp_path):
    assert len(jsonl(tmp_path / "train.jsonl", [])) == 0


def test_parquet_gives_the_same_rows(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    rows = [{"prompt": "a", "answer": 1}, {"prompt": "", "answer": 2}, {"prompt": "c", "answer": None}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet", row_group_size=1)
    source = open_source(DataSettings(path=str(tmp_path / "train.parquet")))
    assert len(source) == 3
    result = dict(source.read_rows([2, 1, 0]))
    assert (result[0], result[2]) == (rows[0], rows[2])
    assert "train.parquet: row 1: the prompt in column 'prompt' is empty" in str(result[1])


def test_a_table_without_the_prompt_column_is_refused(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"question": ["a"]}), tmp_path / "train.parquet")
    with pytest.raises(DataError, match=r"no column 'prompt'; data\.prompt names .*; there are: question"):
        open_source(DataSettings(path=str(tmp_path / "train.parquet")))


def test_an_invalid_parquet_file_is_refused(tmp_path):
    (tmp_path / "train.parquet").write_text("{}")
    with pytest.raises(DataError, match="not a Parquet file"):
        open_source(DataSettings(path=str(tmp_path / "train.parquet")))


def test_a_hugging_face_dataset_is_read_and_splits_must_be_named(tmp_path):
    import datasets

    one = datasets.Dataset.from_list([{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}])
    one.save_to_disk(str(tmp_path / "plain"))
    datasets.DatasetDict({"train": one, "test": one.select([1])}).save_to_disk(str(tmp_path / "split"))
    plain, test = tmp_path / "plain", f"{tmp_path / 'split'}#test"
    assert all_rows(open_source(DataSettings(path=str(plain))))[1] == {"prompt": "b", "answer": "2"}
    assert all_rows(open_source(DataSettings(path=test))) == {0: {"prompt": "b", "answer": "2"}}
    with pytest.raises(DataError, match=r"several splits; name one as .*split#SPLIT; there are: train, test"):
        open_source(DataSettings(path=str(tmp_path / "split")))
    with pytest.raises(DataError, match="there are: train, test"):
        open_source(DataSettings(path=f"{tmp_path / 'split'}#valid"))
    with pytest.raises(DataError, match="leave out #train"):
        open_source(DataSettings(path=f"{plain}#train"))
    assert (default_dataset_name(str(plain)), default_dataset_name(test)) == ("plain", "split#test")
    assert (
        open_source(DataSettings(path=test)).fingerprint() != open_source(DataSettings(path=str(plain))).fingerprint()
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.jsonl", "no such file or folder"),
        ("train.csv", "a .jsonl or .parquet file"),
        ("empty", "datasets cannot read it: .* any data files"),
    ],
)
def test_an_unsupported_path_is_refused_by_name(tmp_path, name, message):
    (tmp_path / "train.csv").write_text("prompt\na")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=message):
        open_source(DataSettings(path=str(tmp_path / name)))


def test_a_folder_of_data_files_is_read_as_a_repository_of_the_hub_is(tmp_path):
    (tmp_path / "train.csv").write_text("prompt,answer\na,1\nb,2\n")
    only = DataSettings(path=str(tmp_path))
    assert all_rows(open_source(only)) == {0: {"prompt": "a", "answer": 1}, 1: {"prompt": "b", "answer": 2}}
    (tmp_path / "test.csv").write_text("prompt,answer\nc,3\n")
    with pytest.raises(DataError, match=r"several splits; name one as split = .*; there are: train, test"):
        open_source(only)
    assert all_rows(open_source(DataSettings(path=str(tmp_path), split="test"))) == {0: {"prompt": "c", "answer": 3}}
    assert len(open_source(DataSettings(path=f"{tmp_path}#train[:1]"))) == 1
    assert (
        open_source(DataSettings(path=str(tmp_path), split="test")).fingerprint()
        == open_source(DataSettings(path=f"{tmp_path}#test")).fingerprint()
    )


def test_one_file_has_no_splits(tmp_path):
    jsonl(tmp_path / "train.jsonl", LINES)
    with pytest.raises(DataError, match=r"train.jsonl is one file, .* leave out test"):
        open_source(DataSettings(path=str(tmp_path / "train.jsonl"), split="test"))


@pytest.mark.parametrize(("library", "name"), [("pyarrow", "train.parquet"), ("datasets", "folder")])
def test_a_missing_library_error_names_the_extra(tmp_path, monkeypatch, library, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "train.parquet").write_text("")
    monkeypatch.setitem(sys.modules, library, None)  # as if it were not installed
    with pytest.raises(
        PenstockError, match=re.escape(f"{library}, which is not installed: pip install 'penstock[data]'")
    ):
        open_source(DataSettings(path=str(tmp_path / name)))


def test_a_hash_sign_in_an_existing_file_name_is_part_of_it(tmp_path):
    assert len(jsonl(tmp_path / "a#b.jsonl", LINES)) == 3
    assert default_dataset_name(str(tmp_path / "a#b.jsonl")) == "a#b"


def test_a_fingerprint_follows_the_content_and_not_the_folder(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    first = jsonl(tmp_path / "train.jsonl", LINES).fingerprint()
    assert jsonl(tmp_path / "elsewhere" / "train.jsonl", LINES).fingerprint() == first
    assert jsonl(tmp_path / "train.jsonl", LINES[:2]).fingerprint() != first


def test_an_epochs_order_has_every_row_once_and_depends_on_seed_and_epoch():
    assert list(epoch_order(5, 3, 0, False)) == [0, 1, 2, 3, 4]
    first = list(epoch_order(50, 0, 7, True))
    assert sorted(first) == list(range(50))
    assert first != list(range(50))
    assert first != list(epoch_order(50, 1, 7, True))
    assert first != list(epoch_order(50, 0, 8, True))


def test_the_order_is_the_same_in_every_process_and_release():
    # A change would feed resumed runs other rows.
    assert list(epoch_order(8, 0, 0, True)) == [2, 1, 6, 5, 0, 3, 7, 4]


def test_reading_any_kind_of_source_loads_no_torch(tmp_path):
    import datasets

    datasets.Dataset.from_list([{"prompt": "a"}]).save_to_disk(str(tmp_path / "plain"))
    code = (
        "import sys; from workers.datasets.sources import open_source; from workers.settings import DataSettings\n"
        f"list(open_source(DataSettings(path={str(tmp_path / 'plain')!r})).read_rows([0]))\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
