"""Checks the model's folder without loading the model: files, their completeness, and the number of parameters."""

import json
import math
import os
import re
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from workers.run.preflight.findings import PreflightReport
from workers.runtime.model_config import max_positions
from workers.settings import Settings

_HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+")
_POINTER: Final = b"version https://git-lfs"
_NOT_CAUSAL: Final = ("ForSequenceClassification", "ForTokenClassification", "ForMaskedLM", "ForQuestionAnswering")
_KEY: Final = "model.path"


class ModelFacts(Struct, frozen=True):
    """What the folder says about the model."""

    parameters: int
    """0 if unknown."""
    max_positions: int
    """Longest sequence that the model was made for; 0 if the folder does not say."""


def check_model(settings: Settings, report: PreflightReport) -> ModelFacts | None:
    """Report faults of `model.path`. Returns None if there is no usable folder."""
    folder = Path(settings.model.path)
    if not folder.is_dir():
        report.error("model", _KEY, _missing(settings.model.path))
        return None
    config = _read_config(folder, report)
    if config is None:
        return None
    for architecture in config.get("architectures") or ():
        if str(architecture).endswith(_NOT_CAUSAL):
            report.error(
                "model",
                _KEY,
                f"{folder} holds a {architecture}, which does not generate text; name a causal language model",
            )
    if "quantization_config" in config:
        report.warn("model", _KEY, f"{folder} holds quantized weights; the trainer needs the original ones")
    return ModelFacts(_count_parameters(folder, report), max_positions(folder))


def _missing(path: str) -> str:
    """Return what to do about a path that is no folder."""
    place = Path(path)
    if place.is_file():
        return f"{path} is a file; name the folder that it is in (config.json, *.safetensors, tokenizer.json)"
    if not _HUB_ID.fullmatch(path) or place.parent.is_dir():
        return f"{path}: no such folder (looked in {Path.cwd()}); model.path names a folder in Hugging Face format"
    name = path.rpartition("/")[2]
    advice = (
        f"{path} is the name of a model on the Hugging Face hub, and there is no such folder. Runs read local folders "
        f'only: `hf download {path} --local-dir models/{name}`, then model.path = "models/{name}"'
    )
    cached = _cached_snapshot(path)
    return f'{advice}. It is in your cache already: model.path = "{cached}"' if cached else advice


def _cached_snapshot(hub_id: str) -> Path | None:
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    found = sorted((cache / f"models--{hub_id.replace('/', '--')}" / "snapshots").glob("*/config.json"))
    return found[-1].parent if found else None


def _read_config(folder: Path, report: PreflightReport) -> dict[str, Any] | None:
    file = folder / "config.json"
    if not file.is_file():
        if (folder / "adapter_config.json").is_file():
            problem = f"{folder} holds a LoRA adapter, not a model; merge it into its base model, and name that folder"
        elif nested := sorted(folder.glob("*/config.json")):
            problem = f"{folder} has no config.json, but {nested[0].parent} has one; name that folder"
        else:
            problem = f"{folder} has no config.json; model.path names a folder in Hugging Face format"
        report.error("model", _KEY, problem)
        return None
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        report.error("model", _KEY, f"{file} cannot be read as JSON: {error}; copy it again")
        return None
    return config if isinstance(config, dict) else {}


def _count_parameters(folder: Path, report: PreflightReport) -> int:
    """Return the number of parameters from the headers of the weight files, which are checked for completeness."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        other = sorted({*folder.glob("*.bin"), *folder.glob("*.gguf"), *folder.glob("*.pt")})
        found = f"; there is {other[0].name}, which must be converted to safetensors" if other else ""
        report.error("model", _KEY, f"{folder} has no weights (*.safetensors){found}")
        return 0
    for name in _missing_shards(folder):
        report.error("model", _KEY, f"{folder} lacks {name}, which its index names; copy or download it again")
    return sum(_parameters_in(file, report) for file in files)


def _missing_shards(folder: Path) -> list[str]:
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_bytes())
        names = sorted(set(index["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return []
    return [name for name in names if not (folder / name).is_file()]


def _parameters_in(file: Path, report: PreflightReport) -> int:
    with file.open("rb") as opened:
        start = opened.read(len(_POINTER))
        if start == _POINTER:
            report.error("model", _KEY, f"{file} is a Git LFS pointer, not the weights: `git lfs pull` fetches them")
            return 0
        length = int.from_bytes(start[:8], "little")
        opened.seek(8)
        header = opened.read(length) if length < file.stat().st_size else b""
    try:
        tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        parameters = sum(int(math.prod(entry["shape"])) for entry in tensors.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        report.error("model", _KEY, f"{file} is not a safetensors file; copy or download it again")
        return 0
    missing = 8 + length + end - file.stat().st_size
    if missing > 0:
        report.error("model", _KEY, f"{file} is cut off: {missing:,} bytes are missing; copy or download it again")
    return parameters
