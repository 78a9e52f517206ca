"""What is pinned when a run is born: values by which a group of one start means the same as a group of another.

=====================================  ================================================================================
`penstock.keys`                        number of the arrangement of keys on the server (`LAYOUT`)
`run.seed`, `data.*`                   settings that decide which prompts there are, and in which order
`rewards.*`, `rollout.*`, `loss.*` ..  settings that decide how a group is sampled, rewarded and trained
`environments.NAME.code` ..            digests of source files (`code_digest.py`)
`model.files`, `model.weights`         digests of the model's tokenizer, template and configuration; of its weights
`data.rows.NAME`                       digests of a data set's rows (`workers.datasets.fingerprint`)
=====================================  ================================================================================

Values are JSON. Places are not pinned, since other machines have other paths: of a file only its name and its content
count. A process pins only what it can read.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from envs.factory import ENTRY_POINT_GROUP as ENVIRONMENTS
from envs.rewards.loading import ENTRY_POINT_GROUP as REWARDS
from stream.connection.keys import LAYOUT
from stream.connection.run_identity import AcceptedChange
from stream.connection.url import redact_url
from stream.errors import RunMismatchError
from workers.datasets.fingerprint import dataset_name, is_rows
from workers.run.code_digest import code_digests
from workers.settings import Settings
from workers.settings.data import EnvironmentSettings, RewardSettings
from workers.settings.section import Section

_LAYOUT: Final = "penstock.keys"
_UNCHANGEABLE: Final = (_LAYOUT, "run.name", "run.seed", "data", "model.files", "model.weights", "model.dtype")
"""No change of these can be accepted: prompts would be fed twice or never, or the checkpoint would not fit."""
_CHANGEABLE: Final = ("data.system", "data.chat_template_kwargs")
_PINNED_SECTIONS: Final = ("estimator", "loss", "algorithm", "filter", "correction")
_OPERATIONAL_REWARD_KEYS: Final = ("run_in", "processes", "timeout_s", "max_concurrency", "calls_per_second")
_MODEL_SUFFIXES: Final = frozenset({".json", ".jinja", ".model", ".txt"})
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16
"""Number and size of the pieces read of a file of weights: hundreds of gigabytes are compared in seconds."""


class Difference(Struct, frozen=True):
    """A pinned value that has changed."""

    name: str
    text: str
    """For people."""
    before: str
    after: str

    @property
    def can_be_accepted(self) -> bool:
        """Whether the run can go on with the change."""
        return is_within(self.name, _CHANGEABLE) or not is_within(self.name, _UNCHANGEABLE)


def pinned_settings(settings: Settings) -> dict[str, str]:
    """Return the pinned settings."""
    names, rewards = list(settings.environments), {_reward_name(each): each for each in settings.rewards}
    found: dict[str, Any] = {_LAYOUT: LAYOUT, "run.name": settings.run.name, "run.seed": settings.run.seed}
    found |= {"model.path": Path(settings.model.path).name, "model.dtype": settings.model.dtype}
    found["model.tool_format"] = settings.model.tool_format
    found |= dict(_section("data", settings.data, ("path", "rows", "sets", "max_queued_prompts")))
    found["data.sets"] = [dataset_name(each) for each in settings.datasets]
    for each in settings.data.sets:
        found |= dict(_section(f"data.sets.{dataset_name(each)}", each, ("path", "rows", "name")))
    found |= {"environments": sorted(names), "environments.default": names[0] if names else ""}
    for name in names:
        found |= dict(_section(f"environments.{name}", _environment(settings, name)))
    found["rewards"] = sorted(rewards)
    for name, reward in rewards.items():
        found |= dict(_section(f"rewards.{name}", reward, ("name", *_OPERATIONAL_REWARD_KEYS)))
    found |= {"rollout.group_size": settings.rollout.group_size, "rollout.temperature": settings.rollout.temperature}
    found |= dict(_section("rollout.sampling", settings.rollout.sampling))
    for name in _PINNED_SECTIONS:
        found |= dict(_section(name, getattr(settings, name)))
    return {name: _text(value) for name, value in found.items()}


def pinned_code(settings: Settings) -> dict[str, str]:
    """Return the digests of the source files of environments and reward functions. Reads files."""
    found = {
        f"environments.{name}.code": code_digests(_environment(settings, name).ref, ENVIRONMENTS)
        for name in settings.environments
    }
    found |= {f"rewards.{_reward_name(each)}.code": code_digests(each.ref, REWARDS) for each in settings.rewards}
    return {name: _text(files) for name, files in found.items() if files}


def pinned_model(settings: Settings, *, with_weights: bool) -> dict[str, str]:
    """Return digests of the model's small files, and of its weights. Reads files; empty without a model folder."""
    folder = Path(settings.model.path)
    if not folder.is_dir():
        return {}
    files = sorted(file for file in folder.iterdir() if file.is_file())
    small = {file.name: _digest(file.read_bytes()) for file in files if file.suffix in _MODEL_SUFFIXES}
    weights = {file.name: _digest_samples(file) for file in files if file.suffix == ".safetensors"}
    return {"model.files": _text(small)} | ({"model.weights": _text(weights)} if with_weights and weights else {})


