"""The ledger: append-only, truncated to the checkpoint's length, with a hash of each group's content."""

import copy
from array import array

import pytest

from stream.errors import RunMismatchError
from stream.records import ActivityTime, Completion, Failure, Group, Prompt, RewardPart, Span
from stream.trainer.ledger import Ledger
from stream.trainer.ledger_records import (
    Dead,
    Dropped,
    LedgerEvent,
    LedgerOutcome,
    LedgerRecord,
    Retried,
    Trained,
    content_hash,
    read_contents,
    read_events,
    read_ledger,
)
from stream.validity import Measured, RewardReason, RolloutReason, TruncationReason, Unmeasured
from tests.cases.rows import sampled_row

TRAINED = Trained()


def line(prompt: str, outcome: LedgerOutcome = TRAINED) -> LedgerRecord:
    return LedgerRecord(prompt, outcome, 1, 0, "abc")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "ledger.jsonl"


@pytest.fixture
def length(path):
    """Write a ledger with two lines within the checkpoint and two after it. Return the checkpoint's length."""
    ledger = Ledger(path)
    ledger.append([line("a"), line("b", Dropped("stale"))])
    length = ledger.sync()
    ledger.append([line("c"), line("d")])
    ledger.close()
    return length


def test_a_new_ledger_is_empty(path):
    ledger = Ledger(path)
    assert (ledger.outcomes, ledger.count_outcomes(), ledger.sync()) == ({}, {}, 0)
    ledger.close()


def test_resuming_truncates_to_the_checkpoint(path, length):
    assert path.stat().st_size > length
    ledger = Ledger(path, length)
    assert ledger.outcomes == {"a": Trained(), "b": Dropped("stale")}
    assert ledger.count_outcomes() == {"trained": 1, "dropped:stale": 1}
    assert (path.stat().st_size, ledger.sync(), ledger.checkpointed_bytes) == (length, length, length)
    ledger.append([line("e")])
    assert ledger.sync() > length
    ledger.close()
    assert list(read_contents(path).outcomes) == ["a", "b", "e"]


def test_an_incomplete_line_after_the_checkpoint_is_cut(path, length):
    with path.open("ab") as file:
        file.write(b'{"prompt":"e","end":"tra')
    assert list(read_contents(path).outcomes) == ["a", "b", "c", "d"]
    ledger = Ledger(path, length)
    assert list(ledger.outcomes) == ["a", "b"]
    ledger.close()


def test_without_a_checkpoint_nothing_remains(path, length):
    ledger = Ledger(path)
    assert (ledger.outcomes, path.stat().st_size) == ({}, 0)
    ledger.close()


@pytest.mark.parametrize("wrong_by", [-1, 1])
def test_a_length_inside_a_line_is_refused_and_nothing_is_cut(path, length, wrong_by):
    before = path.read_bytes()
    with pytest.raises(RunMismatchError, match=f"{path}, line"):
        Ledger(path, length + wrong_by)
    assert path.read_bytes() == before


def test_a_ledger_shorter_than_the_checkpoint_is_refused(path, length):
    before = path.read_bytes()
    with pytest.raises(RunMismatchError, match=r"has .* bytes, but the checkpoint"):
        Ledger(path, len(before) + 1)
    assert path.read_bytes() == before


def test_a_missing_ledger_is_refused_and_not_created(path):
    with pytest.raises(RunMismatchError, match="has 0 bytes"):
        Ledger(path, 100)
    assert not path.exists()


@pytest.mark.parametrize("junk", [b"\0\xff junk\n", b"{}\n", b"\n", b'{"prompt":"\xff"}\n', b"[1]\n"])
def test_an_invalid_line_before_the_checkpoint_is_refused(path, length, junk):
    content = path.read_bytes()
    whole = content[:length] + junk + content[length:]
    path.write_bytes(whole)
    with pytest.raises(RunMismatchError, match="line 3"):
        Ledger(path, length + len(junk))
    assert path.read_bytes() == whole


def test_reading_changes_nothing(path, length):
    before = path.read_bytes()
    assert list(read_contents(path, length).outcomes) == ["a", "b"]
    assert list(read_contents(path).outcomes) == ["a", "b", "c", "d"]
    assert path.read_bytes() == before
    assert read_contents(path.with_name("none.jsonl")).outcomes == {}
    assert not path.with_name("none.jsonl").exists()


def test_unusual_ids_round_trip(path):
    ids = ["ünïcode", 'quote"s', "line\nbreak", "line\u2028separator", ""]
    ledger = Ledger(path)
    ledger.append([line(each) for each in ids])
    length = ledger.sync()
    ledger.close()
    assert list(read_contents(path, length).outcomes) == ids


def make_group() -> Group:
    return Group(
        prompt=Prompt(id="a", messages=[{"role": "user", "content": "?"}]),
        completions=[
            Completion(
                index=i,
                rows=[sampled_row([2, 3], [-0.5, -1.0], version=1, prompt=[1])],
                parts=[RewardPart(name="env", reward=Measured(1.0))],
                reward=Measured(1.0),
            )
            for i in range(2)
        ],
    )


def changed(change) -> Group:
    group = copy.deepcopy(make_group())
    change(group)
    return group


