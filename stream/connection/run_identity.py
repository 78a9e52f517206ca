"""The identity of a run: an id made at its first start, and the values that must stay the same until it ends.

Two runs may have the same name: on one server, or in a folder that was restored or copied. And one run may be started
again with other data or another tokenizer, so that prompts would be fed twice, or never. Both are noticed by comparing
two records, the file `identity.json` in the run's folder and the hash `identity` on its server::

    id         random, made when the folder or the trainer was first used; a server without one takes the folder's
    fixed      name -> value: arrangement of keys, seed, rows of the data, small files of the model
    settings   settings of the trainer's last start, in the folder alone
    changes    what differed between two starts, in order, in the folder alone

Every process compares when it connects, before it claims anything. A server that was emptied gets the record again
from the folder.
"""

import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from stream.connection.run_connection import RunConnection
from stream.durable import write_file_atomically
from stream.errors import RunMismatchError

IDENTITY_FILE: Final = "identity.json"
FILES: Final = "data.files."
"""Prefix of the names of values that are stored but never compared: digests of the files with the rows of the data.
While they are the same, the rows need not be read again."""
KEY_LAYOUT: Final = "penstock.keys"


class SettingChange(Struct, frozen=True):
    """A setting, or the code that it names, that differs from the last start."""

    name: str
    before: str
    after: str
    at: str = ""
    """UTC, ISO 8601."""


class RunIdentity(Struct, frozen=True, kw_only=True):
    """What is known about a run, by its folder or by its server."""

    id: str = ""
    """Empty if it is not known."""
    fixed: dict[str, str] = {}
    settings: dict[str, str] = {}
    changes: tuple[SettingChange, ...] = ()

    def restart(self, settings: Mapping[str, str]) -> "RunIdentity":
        """Return the identity after one more start, with these settings; what changed is added to `changes`."""
        changes = setting_changes(self.settings, settings)
        return replace(self, settings=dict(settings), changes=(*self.changes, *changes))


def setting_changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[SettingChange]:
    """Return what differs between the settings of two starts; a setting that only one of them has does not count."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    names = sorted(name for name in before.keys() & after.keys() if before[name] != after[name])
    return [SettingChange(name, before[name], after[name], at) for name in names]


def read_identity(folder: Path) -> RunIdentity | None:
    """Return the identity of the run in a folder; None if the folder has none.

    Raises:
        RunMismatchError: the file is damaged.
    """
    file = folder / IDENTITY_FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=RunIdentity)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise RunMismatchError(
            f"{file} is damaged ({error}): restore it from a backup. Without one, remove it: the run then gets its "
            "identity from its private server"
        ) from error


def write_identity(folder: Path, identity: RunIdentity) -> None:
    """Write the identity to a folder, completely or not at all; it is on the disk on return."""
    folder.mkdir(parents=True, exist_ok=True)
    write_file_atomically(folder / IDENTITY_FILE, msgspec.json.format(msgspec.json.encode(identity)) + b"\n")


async def read_server_identity(connection: RunConnection) -> RunIdentity:
    """Return what the server knows about the run."""
    fixed = await connection.read_hash("identity")
    return RunIdentity(id=fixed.pop("id", ""), fixed=fixed)


async def compare_with_server(connection: RunConnection, identity: RunIdentity) -> None:
    """Compare id and fixed values with the server's in one atomic step, and add those that it does not have.

    Raises:
        RunMismatchError: the server has another run of this name; nothing was recorded.
    """
    fields = [text for pair in identity.fixed.items() for text in pair]
    answer: list[Any] = [text.decode() for text in await connection.run_script("identify", identity.id, *fields)]
    if identity.id and answer[0] not in {"", identity.id}:
        raise other_run(connection, answer[0], identity.id)
    different = dict(zip(answer[1::2], answer[2::2], strict=True))
    refuse_differences(f"the server of run {connection.run!r}", different, identity.fixed)


async def identify_run(connection: RunConnection, folder: Path, *, is_private: bool = False) -> RunIdentity:
    """Compare a run's folder with the server. Changes nothing.

    Args:
        connection: to the run.
        folder: of the run.
        is_private: the server's data is in the folder, so a folder without an identity takes the server's.

    Returns:
        The identity in the folder with what the server knows in addition; a new one for a new run.

    Raises:
        RunMismatchError: they are different runs, or a trainer with another folder has trained this one.
    """
    stored = await anyio.to_thread.run_sync(read_identity, folder)
    server = await read_server_identity(connection)
    if server.id and (stored.id != server.id if stored else not is_private):
        raise other_run(connection, server.id, stored.id if stored else "")
    if stored is None:
        return replace(server, id=server.id or secrets.token_hex(16))
    refuse_differences(f"the server of run {connection.run!r}", server.fixed, stored.fixed)
    return replace(stored, fixed=stored.fixed | server.fixed)


async def record_identity(connection: RunConnection, folder: Path, identity: RunIdentity) -> None:
    """Record an identity in the run's folder and on the server; a trainer calls it when it holds both.

    Raises:
        RunMismatchError: meanwhile another process has given the server the identity of another run.
    """
    if identity != await anyio.to_thread.run_sync(read_identity, folder):
        await anyio.to_thread.run_sync(write_identity, folder, identity)
    await compare_with_server(connection, identity)


def refuse_differences(place: str, known: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Refuse fixed values that are not those of a run; a value that only one of the two has does not count.

    Raises:
        RunMismatchError: names everything that differs, and the remedy.
    """
    differences = [
        f"{name} is {known[name]} there and {value} here"
        for name, value in sorted(here.items())
        if known.get(name, value) != value and not name.startswith(FILES)
    ]
    if known.get(KEY_LAYOUT, here.get(KEY_LAYOUT)) != here.get(KEY_LAYOUT):
        differences.append("another version of Penstock started it: end it with that one")
    if differences:
        raise RunMismatchError(
            f"{place} holds another run: {'; '.join(differences)}. Put back what was there, or start a new run: give "
            "it another run.name, and another run.folder if you set one"
        )


def other_run(connection: RunConnection, server_id: str, folder_id: str = "") -> RunMismatchError:
    """Return the error for a server that has another run of the same name."""
    ours = f"this folder's run is {folder_id[:8]}" if folder_id else "this folder is new"
    return RunMismatchError(
        f"the server has a run named {connection.run!r} already, {server_id[:8]}, and {ours}: give this run another "
        f"run.name, or start the other one in its own folder (its {IDENTITY_FILE} begins with that id)"
    )
