"""The base models that Penstock ships: small files in `models/`, from which a run can start without a download.

`calculator` is the demo's model, which uses a calculator badly; `tool-caller` calls any tools by their schemas, at
random. `tests/base_models/` makes both.

A folder holds the weights as float16, the tokenizer, and `made_from.json`: hashes of what the script made it from. A
test makes the hashes again, so a change of a template or of the transcripts cannot leave an old model behind.
"""

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

FOLDERS: Final = {
    name: Path(__file__).parent / "models" / name.replace("-", "_") for name in ("calculator", "tool-caller")
}
"""Package folder of each shipped model."""
MADE_FROM: Final = "made_from.json"
_WEIGHTS: Final = "model.safetensors"


def write_base_model(name: str, folder: Path) -> None:
    """Write a shipped model to `folder`, in Hugging Face format with float32 weights.

    Args:
        name: `calculator` or `tool-caller`.
        folder: target; created if it does not exist. Existing files of the same names are replaced.
    """
    source = FOLDERS[name]
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.name not in {_WEIGHTS, MADE_FROM}:
            shutil.copyfile(path, folder / path.name)
    # Last: a folder with weights is complete.
    _copy_weights(source, folder, "float32")


def store_base_model(name: str, folder: Path, made_from: Mapping[str, str]) -> None:
    """Store the model in `folder` in the package, with float16 weights and the hashes of what it was made from."""
    target = FOLDERS[name]
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for path in sorted(folder.iterdir()):
        if path.name != _WEIGHTS:
            shutil.copyfile(path, target / path.name)
    _copy_weights(folder, target, "float16")
    (target / MADE_FROM).write_bytes(msgspec.json.format(msgspec.json.encode(dict(made_from))) + b"\n")


def stored_hashes(name: str) -> dict[str, str]:
    """Return the hashes of what a shipped model was made from, as `store_base_model` wrote them."""
    return msgspec.json.decode((FOLDERS[name] / MADE_FROM).read_bytes(), type=dict[str, str])


def content_hash(content: Any) -> str:
    """Return the start of the SHA-256 of text, or of the JSON of any other value; keys are sorted."""
    data = content.encode() if isinstance(content, str) else msgspec.json.encode(content, order="sorted")
    return hashlib.sha256(data).hexdigest()[:16]


def _copy_weights(source: Path, target: Path, dtype: str) -> None:
    from safetensors.numpy import load_file, save

    weights = {name: tensor.astype(dtype) for name, tensor in load_file(source / _WEIGHTS).items()}
    # `save_file` would make the file readable for its owner alone.
    (target / _WEIGHTS).write_bytes(save(weights, metadata={"format": "pt"}))
