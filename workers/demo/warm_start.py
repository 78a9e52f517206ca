"""The demo's warm start: supervised training on scripted transcripts, first clean ones, then ones with the habit.

The model has to learn in the clean part to copy digits; trained only on transcripts with the habit, it does not improve
in reinforcement learning.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workers.demo.model import END_OF_TURN
from workers.demo.transcripts import Message, transcripts

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
        losses = _imitate(model, _batches(tokenizer, seed, steps, batch), steps, progress)
    finally:
        torch.set_num_threads(before)
    model.eval()
    model.save_pretrained(folder)
    turn = _clean_steps(steps)
    clean, last = losses[max(0, turn - RECENT) : turn], losses[max(turn, steps - RECENT) :]
    return WarmStart(steps, losses[0], sum(clean) / len(clean), sum(last) / len(last))


def _imitate(
    model: Any,
    batches: Iterator[tuple[Tensor, Tensor]],
    steps: int,
    progress: Callable[[int, float], None] | None,
) -> list[float]:
    """Run the optimizer; return the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share_of_peak(step, steps))
    model.train()
    losses = []
    for ids_BT, weights_BT in batches:
        logits_BTV = model(input_ids=ids_BT[:, :-1]).logits
        # Padding is on the right and has weight 0, so causal attention needs no mask.
        nll = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="none")
        weights = weights_BT[:, 1:].flatten()
        loss = (nll * weights).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        if progress is not None:
            progress(len(losses), losses[-1])
    return losses


def _share_of_peak(step: int, steps: int) -> float:
    """Return the learning rate of a step as a fraction of its peak."""
    warmup = min(WARMUP_STEPS, steps // 2)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def _clean_steps(steps: int) -> int:
    return max(1, min(steps - 1, round(steps * CLEAN_SHARE)))


def _batches(tokenizer: Any, seed: int, steps: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield token ids and loss weights, both (batch, time), per step: clean transcripts, then ones with the habit."""
    clean, clumsy = transcripts(seed, habit=False), transcripts(seed, habit=True)
    for step in range(steps):
        source = clean if step < _clean_steps(steps) else clumsy
        pairs = tokenize(tokenizer, list(itertools.islice(source, batch)))
        width = max(len(ids) for ids, _ in pairs)
        ids_BT = torch.full((batch, width), tokenizer.pad_token_id)
        weights_BT = torch.zeros(batch, width)
        for i, (ids, weights) in enumerate(pairs):
            ids_BT[i, : len(ids)] = torch.tensor(ids)
            weights_BT[i, : len(weights)] = torch.tensor(weights)
        yield ids_BT, weights_BT


def tokenize(tokenizer: Any, conversations: list[list[Message]]) -> list[tuple[list[int], list[float]]]:
    """Return token ids and loss weights of each conversation.

    Tokens that the assistant writes, including its end of turn, have weight 1, all others `CONTEXT_WEIGHT`: a rollout
    never samples the line that opens a turn, nor the line break after its end.
    """
    texts = tokenizer.apply_chat_template(conversations, tokenize=False)
    [opening, *encoded] = tokenizer(["<|im_start|>assistant\n", *texts])["input_ids"]
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    return [(ids, _weights(ids, opening, end)) for ids in encoded]


def _weights(ids: list[int], opening: list[int], end: int) -> list[float]:
    weights, speaking = [], False
    for place, token in enumerate(ids, start=1):
        weights.append(1.0 if speaking else CONTEXT_WEIGHT)
        if token == end:
            speaking = False
        elif token == opening[-1] and ids[max(0, place - len(opening)) : place] == opening:
            speaking = True
    return weights
