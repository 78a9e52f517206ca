"""Downloads a settings file, for roles on machines that have none."""

from http.client import HTTPException
from pathlib import Path
from typing import Final, TypeGuard
from urllib.error import HTTPError

from stream.errors import SettingsError

_TIMEOUT_S: Final = 30.0
_MAX_BYTES: Final = 1_000_000


def is_url(source: Path | str) -> TypeGuard[str]:
    """Return whether a settings file is to be downloaded."""
    return isinstance(source, str) and source.startswith(("http://", "https://"))


def display_source(source: Path | str) -> str:
    """Return a file's path, or a URL without password and query, which may hold a key."""
    if not is_url(source):
        return str(source)
    from stream.connection.address import redact_url  # loads redis

    return redact_url(source)


def download_text(url: str) -> str:
    """Download a settings file. Blocks.

    Raises:
        SettingsError: there is no such file, or nothing answers.
    """
    import urllib.request  # takes as long as all settings

    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:  # noqa: S310  (`is_url` allows HTTP alone)
            content: bytes = answer.read(_MAX_BYTES + 1)
    except (OSError, HTTPException, ValueError) as error:
        if isinstance(error, HTTPError):
            error.close()
        raise SettingsError(
            f"{display_source(url)}: the settings could not be downloaded: {error}; check the URL, or give a local file"
        ) from error
    if len(content) > _MAX_BYTES:
        raise SettingsError(f"{display_source(url)}: more than {_MAX_BYTES:,} bytes, so it is no settings file")
    return content.decode(errors="replace")
