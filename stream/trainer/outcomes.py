"""How a scored group ends at the trainer."""

from typing import Final

from msgspec import Struct

_TRAINED: Final = "trained"
_DROPPED, _ALREADY, _DUPLICATE = "dropped:", "already:", "duplicate:"


class Trained(Struct, frozen=True):
    """A step trained on the group."""


class Dropped(Struct, frozen=True):
    """The group ended without being trained on."""

    reason: str


LedgerOutcome = Trained | Dropped
"""An outcome that ends the group's prompt; the ledger records it."""


class AlreadyEnded(Struct, frozen=True):
    """The ledger has an outcome of the group's prompt: this entry is one more delivery of it."""

    outcome: LedgerOutcome


class Duplicate(Struct, frozen=True):
    """The trainer holds a newer entry of the same prompt: this one ends nothing and uses no capacity."""

    kept_entry: str
    """Id of the newer entry."""


GroupOutcome = LedgerOutcome | AlreadyEnded | Duplicate


def encode_outcome(outcome: GroupOutcome) -> str:
    """Return the text form used in the ledger, in the `commit` script and in the server's counts.

    `trained`, `dropped:REASON`, `already:OUTCOME` or `duplicate:ENTRY`.
    """
    match outcome:
        case Trained():
            return _TRAINED
        case Dropped(reason):
            return _DROPPED + reason
        case AlreadyEnded(recorded):
            return _ALREADY + encode_outcome(recorded)
        case Duplicate(kept_entry):
            return _DUPLICATE + kept_entry


def decode_outcome(text: str) -> LedgerOutcome:
    """Parse the text form of an outcome that ends a prompt.

    Raises:
        ValueError: the text is no such outcome.
    """
    if text == _TRAINED:
        return Trained()
    if text.startswith(_DROPPED):
        return Dropped(text.removeprefix(_DROPPED))
    raise ValueError(f"{text!r} is not an outcome of a prompt")
