"""The final state of an episode's environment, as its own `render` shows it, and as plain attributes."""

import reprlib
from typing import Final

import anyio
from msgspec import Struct

from envs.snapshot import omitted_attributes, thaw
from envs.snapshot.rendering import RenderedSnapshot
from stream.errors import RecordError, ReferenceNotFoundError
from workers.dashboard.run_source import RunSource
from workers.runs.snapshots import render_of_run

_MAX_BYTES: Final = 2_000_000
"""Of a snapshot whose attributes are listed."""
_MAX_ATTRIBUTES: Final = 200


class SnapshotPanel(Struct, frozen=True, kw_only=True):
    """One snapshot."""

    completion: int
    """Its completion's index."""
    rendered: RenderedSnapshot
    attributes: list[tuple[str, str]] = []
    """Names and shortened values."""
    problem: str = ""
    """Why attributes are not listed."""


async def snapshot_panel(
    source: RunSource, environment: str | None, completion: int, snapshot: bytes, limit: anyio.CapacityLimiter
) -> SnapshotPanel:
    """Return a snapshot for a page. User code runs in a process that is killed when it takes too long.

    Args:
        source: the run.
        environment: name of the environment.
        completion: index of the completion.
        snapshot: the frozen environment.
        limit: bounds the processes.
    """
    settings = await anyio.to_thread.run_sync(source.settings)
    rendered = RenderedSnapshot(error="the run's settings are not here, so its environment is not known")
    if settings is not None:
        try:
            async with limit:
                (rendered,) = await render_of_run(settings, environment, [snapshot])
        except ReferenceNotFoundError as error:
            rendered = RenderedSnapshot(error=str(error))
    try:
        attributes = await anyio.to_thread.run_sync(_attributes, snapshot)
    except RecordError as error:
        return SnapshotPanel(completion=completion, rendered=rendered, problem=str(error))
    return SnapshotPanel(completion=completion, rendered=rendered, attributes=attributes)


def _attributes(snapshot: bytes) -> list[tuple[str, str]]:
    """List attributes without the environment's class, so that none of its code runs.

    Raises:
        RecordError: the snapshot is too large, or cannot be read.
    """
    if len(snapshot) > _MAX_BYTES:
        raise RecordError(f"its attributes take {len(snapshot):,} bytes, too many to list them here")
    thawed = thaw(snapshot, None)
    shorten = reprlib.Repr()
    shorten.maxlevel, shorten.maxdict, shorten.maxlist, shorten.maxtuple, shorten.maxset = 4, 30, 30, 30, 30
    shorten.maxstring, shorten.maxlong, shorten.maxother = 400, 80, 400
    listed = [(name, shorten.repr(value)) for name, value in list(vars(thawed).items())[:_MAX_ATTRIBUTES]]
    return [*listed, *((name, f"omitted: {reason}") for name, reason in omitted_attributes(thawed).items())]
