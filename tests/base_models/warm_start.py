"""The demo's warm start: supervised training on scripted transcripts, first clean ones, then ones with the habit.

The model has to learn in the clean part to copy digits; trained only on transcripts with the habit, it does not improve
in reinforcement learning.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.base_models.demo_transcripts import Message, transcripts
from tests.base_models.imitation import Schedule, imitate, pad, weigh_tokens
from tests.base_models.small_model import CHATML, render

CLEAN_SHARE = 2 / 3
"""Share of steps, at the start, with clean transcripts. With one half, one seed in three never copies digits well."""
CONTEXT_WEIGHT = 0.1
"""Loss weight of tokens that the assistant does not write; its own tokens have weight 1."""
LEARNING_RATE = 2e-3
"""Peak of the schedule: linear warm-up, then cosine decay to 0."""
WEIGHT_DECAY = 0.1
WARMUP_STEPS = 50
SCHEDULE = (CLEAN_SHARE, CONTEXT_WEIGHT, LEARNING_RATE, WEIGHT_DECAY, WARMUP_STEPS)
"""What determines the weights besides seed, steps and transcripts."""
RECENT = 50
"""Number of steps that the reported losses average."""


@dataclass(frozen=True)
class WarmStart:
    """Result of a warm start. Losses are weighted means in nats per token."""

    steps: int
    first_loss: float
    """Loss of the first step."""
    clean_loss: float
    """Mean of the last steps with clean transcripts: near 0 once the model copies digits, up to irreducible entropy."""
    loss: float
    """Mean of the last steps; well above 0, because the behavior in each transcript is random."""


def warm_start(
    folder: Path,
    seed: int,
    steps: int = 1200,
    batch: int = 8,
    threads: int = 1,
    progress: Callable[[int, float], None] | None = None,
) -> WarmStart:
    """Train the model in `folder` on scripted transcripts and save it there.

    On one machine, the weights are bitwise reproducible for a seed and a number of threads.

    Args:
        folder: output of `make_model`.
        seed: seed of the transcripts.
        steps: optimizer steps, two thirds of them on clean transcripts; at least 2.
        batch: transcripts per step.
        threads: torch threads during this call. Two save a fifth of the time on an idle machine and take ten times as
            long on a busy one.
        progress: called after each step with the number of steps done and the step's loss.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if steps < 2:
        raise ValueError(f"{steps} warm-up steps asked for; there are two parts, so at least 2")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        schedule = Schedule(steps, LEARNING_RATE, WARMUP_STEPS, WEIGHT_DECAY)
        losses = imitate(model, _batches(tokenizer, seed, steps, batch), schedule, progress)
    finally:
        torch.set_num_threads(before)
    model.save_pretrained(folder)
    turn = _clean_steps(steps)
    clean, last = losses[max(0, turn - RECENT) : turn], losses[max(turn, steps - RECENT) :]
    return WarmStart(steps, losses[0], sum(clean) / len(clean), sum(last) / len(last))


def _clean_steps(steps: int) -> int:
    return max(1, min(steps - 1, round(steps * CLEAN_SHARE)))


def _batches(tokenizer: Any, seed: int, steps: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a batch per step: clean transcripts, then ones with the habit."""
    clean, clumsy = transcripts(seed, habit=False), transcripts(seed, habit=True)
    for step in range(steps):
        source = clean if step < _clean_steps(steps) else clumsy
        yield pad(tokenize(tokenizer, list(itertools.islice(source, batch))), tokenizer.pad_token_id)


def tokenize(tokenizer: Any, conversations: list[list[Message]]) -> list[tuple[list[int], list[float]]]:
    """Return token ids and loss weights of each conversation."""
    return weigh_tokens(tokenizer, render(conversations, CHATML.template), CONTEXT_WEIGHT, CHATML.opening)
