"""Object storage behind a URL. Every call blocks; threads may share a bucket."""

import os
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar

from stream.errors import DamagedObjectError, SettingsError, StorageError

T = TypeVar("T")

_TIMEOUT_S: Final = 120
"""For one request, which transfers at most a part."""
_RETRY_TIMEOUT_S: Final = 30
_S3_REASON: Final = re.compile(r"<Code>(\w{1,100})</Code>\s*<Message>([^<]{0,300})")
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
"""Environment variables with the address of an S3-compatible server."""


class Bucket:
    """All objects below a URL. Credentials come from the environment, as the provider's own tools read them.

    Args:
        url: `s3://BUCKET/PREFIX`, `gs://..`, `az://..`, or `file:///FOLDER`.

    Raises:
        SettingsError: the URL is invalid, or the extra `storage` is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        if why := _misread_part(url):
            raise SettingsError(f"storage.url = {url!r}: {why}")
        try:
            from obstore.store import LocalStore, from_url
        except ImportError as error:
            raise SettingsError(
                "storage.url needs the library obstore, which is not installed: pip install 'penstock[storage]'"
            ) from error
        endpoint = next(filter(None, map(os.environ.get, _ENDPOINTS)), "")
        retry: Any = {"max_retries": 3, "retry_timeout": timedelta(seconds=_RETRY_TIMEOUT_S)}
        client: Any = {"timeout": f"{_TIMEOUT_S}s", "connect_timeout": "10s"}
        if endpoint.startswith("http://"):
            client["allow_http"] = True
        try:
            self._store: Any
            if self.url.startswith("file://"):
                self._store = LocalStore.from_url(self.url, mkdir=True)
            else:
                self._store = from_url(self.url, client_options=client, retry_config=retry)
        except Exception as error:  # the library raises several kinds
            raise SettingsError(f"storage.url = {url!r}: {_first_line(error)}") from error

    def put(self, key: str, content: bytes) -> None:
        """Write an object."""
        import obstore

        self._call("write", key, lambda: obstore.put(self._store, key, content))

    def get(self, key: str) -> bytes:
        """Read an object."""
        import obstore

        return self._call("read", key, lambda: bytes(obstore.get(self._store, key).bytes()))

    def list_sizes(self, prefix: str) -> dict[str, int]:
        """Return the size in bytes of each object below a prefix, by key, sorted."""
        import obstore

        return self._call(
            "list",
            prefix,
            lambda: dict(
                sorted((each["path"], each["size"]) for page in obstore.list(self._store, prefix) for each in page)
            ),
        )

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that do not exist do not matter."""
        import obstore

        for key in keys:
            self._call("delete", key, partial(_delete, obstore, self._store, key))

    def _call(self, verb: str, key: str, call: Callable[[], T]) -> T:
        """Make a call.

        Raises:
            DamagedObjectError: storage lacks the object.
            StorageError: storage does not answer, or refuses us.
        """
        try:
            return call()
        except FileNotFoundError as error:
            raise DamagedObjectError(f"{self.url}: {key} does not exist: {_first_line(error)}") from error
        except Exception as error:  # the library's errors have no useful common base class
            raise StorageError(
                f"{self.url}: could not {verb} {key}: {_first_line(error)}; check storage.url, the network, and the "
                "credentials in the environment (for S3 AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL)"
            ) from error


def _misread_part(url: str) -> str:
    """Return what is wrong with a URL whose copy would be elsewhere, or lost; empty: nothing."""
    if url.startswith("memory:"):
        return "what is in memory is lost with the trainer; name object storage or a folder"
    if found := next((mark for mark in "?#" if mark in url), ""):
        return f"what follows {found} would be left out, the run's name too; write %{ord(found):X}"
    return ""


def _delete(obstore: Any, store: Any, key: str) -> None:
    try:
        obstore.delete(store, key)
    except FileNotFoundError:  # a folder, unlike a bucket, reports it
        return


def _first_line(error: Exception) -> str:
    """Return the first line of an error, and the reason that an S3 server gives in the lines behind it."""
    text = str(error).strip() or type(error).__name__
    reason = _S3_REASON.search(text)
    line = text.splitlines()[0][:300]
    return f"{line.partition(': <?xml')[0]}: {reason[1]}: {reason[2]}" if reason else line
