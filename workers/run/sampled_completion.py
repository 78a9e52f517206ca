"""One sampled completion for the people who watch a run: every few steps, and at its end."""

import time
from pathlib import Path

from rich.text import Text

from stream.codec import decode
from stream.connection.run_connection import RunConnection
from stream.errors import PenstockError
from stream.operator.status import RunStatus
from stream.operator.unfinished_groups import newest_scored_group
from stream.records import Completion, Group
from stream.trainer.archive import scan_archive
from workers.runs.transcript import describe_reward, escape_controls
from workers.terminal.lines import compact_lines

_EVERY_STEPS = 5
_MIN_INTERVAL_S = 15.0
"""Fast runs show fewer samples."""


class SampleSchedule:
    """Decides when a running run shows a completion: after its first step, then every few steps.

    Args:
        every_steps: steps from one sample to the next, at least.
        min_interval_s: seconds from one sample to the next, at least.
    """

    def __init__(self, every_steps: int = _EVERY_STEPS, min_interval_s: float = _MIN_INTERVAL_S) -> None:
        self._every_steps, self._min_interval_s = every_steps, min_interval_s
        self._next_step = 1
        self._next_time = 0.0
        self._shown = 0

    async def next_sample(self, connection: RunConnection, status: RunStatus, width: int) -> list[Text]:
        """Return a completion of the group that was scored last, as lines; empty if none is due."""
        step = int(status.policy.get("step", 0))
        if step < self._next_step or time.monotonic() < self._next_time:
            return []
        group = await newest_scored_group(connection)
        if group is None or not group.completions:
            return []
        self._next_step = step + self._every_steps
        self._next_time = time.monotonic() + self._min_interval_s
        completion = group.completions[self._shown % len(group.completions)]
        self._shown += 1
        return sample_lines(group, completion, f"sample at step {step}", width)


def sample_lines(group: Group, completion: Completion, title: str, width: int) -> list[Text]:
    """Return a completion in compact form, under a line that names it."""
    name = f"{escape_controls(group.prompt.id)} #{completion.index}"
    head = Text(f"── {title}: {name}, reward {describe_reward(completion.reward)} ", "bold", no_wrap=True)
    head.append("─" * max(0, width - head.cell_len))
    return [head, *(line.rich_text() for line in compact_lines(completion, width=width)), Text()]


def newest_archived_group(folder: Path) -> Group | None:
    """Return the group that ended last, from the archive in a run's folder; None if none can be read."""
    offset = None
    for _, offset in scan_archive(folder / "groups"):  # noqa: B007
        pass
    try:
        return decode(offset.read_payload(), Group) if offset is not None else None
    except PenstockError:
        return None
