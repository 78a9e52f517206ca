"""All settings of a start by their full names, so that two starts can be compared.

Addresses and the run's folder are left out, since they differ between machines that have one run. Arguments of
environments and reward functions are digests, since some are keys or passwords. `NAME.code` is a digest of the source
file that a reference names, if that is a file or a module in the working directory; what it imports is not seen.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from workers.settings.data import EnvironmentSettings
from workers.settings.section import Section
from workers.settings.settings import Settings

DIGEST: Final = "digest "
"""Beginning of a value that stands for another one."""
_PLACES: Final = ("run.redis", "run.folder", "engine.urls")


def flat_settings(settings: Settings) -> dict[str, str]:
    """Return every setting by its full name, as JSON or as a digest. Reads the source files of user code."""
    found: dict[str, Any] = {}
    for name in settings.__struct_fields__:
        if isinstance(value := getattr(settings, name), Section):
            found |= _flatten(name, value)
    named: dict[str, Section] = {
        f"environments.{name}": EnvironmentSettings(ref=given) if isinstance(given, str) else given
        for name, given in settings.environments.items()
    }
    named |= {f"rewards.{each.name or each.ref.rpartition(':')[2]}": each for each in settings.rewards}
    for name, section in named.items():
        found |= _flatten(name, section)
    texts = {name: _encode(value).decode() for name, value in found.items() if name not in _PLACES}
    texts |= {"environments and rewards": " ".join(named)}
    return texts | dict(_digests(named))


def _flatten(prefix: str, section: Section) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a section; `name` of an estimator or loss is one of them."""
    if (tag := section.__struct_config__.tag) is not None:
        yield f"{prefix}.name", str(tag)
    for name in section.__struct_fields__:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _flatten(f"{prefix}.{name}", value)
        elif name == "sets":
            for i, each in enumerate(value):
                yield from _flatten(f"{prefix}.{name}.{i}", each)
        elif name != "args":
            yield f"{prefix}.{name}", value


def _digests(named: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, section in named.items():
        yield f"{name}.args", _digest(_encode(section.args))
        place = section.ref.rpartition(":")[0]
        file = Path(place if place.endswith(".py") else place.replace(".", "/") + ".py")
        if file.is_file():
            yield f"{name}.code", _digest(file.read_bytes())


def _encode(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic")


def _digest(content: bytes) -> str:
    return DIGEST + hashlib.blake2b(content, digest_size=8).hexdigest()
