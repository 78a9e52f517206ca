"""Render snapshots for people: call an environment's own `render(snapshot)` in a child process that can be killed."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import anyio
import msgspec
from msgspec import Struct

from envs.call import Ok, describe_failure
from envs.call.outcomes import error_cause
from envs.factory import EnvironmentFactory
from envs.sandboxes.pools.child_main import ProcessPoolError
from envs.sandboxes.pools.pool import ProcessPool
from envs.snapshot.freezing import thaw
from stream.errors import RecordError, ReferenceNotFoundError

MAX_CHARACTERS: Final = 20_000
"""Length at which a rendered text is cut off."""
LOAD_TIMEOUT_S: Final = 20.0
"""For starting a process that loads the environment."""
RENDER_TIMEOUT_S: Final = 2.0
"""For one snapshot."""


class RenderedSnapshot(Struct, frozen=True):
    """What `render` returned, or why there is nothing; both empty: the environment offers no `render`."""

    text: str = ""
    error: str = ""


class SnapshotRenderer:
    """Renders snapshots of one environment; the handler in a child process.

    Args:
        ref: reference of the environment.
        args: arguments of its factory.
    """

    def __init__(self, ref: str, args: Mapping[str, Any]) -> None:
        self._factory = EnvironmentFactory.load(ref, args, with_tools=False)

    def __call__(self, snapshot: bytes) -> bytes:
        """Render one snapshot to a `RenderedSnapshot`."""
        return msgspec.msgpack.encode(render_snapshot(self._factory, snapshot))


def render_snapshot(factory: EnvironmentFactory, snapshot: bytes) -> RenderedSnapshot:
    """Call the environment's `render` on a frozen snapshot; runs user code in this process, without a deadline."""
    if not factory.has_render:
        return RenderedSnapshot()
    try:
        thawed: Any = thaw(snapshot, factory)
    except RecordError as error:
        return RenderedSnapshot(error=str(error))
    try:
        text = thawed.render(thawed)
    except Exception as error:  # noqa: BLE001  (user code)
        return RenderedSnapshot(error=f"render raised {error_cause(error).short_headline}")
    if not isinstance(text, str):
        return RenderedSnapshot(error=f"render returned an object of type {type(text).__name__}; it must return a str")
    if len(text) > MAX_CHARACTERS:
        text = f"{text[:MAX_CHARACTERS]}\n… {len(text) - MAX_CHARACTERS:,} more characters"
    return RenderedSnapshot(text=text.encode(errors="replace").decode())


async def render_snapshots(ref: str, args: Mapping[str, Any], snapshots: Sequence[bytes]) -> list[RenderedSnapshot]:
    """Render snapshots of one environment in a process of its own; user code that hangs is killed.

    Args:
        ref: reference of the environment.
        args: arguments of its factory.
        snapshots: frozen environments.

    Returns:
        One result for each snapshot.

    Raises:
        ReferenceNotFoundError: the environment cannot be loaded here.
    """
    handler = f"{SnapshotRenderer.__module__}:{SnapshotRenderer.__qualname__}"
    try:
        with anyio.fail_after(LOAD_TIMEOUT_S + RENDER_TIMEOUT_S * len(snapshots)):
            async with ProcessPool.open(handler, {"ref": ref, "args": dict(args)}, 1) as pool:
                outcomes = await pool.map(snapshots, RENDER_TIMEOUT_S)
    except TimeoutError as error:
        raise ReferenceNotFoundError(f"the environment {ref!r} did not load within {LOAD_TIMEOUT_S:g} s") from error
    except ProcessPoolError as error:
        why = str(error).strip().splitlines()[-1]
        raise ReferenceNotFoundError(f"the environment {ref!r} cannot be loaded here: {why}") from error
    return [
        msgspec.msgpack.decode(outcome.value, type=RenderedSnapshot)
        if isinstance(outcome, Ok)
        else RenderedSnapshot(error=f"render: {describe_failure(outcome)}")
        for outcome in outcomes
    ]
