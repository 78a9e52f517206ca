"""Settings as a TOML file: read, overridden with `--set a.b=c`, checked, written.

The supervisor writes the resolved settings to the run's folder, so that `penstock run runs/NAME/run.toml` resumes the
run.
"""

import re
import tomllib
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

import msgspec
import tomli_w

from stream.errors import SettingsError
from workers.settings.algorithm import Rejection
from workers.settings.cross_checks import check_combinations
from workers.settings.data import DatasetSettings, EnvironmentSettings, RewardSettings
from workers.settings.section import Section
from workers.settings.settings import Settings, sections

_NESTED_TABLES: Final[dict[str, type[Section]]] = {"reject": Rejection, "mix": DatasetSettings}
"""Tables within tables, by their last name."""


def load_settings(path: Path, overrides: tuple[str, ...] = ()) -> Settings:
    """Read a TOML file and apply overrides such as `train.learning_rate=0`.

    Raises:
        SettingsError: names the key, what is wrong with it, and what is allowed.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SettingsError(f"{path}: no such file") from error
    except PermissionError as error:
        raise SettingsError(f"{path}: it is for another user to read") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not TOML: {error}") from error
    for override in overrides:
        _apply_override(table, override)
    return parse_settings(table, str(path))


def settings_for_model(folder: Path, overrides: tuple[str, ...] = ()) -> Settings:
    """The settings of a model folder that is served by itself: all defaults, but for the overrides.

    Raises:
        SettingsError: as `load`.
    """
    table: dict[str, Any] = {"model": {"path": str(folder)}, "data": {"path": ""}}
    for override in overrides:
        _apply_override(table, override)
    return _convert(table, str(folder))  # there is no run whose keys could be at odds


def parse_settings(table: dict[str, Any], source: str = "settings") -> Settings:
    """Check a table of settings.

    Raises:
        SettingsError: names the key, what is wrong with it, and what is allowed.
    """
    settings = _convert(table, source)
    check_combinations(settings, source)
    return settings


def _convert(table: dict[str, Any], source: str) -> Settings:
    try:
        return msgspec.convert(table, Settings, str_keys=True)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{source}: {_explain(str(error), table)}") from error


def parse_rewards(table: dict[str, Any], source: str) -> tuple[RewardSettings, ...]:
    """The reward functions of a table of settings, which may be a whole file or `[[rewards]]` alone.

    Raises:
        SettingsError: there are none, or a key is wrong.
    """
    if unknown := sorted(table.keys() - set(Settings.__struct_fields__)):
        raise SettingsError(f"{source}: unknown key {unknown[0]}; [[rewards]] is read from there")
    if not table.get("rewards"):
        raise SettingsError(f"{source}: it has no [[rewards]], so there is nothing to score with")
    try:
        return msgspec.convert(table["rewards"], tuple[RewardSettings, ...])
    except msgspec.ValidationError as error:
        raise SettingsError(f"{source}: rewards: {error}") from error


def dump_settings(settings: Settings) -> str:
    """The settings as TOML that `load` reads back equal."""
    return tomli_w.dumps(msgspec.to_builtins(settings, str_keys=True))


def _apply_override(table: dict[str, Any], override: str) -> None:
    """Set one dotted key; the value is TOML, or a bare string."""
    dotted, equals, text = override.partition("=")
    if not equals:
        raise SettingsError(f"--set {override}: write it as section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, key = dotted.strip().split(".")
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise SettingsError(f"--set {override}: {parent} is not a table")
    table[key] = value


def _explain(message: str, table: dict[str, Any]) -> str:
    """Turn msgspec's message into one that names the key as it stands in the file, and the allowed ones."""
    text, _, where = message.partition(" - at `$")
    path = (
        where.rstrip("`").lstrip(".").replace("environments[...]", f"environments.{_first_invalid_environment(table)}")
    )
    if "unknown field" in text:
        unknown = text.rsplit("`", 2)[1]
        allowed = ", ".join(_allowed_keys(re.sub(r"\[.*?\]", "", path), table))
        return f"unknown key {'.'.join(filter(None, [path, unknown]))}; allowed there: {allowed}"
    section = path.partition(".")[0]
    if len(kinds := sections().get(section, [])) > 1 and ("Invalid value" in text or "missing" in text):
        names = ", ".join(str(kind.__struct_config__.tag) for kind in kinds)
        return f"{section}.name: {text[:1].lower()}{text[1:]}; use one of {names}"
    choices = _allowed_values(path) if "enum value" in text else ""
    return f"{path or 'settings'}: {text[:1].lower()}{text[1:]}{choices}"


def _allowed_values(path: str) -> str:
    """What a key may be, where that is one of several words."""
    section, _, key = re.sub(r"\[.*?\]", "", path).partition(".")
    for kind in sections().get(section, []):
        words = get_args(get_type_hints(kind).get(key))
        if words and all(isinstance(word, str) for word in words):
            return "; use one of " + ", ".join(repr(word) for word in words)
    return ""


def _first_invalid_environment(table: dict[str, Any]) -> str:
    """The first of `[environments]` that is neither a reference nor a table for one; msgspec does not name it."""
    environments = table.get("environments")
    for name, environment in environments.items() if isinstance(environments, dict) else ():
        try:
            msgspec.convert(environment, str | EnvironmentSettings)
        except msgspec.ValidationError:
            return str(name)
    return "[...]"


def _allowed_keys(path: str, table: dict[str, Any]) -> list[str]:
    """Keys of the table at this path; of one that picks a function, that function's."""
    if not path:
        return list(Settings.__struct_fields__)
    section, _, inner = path.partition(".")
    kinds = sections()[section]
    if section == "environments":
        return list(EnvironmentSettings.__struct_fields__)
    if inner in _NESTED_TABLES:
        return list(_NESTED_TABLES[inner].__struct_fields__)
    if len(kinds) == 1:
        return list(kinds[0].__struct_fields__)
    chosen = next(kind for kind in kinds if kind.__struct_config__.tag == table[section]["name"])
    return ["name", *chosen.__struct_fields__]
