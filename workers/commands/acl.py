"""`penstock acl`: the users that a server needs for a run, as an aclfile has them."""

from collections.abc import Sequence
from typing import cast

import msgspec

from stream.errors import SettingsError
from stream.operator.acl import ACL_ROLES, AclRole, aclfile_line
from workers.run.run_info import find_settings_file
from workers.settings import Run
from workers.settings.toml_file import load_settings


def print_acl(target: str, roles: Sequence[str]) -> None:
    """Print a line for each role.

    Args:
        target: the run's folder or settings file, else its name; it need not have begun.
        roles: all of them if none is named.

    Raises:
        SettingsError: no run could have that name.
    """
    file = find_settings_file(target)
    run = load_settings(file).run.name if file else _run_name(target)
    for role in roles or ACL_ROLES:
        print(aclfile_line(cast("AclRole", role), run))  # noqa: T201  (this is the command's output)


def _run_name(target: str) -> str:
    try:
        if target.endswith(".toml"):
            raise SettingsError(f"{target}: no such file")
        return msgspec.convert({"name": target}, Run).name
    except msgspec.ValidationError as error:
        raise SettingsError(f"{target} is no settings file, no run's folder, and no name of a run: {error}") from error
