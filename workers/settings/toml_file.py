"""The settings file: read it, apply `--set a.b=c`, check it, write it.

The supervisor writes the resolved settings to the run's folder, so `penstock run runs/NAME/run.toml` resumes the run.
Roles on machines without the file download it.
"""

import functools
import re
import tomllib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from enum import EnumType
from pathlib import Path, PurePath
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Literal, TypeGuard, get_args, get_origin, get_type_hints
from urllib.parse import unquote, urlsplit

import msgspec
import tomli_w

from stream.connection.address import redact_url
from stream.errors import SettingsError
from workers.settings.cross_checks import RUN_CHECKS, Check, check_combinations
from workers.settings.data import DatasetSettings, EnvironmentSettings, RewardSettings
from workers.settings.estimator_options import Grpo
from workers.settings.loss_options import Clipped
from workers.settings.rollout import SamplingSettings
from workers.settings.section import LARGEST, Section
from workers.settings.settings import Settings, sections

if TYPE_CHECKING:
    from urllib.request import Request


_NESTED_TABLES: Final[dict[str, type[Section]]] = {"sampling": SamplingSettings, "sets": DatasetSettings}
"""Tables inside tables, by key."""
_SHORT_FLOAT: Final = re.compile(r"[+-]?(\.\d+|\d+\.)(e[+-]?\d+)?")
"""`.3` and `3.`, which TOML does not know."""
_MAX_INTEGER: Final = 2**63 - 1
_SECRET_NAMES: Final = frozenset(
    {"key", "apikey", "token", "secret", "password", "passwd", "auth", "authorization", "credentials", "cookie"}
)
"""Words of a key whose value no screen shows."""
DEFAULT_OPTIONS: Final[dict[str, type[Section]]] = {"estimator": Grpo, "loss": Clipped}
"""Tables whose `name` may be left out."""


def load_settings(
    source: Path | str, overrides: tuple[str, ...] = (), checks: Sequence[Check] = RUN_CHECKS
) -> Settings:
    """Read a settings file and apply overrides such as `train.learning_rate=0`. Blocks.

    Args:
        source: a file; or a URL that begins with `http://` or `https://`.
        overrides: values of single settings.
        checks: combinations of keys to check. An engine passes `ENGINE_CHECKS`, since it also serves settings that no
            run could train with, such as those of a single episode.

    Raises:
        SettingsError: names the key, what is wrong with it, and what is allowed.
    """
    name = display_source(source)
    try:
        text = download_text(source) if is_url(source) else Path(source).read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise SettingsError(f"{name}: no such file") from error
    except PermissionError as error:
        raise SettingsError(f"{name}: permission denied: only another user may read it") from error
    except OSError as error:
        raise SettingsError(f"{name}: {error.strerror}; name a settings file") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{name}: not TOML: {error}") from error
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits is no TOMLDecodeError
        raise SettingsError(f"{name}: not TOML: {error}{_toml_hint(text, error)}") from error
    for override in overrides:
        _apply_override(table, override)
    settings = _convert(table, name)
    check_combinations(settings, name, checks)
    return settings


def settings_for_model(folder: Path, overrides: tuple[str, ...] = ()) -> Settings:
    """Return settings to serve a model folder without a run: defaults and the overrides.

    Raises:
        SettingsError: as `load_settings`.
    """
    table: dict[str, Any] = {"model": {"path": str(folder)}, "data": {"path": ""}}
    for override in overrides:
        _apply_override(table, override)
    return _convert(table, str(folder))  # no cross-checks: there is no run


def parse_settings(table: dict[str, Any], source: str = "settings") -> Settings:
    """Convert and check a table of settings.

    Raises:
        SettingsError: names the key, what is wrong with it, and what is allowed.
    """
    settings = _convert(table, source)
    check_combinations(settings, source)
    return settings


def parse_rewards(table: dict[str, Any], source: str) -> tuple[RewardSettings, ...]:
    """Return the reward functions of a settings file, or of a file that holds only `[[rewards]]`.

    Raises:
        SettingsError: there are none, or a key is wrong.
    """
    if unknown := sorted(table.keys() - set(Settings.__struct_fields__)):
        raise SettingsError(f"{source}: unknown key {unknown[0]}; only [[rewards]] is read")
    if not table.get("rewards"):
        raise SettingsError(f"{source}: no [[rewards]], so there is nothing to score with")
    try:
        return msgspec.convert(table["rewards"], tuple[RewardSettings, ...])
    except msgspec.ValidationError as error:
        raise SettingsError(f"{source}: {_explain(str(error).replace('`$', '`$.rewards'), table)}") from error


