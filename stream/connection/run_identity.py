"""The identity of a run: an id made at its birth, and the values that must not change while it lives.

Two runs may have one name: on one server, or in a folder that was restored or copied. And one run may be started again
with other settings, code or data, so that its groups mean something else. Both are found by comparing two records, the
file `identity.json` in the run's folder and the hash `identity` on its server::

    id        random, made when the folder or the trainer was first used; a server without one takes the folder's
    pinned    name -> value: settings, digests of code, of the model's files and of the data
    changes   changes of pinned values that the operator accepted, in order
    files     name -> digest of a data set's files when its rows were compared; never compared between processes

Every process compares when it connects, before it claims anything. A server that was emptied gets the record again
from the folder.
"""

import hashlib
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
_ID, _CHANGE, _FILES = "id", "change:", "files:"


class AcceptedChange(Struct, frozen=True):
    """A change of a pinned value that the operator accepted."""

    name: str
    before: str
    after: str
    """Empty if the process that accepted it does not know the new value."""
    at: str
    """UTC, ISO 8601."""

    @classmethod
    def now(cls, name: str, before: str, after: str) -> "AcceptedChange":
        """Return a change that is accepted now."""
        return cls(name, before, after, datetime.now(UTC).isoformat(timespec="seconds"))


class RunIdentity(Struct, frozen=True, kw_only=True):
    """What is known about a run, by its folder or by its server."""

    id: str = ""
    """Empty: not known."""
    pinned: dict[str, str] = {}
    changes: tuple[AcceptedChange, ...] = ()
    files: dict[str, str] = {}
    """Files whose content is known to hold the pinned rows: while their bytes stay, the rows are not read."""

    @classmethod
    def create(cls) -> "RunIdentity":
        """Return the identity of a new run."""
        return cls(id=secrets.token_hex(16))

    def accept(self, changes: tuple[AcceptedChange, ...]) -> "RunIdentity":
        """Return the identity after these changes."""
        pinned = self.pinned | {change.name: change.after for change in changes}
        return replace(
            self,
            pinned={name: value for name, value in pinned.items() if value},
            changes=(*self.changes, *changes),
        )


class _File(Struct):
    """Content of `identity.json`."""

    identity: RunIdentity
    digest: str
    """Of the identity; a damaged file is not used."""


def read_identity(folder: Path) -> RunIdentity | None:
    """Return the identity of the run in a folder; None if the folder has none.

    Raises:
        RunMismatchError: the file is damaged.
    """
    file = folder / IDENTITY_FILE
    try:
        found = msgspec.json.decode(file.read_bytes(), type=_File)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise _damaged(file, str(error)) from error
    if found.digest != _digest(found.identity):
        raise _damaged(file, "its digest is another one")
    return found.identity


def write_identity(folder: Path, identity: RunIdentity) -> None:
    """Write the identity to a folder, completely or not at all; it is on the disk on return."""
    file = folder / IDENTITY_FILE
    content = msgspec.json.encode(_File(identity, _digest(identity)))
    folder.mkdir(parents=True, exist_ok=True)
    write_file_atomically(file, msgspec.json.format(content) + b"\n")


async def read_server_identity(connection: RunConnection) -> RunIdentity:
    """Return what the server knows about the run."""
    found = await connection.read_hash("identity")
    numbers = sorted(int(name.removeprefix(_CHANGE)) for name in found if name.startswith(_CHANGE))
    return RunIdentity(
        id=found.get(_ID, ""),
        pinned={name: value for name, value in found.items() if name != _ID and not name.startswith((_CHANGE, _FILES))},
        changes=tuple(msgspec.json.decode(found[f"{_CHANGE}{n}"], type=AcceptedChange) for n in numbers),
        files={name.removeprefix(_FILES): value for name, value in found.items() if name.startswith(_FILES)},
    )


