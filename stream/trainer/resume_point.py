"""What a checkpoint holds for its trainer to resume."""

from msgspec import Struct


class ResumePoint(Struct, frozen=True, kw_only=True):
    """What a checkpoint must hold for its trainer to resume; the defaults are a new run's."""

    ledger_bytes: int = 0
    """Length of the ledger that the weights contain. Later records are cut off, and their groups are leased again."""
    version: int = -1
    """The highest policy version known to have been used; -1: none."""
    step: int = 0
    """Steps committed."""
