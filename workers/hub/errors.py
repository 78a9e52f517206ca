"""Errors of a hub in one line: what was asked for, what went wrong, and the remedy. No message has a token in it."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from stream.connection.address import redact_url
from stream.disk_space import no_room
from stream.errors import PenstockError, SettingsError
from stream.wording import cut
from workers.datasets.tables import explain_unread
from workers.settings.hub import Repository, Revision

FAULTS_OF_OURS: Final = (AttributeError, NameError, TypeError)
"""Errors that no hub causes; each of the libraries raises classes of its own for what it meets on the way."""
_NETWORK_LIBRARIES: Final = ("httpx", "httpx2", "httpcore", "requests", "urllib3")
_MAX_CHARACTERS: Final = 200
_WRONG_SIZE: Final = re.compile(r"should be of size (\d+) but has size (\d+)")
_PROXY_WANTS_PASSWORD: Final = 407


def explain(error: Exception, repository: Repository, revision: Revision, setting: str) -> PenstockError:
    """Return an error of `huggingface_hub` or `datasets` in one line.

    Args:
        error: what was raised.
        repository: what was asked for.
        revision: of it.
        setting: the table that names it; empty: a command does.
    """
    from huggingface_hub import errors

    chain = list(_causes(error))
    status = next((code for each in chain if (code := _status(each))), 0)
    if any(isinstance(each, errors.GatedRepoError) for each in chain):
        return SettingsError(_gated(repository, status))
    if any(isinstance(each, errors.RepositoryNotFoundError | errors.HFValidationError) for each in chain):
        return SettingsError(_unknown(repository, setting))
    if any(isinstance(each, errors.RevisionNotFoundError) for each in chain):
        place = f"{setting}.revision" if setting else "revision"
        return SettingsError(
            f"{place} = {revision.name!r}: {repository.name} has no such branch, tag or commit on {_endpoint()}; set "
            "one that its page lists, or leave it out for main"
        )
    if status in (401, 403):
        return SettingsError(
            f"{_place()} refuses access to {repository} (HTTP {status}): {_token()}, with the right to read it"
        )
    if met_full_disk(error):
        return PenstockError(
            f"no room on the disk for {repository}, which is downloaded to {_cache()}; make room, or set HF_HOME to a "
            "folder on another disk. What is complete is kept"
        )
    if any(isinstance(each, errors.OfflineModeIsEnabled) for each in chain):
        return PenstockError(
            f"HF_HUB_OFFLINE is set, and {_cache()} lacks files of {repository} at {revision.short}: unset it, or copy "
            f"that folder from a machine that has them{_both(setting, revision)}"
        )
    if any(type(each).__module__.startswith("datasets") for each in chain) or _is_of_config(error):
        return SettingsError(f"{f'{setting}.path = ' if setting else ''}{repository.name}: {explain_unread(error)}")
    return PenstockError(f"{_unanswered(chain, repository, status)}{_both(setting, revision)}")


def met_full_disk(error: BaseException) -> bool:
    """Return whether an error, or one behind it, says that a disk has no room."""
    return any(map(no_room, _causes(error)))


def is_unreachable(error: BaseException) -> bool:
    """Return whether an error says that a hub could not be asked, not that it refused."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    chain = list(_causes(error))
    status = next((code for each in chain if (code := _status(each))), 0)
    return status >= 500 or (
        not status and any(isinstance(each, OfflineModeIsEnabled) or _is_of_network(each) for each in chain)
    )


def _gated(repository: Repository, status: int) -> str:
    page = f"{_endpoint()}/{'datasets/' if repository.kind == 'dataset' else ''}{repository.name}"
    if status == 403:
        return f"{repository} is gated, and the account of this token may not read it: ask for access at {page}"
    return f"{repository} is gated: accept its conditions at {page}, and {_token()}"


def _unknown(repository: Repository, setting: str) -> str:
    place = f"{setting}.path = " if setting else ""
    return (
        f"{place}{repository.name!r}: there is no such file or folder in {Path.cwd()}, and {_endpoint()} has no "
        f"{repository} that may be read; correct the name, or, if it is private, {_token()}"
    )


