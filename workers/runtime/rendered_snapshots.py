"""What an environment's own `render` says of the snapshots of a run's completions."""

from collections.abc import Sequence

from envs.snapshot.rendering import RenderedSnapshot, render_snapshots
from workers.settings import Settings


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
