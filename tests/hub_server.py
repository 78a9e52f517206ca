"""A hub on this machine: the routes that `huggingface_hub` and `datasets` ask, over HTTP, with faults on demand.

::

    GET  /api/models/NAME/revision/REV[?blobs=true]     commit, files, sizes          also /api/datasets/...
    GET  /api/models/NAME/tree/REV?recursive=true       files with git and LFS ids
    POST /api/datasets/NAME/paths-info/REV              which of these paths exist
    HEAD /NAME/resolve/REV/FILE                         ETag, size, commit; of a large file where the storage has it
    GET  /NAME/resolve/REV/FILE                         content, or a redirect         also /datasets/NAME/resolve/...
    GET  STORAGE/SHA256                                 content, with ranges; another origin, without the token

These are the requests that huggingface_hub 2.4 and datasets 5.2 make when `HF_HUB_DISABLE_XET` is set. Like the real
one, the hub answers 401 with the code `RepoNotFound` for what does not exist, and `GatedRepo` for what is gated.
"""

import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = 100_000
"""Bytes from which a file is kept in the storage, as with Git LFS."""


@dataclass
class Request:
    """One request, as tests look at it."""

    method: str
    path: str
    token: str
    range: str


@dataclass
class Repo:
    """A repository: commits with their files, and the branches and tags that point to them."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    needs: str = ""
    """`gated`, `private` or `refused`; empty: everyone may read it."""
    token: str = ""
    """The token that may read it."""

    def commit(self, files: dict[str, bytes], *refs: str) -> str:
        """Add a commit and let branches or tags point to it. Returns its hash."""
        content = repr([(name, hashlib.sha1(data).hexdigest()) for name, data in sorted(files.items())])
        sha = hashlib.sha1(f"{len(self.commits)} {content}".encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.refs |= dict.fromkeys(refs, sha)
        return sha

    def find(self, revision: str) -> str | None:
        """Return the commit of a branch, a tag, a hash or the beginning of one."""
        known = [sha for sha in self.commits if sha.startswith(revision) and len(revision) >= 7]
        return self.refs.get(revision) or (known[0] if len(known) == 1 else None)


Fault = Callable[["_Handler"], bool]
"""Answers a request in its own way, or returns False to leave it to the hub."""


class Hub:
    """A running hub; see `run_hub`."""

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.requests: list[Request] = []
        self.faults: dict[str, Fault] = {}
        """Faults by a regular expression for `METHOD PATH`."""
        self.connections: list[socket.socket] = []
        self.port = 0
        self._servers: list[ThreadingHTTPServer] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def storage(self) -> str:
        return f"http://127.0.0.1:{self._servers[1].server_port}"

    def model(self, name: str, **options: Any) -> Repo:
        return self.repos.setdefault(("model", name), Repo(**options))

    def dataset(self, name: str, **options: Any) -> Repo:
        return self.repos.setdefault(("dataset", name), Repo(**options))

    def open(self) -> None:
        """Listen, at the same port as before."""
        self._servers = [self._serve(self.port), self._serve(0)]
        self.port = self._servers[0].server_port

    def close(self) -> None:
        """Refuse connections, and end those that there are."""
        for server in self._servers:
            server.shutdown()
            server.server_close()
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def blob(self, sha256: str) -> bytes | None:
        commits = [files for repo in self.repos.values() for files in repo.commits.values()]
        found = (data for files in commits for data in files.values() if hashlib.sha256(data).hexdigest() == sha256)
        return next(found, None)

    def _serve(self, port: int) -> ThreadingHTTPServer:
        server = ThreadingHTTPServer(("127.0.0.1", port), type("Handler", (_Handler,), {"hub": self}))
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server


@contextmanager
def run_hub() -> Iterator[Hub]:
    """Run a hub until the block ends."""
    hub = Hub()
    hub.open()
    try:
        yield hub
    finally:
        hub.close()


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder, as a commit takes them."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def environment(hub: Hub, cache: Path, **more: str) -> dict[str, str]:
    """Return environment variables for a program that uses this hub and an own cache."""
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "HF_HUB_ETAG_TIMEOUT": "5"} | more


def failing(status: int, code: str = "", times: int = 10**6) -> Fault:
    """Answer with a status, this often."""
    left = [times]

    def fault(handler: "_Handler") -> bool:
        left[0] -= 1
        if left[0] < 0:
            return False
        handler.send(status, b"", **({"X-Error-Code": code} if code else {}))
        return True

    return fault


def cutting(after: int, times: int = 10**6) -> Fault:
    """Close the connection after the first bytes of the content."""
    left = [times]

    def fault(handler: "_Handler") -> bool:
        left[0] -= 1
        if left[0] < 0:
            return False
        handler.cut_after = after
        return False

    return fault


def stalling(after: int, release: threading.Event) -> Fault:
    """Send the first bytes of the content, and nothing more until the event is set."""

    def fault(handler: "_Handler") -> bool:
        handler.cut_after, handler.release = after, release
        return False

    return fault


def altering(alter: Callable[[bytes], bytes]) -> Fault:
    """Send another content, with the headers that go with it."""

    def fault(handler: "_Handler") -> bool:
        handler.alter = alter
        return False

    return fault


def silent(release: threading.Event) -> Fault:
    """Answer nothing until the event is set."""

    def fault(_: "_Handler") -> bool:
        release.wait()
        return True

    return fault


def redirecting(location: str) -> Fault:
    """Say that the content is elsewhere."""

    def fault(handler: "_Handler") -> bool:
        handler.changed = {"Location": location}
        return False

    return fault


def changing(**headers: str | None) -> Fault:
    """Send other headers than the right ones; None: leave it out. Names have `_` for `-`."""

    def fault(handler: "_Handler") -> bool:
        handler.changed = {name.replace("_", "-"): value for name, value in headers.items()}
        return False

    return fault


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    cut_after: int | None = None
    release: threading.Event | None = None
    changed: dict[str, str | None]
    alter: Callable[[bytes], bytes] | None = None

    def setup(self) -> None:
        super().setup()
        self.hub.connections.append(self.connection)

    def log_message(self, *_: object) -> None:
        pass

    def answer(self) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.hub.requests.append(Request(self.command, self.path, token, self.headers.get("Range", "")))
        self.cut_after, self.release, self.changed, self.alter = None, None, {}, None
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        for pattern, fault in self.hub.faults.items():
            if re.search(pattern, f"{self.command} {self.path}") and fault(self):
                return
        path = unquote(urlsplit(self.path).path)
        if self.server.server_port != self.hub.port:
            self.send_blob(path.removeprefix("/"))
        elif match := re.fullmatch(
            r"/api/(model|dataset)s/([^/]+/[^/]+)/(revision|tree|paths-info)/([^/]+)(/.*)?", path
        ):
            kind, name, route, revision, below = match.groups()
            if (found := self.find(kind, name, revision, token)) is not None:
                getattr(self, f"answer_{route.replace('-', '_')}")(*found, (below or "").strip("/"), body)
        elif match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            kind = "dataset" if match[1] else "model"
            if (found := self.find(kind, match[2], match[3], token)) is not None:
                self.answer_resolve(*found, match[4])
        else:
            self.send(404, b"no such route")

    do_GET = do_HEAD = do_POST = answer

    def find(self, kind: str, name: str, revision: str, token: str) -> tuple[str, dict[str, bytes]] | None:
        """Return commit and files; None if the request was answered with an error."""
        repo = self.hub.repos.get((kind, name))
        if repo is None or (repo.needs == "private" and (not token or token != repo.token)):
            self.send(401, b"{}", **{"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        elif repo.needs == "gated" and (not token or token != repo.token):
            self.send(403 if token else 401, b"{}", **{"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
        elif repo.needs == "refused":
            self.send(403, b"{}", **{"X-Error-Message": "refused"})
        elif (sha := repo.find(revision)) is None:
            self.send(404, b"{}", **{"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
        else:
            return sha, repo.commits[sha]
        return None

    def answer_revision(self, sha: str, files: dict[str, bytes], _below: str, _body: bytes) -> None:
        siblings = [_sibling(name, data) for name, data in files.items()]
        self.send_json({"id": "x/y", "sha": sha, "private": False, "tags": [], "downloads": 0, "siblings": siblings})

    def answer_tree(self, _sha: str, files: dict[str, bytes], below: str, _body: bytes) -> None:
        recursive = parse_qs(urlsplit(self.path).query).get("recursive", [""])[0].lower() == "true"
        inside = {name: data for name, data in files.items() if not below or name.startswith(below + "/")}
        if below and not inside:
            self.send(404, b"{}", **{"X-Error-Code": "EntryNotFound"})
            return
        start = len(below) + 1 if below else 0
        folders = {name[: name.index("/", start)] for name in inside if "/" in name[start:]}
        shown = {name: data for name, data in inside.items() if recursive or "/" not in name[start:]}
        self.send_json([*map(_folder, sorted(folders)), *(_file(name, data) for name, data in shown.items())])

    def answer_paths_info(self, _sha: str, files: dict[str, bytes], _below: str, body: bytes) -> None:
        is_json = "json" in self.headers.get("Content-Type", "")
        asked = json.loads(body)["paths"] if is_json else parse_qs(body.decode()).get("paths", [])
        folders = [path for path in asked if any(name.startswith(path.rstrip("/") + "/") for name in files)]
        self.send_json(
            [_file(path, files[path]) for path in asked if path in files] + [_folder(path) for path in folders if path]
        )

    def answer_resolve(self, sha: str, files: dict[str, bytes], name: str) -> None:
        commit = {"X-Repo-Commit": sha}
        if name not in files:
            self.send(404, b"", **commit, **{"X-Error-Code": "EntryNotFound"})
            return
        data = files[name]
        if len(data) < LARGE:
            self.send(200, data, **commit, ETag=f'"{_git(data)}"')
            return
        sha256 = hashlib.sha256(data).hexdigest()
        linked = {"X-Linked-ETag": f'"{sha256}"', "X-Linked-Size": str(len(data))}
        self.send(302, b"", **commit, **linked, Location=f"{self.hub.storage}/{sha256}")

    def send_blob(self, sha256: str) -> None:
        data = self.hub.blob(sha256)
        if data is None:
            self.send(404, b"")
            return
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if match is None:
            self.send(200, data, ETag=f'"{sha256}"')
            return
        start, end = int(match[1]), len(data)
        self.send(206, data[start:], **{"Content-Range": f"bytes {start}-{end - 1}/{end}"})

    def send_json(self, value: object) -> None:
        self.send(200, json.dumps(value).encode(), **{"Content-Type": "application/json"})

    def send(self, status: int, data: bytes, **headers: str) -> None:
        data = self.alter(data) if self.alter is not None else data
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers | self.changed).items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.cut_after is None or len(data) <= self.cut_after:
            self.wfile.write(data)
        else:
            self.wfile.write(data[: self.cut_after])
            self.wfile.flush()
            if self.release is not None:
                self.release.wait()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True


def _git(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _sibling(name: str, data: bytes) -> dict[str, Any]:
    sibling: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": _git(data)}
    if len(data) >= LARGE:
        sha256 = hashlib.sha256(data).hexdigest()
        sibling["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": 134}
        sibling["blobId"] = _git(f"oid sha256:{sha256}\nsize {len(data)}\n".encode())  # of the pointer to the file
    return sibling


def _file(name: str, data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": _git(data)}
    if len(data) >= LARGE:
        found["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return found


def _folder(name: str) -> dict[str, Any]:
    return {"type": "directory", "path": name, "size": 0, "oid": hashlib.sha1(name.encode()).hexdigest()}
