"""Saved progress of groups: parts as the script takes them, and a server of one group in memory."""

from types import SimpleNamespace

import anyio

from stream.codec import decode, encode
from stream.queue.lease import Lease
from stream.queue.progress_writer import ProgressPart
from stream.records import Completion
from workers.rollout.turn_journal import TurnJournal

LEASE = Lease(id="1-0", prompt_id="a", payload=b"", has_progress=True)


def completion_part(completion, names=()):
    return ProgressPart(
        what="completion", field=str(completion.index), record=completion, number=completion.turns, names=names
    )


def turn_part(name, number=1, record=b"x"):
    return ProgressPart(what="turn", field=name, record=record, number=number)


async def save(stage, lease, *parts):
    """Save parts at once; returns whether the server took them."""
    return await stage.save_progress([argument for part in parts for argument in part.arguments(lease.id)])


class SavedBatch:
    """A batch that is saved at once."""

    def __init__(self, is_saved):
        self.is_saved = is_saved

    async def wait(self):
        await anyio.lowlevel.checkpoint()
        return self.is_saved


class SavedGroup:
    """Does for one group what the server does, as a `ProgressWriter`.

    Attributes:
        turns: saved ones, encoded, by their names.
        completions: encoded, by their indexes.
        resumed: how completions were restored, in order.
        again: how many saved turns were given up.
        is_short: takes nothing, for lack of memory.
        on_put: called after each part.
    """

    def __init__(self):
        self.turns, self.completions, self.resumed, self.again = {}, {}, [], 0
        self.is_short = False
        self.on_put = lambda: None
        self.stage = SimpleNamespace(load_progress=self._load)

    def put(self, _lease, part, *, is_urgent=True):
        if not self.is_short:
            self._save(part)
            self.on_put()
        return SavedBatch(not self.is_short)

    async def forget(self, lease):
        pass

    def copy(self):
        """Return a copy, as of a worker that dies now."""
        copied = SavedGroup()
        copied.turns, copied.completions = dict(self.turns), dict(self.completions)
        return copied

    async def journal(self):
        """Open the journal of the next attempt."""
        return await TurnJournal.open(self, LEASE)

    def _save(self, part):
        deleted = sum(self.turns.pop(name, None) is not None for name in part.names)
        match part.what:
            case "turn":
                self.turns[part.field] = encode(part.record)
            case "completion":
                self.completions[part.field] = encode(part.record)
            case "resumed":
                self.resumed.append(part.field.partition(":")[2])
                self.again += deleted

    async def _load(self, _lease):
        completions = [decode(record, Completion) for record in self.completions.values()]
        return completions, {name.encode(): record for name, record in self.turns.items()}