def _unanswered(chain: list[BaseException], repository: Repository, status: int) -> str:
    """Return why an answer is missing or unusable, and what to do."""
    if status == 429:
        return f"{_endpoint()} has had too many requests from here (HTTP 429): wait some minutes, or {_token()}"
    if status == _PROXY_WANTS_PASSWORD:
        return (
            f"{_place()}: the proxy wants a user and a password (HTTP 407) for {repository}: set HTTPS_PROXY, or "
            "HTTP_PROXY, to http://USER:PASSWORD@HOST:PORT"
        )
    if status >= 500:
        return f"{_place()} answered with HTTP {status} for {repository}: try again later; what is complete is kept"
    if status:
        return f"{_place()} answered with HTTP {status} for {repository}: check HF_ENDPOINT"
    network = [each for each in chain if _is_of_network(each)]
    if network:
        return (
            f"{repository} could not be downloaded from {_place()} ({_in_short(network[-1])}): check the network, "
            "HTTPS_PROXY and HF_ENDPOINT, and start again; what is complete is kept"
        )
    if match := next((found for each in chain if (found := _WRONG_SIZE.search(str(each)))), None):
        return damaged(f"a file of {repository}", f"it has {match[2]} bytes instead of {match[1]}")
    if answer := next((each for each in chain if isinstance(each, json.JSONDecodeError)), None):
        return (
            f"{_place()} gave an answer for {repository} that is no JSON ({answer}): check that HF_ENDPOINT names a "
            "hub, and that no proxy or login page answers in its place"
        )
    return (
        f"{repository} could not be downloaded from {_place()}: {_in_short(chain[-1])}. Start again; if it stays, "
        "check that HF_ENDPOINT names a hub"
    )


def damaged(what: str, why: str) -> str:
    """Return a message about a file that came with another content than the hub names for it."""
    return (
        f"{what} came damaged from {_place()} and was thrown away: {why}. Start again; if it stays, HF_ENDPOINT or a "
        "proxy sends other files than the hub has"
    )


def _in_short(error: BaseException) -> str:
    """Return an error's type and text in one line, without the token."""
    why = " ".join(f"{type(error).__name__}: {error}".split())
    if token := os.environ.get("HF_TOKEN"):
        why = why.replace(token, "(hidden)")
    return cut(why, _MAX_CHARACTERS)


def _both(setting: str, revision: Revision) -> str:
    """Return the other possibility: a name whose commit is unknown may have been meant as a folder."""
    is_unknown = setting and not revision.commit
    return f". If {setting}.path was meant as a folder: there is none in {Path.cwd()}" if is_unknown else ""


def _token() -> str:
    """Return how to give a token, or another one."""
    has_one = bool(os.environ.get("HF_TOKEN"))
    return "set HF_TOKEN to the token of an account that may" if has_one else "set HF_TOKEN, or `hf auth login`"


def _endpoint() -> str:
    from huggingface_hub.constants import ENDPOINT

    return redact_url(ENDPOINT) if "://" in ENDPOINT else "HF_ENDPOINT"


def _place() -> str:
    """Return the hub's address with that of the proxy through which it is asked, without its user and password."""
    from huggingface_hub.constants import ENDPOINT

    parts, proxies = urlsplit(ENDPOINT), getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all", "")
    if not proxy or proxy_bypass(parts.netloc):
        return _endpoint()
    return f"{_endpoint()} through the proxy {redact_url(proxy if '://' in proxy else f'http://{proxy}')}"


def _cache() -> str:
    from huggingface_hub.constants import HF_HUB_CACHE

    return str(HF_HUB_CACHE)


def _status(error: BaseException) -> int:
    response: Any = getattr(error, "response", None)
    return int(getattr(response, "status_code", 0) or 0)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those behind it, outermost first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_of_network(error: BaseException) -> bool:
    library = type(error).__module__.partition(".")[0]
    return (library in _NETWORK_LIBRARIES and not _status(error)) or isinstance(error, ConnectionError | TimeoutError)


def _is_of_config(error: Exception) -> bool:
    return isinstance(error, ValueError) and "onfig" in str(error)
