"""Compares a process with its run before it does anything: id, settings, code, model and data.

`penstock run` compares with its folder, changes nothing if something differs, and then with the server. A role that
was started by itself compares with the server, and with the folder if it has one.
"""

from collections.abc import Mapping
from functools import partial
from typing import Final

import anyio
import structlog
from msgspec import Struct

from stream.connection.run_connection import RunConnection
from stream.connection.run_identity import (
    AcceptedChange,
    RunIdentity,
    compare_with_server,
    other_run,
    read_identity,
    read_server_identity,
    write_identity,
)
from stream.errors import DataError, RunMismatchError
from workers.feed.dataset_rows import AcceptData, is_rows, pinned_data
from workers.feed.environment_rows import write_training_rows
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
    data: dict[str, str] = {}
    added: tuple[AcceptedChange, ...] = ()
    try:
        data, added = pinned_data(settings, known, accept.data)
    except RunMismatchError as error:
        problems.append(str(error))
    except DataError:
        pass  # the feeder reports it
    if problems:
        raise RunMismatchError(" ".join(f"{problem}." for problem in problems).removesuffix("."))
    return FolderCheck(identity=identity, pinned=pinned | data, changes=(*changes, *added))


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
    if check.identity is None and (refused := differences(server.pinned, check.pinned)):
        raise refuse(refused, f"the server of run {connection.run!r}")
    updated = identity.accept(check.changes)
    updated = RunIdentity(id=updated.id, pinned=updated.pinned | check.pinned, changes=updated.changes)
    await anyio.to_thread.run_sync(write_identity, settings.folder, updated)
    for change in check.changes:
        log.warning("change.accepted", name=change.name, before=change.before, after=change.after)
    _raise_if_different(connection, await compare_with_server(connection, updated, check.pinned), check.pinned)


async def join_run(connection: RunConnection, settings: Settings, role: str, accept: Accept) -> None:
    """Compare one role's process with the server, and record what the server does not know.

    Raises:
        RunMismatchError: the server has another run of this name, or one with other settings, code, model or data.
    """
    folder = await anyio.to_thread.run_sync(read_identity, settings.folder)
    server = await read_server_identity(connection)
    if folder is not None and server.id not in {"", folder.id}:
        raise other_run(connection, server.id, folder.id)
    known = (folder.pinned if folder is not None else {}) | server.pinned
    pinned = await anyio.to_thread.run_sync(partial(_pin, settings, role))
    changes, refused = split_accepted(differences(known, pinned), accept.changes)
    if refused:
        raise refuse(refused, f"the server of run {connection.run!r}")
    if role == "feed":
        await anyio.to_thread.run_sync(write_training_rows, settings, abandon_on_cancel=True)
        data, added = await anyio.to_thread.run_sync(pinned_data, settings, known, accept.data)
        pinned, changes = pinned | data, (*changes, *added)
    _raise_if_different(connection, await compare_with_server(connection, folder, pinned, changes), pinned)


def _pin(settings: Settings, role: str) -> dict[str, str]:
    """Return what a role pins: what it reads itself."""
    pinned = pinned_settings(settings)
    if role in _ROLES_WITH_CODE:
        pinned |= pinned_code(settings)
    if role != "feed":
        pinned |= pinned_model(settings, with_weights=role == "train")
    return pinned


def _raise_if_different(connection: RunConnection, server: Mapping[str, str], pinned: Mapping[str, str]) -> None:
    """Refuse values that another process recorded on the server meanwhile."""
    if not server:
        return
    found = differences(server, pinned)
    if not found:
        names = ", ".join(map(str, filter(is_rows, server)))
        raise RunMismatchError(
            f"the data of run {connection.run!r} on the server are other rows ({names}): a second "
            "feeder reads another file. Give it another run.name"
        )
    raise refuse(found, f"the server of run {connection.run!r}")
