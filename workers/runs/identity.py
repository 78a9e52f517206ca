"""Compares a process with its run before it does anything: id, arrangement of keys, seed, data, and the model's files.

`penstock run` compares with its folder, changes nothing if something differs, and then with the server. A role that
was started by itself compares with the server, and with the folder if it has one. All other settings may differ: what
does is printed, logged, and written to the ledger.

Values are compared as text. Places are not compared, since other machines have other paths: of a file only its name
and its content count. A process compares only what it reads itself.

All settings of a start by their full names, so that two starts can be compared.

Addresses and the run's folder are left out, since they differ between machines that have one run. Arguments of
environments and reward functions are digests, since some are keys or passwords. `NAME.code` is a digest of the source
file that a reference names, if that is a file or a module in the working directory; what it imports is not seen.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
import structlog
from msgspec import Struct
from msgspec.structs import replace

from stream.connection.keys import LAYOUT
from stream.connection.run_connection import RunConnection
from stream.connection.run_identity import (
    KEY_LAYOUT,
    RunIdentity,
    compare_with_server,
    identify_run,
    other_run,
    read_identity,
    read_server_identity,
    record_identity,
    refuse_differences,
    setting_changes,
)
from stream.errors import DataError
from workers.datasets.environment_rows import write_training_rows
from workers.datasets.mix import dataset_name, fixed_rows
from workers.hub.names import DATA_SECTION, EVAL_SECTION, MODEL_SECTION, recorded_revisions, resolve_names
from workers.settings import Settings
from workers.settings.data import EnvironmentSettings
from workers.settings.section import Section

log = structlog.get_logger()

_SECTIONS_OF_ROLE: Final = {"feed": (DATA_SECTION, EVAL_SECTION), "train": (MODEL_SECTION,)}
"""What a role reads of names on a hub. Rollout workers get what they need of the model from the trainer."""
_MODEL_SUFFIXES: Final = frozenset({".json", ".jinja", ".model", ".txt"})


class FolderCheck(Struct, frozen=True, kw_only=True):
    """A run's folder, compared with what is there now."""

    identity: RunIdentity | None
    """None if the folder has none yet."""
    fixed: dict[str, str]


def check_folder(settings: Settings) -> FolderCheck:
    """Compare settings, model and data with those of the run in the folder. Changes nothing.

    Raises:
        RunMismatchError: they differ; names everything that differs.
    """
    identity = read_identity(settings.folder)
    known = identity.fixed if identity is not None else {}
    fixed = _fixed_settings(settings) | _fixed_model(settings)
    with suppress(DataError):  # the feeder reports it
        fixed |= fixed_rows(settings, known)
    refuse_differences(str(settings.folder), known, fixed)
    return FolderCheck(identity=identity, fixed=fixed)


def describe_changes(identity: RunIdentity, settings: Settings) -> list[str]:
    """Describe the settings that differ from the trainer's last start, and the code that they name."""
    return [
        f"{change.name} changed"
        if change.before.startswith(DIGEST)
        else f"{change.name} from {change.before} to {change.after}"
        for change in setting_changes(identity.settings, flat_settings(settings))
    ]


async def begin_run(connection: RunConnection, settings: Settings, check: FolderCheck) -> None:
    """Compare the folder with the server, and record the run's identity in both.

    Raises:
        RunMismatchError: the server has another run of this name; nothing was changed.
    """
    identity = await identify_run(connection, settings.folder, is_private=not settings.run.redis)
    refuse_differences(f"the server of run {connection.run!r}", identity.fixed, check.fixed)
    if check.identity is None:
        identity = identity.restart(await anyio.to_thread.run_sync(flat_settings, settings))
    identity = replace(identity, fixed=check.fixed | identity.fixed)
    await record_identity(connection, settings.folder, identity)


