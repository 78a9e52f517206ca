"""Names on a hub: `owner/name` in place of a folder or a file, and the commit that a run keeps using.

A revision is a branch, a tag or a commit. When a run starts, `workers.hub.names` looks up the commit that a branch
or tag stands for and writes both, as `main@COMMIT`. From then on every process finds the files in the cache of the
machine by the commit alone. Nothing here asks the hub, and nothing is downloaded.
"""

import re
from pathlib import Path
from typing import Final, Literal, NamedTuple

Kind = Literal["model", "dataset"]
"""Kind of a repository. The names of models and data sets are independent."""

DEFAULT_REVISION: Final = "main"
REVISION_PATTERN: Final = r"^[^\s@]*(@[0-9a-f]{40})?\Z"
REVISION_FORM: Final = "a branch, a tag or a commit; a start adds the commit as NAME@COMMIT"
_NAME: Final = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
_FILE_SUFFIXES: Final = (".bin", ".csv", ".gguf", ".json", ".jsonl", ".parquet", ".safetensors", ".toml")
"""Ends of names that are meant as files."""
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


class Repository(NamedTuple):
    """A repository on a hub."""

    kind: Kind
    name: str
    """`owner/name`."""

    def __str__(self) -> str:
        return f"{'data set' if self.kind == 'dataset' else 'model'} {self.name}"


class Revision(NamedTuple):
    """A revision as in the settings; its text is `NAME`, `NAME@COMMIT` or `COMMIT`."""

    name: str
    """Branch, tag or commit; never empty."""
    commit: str
    """Full hash; empty: not looked up yet."""

    def __str__(self) -> str:
        return self.name if self.commit in ("", self.name) else f"{self.name}@{self.commit}"

    @property
    def short(self) -> str:
        """The revision for a message: `main, commit c1899de289a0`."""
        commit = f"commit {self.commit[:12]}" if self.commit else ""
        return ", ".join(filter(None, ["" if self.name == self.commit else self.name, commit]))


def parse_revision(text: str) -> Revision:
    """Return name and commit of a revision; an empty text is the branch `main`."""
    name, _, commit = text.partition("@")
    name = name or commit or DEFAULT_REVISION
    return Revision(name, commit or (name if _COMMIT.fullmatch(name) else ""))


def is_hub_name(path: str) -> bool:
    """Return whether a path may be the name of a repository: it has the form, and there is no such file or folder."""
    return bool(_NAME.fullmatch(path)) and not path.endswith(_FILE_SUFFIXES) and not Path(path).exists()


def local_folder(path: str, revision: str, kind: Kind = "model") -> Path:
    """Return the folder of a model or data set on this machine: its path, or what the cache has of its commit.

    A name whose commit is unknown or not in the cache is returned as it is, a folder that does not exist.
    """
    commit = parse_revision(revision).commit
    if not commit or not is_hub_name(path):
        return Path(path)
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return Path(path)
    cached = Path(HF_HUB_CACHE).expanduser() / f"{kind}s--{path.replace('/', '--')}" / "snapshots" / commit
    return cached if cached.is_dir() else Path(path)
