"""Prepares a demo run: a small model with a bad habit, training problems, and settings that are known to learn."""

from pathlib import Path
from typing import Literal

import msgspec

from stream.durable import write_file_atomically
from workers.demo.base_models import write_base_model
from workers.demo.task import training_rows
from workers.settings import Settings
from workers.settings.toml_file import dump_settings, parse_settings

NegativeControl = Literal["zero-lr", "permuted"]

STEPS = 32
"""Steps that the prompts suffice for by default; by then the score has flattened, because half of the groups have no
variance left."""
GROUPS_PER_STEP = 16
GROUP_SIZE = 8


def demo_settings(folder: Path, seed: int, control: NegativeControl | None = None, vllm_python: str = "") -> Settings:
    """Return the settings of the demo or of a negative control.

    Args:
        folder: the run's folder.
        seed: seed of problems, sampling and run; the model is the same for every seed.
        control: `zero-lr` trains with learning rate 0; `permuted` permutes rewards within each group.
        vllm_python: interpreter with vLLM; empty: the local engine.
    """
    server = {"server": "vllm", "python": vllm_python} if vllm_python else {}
    return parse_settings(
        {
            "run": {"name": folder.name, "folder": str(folder), "seed": seed},
            "model": {"path": str(folder / "model")},
            "data": {"path": str(folder / "prompts.jsonl"), "chat_template_kwargs": {"tools": False}},
            "environments": {"calculator": "calculator"},
            "rewards": [{"ref": "workers.demo.demo:permuted_answer" if control == "permuted" else "calculator_answer"}],
            "rollout": {
                "workers": 2,
                "groups_in_flight": 16,
                "group_size": GROUP_SIZE,
                "max_turns": 4,
                "max_tokens_per_turn": 40,
                "max_tokens": 256,
            },
            "engine": {"max_batch_size": 256, "max_model_len": 384, **server},
            "train": {
                "batch_size": GROUPS_PER_STEP,
                "learning_rate": 0.0 if control == "zero-lr" else 3e-4,
                "micro_batch_tokens": 4096,
                "save_every": 10,
            },
            "pacing": {"max_staleness": 1},
        },
        "the demo's settings",
    )


def prepare_run(
    folder: Path,
    seed: int,
    steps: int = STEPS,
    control: NegativeControl | None = None,
    vllm_python: str = "",
) -> Settings:
    """Write the base model, the prompt file and `run.toml`, unless they exist; return the settings.

    Args:
        folder: the run's folder.
        seed: seed of problems, sampling and run; the model is the same for every seed.
        steps: optimizer steps that the prompts suffice for.
        control: `zero-lr` trains with learning rate 0; `permuted` permutes rewards within each group.
        vllm_python: interpreter with vLLM; empty: the local engine.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = demo_settings(folder, seed, control, vllm_python)
    model = folder / "model"
    if not (model / "model.safetensors").exists() or not (folder / "run.toml").exists():
        write_base_model("calculator", model)
        rows = training_rows(steps * GROUPS_PER_STEP, seed)
        content = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
        write_file_atomically(folder / "prompts.jsonl", content)
        write_file_atomically(folder / "run.toml", dump_settings(settings).encode())
    return settings
