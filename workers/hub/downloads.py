"""Downloads of models and data sets from a hub, by `huggingface_hub` and `datasets`, with errors of one line.

The two libraries read their own variables for cache, token, endpoint, offline mode and proxies: `HF_HOME`, `HF_TOKEN`,
`HF_ENDPOINT`, `HF_HUB_OFFLINE`, `HTTPS_PROXY`. A file has its name in the cache only when it is whole. What an
interrupted download completed is kept, and the next start downloads the rest. The libraries compare sizes alone; we
compare checksums, too: a changed weight or prompt would otherwise stay in the cache, for every later run.
"""

import glob
import hashlib
import json
import time
from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from stream.disk_space import free_bytes
from stream.durable import write_file_atomically
from stream.errors import PenstockError, SettingsError
from stream.wording import format_bytes, quantity
from workers.hub.errors import FAULTS_OF_OURS, damaged, explain, is_unreachable
from workers.hub.libraries import Say, import_library, library_calls, show_progress, wait_for
from workers.settings.hub import Repository, Revision

_MODEL_FILES: Final = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
_NOT_OF_MODEL: Final = ("*/*", "consolidated*")
"""Files in subfolders are other forms of the model; `consolidated` are the same weights again."""
_CARD_FILES: Final = ("README.md", ".huggingface.yaml", "dataset_infos.json")
"""Files of a data set that name its configurations and splits."""
_SHA1_DIGITS: Final = 40
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt")


def look_up(repository: Repository, revision: Revision, setting: str, say: Say) -> str:
    """Return the commit that a branch, a tag or a short hash stands for. Blocks.

    If the hub cannot be reached, this is the commit that the cache has under the same name, and a line says so.

    Args:
        repository: a name, of which nothing on this disk has the same.
        revision: without a commit.
        setting: the table that names it; empty: a command does.
        say: gets a line for people.

    Raises:
        PenstockError: there is none, it may not be read, or the hub cannot be asked and the cache has none.
    """
    api = import_library(repository, "huggingface_hub", setting).HfApi(library_name="penstock")
    resolve = partial(api.resolve_revision, repository.name, repo_type=repository.kind, revision=revision.name)
    with library_calls():
        cached = _cached_commit(resolve)
        try:
            info = api.repo_info(repository.name, repo_type=repository.kind, revision=revision.name)
            commit = str(info.sha)
            if cached != commit:
                resolve()  # writes it to the cache, for a start without network
        except FAULTS_OF_OURS:
            raise
        except Exception as error:
            if not cached or not is_unreachable(error):
                raise explain(error, repository, revision, setting) from error
            say(f"{repository}: the hub cannot be asked; the cache has {revision._replace(commit=cached).short}")
            return cached
    return commit


def _cached_commit(resolve: Callable[..., Any]) -> str:
    """Return the commit under which the cache has a branch or tag; empty if it has none."""
    from huggingface_hub.errors import RevisionResolutionError

    try:
        return str(resolve(local_files_only=True).resolved)
    except (RevisionResolutionError, ValueError):  # ValueError: no hub has such a name
        return ""


def download(repository: Repository, revision: Revision, config: str, setting: str, say: Say) -> Path:
    """Download what the cache lacks of a model, or of one configuration of a data set. Returns the folder. Blocks.

    If the cache has everything, no request is made.

    Args:
        repository: model or data set.
        revision: with its commit.
        config: configuration of a data set; empty: the only one, or its default.
        setting: the table that names it; empty: a command does.
        say: gets a line for people.

    Raises:
        PenstockError: it cannot be downloaded, or there is no room for it on the disk.
        SettingsError: it is no model that can be trained, or the data set has no such configuration.
    """
    hub = import_library(repository, "huggingface_hub", setting)
    if repository.kind == "dataset":
        import_library(repository, "datasets", setting)
    if (folder := _whole(repository, revision, config)) is not None:
        return folder
    try:
        with library_calls():
            return wait_for(partial(_fetch, hub, repository, revision, config, setting, say))
    except (PenstockError, *FAULTS_OF_OURS):
        raise
    except Exception as error:
        raise explain(error, repository, revision, setting) from error


