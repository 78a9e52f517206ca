"""Train on the same task with TRL's `GRPOTrainer`: `python train_with_trl.py sums.toml OUT --seed 1`.

Run it in a virtual environment of its own: `pip install trl peft reasoning-gym torch`. Model, task, group size, samples
of a step, tokens of an answer, learning rate and adapter come from the settings file of the Penstock run; what has no
counterpart there keeps TRL's default. On a CPU TRL has no vLLM to sample with: it uses transformers' `generate`.

Writes the mean reward of each step, with its time, to OUT/metrics.jsonl, and the merged model to OUT/model.
"""

import argparse
import json
import os
import time
import tomllib
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tasks import Solved
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import utils

ROWS_OF_A_PASS = 24
"""Completions in one pass, of the batch's 96: more need more memory and are no faster on two cores."""


class Log(TrainerCallback):  # type: ignore[misc]  # TRL is not installed where this is type-checked
    """Writes one line a step."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs and "reward" in logs:
            line = {"step": state.global_step, "time": time.time(), "reward/mean": logs["reward"]}
            with self._file.open("a") as file:
                file.write(json.dumps(line) + "\n")


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("settings", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0, help="default: `train.max_steps` of the settings file")
    options = parser.parse_args()
    settings = tomllib.loads(options.settings.read_text())
    (task,) = (each["args"] for each in settings["environments"].values())
    rollout, train, rank = settings["rollout"], settings["train"], settings.get("lora", {}).get("rank", 0)
    steps = options.steps or train["max_steps"]
    rows = train["batch_size"] * rollout["group_size"]

    environment = Solved(**task)
    seeds = range(options.seed * 100_000, options.seed * 100_000 + steps * train["batch_size"])
    data = Dataset.from_list([{"prompt": environment.reset(seed), "problem": seed} for seed in seeds])

    def reward(completions: list[list[dict[str, str]]], problem: list[int], **_: Any) -> list[float]:
        scores = []
        for completion, seed in zip(completions, problem, strict=True):
            environment.reset(seed)
            scores.append(environment.get_reward(completion))
        return scores

    options.out.mkdir(parents=True)
    torch.set_num_threads(os.cpu_count() or 1)
    # As TRL does on a GPU: the output layer for the answers alone, and not for their prompts, which takes 30 % longer.
    utils._use_triton = lambda _: True  # noqa: SLF001  (there is no setting)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"]["path"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]["path"], padding_side="left"),
        reward_funcs=reward,
        train_dataset=data,
        peft_config=LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear") if rank else None,
        callbacks=[Log(options.out / "metrics.jsonl")],
        args=GRPOConfig(
            output_dir=str(options.out / "trl"),
            seed=options.seed,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=ROWS_OF_A_PASS,
            gradient_accumulation_steps=rows // ROWS_OF_A_PASS,
            num_generations=rollout["group_size"],
            max_completion_length=rollout["max_tokens_per_turn"],
            max_steps=steps,
            learning_rate=train["learning_rate"],
            lr_scheduler_type="constant",
            gradient_checkpointing=False,  # TRL's default recomputes activations: a third slower
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
    )
    trainer.train()
    model = trainer.model.merge_and_unload() if rank else trainer.model
    model.save_pretrained(options.out / "model")
    trainer.processing_class.save_pretrained(options.out / "model")


if __name__ == "__main__":
    main()
