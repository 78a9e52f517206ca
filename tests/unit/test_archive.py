"""The archive of groups: written groups survive damage to the file, and its size is bounded."""

import os
import resource

import pytest

from stream.codec import encode
from stream.errors import PenstockError, RecordError, RunFailedError
from stream.records import Group, TrainedCompletion
from stream.trainer.archive import Archive, ArchivedGroups, scan_archive
from stream.trainer.ledger_records import LedgerRecord, Trained, content_hash
from tests.cases import groups


def group(name: str, token: int = 1, tokens: int = 10) -> Group:
    return groups.group(groups.completion(0, 1.0, [token] * tokens), name=name)


def ended(made: Group, step: int = 1) -> tuple[LedgerRecord, bytes]:
    return LedgerRecord(made.prompt.id, Trained(), step, 0, content_hash(made)), encode(made)


def life(folder, *made: Group, limit: int | None = None) -> None:
    """Write groups as one trainer process does, from opening the archive to closing it."""
    archive = Archive(folder, limit)
    archive.write([ended(each) for each in made])
    archive.sync()
    archive.close()


def names(folder) -> list[str]:
    """Return the prompts in the archive, in file order."""
    return [line.prompt for line, _ in scan_archive(folder)]


def segments(folder):
    return sorted(folder.iterdir())


def test_a_written_group_is_found_by_prompt_and_content(tmp_path):
    life(tmp_path / "groups", group("a"), group("b", token=2))
    result = ArchivedGroups(tmp_path / "groups")
    for made in (group("a"), group("b", token=2)):
        assert (made.prompt.id, content_hash(made)) in result
        assert result.read(made.prompt.id, content_hash(made)) == made
    assert len(result) == 2
    assert ("a", content_hash(group("a", token=2))) not in result


def test_sync_forces_groups_to_the_disk(tmp_path, monkeypatch):
    forced = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: forced.add(os.fstat(descriptor).st_ino))
    archive = Archive(tmp_path / "groups")
    archive.write([ended(group("a"))])
    assert not forced & {path.stat().st_ino for path in segments(tmp_path / "groups")}
    archive.sync()
    assert {path.stat().st_ino for path in [tmp_path / "groups", *segments(tmp_path / "groups")]} <= forced
    archive.close()


def test_a_record_contains_the_ledger_record_as_written(tmp_path):
    life(tmp_path, group("ünïcode\n"))
    assert [line for line, _ in scan_archive(tmp_path)] == [ended(group("ünïcode\n"))[0]]


def test_a_missing_archive_is_empty_and_not_created(tmp_path):
    Archive(tmp_path / "groups").close()
    assert len(ArchivedGroups(tmp_path / "groups")) == 0
    assert not (tmp_path / "groups").exists()


def test_each_start_has_its_own_segment(tmp_path):
    first, second = Archive(tmp_path), Archive(tmp_path)
    for number in range(3):
        first.write([ended(group(f"zombie {number}"))])
        second.write([ended(group(f"heir {number}"))])
    first.close()
    second.close()
    assert [path.name for path in segments(tmp_path)] == ["000001.groups", "000002.groups"]
    assert names(tmp_path) == [f"zombie {n}" for n in range(3)] + [f"heir {n}" for n in range(3)]


def test_two_archives_opened_together_use_different_segments(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "stream.trainer.archive._segments", lambda _: []
    )  # both list the segments before either has created one
    for name in ("a", "b", "c"):
        life(tmp_path, group(name))
    monkeypatch.undo()
    assert [path.name for path in segments(tmp_path)] == [f"00000{n}.groups" for n in (1, 2, 3)]
    assert names(tmp_path) == ["a", "b", "c"]


@pytest.mark.parametrize("left", [1, 15, 16, 40, 150])
def test_an_incomplete_record_is_skipped(tmp_path, left):
    life(tmp_path, group("a"))
    whole = segments(tmp_path)[0].stat().st_size
    life(tmp_path / "more", group("a"), group("torn"))
    content = segments(tmp_path / "more")[0].read_bytes()
    assert left < len(content) - whole
    segments(tmp_path / "more")[0].write_bytes(content[: whole + left])
    assert names(tmp_path / "more") == ["a"]
    life(tmp_path / "more", group("torn"), group("b"))
    assert names(tmp_path / "more") == ["a", "torn", "b"]
    assert ArchivedGroups(tmp_path / "more").read("torn", content_hash(group("torn"))) == group("torn")


def test_every_prefix_of_a_segment_yields_only_complete_records(tmp_path):
    life(tmp_path, group("a", tokens=2), group("b", tokens=1))
    path = segments(tmp_path)[0]
    content = path.read_bytes()
    ends = [place.offset + place.size for _, place in scan_archive(tmp_path)]
    for length in {*range(0, len(content), 3), *ends, *(end - 1 for end in ends)}:
        path.write_bytes(content[:length])
        assert len(names(tmp_path)) == sum(end <= length for end in ends)


