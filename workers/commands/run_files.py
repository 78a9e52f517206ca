"""The files of a run that commands read."""

from pathlib import Path

from stream.errors import PenstockError
from workers.run.run_info import RunLocation
from workers.settings import Settings
from workers.settings.toml_file import load_settings


def saved_settings(location: RunLocation, command: str) -> tuple[Settings, Path]:
    """Return the settings with which a run was last started, and its folder.

    Args:
        location: the run.
        command: name of the command that needs the files, for the error message.

    Raises:
        PenstockError: only the run's server is known.
    """
    if location.folder is None or location.settings is None:
        raise PenstockError(
            f"{command} of run {location.run!r} reads its files: give its folder or its settings file instead"
        )
    saved = location.folder / "run.toml"
    return (load_settings(saved) if saved.is_file() else location.settings), location.folder
