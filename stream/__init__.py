"""Records, queues and files that a run's processes share, and how no prompt is lost or counted twice.

::

    feed ─► [prompts] ─► rollout xN ─► [groups] ─► score xM ─► [scored] ─► train
                                                                             │ commits at a step,
          any stage, failure limit reached or record unreadable ─► [dead] ◄──┘ acknowledges at a checkpoint

Each `[ ]` is a Redis stream with a consumer group. A claim is a lease, renewed while its worker lives. To complete an
entry is one atomic step: if the lease is still held, the output is added and the input deleted. To release an entry
gives it back, up to a failure limit; an entry that is unreadable or has reached its limit becomes a dead letter. The
Lua scripts in `stream/lua/` are the whole protocol.

To feed prompts: `Feed`. To work on a stage: `Stage`. To train: `consume`; it is built on `TrainerLease`, `Ledger` and
`Archive`. To inspect a run: `read_status`, `list_dead_letters`, `ArchivedGroups`.
"""

from typing import TYPE_CHECKING

from stream.lazy_names import lazy_names

if TYPE_CHECKING:
    from stream.codec import decode, encode
    from stream.connection.run_connection import RunConnection, connect
    from stream.errors import PenstockError
    from stream.operator.dead_letters import DeadLetter, list_dead_letters
    from stream.operator.run_status import RunStatus, read_status
    from stream.queue.feed import Feed
    from stream.queue.lease import Lease
    from stream.queue.stage import RetryPolicy, Stage
    from stream.records import Completion, Group, Prompt, Row, Span
    from stream.server_process import private_server
    from stream.trainer.archive import Archive, ArchivedGroups
    from stream.trainer.consume import consume, open_consumer, open_trainer_lease
    from stream.trainer.consumer import Consumer
    from stream.trainer.lease import EndedGroup, TrainerLease
    from stream.trainer.leased_group import DroppedGroup, LeasedGroup
    from stream.trainer.ledger import Ledger
    from stream.trainer.outcomes import AlreadyEnded, Dropped, Duplicate, Trained
    from stream.trainer.resume_point import ResumePoint
    from stream.validity import Measured, Unmeasured, measure

__all__ = [
    "AlreadyEnded",
    "Archive",
    "ArchivedGroups",
    "Completion",
    "Consumer",
    "DeadLetter",
    "Dropped",
    "DroppedGroup",
    "Duplicate",
    "EndedGroup",
    "Feed",
    "Group",
    "Lease",
    "LeasedGroup",
    "Ledger",
    "Measured",
    "PenstockError",
    "Prompt",
    "ResumePoint",
    "RetryPolicy",
    "Row",
    "RunConnection",
    "RunStatus",
    "Span",
    "Stage",
    "Trained",
    "TrainerLease",
    "Unmeasured",
    "connect",
    "consume",
    "decode",
    "encode",
    "list_dead_letters",
    "measure",
    "open_consumer",
    "open_trainer_lease",
    "private_server",
    "read_status",
]

_NAMES = {
    "stream.codec": ("decode", "encode"),
    "stream.connection.run_connection": ("RunConnection", "connect"),
    "stream.errors": ("PenstockError",),
    "stream.operator.dead_letters": ("DeadLetter", "list_dead_letters"),
    "stream.operator.run_status": ("RunStatus", "read_status"),
    "stream.queue.feed": ("Feed",),
    "stream.queue.lease": ("Lease",),
    "stream.queue.stage": ("RetryPolicy", "Stage"),
    "stream.records": ("Completion", "Group", "Prompt", "Row", "Span"),
    "stream.server_process": ("private_server",),
    "stream.trainer.archive": ("Archive", "ArchivedGroups"),
    "stream.trainer.consume": ("consume", "open_consumer", "open_trainer_lease"),
    "stream.trainer.consumer": ("Consumer",),
    "stream.trainer.leased_group": ("DroppedGroup", "LeasedGroup"),
    "stream.trainer.lease": ("EndedGroup", "TrainerLease"),
    "stream.trainer.ledger": ("Ledger",),
    "stream.trainer.outcomes": ("AlreadyEnded", "Dropped", "Duplicate", "Trained"),
    "stream.trainer.resume_point": ("ResumePoint",),
    "stream.validity": ("Measured", "Unmeasured", "measure"),
}
# A command that needs only the errors does not load a Redis client.
__getattr__ = lazy_names(__name__, _NAMES)