UNSEEN = {
    "attempt": lambda g: setattr(g, "attempt", 3),
    "worker": lambda g: setattr(g, "worker", "rollout-2"),
    "claimed": lambda g: setattr(g, "claimed_at", 1.0),
    "rolled out": lambda g: setattr(g, "rolled_out_at", 1.0),
    "scored": lambda g: setattr(g, "scored_at", 1.0),
    "claimed by a scorer": lambda g: setattr(g, "score_claimed_at", 1.0),
    "activity_times": lambda g: g.completions[0].activity_times.append(ActivityTime("engine", 1.0, 2.0)),
    "fed": lambda g: setattr(g.prompt, "fed_at", 1.0),
    "seconds": lambda g: g.completions[0].seconds.update(total=1.0),
}


@pytest.mark.parametrize("change", UNSEEN.values(), ids=UNSEEN)
def test_the_hash_ignores_times_attempts_and_workers(change):
    assert content_hash(changed(change)) == content_hash(make_group())


SEEN = {
    "prompt id": lambda g: setattr(g.prompt, "id", "b"),
    "index": lambda g: setattr(g.completions[0], "index", 7),
    "order": lambda g: g.completions.reverse(),
    "one completion fewer": lambda g: g.completions.pop(),
    "one row more": lambda g: g.completions[0].rows.append(g.completions[0].rows[0]),
    "a row elsewhere": lambda g: g.completions[1].rows.append(g.completions[0].rows.pop()),
    "prompt ids": lambda g: setattr(g.completions[0].rows[0], "prompt_ids", array("i", [9]).tobytes()),
    "token ids": lambda g: setattr(g.completions[0].rows[0], "token_ids", array("i", [2, 9]).tobytes()),
    "log-probs": lambda g: setattr(g.completions[0].rows[0], "logprobs", array("f", [-0.5, -1.1]).tobytes()),
    "sampled ranges": lambda g: setattr(g.completions[0].rows[0], "sampled_ranges", [(0, 1)]),
    "versions": lambda g: setattr(g.completions[0].rows[0], "spans", [Span(2, 0, 2)]),
    "reward": lambda g: setattr(g.completions[0], "reward", Measured(0.0)),
    "no reward": lambda g: setattr(g.completions[0], "reward", None),
    "unmeasured": lambda g: setattr(g.completions[0], "reward", Unmeasured(RewardReason.RAISED)),
    "part's reward": lambda g: setattr(g.completions[0].parts[0], "reward", Measured(0.0)),
    "part's weight": lambda g: setattr(g.completions[0].parts[0], "weight", 2.0),
    "failure": lambda g: setattr(g.completions[0], "failure", Failure(reason=RolloutReason.ENGINE)),
    "truncated": lambda g: setattr(g.completions[0], "truncated", TruncationReason.LENGTH),
}


@pytest.mark.parametrize("change", SEEN.values(), ids=SEEN)
def test_the_hash_covers_everything_that_the_trainer_uses(change):
    assert content_hash(changed(change)) != content_hash(make_group())


def test_reading_returns_lines_with_offsets_and_reports_junk(path, length):
    content = path.read_bytes()
    path.write_bytes(content[:length] + b'{"a\r":1}\n' + content[length:] + b'{"prompt":"e","end":"tra')
    written, broken = read_ledger(path)
    assert [(each.number, each.record.prompt) for each in written] == [(1, "a"), (2, "b"), (4, "c"), (5, "d")]
    assert written[1].end_offset == length
    assert written[-1].end_offset == len(content) + 9
    assert [text.partition(": ")[0] for text in broken] == [f"{path}, line 3"]


def test_a_line_with_an_unknown_outcome_is_junk(path):
    ledger = Ledger(path)
    ledger.append([line("a")])
    ledger.close()
    path.write_bytes(path.read_bytes().replace(b"trained", b"tr@ined"))
    assert read_ledger(path) == ([], [f"{path}, line 1: 'tr@ined' is not an outcome of a prompt"])


def test_a_missing_ledger_has_no_lines(path):
    assert read_ledger(path) == ([], [])


def test_lines_that_stay_when_the_ledger_is_cut_stay_once_when_the_newer_checkpoint_comes_back(path, length):
    ledger = Ledger(path, length)
    ledger.append([line("c")])
    ledger.append_end("d", Dropped("operator"), 2, 1)
    newer, digest = ledger.sync(), ledger.digest()
    ledger.append_end("e", Dead("unreadable"), 2, 1)
    ledger.append_event(LedgerEvent("setting_changed", 2, {}))
    ledger.close()
    older = Ledger(path, length, cut=False)
    older.cut(keep_cut=True)
    older.append_end("e", Retried(), 2, 1)
    older.append_end("c", Dead("unreadable"), 2, 1)
    older.append_end("c", Dropped("operator"), 2, 1)
    older.close()
    back = Ledger(path, newer, digest=digest)
    assert (back.outcomes["c"], back.outcomes["d"], back.dead) == (Trained(), Dropped("operator"), {})
    back.close()
    lines, junk = read_ledger(path)
    assert (junk, len(read_events(path))) == ([], 1)
    assert [each.record.prompt for each in lines] == ["a", "b", "c", "d", "e", "e"]
