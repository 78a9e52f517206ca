"""The command `penstock init`: write a project that runs at once."""

import shutil
from pathlib import Path

from stream.errors import SettingsError
from workers.demo.base_models import write_base_model
from workers.settings import settings

_FILES = Path(__file__).parent / "project"
_SCHEMA = Path(settings.__file__).with_name("settings.schema.json")


def write_project(folder: Path) -> list[Path]:
    """Write an environment with its test, a reward, settings with their schema, and a small model.

    Args:
        folder: the project's folder; created if it does not exist. Nothing in it is replaced.

    Returns:
        The files that were written; the model's folder is the last.

    Raises:
        SettingsError: a file of the project exists already; nothing was written.
    """
    sources = [*sorted(path for path in _FILES.iterdir() if path.is_file()), _SCHEMA]
    targets = [folder / source.name for source in sources]
    model = folder / "model"
    if existing := [target for target in (*targets, model) if target.exists()]:
        raise SettingsError(f"{existing[0]} exists already; name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    for source, target in zip(sources, targets, strict=True):
        shutil.copyfile(source, target)
    write_base_model("tool-caller", model)
    return [*targets, model]
