"""How an audit classifies a prompt from the evidence. Each case has one prompt unless stated otherwise."""

import msgspec
import pytest

from stream.operator.audit import AuditInput, AuditReport, RunScan, audit
from stream.queue.entry_scan import DeadEntry, StreamEntry
from stream.trainer.ledger_records import LedgerLine, LedgerRecord, decode_outcome
from workers.runs.audit import audit_until_stable

LINE = 100
"""Bytes of a ledger line in these tests."""


def facts(
    *entries: StreamEntry,
    fed: str = "",
    ledger: str = "",
    kept: int | None = 0,
    opened: str = "",
    dead=(),
    removed: str = "",
) -> AuditInput:
    """Make an audit's input; `ledger` holds `prompt` or `prompt=end`, separated by spaces, and `kept` counts lines."""
    lines = []
    for number, text in enumerate(ledger.split(), 1):
        prompt, _, end = text.partition("=")
        lines.append(
            LedgerLine(
                number,
                number * LINE,
                LedgerRecord(prompt, decode_outcome(end or "trained"), number, number - 1, "hash"),
            )
        )
    census = RunScan(
        unfinished=set(opened.split()), entries=list(entries), dead=list(dead), dropped_dead=set(removed.split())
    )
    return AuditInput(
        fed=set(fed.split()), ledger=lines, checkpointed_bytes=None if kept is None else kept * LINE, scan=census
    )


def entry(stage: str, prompt: str = "a", *, marked: bool = False) -> StreamEntry:
    return StreamEntry(stage, "7-0", prompt, marked)


def letter(prompt: str = "a", *, fed: bool = True, id_: str = "9-0") -> DeadEntry:
    return DeadEntry(id_, "prompts", prompt, "infra", "its workers died", fed)


def place(report: AuditReport) -> str:
    """Return the one class of the audit that contains the prompt."""
    places = {"trained": report.trained, "dead": report.dead, "lost": len(report.lost), "twice": len(report.twice)}
    places |= {f"dropped:{reason}": n for reason, n in report.dropped.items()}
    places |= {f"outstanding:{stage}": n for stage, n in report.outstanding.items()}
    assert report.fed == sum(places.values()) == 1
    return next(name for name, n in places.items() if n)


CASES = {
    "waiting to be rolled out": (facts(entry("prompts"), fed="a", opened="a"), "outstanding:prompts"),
    "waiting to be scored": (facts(entry("groups"), fed="a", opened="a"), "outstanding:groups"),
    "waiting to be trained": (facts(entry("scored"), fed="a", opened="a"), "outstanding:scored"),
    "fed after the cursor was read": (facts(entry("prompts"), opened="a"), "outstanding:prompts"),
    "in two places, one of them old": (
        facts(entry("groups"), entry("prompts"), fed="a", opened="a"),
        "outstanding:groups",
    ),
    "trained, in a checkpoint": (facts(fed="a", ledger="a", kept=1), "trained"),
    "dropped, in a checkpoint": (facts(fed="a", ledger="a=dropped:stale", kept=1), "dropped:stale"),
    "trained, not in a checkpoint yet": (facts(entry("scored", marked=True), fed="a", ledger="a"), "trained"),
    "trained, its line written, not marked yet": (facts(entry("scored"), fed="a", ledger="a", opened="a"), "trained"),
    "trained, in a checkpoint, and still open: a server that lost its last writes": (
        facts(fed="a", ledger="a", kept=1, opened="a"),
        "trained",
    ),
    "trained, in a checkpoint, and on its way again": (
        facts(entry("prompts"), fed="a", ledger="a", kept=1, opened="a"),
        "trained",
    ),
    "trained, in a checkpoint, ahead of a cursor that went back": (facts(ledger="a", kept=1), "trained"),
    "trained in no checkpoint, ahead of a cursor that went back": (facts(ledger="a"), "outstanding:again"),
    "trained, where no checkpoint is known of": (facts(fed="a", ledger="a", kept=None), "trained"),
    "trained in no checkpoint, and gone": (facts(fed="a", ledger="a"), "lost"),
    "trained in no checkpoint, open, and gone": (facts(ledger="a", opened="a"), "lost"),
    "marked, but not in the ledger": (facts(entry("scored", marked=True), fed="a"), "outstanding:marked"),
    "marked, not in the ledger, with a copy under way": (
        facts(entry("scored", marked=True), entry("groups"), fed="a"),
        "outstanding:scored",
    ),
    "dead": (facts(fed="a", dead=[letter()]), "dead"),
    "dead, and a copy under way": (facts(entry("groups"), fed="a", dead=[letter()]), "dead"),
    "dropped by the operator": (facts(fed="a", removed="a"), "dropped:operator"),
    "nowhere": (facts(fed="a"), "lost"),
    "open, but in no stage": (facts(fed="a", opened="a"), "lost"),
    "a copy of it died, and it is nowhere": (facts(fed="a", dead=[letter(fed=False)]), "lost"),
    "trained, and a copy of it died": (facts(fed="a", ledger="a", kept=1, dead=[letter(fed=False)]), "trained"),
    "ended twice in the ledger, in different steps": (facts(fed="a", ledger="a a", kept=2), "twice"),
    "ended twice in the ledger, once in no checkpoint": (
        facts(entry("scored", marked=True), fed="a", ledger="a a", kept=1),
        "twice",
    ),
    "trained and dropped": (facts(fed="a", ledger="a a=dropped:stale", kept=2), "twice"),
    "dead and trained": (facts(fed="a", ledger="a", kept=1, dead=[letter()]), "twice"),
    "dead twice": (facts(fed="a", dead=[letter(), letter(id_="9-1")]), "twice"),
    "dropped by the operator, and trained": (facts(fed="a", ledger="a", kept=1, removed="a"), "twice"),
}


