"""What a trainer gets from the queue, and what it resumes from: leased groups, and the resume point of a checkpoint."""

from collections.abc import Sequence
from typing import Generic, TypeVar

from msgspec import Struct

from stream.queue.lease import Lease
from stream.records import Group, TrainedCompletion

Checked = TypeVar("Checked")


class LeasedGroup(Struct, Generic[Checked], frozen=True, eq=False):
    """A group that this trainer has leased and has not ended."""

    lease: Lease
    group: Group
    checked: Checked
    """What the consumer's `check` returned; the group itself without `check`."""


class DroppedGroup(Struct, frozen=True):
    """What a consumer's `check` returns to end a group without training, and to have the reasons archived."""

    reason: str
    """Why the group is dropped, as in its outcome."""
    completions: Sequence[TrainedCompletion] = ()
    """Why each completion bears no loss, except the greedy one."""


class ResumePoint(Struct, frozen=True, kw_only=True):
    """What a checkpoint must hold for its trainer to resume; the defaults are a new run's."""

    ledger_bytes: int = 0
    """Length of the ledger that the weights contain. Later records are cut off, and their groups are leased again."""
    ledger_digest: str = ""
    """Digest of that part of the ledger: an altered ledger is refused. Empty: it is not checked."""
    version: int = -1
    """The highest policy version known to have been used; -1: none."""
    step: int = 0
    """Steps committed."""
    groups: int = -1
    """Groups trained; -1: unknown. A damaged ledger is rebuilt from the archive only if all of them are found again."""
    resumed: tuple[tuple[int, int], ...] = ()
    """Step and version of the checkpoints that the run was resumed from before."""
    is_newest: bool = True
    """False if a newer checkpoint exists and cannot be read. What is cut from the ledger is then kept, so that the
    newer one is used if it can be read again."""
    is_restored: bool = False
    """Ledger and weights come from a copy that may be older than what the server has deleted: instead of being refused,
    the prompts that the ledger lacks are fed again."""
