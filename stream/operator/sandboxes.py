"""The sandboxes of a run as the operator sees them: which there are, whose they are, whether all are accounted for."""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec
from msgspec import Struct, field

from stream.connection.run_connection import RunConnection
from stream.queue.sandboxes import SandboxCounts, SandboxRecord

MAX_LOST_S: Final = 60.0
"""Seconds after the end of its lease within which a sandbox is removed."""
_MAX_NAMES: Final = 5
"""Names in a finding."""


class LiveSandbox(Struct, frozen=True, kw_only=True):
    """A sandbox that is not known to be gone."""

    name: str
    place: str
    """Where it lives: an engine's id, a cluster and namespace, a host."""
    provider: str
    prompt: str
    completion: int
    """Position of its completion in the group."""
    purpose: str
    state: Literal["owned", "lost", "due"]
    """`lost`: no lease owns it; it can still be adopted. `due`: it is about to be removed."""
    owner: str
    """The worker that created or adopted it last."""
    fence: int
    age_s: float
    lease_s: float
    """Seconds until the lease that owns it ends unless it is renewed; negative: since it was lost."""


class SandboxScan(Struct, frozen=True, kw_only=True):
    """What the server knows about a run's sandboxes at one moment."""

    now: float
    """Unix time in seconds, by the server's clock."""
    has_finished: bool
    """The run has ended, so there should be none."""
    counts: SandboxCounts
    places: dict[str, str]
    """Each place in which the run has had sandboxes, with the name of its provider."""
    live: list[LiveSandbox]
    """The oldest first."""


class ListedPlace(Struct, frozen=True, kw_only=True):
    """What a place itself says."""

    begun: Mapping[str, float]
    """Names of the run's sandboxes there -> Unix time in seconds at which each was noted."""


class SandboxAccount(Struct, frozen=True, kw_only=True):
    """The account of a run's sandboxes: `begun = stopped + reaped + stray + live`."""

    begun: int
    stopped: int
    """Removed by the worker that owned them."""
    reaped: int
    """Removed by a reaper, because no lease owned them."""
    stray: int
    """Removed by a reaper that found them without a record."""
    live: int
    adopted: int
    findings: list[str] = field(default_factory=list)
    """What should not be; empty: all is well."""
    notes: list[str] = field(default_factory=list)
    """Places that could not be asked."""

    def __str__(self) -> str:
        return (
            f"sandboxes: begun {self.begun:,} = stopped {self.stopped:,} + reaped {self.reaped:,} + stray "
            f"{self.stray:,} + live {self.live:,}"
        )


async def scan_sandboxes(connection: RunConnection) -> SandboxScan:
    """Read which sandboxes a run has."""
    now_ms, has_finished, counts, *places = await connection.run_script("scan_sandboxes")
    counted = {name.decode(): int(n) for name, n in zip(counts[::2], counts[1::2], strict=True)}
    live = []
    for place, provider, *records in places:
        for name, record, lease_ms in records:
            known = msgspec.json.decode(record, type=SandboxRecord)
            live.append(_live(name.decode(), place.decode(), provider.decode(), known, lease_ms - now_ms, now_ms))
    return SandboxScan(
        now=now_ms / 1000,
        has_finished=bool(has_finished),
        counts=SandboxCounts.parse(counted),
        places={place.decode(): provider.decode() for place, provider, *_ in places},
        live=sorted(live, key=lambda sandbox: -sandbox.age_s),
    )


def _live(name: str, place: str, provider: str, record: SandboxRecord, left_ms: int, now_ms: int) -> LiveSandbox:
    """Return one sandbox; `left_ms` is the time left of its lease, very negative if its owner does not have it."""
    lost_ms = now_ms - (record.lost_ms or now_ms) if left_ms <= -now_ms else max(0, -left_ms)
    is_owned = left_ms > 0
    return LiveSandbox(
        name=name,
        place=place,
        provider=provider,
        prompt=record.prompt,
        completion=record.index,
        purpose=record.purpose,
        state="due" if record.is_due else "owned" if is_owned else "lost",
        owner=record.owner,
        fence=record.fence,
        age_s=(now_ms - record.begun_ms) / 1000,
        lease_s=left_ms / 1000 if is_owned else -lost_ms / 1000,
    )


def account_for_sandboxes(
    scan: SandboxScan, listed: Mapping[str, ListedPlace | str], created_within_s: float
) -> SandboxAccount:
    """Add up a run's sandboxes, and compare them with what their places say.

    Args:
        scan: what the server knows; read after the places were asked.
        listed: by place: what it says, or why it was not asked.
        created_within_s: time within which a creation succeeds or never does.
    """
    counts, live = scan.counts, scan.live
    findings, notes = [], []
    if missing := counts.begun - counts.ended - len(live):
        findings.append(f"{missing:,} of {counts.begun:,} sandboxes are neither ended nor live")
    late = [each.name for each in live if -each.lease_s > MAX_LOST_S and each.age_s > created_within_s + MAX_LOST_S]
    if late:
        findings.append(f"lost for more than {MAX_LOST_S:g} s and not removed: {_names(late)}")
    if scan.has_finished and live:
        findings.append(f"the run has finished and has sandboxes: {_names([each.name for each in live])}")
    for place in scan.places:
        said = listed.get(place, "no worker of this machine uses it")
        if isinstance(said, str):
            notes.append(f"sandboxes in {place} were not compared: {said}")
            continue
        known = {each.name: each for each in live if each.place == place}
        settled_before = scan.now - created_within_s - MAX_LOST_S
        strays = [name for name, begun in said.begun.items() if name not in known and begun < settled_before]
        if strays:
            findings.append(f"{place} has sandboxes of the run without a record: {_names(strays)}")
        gone = [name for name, each in known.items() if name not in said.begun and each.age_s > created_within_s]
        if gone:
            notes.append(f"{place} does not have {_names(gone)}; their episodes find out")
    return SandboxAccount(
        begun=counts.begun,
        stopped=counts.stopped,
        reaped=counts.reaped,
        stray=counts.stray,
        live=len(live),
        adopted=counts.adopted,
        findings=findings,
        notes=notes,
    )


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES:,} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