async def compare_with_server(
    connection: RunConnection,
    folder: RunIdentity | None,
    pinned: Mapping[str, str],
    accepted: tuple[AcceptedChange, ...] = (),
    files: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Compare with the server in one atomic step, and record what the server does not know.

    Args:
        connection: to the run.
        folder: identity in the run's folder; None if this process has no such folder.
        pinned: the values that this process has determined itself.
        accepted: changes to record, beside those of the folder that the server does not know.
        files: what this process has compared, which replaces the server's `RunIdentity.files`.

    Returns:
        The server's values of the names that differ; then nothing was recorded.

    Raises:
        RunMismatchError: the server has another run of this name.
    """
    folder = folder or RunIdentity()
    server = await read_server_identity(connection)
    unknown = (*folder.changes[len(server.changes) :], *accepted) if server.id else accepted
    changes = server.changes if server.id else folder.changes
    changes = (*changes, *unknown)
    replaced = {change.name: change.after for change in unknown} | _file_fields(files or {})
    numbered = {f"{_CHANGE}{n}": msgspec.json.encode(change).decode() for n, change in enumerate(changes, 1)}
    lists = (pinned, replaced, folder.pinned | numbered | _file_fields(folder.files))
    flat = [text for each in lists for text in (str(len(each)), *(text for pair in each.items() for text in pair))]
    found: list[Any] = [text.decode() for text in await connection.run_script("identify", folder.id, *flat)]
    if folder.id and found[0] not in {"", folder.id}:
        raise other_run(connection, found[0], folder.id)
    return dict(zip(found[1::2], found[2::2], strict=True))


async def identify_for_trainer(connection: RunConnection, folder: Path) -> RunIdentity:
    """Compare a trainer's folder with the server. Changes nothing.

    Returns:
        The identity in the folder with what the server knows in addition; a new one for a new run.

    Raises:
        RunMismatchError: they are different runs, or a trainer with another folder has trained this one.
    """
    stored = await anyio.to_thread.run_sync(read_identity, folder)
    server = await read_server_identity(connection)
    if server.id and (stored is None or stored.id != server.id):
        raise other_run(connection, server.id, stored.id if stored else "")
    if stored is None:
        return replace(server, id=secrets.token_hex(16))
    if len(server.changes) > len(stored.changes):
        return replace(server, pinned=stored.pinned | server.pinned, files=stored.files | server.files)
    if different := [name for name, value in server.pinned.items() if stored.pinned.get(name, value) != value]:
        raise RunMismatchError(
            f"the server of run {connection.run!r} has other values than {folder / IDENTITY_FILE}: "
            f"{', '.join(sorted(different))}. A process with other settings or code has reached the server first; stop "
            "it, correct it, and delete the server's key with the suffix :identity"
        )
    return replace(stored, pinned=stored.pinned | server.pinned, files=stored.files | server.files)


async def record_for_trainer(connection: RunConnection, folder: Path, identity: RunIdentity) -> None:
    """Record the identity in the trainer's folder and on the server. Call it when the trainer holds both."""
    if identity != await anyio.to_thread.run_sync(read_identity, folder):
        await anyio.to_thread.run_sync(write_identity, folder, identity)
    await compare_with_server(connection, identity, {})


def other_run(connection: RunConnection, server_id: str, folder_id: str = "") -> RunMismatchError:
    """Return the error for a server that has another run of the same name."""
    ours = f"this folder's run is {folder_id[:8]}" if folder_id else "this folder is new"
    return RunMismatchError(
        f"the server has a run named {connection.run!r} already, {server_id[:8]}, and {ours}: give this run another "
        f"run.name, or start the other one in its own folder (its {IDENTITY_FILE} begins with that id)"
    )


def _file_fields(files: Mapping[str, str]) -> dict[str, str]:
    return {f"{_FILES}{name}": value for name, value in files.items()}


def _digest(identity: RunIdentity) -> str:
    return hashlib.blake2b(msgspec.json.encode(identity, order="deterministic"), digest_size=16).hexdigest()


def _damaged(file: Path, why: str) -> RunMismatchError:
    return RunMismatchError(
        f"{file} is damaged ({why}): restore it from a backup. Without one, remove it: the run then gets its identity "
        "from its private server, and its settings are compared with run.toml"
    )
