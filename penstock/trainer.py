"""Write a trainer, or a feeder of prompts, of your own.

`connect` opens a run on a Redis server, and `Feed` adds prompts to it. `consume` leases scored groups and records the
outcome of each, so that none is lost or trained twice. `examples/own_trainer` has a whole trainer in sixty lines.
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
