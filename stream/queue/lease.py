"""A worker's exclusive right to one entry of a stage."""

from collections.abc import Iterator
from contextlib import contextmanager

import anyio
from msgspec import Struct

from stream.codec import decode, decode_group, encode
from stream.errors import RecordError
from stream.records import Group, Prompt

_DEATHS_OF_SUSPECTS = 2
"""As in `stream/lua/common.lua`."""


class Lease(Struct, kw_only=True, eq=False):
    """An entry that belongs to this worker while it renews the lease."""

    id: str
    """The entry's id in its stream."""
    prompt_id: str
    """The entry's plain field beside the payload; empty for a foreign entry."""
    payload: bytes
    """The record. Of a scored group that of the rollout, if `scores` has the rest."""
    scores: bytes = b""
    infra_failures: int = 0
    data_failures: int = 0
    deaths: int = 0
    """How many workers in a row died or stopped responding while they held it."""
    cancelled_attempts_s: tuple[float, ...] = ()
    """The run time of each attempt that was cancelled as stale, oldest first."""
    has_progress: bool = False
    """Earlier attempts have saved turns or completions."""
    evaluated_version: int | None = None
    """For a prompt of an evaluation: the policy version that must sample it."""
    claimed_version: int = 0
    """The policy version at the claim; 0 before the first publication, since nothing is sampled before."""
    claimed_at: float = 0.0
    """By this process's monotonic clock, in seconds."""
    lost: bool = False
    """The lease expired and another worker may have the entry."""
    stale: bool = False
    """The work was cancelled as stale; the worker gives the entry back for that reason."""
    ending: bool = False
    """The verb that ends the lease is in progress; it reports whether the lease was still held."""
    _scope: anyio.CancelScope | None = None

    @property
    def earlier_attempts(self) -> int:
        """How often the entry was delivered before. Deaths are failures as well, but for the first ones in a row."""
        failures = self.infra_failures + self.data_failures + min(self.deaths, _DEATHS_OF_SUSPECTS)
        return failures + len(self.cancelled_attempts_s)

    @contextmanager
    def cancel_on_loss(self) -> Iterator[anyio.CancelScope]:
        """Run the body of the `with` statement in a scope that is cancelled when the lease is lost or becomes stale."""
        with anyio.CancelScope() as self._scope:
            if self.lost:
                self._scope.cancel()
            yield self._scope

    def mark_lost(self) -> None:
        """Note that the lease was lost, and cancel the work."""
        self.lost = True
        self._cancel()

    def cancel_stale(self) -> None:
        """Cancel the work because newer policies overtook it, unless the lease is being ended at this moment."""
        if self._scope is not None and not self.ending:
            self.stale = True
            self._cancel()

    def begin_ending(self) -> None:
        """Note that the verb that ends the lease is in progress."""
        self.ending = True

    @property
    def is_suspect(self) -> bool:
        """It may be what ends its workers. So it is worked on alone, and dies with nothing else."""
        return self.deaths >= _DEATHS_OF_SUSPECTS

    @property
    def entered_at(self) -> float:
        """Unix time in seconds, by the server's clock, at which the entry entered its stage."""
        return int(self.id.partition("-")[0]) / 1000

    def prompt(self) -> Prompt:
        """Return the record of an entry of `prompts`.

        Raises:
            NewerSchemaError: a newer major version wrote it; release the lease.
            RecordError: it is not a prompt, or not the one that the entry names; dead-letter the lease.
        """
        prompt = decode(self.payload, Prompt)
        self._check_name(prompt.id)
        return prompt

    def group(self) -> Group:
        """Return the record of an entry of `groups` or `scored`.

        Raises:
            NewerSchemaError: a newer major version wrote it; release the lease.
            RecordError: it is not a group, or not of the prompt that the entry names; dead-letter the lease.
        """
        group = decode_group(self.payload, self.scores)
        self._check_name(group.prompt.id)
        return group

    def record(self) -> bytes:
        """Return the whole record of an entry, with its scores."""
        return encode(decode_group(self.payload, self.scores)) if self.scores else self.payload

    def _check_name(self, prompt_id: str) -> None:
        """Ending an entry ends the prompt that the entry names, so the record must be of that prompt."""
        if prompt_id != self.prompt_id:
            raise RecordError(f"the entry names prompt {self.prompt_id!r}, its record prompt {prompt_id!r}")

    def _cancel(self) -> None:
        if self._scope is not None:
            self._scope.cancel()