def dump_settings(settings: Settings) -> str:
    """Return the settings as TOML; `load_settings` reads an equal value back."""
    return tomli_w.dumps(msgspec.to_builtins(settings, str_keys=True, builtin_types=(datetime, date, time)))


def dump_redacted(settings: Settings) -> str:
    """Return the settings as TOML for a screen.

    URLs are without user, password and options; other secrets are known by the names of their keys.
    """
    return tomli_w.dumps(_redact(tomllib.loads(dump_settings(settings))))


def _redact(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _redact(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [_redact(each, name) for each in value]
    if not isinstance(value, str) or not value:
        return value
    if _SECRET_NAMES.intersection(re.split(r"[^a-z0-9]+", name.lower())):
        return "(hidden)"
    return redact_url(value) if "://" in value else value


def _convert(table: dict[str, Any], source: str) -> Settings:
    for name in DEFAULT_OPTIONS:  # options without a name are those of the default
        if isinstance(options := table.get(name), dict) and "name" not in options:
            table = {**table, name: {"name": DEFAULT_OPTIONS[name].__struct_config__.tag, **options}}
    if (path := _find_long_integer(table)) is not None:
        raise SettingsError(f"{source}: {path} is an integer of more than 64 bits; write a smaller one")
    try:
        return msgspec.convert(table, Settings, str_keys=True)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{source}: {_explain(str(error), table)}") from error


def _find_long_integer(value: Any, path: str = "") -> str | None:
    """Return the path of an integer that TOML does not have; None without one."""
    if isinstance(value, int):
        return path if abs(value) > _MAX_INTEGER else None
    pairs: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        pairs = [(f"{path}.{key}".lstrip("."), each) for key, each in value.items()]
    elif isinstance(value, list):
        pairs = [(f"{path}[{index}]", each) for index, each in enumerate(value)]
    return next(filter(None, (_find_long_integer(each, inner) for inner, each in pairs)), None)


def _toml_hint(text: str, error: Exception) -> str:
    """Return the likely cause of a syntax error, or nothing."""
    if text.lstrip().startswith("<"):
        return "; it is a web page, perhaps one that asks to log in"
    return "; text is written in quotes" if str(error).startswith("Invalid value") else ""


def write_overrides(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return values of single settings in the form of `--set`; a path is written as its text.

    Raises:
        SettingsError: a value cannot be written in TOML.
    """
    return tuple(f"{key}={_toml_value(key, value)}" for key, value in values.items())


def _toml_value(key: str, value: Any) -> str:
    """Return a value in TOML, a table in braces however long it is."""
    try:  # inside two lists, since a list of long tables would become `[[v]]`
        text = tomli_w.dumps({"v": [[str(value) if isinstance(value, PurePath) else value]]})
    except TypeError as error:
        what = "a value is a text, a number, true or false, a list or a table"
        raise SettingsError(f"overrides: {key}: {error}; {what}") from error
    for _ in range(2):
        text = text[text.index("[") + 1 : text.rindex("]")].strip(" ,\n")
    return text


def _apply_override(table: dict[str, Any], override: str) -> None:
    """Set one dotted key; the value is TOML or a bare string."""
    dotted, equals, text = override.partition("=")
    if not equals:
        raise SettingsError(f"--set {override}: write it as section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = float(text) if _SHORT_FLOAT.fullmatch(text) else text
    *parents, key = dotted.strip().split(".")
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise SettingsError(f"--set {override}: {parent} is not a table")
    table[key] = value


def _explain(message: str, table: dict[str, Any]) -> str:
    """Return msgspec's message with the key as it is written in the file, and the allowed keys or values."""
    message = message.replace(f">= {-LARGEST}", "that is finite").replace(f"<= {LARGEST}", "that is finite")
    text, _, where = message.replace(" - at `key` in `$", " - at `$").partition(" - at `$")
    environment = f"environments.{_first_invalid_environment(table)}"
    path = where.rstrip("`").lstrip(".").replace("environments[...]", environment)
    if "unknown field" in text:
        key = ".".join(filter(None, [re.sub(r"\[.*?\]", "", path), text.rsplit("`", 2)[1]]))
        shown = ".".join(filter(None, [path, text.rsplit("`", 2)[1]]))
        return f"unknown key {shown}; allowed there: {', '.join(_allowed_keys(key.rpartition('.')[0], table))}"
    section = path.partition(".")[0]
    if len(kinds := sections().get(section, [])) > 1 and ("Invalid value" in text or "missing" in text):
        names = ", ".join(str(kind.__struct_config__.tag) for kind in kinds)
        return f"{section}.name: {text[:1].lower()}{text[1:]}; use one of {names}"
    if "matching regex" in text:
        value = functools.reduce(lambda table, key: table.get(key, {}), path.split("."), table)
        return f"{path}: {value!r} is refused: write {_text_form(path)}"
    return f"{path or 'settings'}: {text[:1].lower()}{text[1:]}{_value_hint(text, path)}"


def _value_hint(text: str, path: str) -> str:
    """Return how to write a value of which msgspec says `text`, or nothing."""
    if "enum value" in text:
        return _allowed_values(path)
    if text.startswith("Expected `array`, got `object`"):
        return f"; write [[{path}]], with two brackets"
    return '; write a list, as in ["..."]' if text.startswith("Expected `array`, got `str`") else ""


def _text_form(path: str) -> str:
    """Return in words what the text of a key looks like: the description beside its pattern."""
    section, _, key = path.partition(".")
    accepted = get_type_hints(sections()[section][0], include_extras=True)[key]
    return str(next(meta.description for meta in accepted.__metadata__ if isinstance(meta, msgspec.Meta)))


def _allowed_values(path: str) -> str:
    """Return the words that a key accepts, if it accepts only words; of a table, its keys or values."""
    section, _, key = re.sub(r"\[.*?\]", "", path).partition(".")
    for kind in sections().get(section, []):
        accepted = get_type_hints(kind).get(key)
        if get_origin(accepted) is dict:
            accepted = get_args(accepted)["[...]" in path]
        words = tuple(map(str, accepted)) if isinstance(accepted, EnumType) else get_args(accepted)
        if len(words) == 2 and get_origin(words[0]) is Literal and words[1] is int:
            return f"; use {', '.join(map(repr, get_args(words[0])))} or an integer"
        if words and all(isinstance(word, str) for word in words):
            return "; use one of " + ", ".join(repr(word) for word in words)
    return ""


def _first_invalid_environment(table: dict[str, Any]) -> str:
    """Return the name of the first entry of `[environments]` that is invalid; msgspec's message does not have it."""
    environments = table.get("environments")
    for name, environment in environments.items() if isinstance(environments, dict) else ():
        try:
            msgspec.convert(environment, str | EnvironmentSettings)
        except msgspec.ValidationError:
            return str(name)
    return "[...]"


def _allowed_keys(path: str, table: dict[str, Any]) -> list[str]:
    """Return the keys of the table at this path; for `estimator` and `loss`, the options of the selected name."""
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


_TIMEOUT_S: Final = 30.0
_MAX_BYTES: Final = 1_000_000


def is_url(source: Path | str) -> TypeGuard[str]:
    """Return whether a settings file is to be downloaded."""
    return isinstance(source, str) and source.startswith(("http://", "https://"))


def display_source(source: Path | str) -> str:
    """Return a file's path, or a URL without password and query, which may hold a key."""
    if not is_url(source):
        return str(source)
    return redact_url(source)


def download_text(url: str) -> str:
    """Download a settings file. Blocks. User and password in the URL are sent as HTTP's basic authentication.

    Raises:
        SettingsError: there is no such file, nothing answers in time, or it is not text.
    """
    import urllib.request  # with what it needs, this takes as long as all settings
    from http.client import HTTPException, IncompleteRead
    from urllib.error import HTTPError

    content, deadline = b"", monotonic() + _TIMEOUT_S
    try:
        with urllib.request.urlopen(_request(url), timeout=_TIMEOUT_S) as answer:  # noqa: S310  (`is_url`: HTTP alone)
            while len(content) <= _MAX_BYTES and (part := answer.read1(_MAX_BYTES)):
                content += part
                if monotonic() > deadline:
                    raise TimeoutError(f"not complete after {_TIMEOUT_S:g} s")
            if answer.length and len(content) <= _MAX_BYTES:  # a part of settings may be valid settings
                raise IncompleteRead(content, answer.length)
    except (OSError, HTTPException, ValueError) as error:
        if isinstance(error, HTTPError):
            error.close()
        raise SettingsError(
            f"{display_source(url)}: the settings could not be downloaded: {error}; check the URL, or give a local file"
        ) from error
    if len(content) > _MAX_BYTES:
        raise SettingsError(f"{display_source(url)}: more than {_MAX_BYTES:,} bytes, so it is no settings file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:  # with other characters in its place a path would name another file
        raise SettingsError(f"{display_source(url)}: not TOML: {error}") from error


def _request(url: str) -> "Request":
    """Return the request for a URL; the library takes user and password for a part of the host."""
    from urllib.request import Request

    parts = urlsplit(url)
    try:
        _ = parts.port
    except ValueError:  # its text would show a part of the password
        raise ValueError("not a valid URL; escape / ? # in user and password with %") from None
    request = Request(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl())  # noqa: S310
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        request.add_unredirected_header("Authorization", f"Basic {b64encode(pair.encode()).decode()}")
    return request
