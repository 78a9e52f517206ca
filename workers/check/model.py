"""Checks the model's folder without loading the model: files, their completeness, and the number of parameters."""

import json
import math
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from workers.check.report import Checker, Subject
from workers.hub.downloads import needs_own_code
from workers.settings.secrets import max_positions

_POINTER: Final = b"version https://git-lfs"
_NOT_CAUSAL: Final = ("ForSequenceClassification", "ForTokenClassification", "ForMaskedLM", "ForQuestionAnswering")
_COPY_AGAIN: Final = "copy or download it again"


class ModelFacts(Struct, frozen=True):
    """What the folder says about the model."""

    parameters: int
    """0 if unknown."""
    max_positions: int
    """Longest sequence that the model was made for; 0 if the folder does not say."""


def check_model(checker: Checker) -> ModelFacts | None:
    """Report faults of `model.path`. Returns None if there is no usable folder."""
    folder, model = checker.settings.model.folder, checker.about("model", "model.path")
    if not folder.is_dir():
        model.error(*_missing(checker.settings.model.path))
        return None
    config = _read_config(folder, model)
    if config is None:
        return None
    for architecture in config.get("architectures") or ():
        if str(architecture).endswith(_NOT_CAUSAL):
            message = f"{folder} holds a {architecture}, which does not generate text"
            model.error(message, "name a causal language model")
    if why := needs_own_code(folder):
        model.error(why)
    if "quantization_config" in config:
        model.warn(f"{folder} holds quantized weights", "name a folder with the original ones")
    return ModelFacts(_count_parameters(folder, model), max_positions(folder))


def _missing(path: str) -> tuple[str, str]:
    """Return what is wrong with a path that is no folder, and what to do about it."""
    place = Path(path)
    if place.is_file():
        return f"{path} is a file", "name the folder that it is in (config.json, *.safetensors, tokenizer.json)"
    return (
        f"{path}: no such folder (looked in {Path.cwd()}), and no name of a model on a hub, which is OWNER/NAME",
        "name a folder in Hugging Face format, or a model such as Qwen/Qwen3-0.6B",
    )


def _read_config(folder: Path, model: Subject) -> dict[str, Any] | None:
    file = folder / "config.json"
    if not file.is_file():
        if (folder / "adapter_config.json").is_file():
            fault = (
                f"{folder} holds a LoRA adapter, not a model",
                "merge it into its base model, and name that folder",
            )
        elif nested := sorted(folder.glob("*/config.json")):
            fault = (f"{folder} has no config.json, but {nested[0].parent} has one", "name that folder")
        else:
            fault = (f"{folder} has no config.json", "name a folder in Hugging Face format")
        model.error(*fault)
        return None
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        model.error(f"{file} cannot be read as JSON: {error}", "copy it again")
        return None
    return config if isinstance(config, dict) else {}


def _count_parameters(folder: Path, model: Subject) -> int:
    """Return the number of parameters from the headers of the weight files, which are checked for completeness."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        other = sorted({*folder.glob("*.bin"), *folder.glob("*.gguf"), *folder.glob("*.pt")})
        remedy = f"convert {other[0].name} to safetensors" if other else "copy or download them"
        model.error(f"{folder} has no weights (*.safetensors)", remedy)
        return 0
    for name in _missing_shards(folder):
        model.error(f"{folder} lacks {name}, which its index names", _COPY_AGAIN)
    return sum(_parameters_in(file, model) for file in files)


def _missing_shards(folder: Path) -> list[str]:
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_bytes())
        names = sorted(set(index["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return []
    return [name for name in names if not (folder / name).is_file()]


def _parameters_in(file: Path, model: Subject) -> int:
    with file.open("rb") as opened:
        start = opened.read(len(_POINTER))
        if start == _POINTER:
            model.error(f"{file} is a Git LFS pointer, not the weights", "`git lfs pull` fetches them")
            return 0
        length = int.from_bytes(start[:8], "little")
        opened.seek(8)
        header = opened.read(length) if length < file.stat().st_size else b""
    try:
        tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        parameters = sum(int(math.prod(entry["shape"])) for entry in tensors.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        model.error(f"{file} is not a safetensors file", _COPY_AGAIN)
        return 0
    missing = 8 + length + end - file.stat().st_size
    if missing > 0:
        model.error(f"{file} is cut off: {missing:,} bytes are missing", _COPY_AGAIN)
    return parameters
