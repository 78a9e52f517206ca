"""Options and arguments that several commands use."""

import os
from pathlib import Path
from typing import Final

import click

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
PATH: Final = click.Path(exists=True, path_type=Path)
"""An existing file or folder."""

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
