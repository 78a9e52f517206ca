"""Downloads a settings file, for roles on machines that have none."""

import time
from base64 import b64encode
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeGuard
from urllib.parse import unquote, urlsplit

from stream.connection.address import redact_url
from stream.errors import SettingsError

if TYPE_CHECKING:
    from urllib.request import Request

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

    content, deadline = b"", time.monotonic() + _TIMEOUT_S
    try:
        with urllib.request.urlopen(_request(url), timeout=_TIMEOUT_S) as answer:  # noqa: S310  (`is_url`: HTTP alone)
            while len(content) <= _MAX_BYTES and (part := answer.read1(_MAX_BYTES)):
                content += part
                if time.monotonic() > deadline:
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
