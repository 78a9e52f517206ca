"""Options and arguments that several commands use, and what their texts mean."""

import json as json_format
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from workers.check.scripted import Call

FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)


class _FileOrUrl(click.Path):
    """An existing file, or the URL of one (`http`, `https`), which stays a string."""

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> Path | str:
        if isinstance(value, str) and value.startswith(("http://", "https://")):
            return value
        return Path(super().convert(value, param, ctx))  # type: ignore[arg-type]


FILE_OR_URL: Final = _FileOrUrl(exists=True, dir_okay=False)


class _ModelOrPath(click.Path):
    """An existing file or folder, or the name of a model on the hub: `owner/name`, `owner/name@REVISION`."""

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> Path | str:
        from workers.settings.hub import is_hub_name

        if not Path(value).exists() and is_hub_name(str(value).partition("@")[0]):
            return Path(value)
        return Path(super().convert(value, param, ctx))  # type: ignore[arg-type]


MODEL_OR_PATH: Final = _ModelOrPath(exists=True)

run = click.argument("target", metavar="[RUN]", required=False)
redis = click.option(
    "--redis",
    default="",
    metavar="URL",
    help="URL of the run's Redis server, if its folder does not name it; default: $PENSTOCK_REDIS.",
)
overrides = click.option(
    "overrides", "--set", multiple=True, metavar="a.b=c", help="Override a setting; may be repeated."
)
json = click.option("as_json", "--json", is_flag=True, help="Print JSON for programs.")


def parse_pairs(texts: Iterable[str], option: str) -> dict[str, Any]:
    """Return values by name, from `name=value` texts; a value that is JSON is decoded.

    Raises:
        UsageError: a text is not of that form.
    """
    return dict(_parse_pair(text, option) for text in texts)


def _parse_pair(text: str, option: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.UsageError(f"{option} {text}: write it as name=value")
    try:
        return name, json_format.loads(value)
    except ValueError:
        return name, value


def parse_call(text: str) -> "Call":
    """Return the call that `--call NAME={"argument": value}` names; `--call NAME` has no arguments.

    Raises:
        UsageError: the arguments are no JSON object.
    """
    from workers.check.scripted import Call

    name, equals, arguments = text.partition("=")
    try:
        decoded = json_format.loads(arguments) if equals else {}
    except ValueError as error:
        raise click.UsageError(f"--call {text}: the arguments are not JSON: {error}") from error
    if not name or not isinstance(decoded, dict):
        raise click.UsageError(f'--call {text}: write it as NAME={{"argument": value}}')
    return Call(name, decoded)
