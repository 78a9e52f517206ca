"""The demo's warm start: plain imitation of scripted transcripts, clean ones first, then ones with the habit.

Copying digits has to emerge in the clean half; a policy that has only ever seen clumsy transcripts does not take off
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

CONTEXT_WEIGHT = 0.1
"""Weight of a token that is not the assistant's, in a loss where the assistant's weigh 1."""
WARMUP_STEPS = 50
RECENT = 50
"""Steps that the reported losses are the mean of."""


@dataclass(frozen=True)
class WarmStart:
    """What a warm start came to. Losses are weighted means in nats per token."""

    steps: int
    first_loss: float
    """Of the first step."""
    clean_loss: float
    """Over the last steps of the clean half: near 0 once digits are copied, except for what no policy can know."""
    loss: float
    """Over the last steps; well above 0, because which script an episode follows is chance."""


def warm_start(
    folder: Path,
    seed: int,
    steps: int = 1200,
    batch: int = 8,
    learning_rate: float = 3e-3,
    threads: int = 2,
    progress: Callable[[int, float], None] | None = None,
) -> WarmStart:
    """Train the model in `folder` on scripted transcripts, and save it there again.

    For a seed and a number of threads the weights come out the same to the bit, on one machine.

    Args:
        folder: What `make_model` wrote.
        seed: Of the transcripts.
        steps: Optimizer steps, half of them on clean transcripts; at least 2.
        batch: Transcripts of a step.
        learning_rate: Its peak; warm-up is linear, the rest of the way down a cosine.
        threads: Of torch, for the time of this call.
        progress: Called after each step with steps done and the step's loss.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if steps < 2:
        raise ValueError(f"{steps} warm-up steps asked for; there are two halves, so at least 2")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        losses = _imitate(model, _batches(tokenizer, seed, steps, batch), steps, learning_rate, progress)
    finally:
        torch.set_num_threads(before)
    model.eval()
    model.save_pretrained(folder)
    half = steps // 2
    clean, last = losses[max(0, half - RECENT) : half], losses[max(half, steps - RECENT) :]
    return WarmStart(steps, losses[0], sum(clean) / len(clean), sum(last) / len(last))


def _imitate(
    model: Any,
    batches: Iterator[tuple[Tensor, Tensor]],
    steps: int,
    learning_rate: float,
    progress: Callable[[int, float], None] | None,
) -> list[float]:
    """Run the optimizer; returns each step's loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share_of_peak(step, steps))
    model.train()
    losses = []
    for ids_BT, weights_BT in batches:
        logits_BTV = model(input_ids=ids_BT[:, :-1]).logits
        # Padding follows every real token and weighs nothing, so causal attention needs no mask.
        nll = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="none")
        weights = weights_BT[:, 1:].flatten()
        loss = (nll * weights).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        if progress is not None:
            progress(len(losses), losses[-1])
    return losses


def _share_of_peak(step: int, steps: int) -> float:
    """The learning rate at a step, as a share of its peak."""
    warmup = min(WARMUP_STEPS, steps // 2)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def _batches(tokenizer: Any, seed: int, steps: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Token ids and loss weights, both (batch, time), of every step: the clean half, then the habit's."""
    clean, clumsy = transcripts(seed, habit=False), transcripts(seed, habit=True)
    for step in range(steps):
        source = clean if step < steps // 2 else clumsy
        pairs = [tokenize(tokenizer, conversation) for conversation in itertools.islice(source, batch)]
        width = max(len(ids) for ids, _ in pairs)
        ids_BT = torch.full((batch, width), tokenizer.pad_token_id)
        weights_BT = torch.zeros(batch, width)
        for i, (ids, weights) in enumerate(pairs):
            ids_BT[i, : len(ids)] = torch.tensor(ids)
            weights_BT[i, : len(weights)] = torch.tensor(weights)
        yield ids_BT, weights_BT


def tokenize(tokenizer: Any, conversation: list[Message]) -> tuple[list[int], list[float]]:
    """Token ids of a conversation and the weight of each in the loss.

    What the assistant has to write, its end of turn included, weighs 1, all else `CONTEXT_WEIGHT`: a rollout never
    asks the model for the line that opens its turn, nor for the line break after its end.
    """
    ids: list[int] = tokenizer(tokenizer.apply_chat_template(conversation, tokenize=False))["input_ids"]
    opening: list[int] = tokenizer("<|im_start|>assistant\n")["input_ids"]
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    weights, speaking = [], False
    for place, token in enumerate(ids):
        weights.append(1.0 if speaking else CONTEXT_WEIGHT)
        if token == end:
            speaking = False
        elif ids[max(0, place + 1 - len(opening)) : place + 1] == opening:
            speaking = True
    return ids, weights
