"""`penstock acl`: the Redis users that a run needs, in the format of an aclfile."""

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, cast

import msgspec

from stream.errors import SettingsError
from stream.operator.acl import ACL_ROLES, AclRole, aclfile_line
from workers.runs.find import find_settings_file
from workers.settings import Run
from workers.settings.pipeline import RUN_NAME
from workers.settings.toml_file import load_settings
from workers.terminal.output import print_line


def print_acl(target: str, roles: Sequence[str]) -> None:
    """Print one line for each role.

    Args:
        target: folder, settings file or name of the run. The run need not have started.
        roles: the roles to print; empty: all.

    Raises:
        SettingsError: the target is not a valid run name.
    """
    file = find_settings_file(target)
    run = (load_settings(file).run.name or _missing_name(file)) if file else _run_name(target)
    for role in roles or ACL_ROLES:
        print_line(aclfile_line(cast("AclRole", role), run))


def _missing_name(file: Path) -> NoReturn:
    raise SettingsError(f"{file}: run.name is empty, and the users' permissions begin with it; set it")


def _run_name(target: str) -> str:
    try:
        if target.endswith(".toml"):
            raise SettingsError(f"{target}: no such file")
        return msgspec.convert({"name": target}, Run).name
    except msgspec.ValidationError as error:
        raise SettingsError(
            f"{target} is not a settings file, not a run's folder, and not a name for a run, which has {RUN_NAME}"
        ) from error