async def join_run(connection: RunConnection, settings: Settings, role: str) -> Settings:
    """Compare one role's process with the server, and record what the server does not know.

    Returns:
        The settings with the run's commits of what they name on a hub. What the role itself reads is downloaded, if the
        cache of this machine lacks it.

    Raises:
        RunMismatchError: the server has another run of this name, or one with another seed, model or other data.
    """
    folder = await anyio.to_thread.run_sync(read_identity, settings.folder) or RunIdentity()
    server = await read_server_identity(connection)
    if folder.id and server.id not in {"", folder.id}:
        raise other_run(connection, server.id, folder.id)
    known = folder.fixed | server.fixed
    sections = _SECTIONS_OF_ROLE.get(role, ())
    resolve = partial(resolve_names, settings, known, lambda line: log.info("hub.downloading", what=line), sections)
    settings = await anyio.to_thread.run_sync(resolve, abandon_on_cancel=True)
    fixed = await anyio.to_thread.run_sync(_fixed_for_role, settings, role, known, abandon_on_cancel=True)
    refuse_differences(f"the server of run {connection.run!r}", known, fixed)
    await compare_with_server(connection, replace(folder, fixed=folder.fixed | fixed))
    return settings


def _fixed_for_role(settings: Settings, role: str, known: Mapping[str, str]) -> dict[str, str]:
    """Return what a role reads itself; the feeder calls `rows()` of environments first."""
    if role != "feed":
        return _fixed_settings(settings) | _fixed_model(settings)
    write_training_rows(settings)
    return _fixed_settings(settings) | fixed_rows(settings, known)


def _fixed_settings(settings: Settings) -> dict[str, str]:
    """Return the settings that decide which prompts there are, and in which order."""
    data, sets = settings.data, {dataset_name(each): each.weight for each in settings.datasets}
    found = {KEY_LAYOUT: LAYOUT, "run.name": settings.run.name, "run.seed": settings.run.seed}
    found |= {"data.epochs": data.epochs, "data.shuffle": data.shuffle, "data.sets": sets}
    return {name: msgspec.json.encode(value).decode() for name, value in found.items()} | recorded_revisions(settings)


def _fixed_model(settings: Settings) -> dict[str, str]:
    """Return digests of the model's tokenizer, template and configuration; nothing without a model folder."""
    folder = settings.model.folder
    if not folder.is_dir():
        return {}
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.suffix in _MODEL_SUFFIXES)
    found = {
        f"model.files.{file.name}": hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest() for file in files
    }
    return found | {"model.files": ", ".join(file.name for file in files)}


DIGEST: Final = "digest "
"""Beginning of a value that stands for another one."""
_PLACES: Final = ("run.redis", "run.folder", "engine.urls")


def flat_settings(settings: Settings) -> dict[str, str]:
    """Return every setting by its full name, as JSON or as a digest. Reads the source files of user code."""
    found: dict[str, Any] = {}
    for name in settings.__struct_fields__:
        if isinstance(value := getattr(settings, name), Section):
            found |= _flatten(name, value)
    named: dict[str, Section] = {
        f"environments.{name}": EnvironmentSettings(ref=given) if isinstance(given, str) else given
        for name, given in settings.environments.items()
    }
    named |= {f"rewards.{each.name or each.ref.rpartition(':')[2]}": each for each in settings.rewards}
    for name, section in named.items():
        found |= _flatten(name, section)
    texts = {name: _encode(value).decode() for name, value in found.items() if name not in _PLACES}
    texts |= {"environments and rewards": " ".join(named)}
    return texts | dict(_digests(named))


def _flatten(prefix: str, section: Section) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a section; `name` of an estimator or loss is one of them."""
    if (tag := section.__struct_config__.tag) is not None:
        yield f"{prefix}.name", str(tag)
    for name in section.__struct_fields__:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _flatten(f"{prefix}.{name}", value)
        elif name == "sets":
            for i, each in enumerate(value):
                yield from _flatten(f"{prefix}.{name}.{i}", each)
        elif name != "args":
            yield f"{prefix}.{name}", value


def _digests(named: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, section in named.items():
        yield f"{name}.args", _digest(_encode(section.args))
        place = section.ref.rpartition(":")[0]
        file = Path(place if place.endswith(".py") else place.replace(".", "/") + ".py")
        if file.is_file():
            yield f"{name}.code", _digest(file.read_bytes())


def _encode(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic")


def _digest(content: bytes) -> str:
    return DIGEST + hashlib.blake2b(content, digest_size=8).hexdigest()
