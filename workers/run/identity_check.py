"""Compares a process with its run before it does anything: id, settings, code, model and data.

`penstock run` compares with its folder, changes nothing if something differs, and then with the server. A role that
was started by itself compares with the server, and with the folder if it has one.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import structlog
from msgspec import Struct
from msgspec.structs import replace

from stream.connection.run_connection import RunConnection
from stream.connection.run_identity import (
    IDENTITY_FILE,
    AcceptedChange,
    RunIdentity,
    compare_with_server,
    other_run,
    read_identity,
    read_server_identity,
    write_identity,
)
from stream.errors import DataError, RunMismatchError
from workers.datasets.environment_rows import write_training_rows
from workers.datasets.fingerprint import AcceptData, PinnedData, is_rows, pinned_data
from workers.run.pinned import (
    differences,
    pinned_code,
    pinned_model,
    pinned_settings,
    refuse,
    split_accepted,
)
from workers.settings import Settings
from workers.settings.toml_file import load_settings

log = structlog.get_logger()

_ROLES_WITH_CODE: Final = ("rollout", "score")


class Accept(Struct, frozen=True):
    """Changes that the operator accepts at this start."""

    changes: tuple[str, ...] = ()
    """Names of pinned values, or beginnings of them: `rewards`, `environments.calculator.code`."""
    data: AcceptData = ""


NOTHING: Final = Accept()


class FolderCheck(Struct, frozen=True, kw_only=True):
    """A run's folder, compared with what is there now."""

    identity: RunIdentity | None
    """None if the folder has none yet."""
    pinned: dict[str, str]
    changes: tuple[AcceptedChange, ...]
    """Changes since the last start that the operator accepts."""
    files: dict[str, str] = {}
    """See `RunIdentity.files`."""

    def updated(self, identity: RunIdentity) -> RunIdentity:
        """Return an identity with what this start pins and accepts."""
        accepted = identity.accept(self.changes)
        return replace(accepted, pinned=accepted.pinned | self.pinned, files=accepted.files | self.files)


def check_folder(settings: Settings, accept: Accept) -> FolderCheck:
    """Compare settings, code, model and data with those of the run in the folder. Changes nothing.

    Raises:
        RunMismatchError: they differ, and the difference is not accepted; names everything that differs.
    """
    folder = settings.folder
    identity = read_identity(folder)
    if identity is not None:
        known: Mapping[str, str] = identity.pinned
    else:
        file = folder / "run.toml"
        known = pinned_settings(load_settings(file)) if file.exists() else {}
    pinned = pinned_settings(settings) | pinned_code(settings) | pinned_model(settings, with_weights=True)
    changes, refused = split_accepted(differences(known, pinned), accept.changes)
    problems = [str(refuse(refused, str(folder)))] if refused else []
    data = PinnedData(pinned={}, files={})
    try:
        data = pinned_data(settings, known, accept.data, identity.files if identity is not None else {})
    except RunMismatchError as error:
        problems.append(str(error))
    except DataError:
        pass  # the feeder reports it
    if problems:
        raise RunMismatchError(" ".join(f"{problem}." for problem in problems).removesuffix("."))
    return FolderCheck(
        identity=identity, pinned=pinned | data.pinned, changes=(*changes, *data.changes), files=data.files
    )


async def record_identity(
    connection: RunConnection, settings: Settings, check: FolderCheck, *, is_private: bool
) -> None:
    """Compare the folder with the server, and record the run's identity in both.

    Args:
        connection: to the run.
        settings: of the run.
        check: of the folder.
        is_private: the server's data are in the folder, so a folder without an identity takes the server's.

    Raises:
        RunMismatchError: the server has another run of this name; nothing was changed.
    """
    server = await read_server_identity(connection)
    identity = check.identity
    if identity is None:
        if server.id and not is_private:
            raise other_run(connection, server.id)
        identity = server if server.id else RunIdentity.create()
    elif server.id not in {"", identity.id}:
        raise other_run(connection, server.id, identity.id)
    updated = check.updated(identity)
    unknown = {change.name for change in updated.changes[len(server.changes) :]} if server.id else set()
    here = {name: value for name, value in check.pinned.items() if name not in unknown}
    _raise_if_different(connection, server.pinned, here)
    await anyio.to_thread.run_sync(write_identity, settings.folder, updated)
    try:
        found = await compare_with_server(connection, updated, check.pinned, files=check.files)
        _raise_if_different(connection, found, check.pinned)
    except RunMismatchError:  # another process has been there since the server was read
        await anyio.to_thread.run_sync(_put_back, settings.folder, check.identity)
        raise
    for change in check.changes:
        log.warning("change.accepted", name=change.name, before=change.before, after=change.after)


async def join_run(connection: RunConnection, settings: Settings, role: str, accept: Accept) -> None:
    """Compare one role's process with the server, and record what the server does not know.

    Raises:
        RunMismatchError: the server has another run of this name, or one with other settings, code, model or data.
    """
    folder = await anyio.to_thread.run_sync(read_identity, settings.folder)
    server = await read_server_identity(connection)
    if folder is not None and server.id not in {"", folder.id}:
        raise other_run(connection, server.id, folder.id)
    stored = folder or RunIdentity()
    known = stored.pinned | server.pinned
    pinned = await anyio.to_thread.run_sync(partial(_pin, settings, role))
    changes, refused = split_accepted(differences(known, pinned), accept.changes)
    if refused:
        raise refuse(refused, f"the server of run {connection.run!r}")
    files: dict[str, str] = {}
    if role == "feed":
        await anyio.to_thread.run_sync(write_training_rows, settings, abandon_on_cancel=True)
        compared = stored.files | server.files
        data = await anyio.to_thread.run_sync(pinned_data, settings, known, accept.data, compared)
        pinned, changes, files = pinned | data.pinned, (*changes, *data.changes), data.files
    found = await compare_with_server(connection, folder, pinned, changes, files)
    _raise_if_different(connection, found, pinned)


def _pin(settings: Settings, role: str) -> dict[str, str]:
    """Return what a role pins: what it reads itself."""
    pinned = pinned_settings(settings)
    if role in _ROLES_WITH_CODE:
        pinned |= pinned_code(settings)
    if role != "feed":
        pinned |= pinned_model(settings, with_weights=role == "train")
    return pinned


def _raise_if_different(connection: RunConnection, server: Mapping[str, str], pinned: Mapping[str, str]) -> None:
    """Refuse values that differ from the server's."""
    if found := differences(server, pinned):
        raise refuse(found, f"the server of run {connection.run!r}")
    if names := [name for name in pinned if is_rows(name) and server.get(name, pinned[name]) != pinned[name]]:
        raise RunMismatchError(
            f"the server of run {connection.run!r} knows other rows than there are here ({', '.join(names)}): the file "
            "was changed, or another feeder reads another one. Restore the file, or give this run another run.name"
        )


def _put_back(folder: Path, identity: RunIdentity | None) -> None:
    """Give a folder the identity again that it had, or none."""
    if identity is None:
        (folder / IDENTITY_FILE).unlink(missing_ok=True)
    else:
        write_identity(folder, identity)