def _whole(repository: Repository, revision: Revision, config: str) -> Path | None:
    """Return the folder in the cache if it has all files that are needed; None if one may be missing."""
    from huggingface_hub import snapshot_download

    files = list(_MODEL_FILES)
    if repository.kind == "dataset":
        try:
            files = json.loads(_list_file(repository, revision, config).read_bytes())
        except (OSError, ValueError):
            return None
    try:
        with library_calls():
            folder = Path(_snapshot(snapshot_download, repository, revision.commit, files, local_files_only=True))
    except OSError:
        return None
    if repository.kind == "dataset":
        return folder if all((folder / name).is_file() for name in files) else None
    has_small_files = all((folder / name).is_file() for name in ("config.json", "tokenizer.json"))
    return folder if has_small_files and not _missing_weights(folder) else None


def _missing_weights(folder: Path) -> bool:
    """Return whether a model's folder lacks weights, as far as its index names them."""
    try:
        names = set(json.loads((folder / "model.safetensors.index.json").read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return not any(folder.glob("*.safetensors"))
    return not all((folder / name).is_file() for name in names)


def _list_file(repository: Repository, revision: Revision, config: str) -> Path:
    """Return the file with the names of a configuration's files, which exists once all of them were downloaded."""
    from huggingface_hub import cached_assets_path

    folder = cached_assets_path("penstock", repository.name.replace("/", "--"), revision.commit)
    return Path(folder) / f"{config.replace('/', '--') or 'default'}.files.json"


def _fetch(hub: Any, repository: Repository, revision: Revision, config: str, setting: str, say: Say) -> Path:
    """Ask the hub for the files, say what there is to do, and download."""
    info = hub.HfApi(library_name="penstock").repo_info(
        repository.name, repo_type=repository.kind, revision=revision.commit, files_metadata=True
    )
    sizes = {each.rfilename: int(each.size or 0) for each in info.siblings or ()}
    checksums = {each.rfilename: _checksum(each) for each in info.siblings or ()}
    is_model = repository.kind == "model"
    if is_model:
        _refuse_unusable(repository, setting, sizes)
    else:
        _fetch_cards(hub, repository, revision, checksums)
    names = [name for name in sizes if _is_of_model(name)] if is_model else []
    names = names or _files_of_config(repository, revision, config, sizes)
    total, cached = sum(sizes[name] for name in names), _cached_bytes(repository, revision, names, sizes)
    what = f"{repository} ({revision.short})"
    in_cache = f", {format_bytes(cached)} of them in the cache" if cached else ""
    say(f"downloading {what}: {quantity(len(names), 'file')}, {format_bytes(total)}{in_cache}")
    _refuse_full_disk(repository, total - cached)
    if is_model:
        config_file = Path(hub.hf_hub_download(repository.name, "config.json", revision=revision.commit))
        if why := needs_own_code(config_file.parent):
            raise SettingsError(f"{repository.name}: {why}")
    patterns, began = list(_MODEL_FILES) if is_model else [glob.escape(name) for name in names], time.monotonic()
    with show_progress(repository, total - cached, say) as options:
        folder = Path(_snapshot(hub.snapshot_download, repository, revision.commit, patterns, **options))
    _refuse_damaged(repository, folder, {name: checksums[name] for name in names})
    if not is_model:
        write_file_atomically(_list_file(repository, revision, config), json.dumps(names).encode())
    say(f"downloaded {what} in {time.monotonic() - began:.0f} s")
    return folder


def _fetch_cards(hub: Any, repository: Repository, revision: Revision, checksums: dict[str, str]) -> None:
    """Download the files that name a data set's configurations, before `datasets` reads them."""
    for name in _CARD_FILES:
        if name in checksums:
            file = hub.hf_hub_download(repository.name, name, repo_type="dataset", revision=revision.commit)
            _refuse_damaged(repository, Path(file).parent, {name: checksums[name]})


def _checksum(sibling: Any) -> str:
    """Return the SHA-256 that a hub has of a large file, or git's SHA-1 of another one; empty if it has neither."""
    checksum = str((sibling.lfs["sha256"] if sibling.lfs else sibling.blob_id) or "")
    return checksum if sibling.lfs or len(checksum) == _SHA1_DIGITS else ""


def _refuse_damaged(repository: Repository, folder: Path, checksums: dict[str, str]) -> None:
    """Remove files with another content than the hub names for them from the cache. Reads 0.4 GB or more a second.

    Raises:
        PenstockError: there is one.
    """
    wrong = [name for name, checksum in checksums.items() if checksum and not _has_content(folder / name, checksum)]
    for name in wrong:
        (folder / name).resolve().unlink(missing_ok=True)
        (folder / name).unlink(missing_ok=True)
    if wrong:
        raise PenstockError(damaged(f"{', '.join(wrong)} of {repository}", "the hub has another checksum for it"))


def _has_content(file: Path, checksum: str) -> bool:
    if len(checksum) == _SHA1_DIGITS:
        content = file.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest() == checksum
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest() == checksum


def _snapshot(snapshot_download: Any, repository: Repository, revision: str, files: list[str], **options: Any) -> str:
    ignored = list(_NOT_OF_MODEL) if repository.kind == "model" else None
    return str(
        snapshot_download(
            repository.name,
            repo_type=repository.kind,
            revision=revision,
            allow_patterns=files,
            ignore_patterns=ignored,
            **options,
        )
    )


def _is_of_model(name: str) -> bool:
    return any(fnmatch(name, each) for each in _MODEL_FILES) and not any(fnmatch(name, each) for each in _NOT_OF_MODEL)


def _cached_bytes(repository: Repository, revision: Revision, names: list[str], sizes: dict[str, int]) -> int:
    """Return how much of the files the cache has, without those that were read to find the others."""
    from huggingface_hub import try_to_load_from_cache

    find = partial(try_to_load_from_cache, repository.name, revision=revision.commit, repo_type=repository.kind)
    return sum(sizes[name] for name in names if name not in _CARD_FILES and isinstance(find(name), str))


def _refuse_unusable(repository: Repository, setting: str, sizes: dict[str, int]) -> None:
    """Refuse a repository that holds no model which the trainer could load, before its files are downloaded.

    Raises:
        SettingsError: it has no configuration or no safetensors.
    """
    name, place = repository.name, f"{setting}.path" if setting else "the model's name"
    if "config.json" not in sizes:
        what = "a LoRA adapter; merge it into its base model" if "adapter_config.json" in sizes else "no model"
        raise SettingsError(f"{name} has no config.json, so it holds {what}; set {place} to a model")
    if not any(each.endswith(".safetensors") and _is_of_model(each) for each in sizes):
        pickles = sorted(each for each in sizes if each.endswith(_PICKLES) and "/" not in each)
        if not pickles:
            raise SettingsError(f"{name} has no weights in safetensors; set {place} to a model that has")
        raise SettingsError(
            f"{name} has no safetensors, only {pickles[0]}, a pickle, which can run code when it is loaded. Convert it "
            "once: AutoModelForCausalLM.from_pretrained(...) and save_pretrained(FOLDER), the same with AutoTokenizer, "
            f"then set {place} to FOLDER"
        )


def needs_own_code(folder: Path) -> str:
    """Return why a model cannot be loaded without code from its own folder, and what to do; empty if it can be."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        kind, code = str(config["model_type"]), config["auto_map"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    spec = find_spec("transformers")
    if not code or spec is None or spec.origin is None:
        return ""
    if (Path(spec.origin).parent / "models" / kind.replace("-", "_")).is_dir():
        return ""  # transformers has its own code for this architecture, and uses that
    file = str(next(iter(code.values()))).partition(".")[0].rpartition("--")[2]
    return (
        f"transformers has no architecture {kind!r}; its code is the model's own {file}.py, which "
        "trust_remote_code=True would run on every machine of the run. Read that file to decide whether you would; "
        "Penstock never does. Use a newer transformers if it has the architecture, or another model"
    )


def _files_of_config(repository: Repository, revision: Revision, config: str, sizes: dict[str, int]) -> list[str]:
    """Return the files of a configuration, as `datasets` finds them.

    Raises:
        SettingsError: some of them are elsewhere.
    """
    import datasets

    builder = datasets.load_dataset_builder(repository.name, config or None, revision=revision.commit)
    start = f"hf://datasets/{repository.name}@{revision.commit}/"
    files = sorted({file for split in (builder.config.data_files or {}).values() for file in split})
    if elsewhere := [file for file in files if not file.startswith(start)]:
        raise SettingsError(f"{repository} names files elsewhere, such as {elsewhere[0]}, which no commit fixes")
    return [*(name for name in _CARD_FILES if name in sizes), *(file.removeprefix(start) for file in files)]


def _refuse_full_disk(repository: Repository, missing: int) -> None:
    from huggingface_hub.constants import HF_HUB_CACHE

    free = free_bytes(Path(HF_HUB_CACHE).expanduser().absolute())
    if free is not None and free < missing:
        raise PenstockError(
            f"no room for {repository}: {format_bytes(missing)} are to be downloaded to {HF_HUB_CACHE}, and its disk "
            f"has {format_bytes(free)} free; make room, or set HF_HOME to a folder on another disk"
        )
