"""How a prompt ends: at the trainer, with a dead letter, or because an operator dropped one."""

from typing import Final

from msgspec import Struct

_TRAINED: Final = "trained"
_RETRIED: Final = "retried"
_DROPPED, _DEAD, _ALREADY, _DUPLICATE = "dropped:", "dead:", "already:", "duplicate:"
OPERATOR: Final = "operator"
"""The reason of a prompt whose dead letter the operator dropped."""


class Trained(Struct, frozen=True):
    """A step trained on the group."""


class Dropped(Struct, frozen=True):
    """The group ended without being trained on."""

    reason: str


LedgerOutcome = Trained | Dropped
"""An outcome that ends the group's prompt; the ledger records it."""


class Dead(Struct, frozen=True):
    """The prompt is a dead letter. Any later record of the prompt replaces this one."""

    reason: str


class Retried(Struct, frozen=True):
    """The operator retried the prompt's dead letter: the prompt is unfinished again."""


LedgerEntry = LedgerOutcome | Dead | Retried
"""What a line of the ledger says about a prompt."""


class AlreadyEnded(Struct, frozen=True):
    """The ledger has an outcome of the group's prompt: this entry is one more delivery of it."""

    outcome: LedgerOutcome


class Duplicate(Struct, frozen=True):
    """The trainer holds a newer entry of the same prompt: this one ends nothing and uses no capacity."""

    kept_entry: str
    """Id of the newer entry."""


GroupOutcome = LedgerOutcome | AlreadyEnded | Duplicate


def encode_outcome(outcome: GroupOutcome | LedgerEntry) -> str:
    """Return the text form used in the ledger, in the scripts and in the server's counts.

    `trained`, `dropped:REASON`, `dead:REASON`, `retried`, `already:OUTCOME` or `duplicate:ENTRY`.
    """
    match outcome:
        case Trained():
            return _TRAINED
        case Retried():
            return _RETRIED
        case Dead(reason):
            return _DEAD + reason
        case Dropped(reason):
            return _DROPPED + reason
        case AlreadyEnded(recorded):
            return _ALREADY + encode_outcome(recorded)
        case Duplicate(kept_entry):
            return _DUPLICATE + kept_entry


def decode_outcome(text: str) -> LedgerEntry:
    """Parse the text form of what the ledger says about a prompt.

    Raises:
        ValueError: the text is no such outcome.
    """
    if text == _TRAINED:
        return Trained()
    if text.startswith(_DROPPED):
        return Dropped(text.removeprefix(_DROPPED))
    if text.startswith(_DEAD):
        return Dead(text.removeprefix(_DEAD))
    if text == _RETRIED:
        return Retried()
    raise ValueError(f"{text!r} is not an outcome of a prompt")
