"""Trained tokens on disk: what is read of them, and what is never believed."""

import math
import resource
from array import array

import msgspec
import pytest

from stream.errors import RunFailedError
from stream.records import TrainedCompletion, TrainedRow
from stream.trainer.archive import Archive, scan_archive
from stream.trainer.ledger_records import LedgerRecord, Trained
from stream.trainer.trained_tokens import TrainedTokenFiles, read_trained_tokens
from tests.cases.rows import sampled_row
from workers.runs.tokens import logprob_differences, rejected_tokens, token_columns


def floats(*values: float) -> bytes:
    return array("f", values).tobytes()


ROW = TrainedRow(
    loss_mask=b"\1\0\1",
    advantages=floats(0.5, 9.0, -0.25),
    logprob_differences=floats(0.125, 4.0, math.nan),
    rejected_by=b"\0\1\0",
    rules=("token_k1",),
)
DONE = [TrainedCompletion("valid", 0.125, 2, (ROW,)), TrainedCompletion("failed:env_step", None, 0)]


def record(prompt="a", step=1, version=7):
    return LedgerRecord(prompt, Trained(), step, version, "0" * 8)


def write(folder, step, version, *prompts, max_bytes=1_000_000, done=DONE):
    files = TrainedTokenFiles(folder / "trained_tokens", max_bytes)
    files.publish(step, files.write_unpublished(step, version, dict.fromkeys(prompts, done)))


def test_what_a_step_did_with_each_token_is_read_by_its_ledger_record(tmp_path):
    write(tmp_path, 1, 7, "a", "b")
    write(tmp_path, 2, 8, "c", done=DONE[1:])
    assert read_trained_tokens(tmp_path, record("a")) == read_trained_tokens(tmp_path, record("b")) == DONE
    assert read_trained_tokens(tmp_path, record("c", 2, 8)) == DONE[1:]
    assert read_trained_tokens(tmp_path, record("c", 1, 7)) is None
    assert read_trained_tokens(tmp_path, record("a", 3, 9)) is None


def test_a_step_that_was_lost_is_not_believed_and_its_repetition_replaces_it(tmp_path):
    write(tmp_path, 1, 7, "a")
    again = record(version=9)  # the resumed trainer published another version first
    assert read_trained_tokens(tmp_path, again) is None
    write(tmp_path, 1, 9, "a", done=DONE[1:])
    assert read_trained_tokens(tmp_path, again) == DONE[1:]
    assert read_trained_tokens(tmp_path, record()) is None


def test_the_oldest_steps_are_removed_and_the_newest_never(tmp_path):
    for step in range(1, 5):
        write(tmp_path, step, step, "a")
    size = (tmp_path / "trained_tokens" / "000001.trained_tokens").stat().st_size
    (tmp_path / "trained_tokens" / ".000005-5.tmp").touch()  # a trainer was killed
    write(tmp_path, 5, 5, "a", max_bytes=2 * size)
    assert sorted(path.name for path in (tmp_path / "trained_tokens").iterdir()) == [
        "000004.trained_tokens",
        "000005.trained_tokens",
    ]
    write(tmp_path, 6, 6, "a", max_bytes=1)
    assert read_trained_tokens(tmp_path, record(step=6, version=6)) == DONE


def test_a_damaged_file_has_no_trained_tokens(tmp_path):
    write(tmp_path, 1, 7, "a")
    path = tmp_path / "trained_tokens" / "000001.trained_tokens"
    content = path.read_bytes()
    for at in range(len(content)):
        for damaged in (content[:at], content[:at] + bytes([content[at] ^ 255]) + content[at + 1 :]):
            path.write_bytes(damaged)
            assert read_trained_tokens(tmp_path, record()) is None


def test_a_full_disk_is_an_error_that_says_what_to_do(tmp_path):
    files = TrainedTokenFiles(tmp_path / "trained_tokens", 1_000_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))  # file size limit: the disk seems full
    try:
        with pytest.raises(RunFailedError, match=r"trained tokens of step 1.*archive\.keep"):
            files.write_unpublished(1, 7, {"a": DONE})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "trained_tokens").iterdir()) == []


def test_the_archive_keeps_the_summary_and_passes_the_tokens_on(tmp_path):
    archive = Archive(tmp_path / "groups", trained_tokens=TrainedTokenFiles(tmp_path / "trained_tokens", 1_000_000))
    archive.write([(record("dropped"), b"payload")])
    assert not (tmp_path / "trained_tokens").exists()
    archive.write([(record(), b"payload")], {"a": DONE})
    archive.close()
    _, (_, offset) = scan_archive(tmp_path / "groups")
    assert offset.read_completions() == [msgspec.structs.replace(each, rows=()) for each in DONE]
    assert read_trained_tokens(tmp_path, record()) == DONE


def test_columns_have_one_value_for_each_token_after_the_prompt():
    row = msgspec.structs.replace(
        sampled_row([3, 4, 5, 6], [-0.5, -1.0, -1.5, 0]),
        sampled_ranges=[(0, 2), (3, 4)],
        logprobs=floats(-0.5, -1.0, -1.5),
    )
    columns = token_columns(row, ROW)
    assert (columns.sampled_mask, columns.loss_mask) == ([1, 1, 0, 1], [1, 0, 0, 1])
    assert columns.logprobs == [-0.5, -1.0, None, -1.5]
    assert columns.advantages == [0.5, None, None, -0.25]
    assert columns.logprob_differences == [0.125, 4.0, None, None]
    assert columns.rejected_by == [None, "token_k1", None, None]
    shared = token_columns(row, TrainedRow(advantages=floats(0.5)))
    assert (shared.loss_mask, shared.advantages) == ([1, 1, 0, 1], [0.5, 0.5, None, 0.5])
    assert shared.logprob_differences == shared.rejected_by == [None] * 4
    for unknown in (None, TrainedRow(loss_mask=b"\1"), TrainedRow(rejected_by=b"\0\2\0", rules=("a",))):
        assert token_columns(row, unknown).loss_mask is None


def test_a_completion_is_summed_up_over_its_rows():
    trained = TrainedCompletion("valid", 0.125, 4, (ROW, msgspec.structs.replace(ROW, rules=("too_old",))))
    assert rejected_tokens(trained) == {"token_k1": 1, "too_old": 1}
    assert logprob_differences(trained) == [0.125, 4.0, 0.125, 4.0]
