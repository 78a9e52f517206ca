"""The final state of a completion's environment: as its own `render` shows it, and as plain attributes."""

import reprlib
from collections.abc import Sequence
from typing import Final

import anyio.to_thread
from msgspec import Struct

from envs.snapshot import omitted_attributes, thaw
from envs.snapshot.render import RenderedSnapshot, render_snapshots
from stream.errors import RecordError, ReferenceNotFoundError
from workers.runs.groups import CompletionView
from workers.settings import Settings

_MAX_BYTES: Final = 2_000_000
"""A larger snapshot is shown without a list of its attributes."""
_MAX_ATTRIBUTES: Final = 200


async def render_completions(
    settings: Settings, views: Sequence[CompletionView]
) -> tuple[list[RenderedSnapshot], list[str]]:
    """Return what the environments' own `render` says of each completion's final state, and what cannot be loaded.

    User code runs in processes that are killed when it takes too long.
    """
    by_environment: dict[str | None, list[int]] = {}
    for position, view in enumerate(views):
        if view.completion.snapshot is not None:
            by_environment.setdefault(view.group.prompt.environment, []).append(position)
    rendered, notes = [RenderedSnapshot()] * len(views), list[str]()
    for environment, positions in by_environment.items():
        snapshots = [views[position].completion.snapshot or b"" for position in positions]
        try:
            states = await render_of_run(settings, environment, snapshots)
        except ReferenceNotFoundError as error:
            notes.append(f"final states are not rendered: {error}")
            continue
        for position, state in zip(positions, states, strict=True):
            rendered[position] = state
    return rendered, notes


async def render_of_run(
    settings: Settings, environment: str | None, snapshots: Sequence[bytes]
) -> list[RenderedSnapshot]:
    """Render snapshots of one of a run's environments, in a process of its own.

    Args:
        settings: of the run.
        environment: its name in `[environments]`, as the prompt has it.
        snapshots: frozen environments.

    Raises:
        ReferenceNotFoundError: the environment cannot be loaded here.
    """
    named = settings.environments.get(environment or "")
    if named is None or not snapshots:
        return [RenderedSnapshot()] * len(snapshots)
    ref, args = (named, {}) if isinstance(named, str) else (named.ref, named.args)
    return await render_snapshots(ref, args, snapshots)


class SnapshotView(Struct, frozen=True, kw_only=True):
    """One snapshot: rendered, and as a list of attributes."""

    rendered: RenderedSnapshot
    attributes: list[tuple[str, str]] = []
    """Names and shortened values."""
    problem: str = ""
    """Why attributes are not listed."""


async def describe_snapshot(settings: Settings | None, environment: str | None, snapshot: bytes) -> SnapshotView:
    """Return a snapshot for people.

    Args:
        settings: of the run; None: they are not here.
        environment: name of the environment.
        snapshot: the frozen environment.
    """
    rendered = RenderedSnapshot(error="the run's settings are not here, so its environment is not known")
    if settings is not None:
        try:
            (rendered,) = await render_of_run(settings, environment, [snapshot])
        except ReferenceNotFoundError as error:
            rendered = RenderedSnapshot(error=str(error))
    try:
        attributes = await anyio.to_thread.run_sync(_list_attributes, snapshot)
    except RecordError as error:
        return SnapshotView(rendered=rendered, problem=str(error))
    return SnapshotView(rendered=rendered, attributes=attributes)


def _list_attributes(snapshot: bytes) -> list[tuple[str, str]]:
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