def differences(stored: Mapping[str, str], current: Mapping[str, str]) -> list[Difference]:
    """Describe the pinned values that differ; values that only one of the two knows do not count."""
    return [
        Difference(name, _describe(name, stored[name], value), stored[name], value)
        for name, value in sorted(current.items())
        if name in stored and stored[name] != value and not is_rows(name)
    ]


def free_changes(stored: Settings, current: Settings) -> list[str]:
    """Describe the settings that differ and may: workers, limits, learning rate."""
    before, after = _free_settings(stored), _free_settings(current)
    return [
        f"{name} from {before[name]!r} to {after[name]!r}"
        for name in sorted(before.keys() & after.keys())
        if before[name] != after[name]
    ]


def split_accepted(
    found: Sequence[Difference], accept: Sequence[str]
) -> tuple[tuple[AcceptedChange, ...], list[Difference]]:
    """Return the accepted changes, and the differences that are not accepted or cannot be."""
    accepted = [each for each in found if each.can_be_accepted and is_within(each.name, accept)]
    changes = tuple(AcceptedChange.now(each.name, each.before, each.after) for each in accepted)
    return changes, [each for each in found if each not in accepted]


def refuse(found: Sequence[Difference], place: str) -> RunMismatchError:
    """Return the error that names everything that changed, and the remedy."""
    remedy = "Undo the changes, or give this run another run.name"
    if flags := [f"--accept-change {each.name}" for each in found if each.can_be_accepted]:
        only = "" if len(flags) == len(found) else " for those that can be accepted"
        remedy += f"; to go on with them{only}: {' '.join(flags)} (the ledger records it)"
    return RunMismatchError(f"{place} holds another run: {'; '.join(each.text for each in found)}. {remedy}")


def is_within(name: str, places: Sequence[str]) -> bool:
    """Return whether a name is one of these places, or below one."""
    return any(name == place or name.startswith(f"{place}.") for place in places)


def _free_settings(settings: Settings) -> dict[str, Any]:
    """Return all settings that are not pinned, without secrets."""
    found: dict[str, Any] = {}
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        if isinstance(value, Section):
            found |= dict(_section(name, value))
    for reward in settings.rewards:
        found |= dict(_section(f"rewards.{_reward_name(reward)}", reward))
    found["run.redis"] = redact_url(settings.run.redis)
    pinned = pinned_settings(settings)
    return {name: value for name, value in found.items() if name not in pinned or name == "model.path"}


def _environment(settings: Settings, name: str) -> EnvironmentSettings:
    found = settings.environments[name]
    return EnvironmentSettings(ref=found) if isinstance(found, str) else found


def _section(prefix: str, section: Section, skip: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a section; `name` of an estimator or loss is one of them."""
    if (tag := section.__struct_config__.tag) is not None:
        yield f"{prefix}.name", str(tag)
    for name in section.__struct_fields__:
        value = getattr(section, name)
        if name in skip:
            continue
        if isinstance(value, Section):
            yield from _section(f"{prefix}.{name}", value)
        else:
            yield f"{prefix}.{name}", _PORTABLE[name](value) if name in _PORTABLE else value


def _portable(ref: str) -> str:
    """Return a reference without the folder of its file."""
    place, colon, attribute = ref.rpartition(":")
    return f"{Path(place).name}:{attribute}" if colon and place.endswith(".py") else ref


def _digest_values(args: Mapping[str, Any]) -> dict[str, str]:
    """Return digests of arguments: some are keys or passwords, and pinned values are shown and stored."""
    return {name: _digest(_text(value).encode()) for name, value in args.items()}


def _reward_name(reward: RewardSettings) -> str:
    return reward.name or reward.ref.rpartition(":")[2]


_PORTABLE: Final[Mapping[str, Callable[[Any], Any]]] = {"ref": _portable, "args": _digest_values}
"""Fields that are pinned in another form."""


def _describe(name: str, before: str, after: str) -> str:
    if name == _LAYOUT:
        return (
            f"another version of Penstock started it ({name} is {before} there and {after} here): end it with that one"
        )
    if name.endswith((".code", ".files", ".weights", ".args")):
        old, new = json.loads(before), json.loads(after)
        changed = [file for file in sorted(old.keys() | new.keys()) if old.get(file) != new.get(file)]
        how = {file: " (new)" if file not in old else " (gone)" if file not in new else "" for file in changed}
        return f"{name}: changed {', '.join(file + how[file] for file in changed)}"
    return f"{name} is {json.loads(before)!r} there and {json.loads(after)!r} here"


def _text(value: Any) -> str:
    return json.dumps(msgspec.to_builtins(value, str_keys=True), sort_keys=True)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _digest_samples(file: Path) -> str:
    """Return a digest of a large file's size and of evenly spaced pieces of it, its beginning included."""
    size = file.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=8)
    with file.open("rb") as opened:
        for i in range(_SAMPLES):
            opened.seek(max(0, size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
            digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()