@pytest.mark.parametrize(("known", "expected"), CASES.values(), ids=CASES)
def test_a_prompt_has_one_location(known, expected):
    report = audit(known)
    assert place(report) == expected
    assert report.clean is (expected not in {"lost", "twice"})


def test_foreign_entries_are_counted_separately():
    report = audit(facts(entry("groups", ""), entry("scored", "nobody's"), dead=[letter("", fed=False)]))
    assert (report.fed, report.foreign_entries, report.clean) == (0, 3, True)


def test_entries_that_are_being_processed_are_not_foreign():
    assert audit(facts(entry("groups"), opened="a")).foreign_entries == 0


def test_outcomes_after_the_last_checkpoint_are_counted_as_unsaved():
    report = audit(facts(entry("scored", "b", marked=True), fed="a b", ledger="a b=dropped:stale", kept=1))
    assert (report.trained, report.dropped, report.unsaved) == (1, {"stale": 1}, 1)


def test_an_empty_run_is_clean():
    report = audit(facts())
    assert (report.fed, report.outstanding, report.dropped, report.clean) == (0, {}, {}, True)


def test_many_prompts_add_up():
    report = audit(
        facts(
            *(entry("prompts", "c"), entry("groups", "d"), entry("scored", "e"), entry("scored", "f", marked=True)),
            fed="a b c d e f g h i j k",
            ledger="a b=dropped:zero_variance f j j",
            kept=2,
            opened="c d e",
            dead=[letter("g")],
            removed="h",
        )
    )
    assert (report.fed, report.trained, report.dead) == (11, 2, 1)
    assert report.dropped == {"operator": 1, "zero_variance": 1}
    assert report.outstanding == {"groups": 1, "prompts": 1, "scored": 1}
    assert [each.prompt for each in report.lost] == ["i", "k"]
    assert [each.prompt for each in report.twice] == ["j"]


def test_findings_list_all_evidence():
    (result,) = audit(
        facts(entry("scored", marked=True), fed="a", ledger="a a=dropped:stale", kept=1, removed="a")
    ).twice
    assert result.evidence == [
        "ledger line 1: trained in step 1, version 0",
        "ledger line 2: dropped:stale in step 2, version 1, which no checkpoint holds",
        "its dead letter was dropped by the operator",
        "entry 7-0 in scored, marked",
    ]
    (result,) = audit(facts(fed="a", ledger="a", kept=1, dead=[letter()])).twice
    assert result.evidence[1] == "dead letter 9-0 of prompts: infra: its workers died"
    (result,) = audit(facts(opened="a")).lost
    assert result.evidence == ["unfinished on the server, which has no entry of it"]
    (result,) = audit(facts(fed="a")).lost
    assert result.evidence == ["no entry on the server"]


def test_the_report_has_these_keys():
    report = msgspec.to_builtins(audit(facts()))
    assert list(report) == [
        "fed", "trained", "dropped", "dead", "outstanding", "lost", "twice", "clean", "unsaved", "foreign_entries",
        "turns", "sandboxes", "notes",
    ]  # fmt: skip


async def looked(*lost: str) -> tuple[AuditReport, int]:
    """Return what `audit_until_stable` reports, and its number of audits, if successive audits find `lost`."""
    looks = [audit(facts(fed=prompts)) for prompts in lost]
    taken = []

    async def look() -> AuditReport:
        taken.append(looks[len(taken)])
        return taken[-1]

    return await audit_until_stable(look), len(taken)


async def test_a_finding_must_appear_in_two_audits_in_a_row():
    report, looks = await looked("", "a")
    assert (report.clean, looks) == (True, 1)
    report, looks = await looked("a", "")
    assert (report.clean, looks) == (True, 2)
    report, looks = await looked("a b", "b", "b", "")
    assert ([each.prompt for each in report.lost], looks) == (["b"], 3)
    report, looks = await looked("a", "b", "c", "d", "")
    assert ([each.prompt for each in report.lost], looks) == (["d"], 4)
