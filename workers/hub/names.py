"""Names on a hub in the settings of a run: each is bound to a commit once, before anything starts, and downloaded.

The first start looks up which commit `model.revision`, `data.revision` or `eval.revision` stands for. The run's
identity keeps name and commit, so every later start and every role uses the same files, whatever the branch points to
by then, and asks the hub for nothing that the cache has. A start whose settings name another revision is refused.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from stream.connection.run_identity import read_identity
from stream.errors import DataError, PenstockError, RunMismatchError, SettingsError
from workers.datasets.mix import dataset_name
from workers.datasets.sources import open_source
from workers.hub.downloads import download, look_up
from workers.hub.errors import explain, met_full_disk
from workers.hub.libraries import Say, say_nothing
from workers.settings import Settings
from workers.settings.data import DataSettings
from workers.settings.hub import Repository, Revision, is_hub_name, parse_revision
from workers.settings.toml_file import write_overrides

MODEL_SECTION: Final = "model"
DATA_SECTION: Final = "data"
EVAL_SECTION: Final = "eval"
SECTIONS: Final = (MODEL_SECTION, DATA_SECTION, EVAL_SECTION)
"""Tables of the settings that may name something on a hub."""


class HubName(Struct, frozen=True):
    """One name on a hub in the settings."""

    section: str
    """One of `SECTIONS`."""
    index: int
    """Index in `data.sets`; -1: the section's own path."""
    key: str
    """Name of its value in the run's identity."""
    repository: Repository
    revision: Revision
    config: str = ""
    split: str = ""

    @property
    def setting(self) -> str:
        """The table with `path` and `revision`, as messages name it."""
        return f"data.sets[{self.index}]" if self.index >= 0 else self.section

    @property
    def value(self) -> str:
        """What the run's identity keeps."""
        return f"{self.repository.name} {self.revision}"


def hub_names(settings: Settings) -> list[HubName]:
    """Return the names on a hub in these settings; what exists on this disk is none."""
    found = [_name(MODEL_SECTION, -1, f"{MODEL_SECTION}.revision", settings.model)]
    data = settings.data
    if data.path:
        found.append(_name(DATA_SECTION, -1, f"data.revision.{dataset_name(settings.datasets[0])}", data))
    found += [_name(DATA_SECTION, i, f"data.revision.{dataset_name(each)}", each) for i, each in enumerate(data.sets)]
    found.append(_name(EVAL_SECTION, -1, f"{EVAL_SECTION}.revision", settings.eval))
    return [each for each in found if is_hub_name(each.repository.name)]


def _name(section: str, index: int, key: str, table: Any) -> HubName:
    place, _, split = table.path.partition("#") if section != MODEL_SECTION else (table.path, "", "")
    repository = Repository("model" if section == MODEL_SECTION else "dataset", place)
    config, split = getattr(table, "config", ""), split or getattr(table, "split", "")
    return HubName(section, index, key, repository, parse_revision(table.revision), config, split)


def recorded_revisions(settings: Settings) -> dict[str, str]:
    """Return what a run's identity keeps of the names whose commit is known."""
    return {each.key: each.value for each in hub_names(settings) if each.revision.commit}


def known_values(settings: Settings) -> Mapping[str, str]:
    """Return what the identity in the run's folder keeps; nothing without a folder, or without a name on a hub.

    Raises:
        RunMismatchError: the file is damaged.
    """
    identity = read_identity(settings.folder) if settings.run.name and hub_names(settings) else None
    return identity.fixed if identity is not None else {}


def bind_revisions(
    settings: Settings, known: Mapping[str, str], say: Say, sections: tuple[str, ...] = SECTIONS
) -> Settings:
    """Return settings whose revisions have a commit: that of the run, or else the one that the hub names now. Blocks.

    Args:
        settings: as they were given.
        known: what the run's identity keeps.
        say: gets a line for people.
        sections: leave out names of another section, but for those whose commit the run knows.

    Raises:
        RunMismatchError: the settings name another repository or revision than the run has.
        SettingsError: there is no such repository or revision, or it may not be read.
        PenstockError: the hub cannot be asked.
    """
    _refuse_unused(settings, sections)
    for each in hub_names(settings):
        if each.key in known:
            revision = _of_run(each, known[each.key])
        elif not each.revision.commit and each.section in sections:
            revision = Revision(each.revision.name, look_up(each.repository, each.revision, each.setting, say))
        else:
            continue
        settings = _with_revision(settings, each, str(revision))
    return settings


def _refuse_unused(settings: Settings, sections: tuple[str, ...]) -> None:
    """Refuse a revision of what is on this disk, which takes precedence over a name on a hub.

    Raises:
        SettingsError: names the setting and the remedy.
    """
    tables: dict[str, Any] = {MODEL_SECTION: settings.model, DATA_SECTION: settings.data, EVAL_SECTION: settings.eval}
    tables |= {f"data.sets[{i}]": each for i, each in enumerate(settings.data.sets)}
    for name, table in tables.items():
        if (
            name.partition(".")[0] in sections
            and table.path
            and table.revision
            and Path(table.path.partition("#")[0]).exists()
        ):
            raise SettingsError(
                f"{name}.revision is for a name on a hub, but {name}.path = {table.path!r} is on this disk, which "
                "takes precedence; leave out the first, or move that folder"
            )


