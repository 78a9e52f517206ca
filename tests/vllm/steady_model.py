"""A tiny model that is neither sure nor clueless, with a `generation_config.json` that would bend what is sampled."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from workers.demo.model import make_model

BENT = {"temperature": 0.4, "top_k": 5, "top_p": 0.7, "min_p": 0.1, "repetition_penalty": 1.5}
"""vLLM takes these for whatever a request to `/v1/completions` leaves out."""


def make_steady_model(folder: Path, seed: int) -> None:
    """Write it to `folder`, in Hugging Face form; its likeliest tokens have about a third of the mass."""
    make_model(folder, seed)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2.0)
    model.config.max_position_embeddings = 4096
    model.save_pretrained(folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | BENT))
