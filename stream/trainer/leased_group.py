"""A scored group in a trainer's hands, and what its `check` says of it."""

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
    """Of the group's outcome."""
    completions: Sequence[TrainedCompletion] = ()
    """Of each completion that is not greedy: why it bears no loss."""
