"""The libraries `huggingface_hub` and `datasets` in use: bounded requests, a remedy, progress in lines."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final, TypeVar

from stream.errors import SettingsError
from stream.wording import format_bytes
from workers.settings.hub import Repository

T = TypeVar("T")
Say = Callable[[str], None]
"""Shows a line to people."""

ANSWER_WITHIN_S = 30.0
"""Seconds without a byte after which a request has failed. The libraries set a limit for contents of files alone."""
_WAITS: Final = ("connect", "read", "write", "pool")
_LINE_EVERY_S: Final = 10.0
"""Seconds between two lines about a download where there is no terminal to draw a bar on."""


def say_nothing(_line: str) -> None:
    """Show nothing: no line, and no bar either."""


def import_library(repository: Repository, name: str, setting: str) -> Any:
    """Import a library that the hub needs.

    Raises:
        SettingsError: it is not installed.
    """
    try:
        return __import__(name)
    except ImportError as error:
        extra = "data" if name == "datasets" else "rollout"
        raise SettingsError(
            f"{setting + '.path = ' if setting else ''}{repository.name!r}: there is no such file or folder in "
            f"{Path.cwd()}; if it is the name of a {repository} on the hub, reading it needs {name}: "
            f"pip install 'penstock[{extra}]'"
        ) from error


@contextmanager
def library_calls() -> Iterator[None]:
    """Bound the libraries' requests, and leave out their messages, which name URLs and repeat what our lines say."""
    from huggingface_hub import get_session
    from huggingface_hub.utils import logging

    session, verbosity = get_session(), logging.get_verbosity()
    hooks = session.event_hooks
    logging.set_verbosity_error()
    session.event_hooks = {**hooks, "request": [*hooks["request"], _bound_waits]}
    try:
        yield
    finally:
        session.event_hooks = hooks
        logging.set_verbosity(verbosity)


def wait_for(call: Callable[[], T]) -> T:
    """Call a library in another thread, and return its result or raise its error.

    Ctrl-C ends this wait at once. In the caller's thread it would wait for the library's own threads, up to a minute
    where a request stalls.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001  (raised again in the caller's thread)
            result.set_exception(error)

    Thread(target=run, daemon=True, name="penstock download").start()
    return result.result()


def _bound_waits(request: Any) -> None:
    """Set the limits that a request of a library lacks."""
    limits = request.extensions.setdefault("timeout", {})
    limits.update({name: ANSWER_WITHIN_S for name in _WAITS if limits.get(name) is None})


@contextmanager
def show_progress(repository: Repository, missing: int, say: Say) -> Iterator[dict[str, Any]]:
    """Yield options of `snapshot_download`: it draws bars on a terminal; elsewhere a line says how far it is."""
    from huggingface_hub.utils import tqdm

    if sys.stderr.isatty() and say is not say_nothing:
        yield {}
        return

    class NoBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})

    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE).expanduser() / f"{repository.kind}s--{repository.name.replace('/', '--')}" / "blobs"
    done, before = Event(), _bytes_in(folder)

    def tell() -> None:
        while not done.wait(_LINE_EVERY_S):
            say(f"downloading {repository}: {format_bytes(_bytes_in(folder) - before)} of {format_bytes(missing)}")

    thread = Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield {"tqdm_class": NoBar}
    finally:
        done.set()
        thread.join()


def _bytes_in(folder: Path) -> int:
    found = 0
    for file in folder.glob("*"):
        try:
            found += file.stat().st_size
        except OSError:  # it got its final name meanwhile
            continue
    return found
