"""Ids of what an episode does in its sandboxes, so that another worker can do it again without doing it twice.

A sandbox that survives its worker remembers the result of each command by its id. The worker that adopts it runs the
environment's code again, from `reset` on, with the same ids::

    worker 1   reset ─ exec reset-5c1f…-0      turn 0 ─ exec turn0-99ab…-0      turn 1 ─ exec turn1-77e0…-0, killed
    worker 2   reset ─ its result              turn 0 ─ its result              turn 1 ─ its result, once it has ended

So the environment has its own state again, and each command has run once. Files that a past call has written are not
written again, since later commands may have changed them. Whatever else a past call asks of a sandbox has no answer
that is still true; then the episode begins anew.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Final, NamedTuple


class CallScope(NamedTuple):
    """The part of an episode that is going on."""

    name: str = ""
    """`reset`, `turn3`, `reward`; empty: none that is recorded."""
    is_past: bool = False
    """A former worker had come to the end of it, in the same sandboxes."""


_NO_SCOPE: Final = CallScope()
call_scope: Final[ContextVar[CallScope]] = ContextVar("call_scope", default=_NO_SCOPE)
"""Set by the episode, in whose task or threads its environment runs."""

_DIGEST_BYTES: Final = 6


class RecordedCalls:
    """Makes the ids of one episode's commands.

    Attributes:
        difference: what a past call asked of a sandbox that cannot be answered as before; empty: nothing.
    """

    def __init__(self) -> None:
        self.difference = ""
        self._seen = Counter[tuple[str, str]]()

    def new_id(self, sandbox: str, command: Sequence[str], *where: str) -> str:
        """Return the id of a command: the same one if the episode runs again; empty outside of an episode.

        Args:
            sandbox: its name.
            command: program and arguments.
            where: folder and user.
        """
        scope = call_scope.get()
        if not scope.name:
            return ""
        digest = hashlib.blake2b("\0".join((*where, *command)).encode(errors="replace"), digest_size=_DIGEST_BYTES)
        name = f"{scope.name}-{digest.hexdigest()}"
        number = self._seen[sandbox, name]
        self._seen[sandbox, name] += 1
        return f"{name}-{number}"

    def is_past(self) -> bool:
        """Return whether what happens now has happened before, to the end."""
        return call_scope.get().is_past

    def note(self, what: str) -> None:
        """Note something that cannot be done again, if it is past."""
        if self.is_past() and not self.difference:
            self.difference = f"{call_scope.get().name} {what} in a sandbox that has changed since"
