"""Settings as a TOML file: read, overridden with `--set a.b=c`, checked, written.

The supervisor writes the resolved settings to the run's folder, so that `penstock run runs/NAME/run.toml` resumes the
run.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from stream.errors import SettingsError
from workers.settings import RewardFunction, Settings


def load(path: Path, overrides: tuple[str, ...] = ()) -> Settings:
    """Read a TOML file and apply overrides such as `train.learning_rate=0`.

    Raises:
        SettingsError: names the key, what is wrong with it, and what is allowed.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SettingsError(f"{path}: no such file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not TOML: {error}") from error
    for override in overrides:
        _apply(table, override)
    return parse(table, str(path))


def parse(table: dict[str, Any], source: str = "settings") -> Settings:
    """Check a table of settings.

    Raises:
        SettingsError: names the key, what is wrong with it, and what is allowed.
    """
    try:
        settings = msgspec.convert(table, Settings)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{source}: {_explain(str(error))}") from error
    _check_combinations(settings, source)
    return settings


def dump(settings: Settings) -> str:
    """The settings as TOML that `load` reads back equal."""
    return tomli_w.dumps(msgspec.to_builtins(settings))


def _check_combinations(settings: Settings, source: str) -> None:
    """Refuse what is possible key by key, but not together."""
    if not settings.environments and not settings.rewards:
        raise SettingsError(
            f"{source}: neither [environments] nor [[rewards]] is set, so nothing would measure a reward; add one"
        )
    if settings.rollout.max_tokens_per_turn > settings.rollout.max_tokens:
        raise SettingsError(
            f"{source}: rollout.max_tokens_per_turn ({settings.rollout.max_tokens_per_turn}) is more than "
            f"rollout.max_tokens ({settings.rollout.max_tokens}); lower the first or raise the second"
        )
    if settings.rollout.temperature == 0 and settings.train.learning_rate > 0:
        raise SettingsError(
            f"{source}: rollout.temperature is 0, so all completions of a group are equal and nothing can be learned "
            "while train.learning_rate is above 0; raise the first or set the second to 0"
        )
    if settings.min_valid_rows > settings.rollout.group_size:
        raise SettingsError(
            f"{source}: algorithm.min_valid_rows ({settings.min_valid_rows}, at least 2 unless set) is more than "
            f"rollout.group_size ({settings.rollout.group_size}), so every group would be dropped; lower the first or "
            "raise the second"
        )
    if "penalty" in settings.algorithm.truncation.values():
        raise SettingsError(
            f"{source}: algorithm.truncation: 'penalty' (overlong shaping) is not part of this version; "
            "use exclude, keep, zero_reward or baseline_only"
        )


def _apply(table: dict[str, Any], override: str) -> None:
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


def _explain(message: str) -> str:
    """Turn msgspec's message into one that names the key as it stands in the file, and the allowed ones."""
    text, _, where = message.partition(" - at `$")
    path = where.rstrip("`").lstrip(".")
    if "unknown field" in text:
        unknown = text.rsplit("`", 2)[1]
        kind = Settings
        for name in filter(None, re.sub(r"\[.*?\]", "", path).split(".")):
            found = {f.name: f.type for f in msgspec.structs.fields(kind)}.get(name)
            kind = RewardFunction if name == "rewards" else found  # type: ignore[assignment]
        allowed = ", ".join(f.name for f in msgspec.structs.fields(kind))
        return f"unknown key {'.'.join(filter(None, [path, unknown]))}; allowed there: {allowed}"
    return f"{path or 'settings'}: {text[:1].lower()}{text[1:]}"