@pytest.mark.parametrize("junk", [b"\0", b"PSgr", b"PSgr" * 5, b"PSgr" + b"\xff" * 12, b"not a record" * 9])
def test_junk_between_records_is_skipped(tmp_path, junk):
    life(tmp_path, group("a"), group("b"))
    path = segments(tmp_path)[0]
    content = path.read_bytes()
    _, place = next(scan_archive(tmp_path))
    end = place.offset + place.size
    path.write_bytes(junk + content[:end] + junk + content[end:] + junk)
    assert names(tmp_path) == ["a", "b"]


def test_a_flipped_byte_affects_at_most_its_own_record(tmp_path):
    made = [group("a"), group("b"), group("c")]
    life(tmp_path, *made)
    path = segments(tmp_path)[0]
    content = path.read_bytes()
    spans = [place.offset + place.size for _, place in scan_archive(tmp_path)]
    for position in range(0, len(content), 5):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        hit = sum(end <= position for end in spans)
        result = ArchivedGroups(tmp_path)
        for number, each in enumerate(made):
            key = (each.prompt.id, content_hash(each))
            if number != hit:
                assert result.read(*key) == each
            elif key in result:
                with pytest.raises(RecordError, match=rf"{path}, byte \d+: the group of prompt"):
                    result.read(*key)


def test_a_payload_of_another_group_is_an_error(tmp_path):
    line, _ = ended(group("a"))
    archive = Archive(tmp_path)
    archive.write([(line, encode(group("a", token=2)))])
    archive.close()
    with pytest.raises(RecordError, match=r"not the group of prompt a with hash"):
        ArchivedGroups(tmp_path).read("a", line.hash)


def test_what_a_step_did_with_completions_is_stored_beside_the_group(tmp_path):
    done = [TrainedCompletion("valid", 0.1, 10), TrainedCompletion("reward:raised", None, 0)]
    archive = Archive(tmp_path)
    archive.write([ended(group("a")), ended(group("b"))], {"a": done})
    archive.close()
    (first, at), (_, other) = scan_archive(tmp_path)
    assert at.read_completions() == done
    assert other.read_completions() == []
    assert first == ended(group("a"))[0]


def test_repeated_groups_are_found_by_content(tmp_path):
    life(tmp_path, group("a"))
    life(tmp_path, group("a"), group("a", token=2))
    result = ArchivedGroups(tmp_path)
    assert names(tmp_path) == ["a", "a", "a"]
    assert len(result) == 2
    for made in (group("a"), group("a", token=2)):
        assert result.read("a", content_hash(made)) == made


def test_a_bounded_archive_removes_the_oldest_segments_first(tmp_path):
    limit = 100_000
    archive = Archive(tmp_path, limit)
    for number in range(500):
        archive.write([ended(group(str(number), tokens=100))])
        assert sum(path.stat().st_size for path in segments(tmp_path)) <= limit
    archive.close()
    kept = [int(name) for name in names(tmp_path)]
    assert kept == list(range(kept[0], 500))
    assert sum(path.stat().st_size for path in segments(tmp_path)) > limit * 3 / 4
    assert len(segments(tmp_path)) == 8


def test_the_limit_holds_across_restarts_and_the_last_segment_stays(tmp_path):
    limit = 10_000
    for number in range(30):
        life(tmp_path, group(str(number), tokens=100), limit=limit)
        assert sum(path.stat().st_size for path in segments(tmp_path)) <= limit
    life(tmp_path, group("large", tokens=20_000), limit=limit)
    assert names(tmp_path) == ["large"]
    life(tmp_path, group("next"), limit=limit)
    assert names(tmp_path) == ["next"]


def test_an_unbounded_archive_keeps_everything(tmp_path):
    life(tmp_path, *[group(str(number)) for number in range(100)], limit=None)
    for number in range(100, 110):
        life(tmp_path, group(str(number)))
    assert names(tmp_path) == [str(number) for number in range(110)]


def test_other_files_in_the_folder_are_ignored(tmp_path):
    (tmp_path / "notes.groups").write_text("PSgr mine")
    life(tmp_path, group("a"), limit=1000)
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "notes.groups").exists()


def test_a_full_disk_is_an_error_and_earlier_groups_remain(tmp_path):
    life(tmp_path, group("a"))
    archive = Archive(tmp_path)
    archive.write([ended(group("b"))])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # file size limit: the disk seems full
    try:
        with pytest.raises(
            RunFailedError, match=r"000002.groups.*Free space on that disk, or keep less \(archive.keep"
        ):
            archive.write([ended(group("c", tokens=1000)), ended(group("d"))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    archive.close()
    assert names(tmp_path) == ["a", "b"]
    with segments(tmp_path)[1].open("ab") as file:  # what a trainer leaves that is killed while it writes
        file.write(segments(tmp_path)[1].read_bytes()[:200])
    life(tmp_path, group("c", tokens=1000))
    assert names(tmp_path) == ["a", "b", "c"]


def test_a_segment_removed_during_reading_is_an_error(tmp_path):
    life(tmp_path, group("a"))
    result = ArchivedGroups(tmp_path)
    assert ("a", content_hash(group("a"))) in result
    segments(tmp_path)[0].unlink()
    with pytest.raises(PenstockError, match=r"was removed while it was read \(archive.keep\)"):
        result.read("a", content_hash(group("a")))
