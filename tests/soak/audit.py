"""Where each prompt of a soak run ended: by the weights, then by ledger, dead letters and counters."""

from collections import Counter
from pathlib import Path

from msgspec import Struct

from stream.connection.run_connection import RunConnection
from stream.operator.dead_letters import DeadLetter, list_dead_letters
from stream.operator.status import RunStatus, read_status
from stream.trainer.ledger_records import decode_event, encode_outcome, record_or_none
from tests.soak.ends import intended
from tests.soak.witness import row_of, testimony
from workers.runs.find import open_run
from workers.train.checkpointing.checkpoint import CheckpointStore


class Verdict(Struct, kw_only=True):
    """Result of an audit."""

    fed: int
    trained: int
    """Prompts whose weight is exactly 1."""
    dropped: dict[str, int]
    dead: int
    lost: int
    """Prompts without an end."""
    twice: int
    """Prompts with more than one end, or that ended more than once."""
    astray: int
    """Prompts whose only end differs from the intended one."""
    contradicted: int
    """Prompts on which ledger and weights disagree about whether they were trained."""
    forgotten: int
    """Duplicate groups that the trainer discarded, mostly after the server lost its record of them."""
    unsettled: int
    """Rest on the server: entries, unfinished prompts, and differences between its counters and the ends found here."""
    orphaned: int
    """Records on the server that belong to no entry and no dead letter; nobody would ever free their memory."""


def audit(folder: Path, groups: int) -> Verdict:
    """Audit the run in `folder`; no role may be at work."""
    status, dead, records = open_run(folder).call(_ask)
    checkpoint = CheckpointStore(folder / "checkpoints").latest()
    weights = testimony(checkpoint.model).tolist() if checkpoint else [0.0] * groups
    noted: list[list[str]] = [[] for _ in range(groups)]
    for text in (folder / "ledger.jsonl").read_bytes().splitlines():
        line = record_or_none(text)
        if line is None:
            assert decode_event(text) is not None, text
        elif line.has_group:
            noted[row_of(line.prompt)].append(encode_outcome(line.outcome))
    buried: list[list[str]] = [[] for _ in range(groups)]
    for letter in dead:
        if not letter.ends_prompt:  # not the end of a prompt: entries added by others
            continue
        buried[row_of(letter.prompt_id)].append(f"dead:{letter.stage}")
    ends: list[list[str]] = [[] for _ in range(groups)]
    twice = 0
    for row, weight in enumerate(weights):
        dropped = [end for end in noted[row] if end != "trained"]
        ends[row] = ["trained"] * (weight != 0) + dropped + buried[row]
        twice += weight not in {0.0, 1.0} or len(ends[row]) > 1 or len(noted[row]) > 1
    only = Counter(result[0] for result in ends if len(result) == 1)
    reasons = {end.partition(":")[2]: n for end, n in sorted(only.items()) if end.startswith("dropped:")}
    trained = sum(result == ["trained"] and weight == 1.0 for result, weight in zip(ends, weights, strict=True))
    buried_once = sum(n for end, n in only.items() if end.startswith("dead:"))
    return Verdict(
        fed=status.counts.get("fed", 0),
        trained=trained,
        dropped=reasons,
        dead=buried_once,
        lost=sum(not result for result in ends),
        twice=twice,
        astray=sum(len(result) == 1 and result[0] != intended(row) for row, result in enumerate(ends)),
        contradicted=sum(("trained" in noted[row]) != (weight == 1.0) for row, weight in enumerate(weights)),
        forgotten=status.counts.get("duplicates", 0),
        unsettled=_unsettled(status, trained, reasons, buried_once),
        orphaned=sum(not _has_owner(name, {letter.id for letter in dead}) for name in records),
    )


def acquitted(verdict: Verdict, groups: int) -> bool:
    """Whether nothing is lost or duplicated, every end is the intended one, and all records agree."""
    ended = verdict.trained + sum(verdict.dropped.values()) + verdict.dead
    amiss = (verdict.lost, verdict.twice, verdict.astray, verdict.contradicted, verdict.unsettled, verdict.orphaned)
    return verdict.fed == groups == ended and not any(amiss)


async def _ask(connection: RunConnection) -> tuple[RunStatus, list[DeadLetter], list[str]]:
    letters = await list_dead_letters(connection, count=1_000_000)
    names = [name.decode() async for name in connection.redis.scan_iter(connection.key("*"), count=1000)]
    records = [name for name in names if ":payload:" in name or ":partials:" in name]
    return await read_status(connection), letters, records


def _has_owner(record: str, dead: set[str]) -> bool:
    """Whether the key of a record is that of a dead letter: no entry is left when a run has ended."""
    return ":dead:payload:" in record and record.rpartition(":")[2] in dead


def _unsettled(status: RunStatus, trained: int, dropped: dict[str, int], dead: int) -> int:
    left = sum(stage.depth for stage in status.stages.values()) + status.unfinished + status.outstanding
    books = {"trained": trained, "dead": dead, **{f"dropped:{reason}": n for reason, n in dropped.items()}}
    return left + sum(abs(status.counts.get(name, 0) - n) for name, n in books.items())