def _of_run(here: HubName, recorded: str) -> Revision:
    """Return the revision of the run if the settings mean the same one.

    Raises:
        RunMismatchError: they mean another one.
    """
    name, _, text = recorded.partition(" ")
    revision, table = parse_revision(text), here.setting
    if name != here.repository.name:
        raise RunMismatchError(
            f"{table}.path is {here.repository.name}, and this run began with {name} at {revision.short}. Put that "
            "back, or start a new run: give it another run.name"
        )
    if here.revision.name == revision.name and here.revision.commit in ("", revision.commit):
        return revision
    commit = here.revision.commit
    try:
        commit = commit or look_up(here.repository, here.revision, table, say_nothing)
        found = here.revision._replace(commit=commit).short
    except PenstockError as error:
        found = f"{here.revision.name}, whose commit is unknown ({error})"
    if commit == revision.commit:
        return revision
    raise RunMismatchError(
        f"{table}.revision: the settings name {name} at {found}, and this run began with {revision.short}. Set "
        f'{table}.revision = "{revision}", or start a new run: give it another run.name'
    )


def _with_revision(settings: Settings, which: HubName, revision: str) -> Settings:
    replace, section = msgspec.structs.replace, getattr(settings, which.section)
    if which.index < 0:
        return replace(settings, **{which.section: replace(section, revision=revision)})
    sets = list(section.sets)
    sets[which.index] = replace(sets[which.index], revision=revision)
    return replace(settings, data=replace(section, sets=tuple(sets)))


def download_names(settings: Settings, say: Say, sections: tuple[str, ...] = SECTIONS) -> None:
    """Download what the cache lacks of the commits that settings are bound to. Blocks.

    Args:
        settings: from `bind_revisions`.
        say: gets a line for people.
        sections: leave out the others.

    Raises:
        SettingsError: the repository holds no such model or data set, or it may not be read. The data set has no such
            configuration or split, or cannot be read.
        PenstockError: the hub cannot be asked, or there is no room on the disk.
    """
    for each in hub_names(settings):
        if each.section in sections:
            download(each.repository, each.revision, each.config, each.setting, say)
            if each.section != MODEL_SECTION:  # what it cannot read, the feeder could not
                _try_to_open(each)


def _try_to_open(which: HubName) -> None:
    table = DataSettings(
        path=which.repository.name,
        config=which.config,
        split=which.split,
        revision=str(which.revision),
        prompt="",
    )
    try:
        open_source(table)
    except DataError as error:
        if met_full_disk(error):  # `datasets` writes its own form of the files
            raise explain(error, which.repository, which.revision, which.setting) from error
        raise SettingsError(f"{which.setting}.path = {error}") from error


def resolve_names(
    settings: Settings, known: Mapping[str, str], say: Say, sections: tuple[str, ...] = SECTIONS
) -> Settings:
    """Bind and download all names on a hub, as `bind_revisions` and `download_names` do one after the other. Blocks."""
    settings = bind_revisions(settings, known, say, sections)
    download_names(settings, say, sections)
    return settings


def try_to_resolve(settings: Settings, known: Mapping[str, str], say: Say) -> tuple[Settings, dict[str, PenstockError]]:
    """Bind and download all names on a hub. Returns the errors, each with its section, instead of raising. Blocks."""
    errors: dict[str, PenstockError] = {}
    for section in SECTIONS:
        of_section = {key: value for key, value in known.items() if key.startswith(f"{section}.")}
        try:
            settings = resolve_names(settings, of_section, say, (section,))
        except PenstockError as error:
            errors[section] = error
    return settings, errors


def print_note(line: str) -> None:
    """Print a line to stderr, for a command that has no display of its own."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201


def revision_overrides(settings: Settings) -> tuple[str, ...]:
    """Return overrides, as `--set` takes them, with which a settings file gives the same revisions."""
    found: dict[str, Any] = {}
    for each in hub_names(settings):
        if each.index >= 0:
            found["data.sets"] = msgspec.to_builtins(settings.data.sets)
        else:
            found[f"{each.section}.revision"] = str(each.revision)
    return write_overrides(found)


def find_model(path: str, say: Callable[[str], None]) -> Path:
    """Return the folder of a model that a command names as a folder, or as `owner/name` or `owner/name@REVISION`.

    Downloads what the cache lacks. Blocks.

    Raises:
        PenstockError: as `resolve_names`.
    """
    name, _, text = path.partition("@")
    if Path(path).exists() or not is_hub_name(name):
        return Path(path)
    repository, revision = Repository("model", name), parse_revision(text)
    if not revision.commit:
        revision = Revision(revision.name, look_up(repository, revision, "", say))
    return download(repository, revision, "", "", say)
