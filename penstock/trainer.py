"""Write a trainer, or a feeder of prompts, of your own: leased groups in, commits and checkpoints out, nothing lost.

`connect` opens a run on a server, `Feed` adds prompts, `consume` leases scored groups and records what became of them.
A whole trainer of sixty lines is in `examples/own_trainer`.
"""

from stream.connection.run_connection import RunConnection, connect
from stream.queue.feed import Feed
from stream.records import Completion, Group, Prompt, Row, Span
from stream.trainer.archive import ArchivedGroups
from stream.trainer.consume import consume
from stream.trainer.consumer import Consumer
from stream.trainer.leased_group import DroppedGroup, LeasedGroup, ResumePoint
from stream.validity import Measured, Unmeasured, measure

__all__ = [
    "ArchivedGroups",
    "Completion",
    "Consumer",
    "DroppedGroup",
    "Feed",
    "Group",
    "LeasedGroup",
    "Measured",
    "Prompt",
    "ResumePoint",
    "Row",
    "RunConnection",
    "Span",
    "Unmeasured",
    "connect",
    "consume",
    "measure",
]
