"""Supervised training of a small model on rendered conversations, before reinforcement learning begins."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.base_models.small_model import END_OF_TURN


@dataclass(frozen=True)
class Schedule:
    """Options of AdamW. The learning rate rises linearly, then falls as a cosine."""

    steps: int
    learning_rate: float = 2e-3
    """Peak."""
    warmup_steps: int = 50
    weight_decay: float = 0.1
    final_share: float = 0.0
    """The learning rate at the end, as a share of the peak."""


def imitate(
    model: Any,
    batches: Iterable[tuple[Tensor, Tensor]],
    schedule: Schedule,
    progress: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Train on batches of `pad`, one per step; return the loss of each step: a weighted mean in nats per token."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=schedule.learning_rate, betas=(0.9, 0.95), weight_decay=schedule.weight_decay
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share_of_peak(step, schedule))
    model.train()
    losses = []
    for ids_BT, weights_BT in batches:
        # Padding is on the right and has weight 0, so causal attention needs no mask.
        hidden_BTH = model.model(input_ids=ids_BT[:, :-1]).last_hidden_state
        counts_BT = weights_BT[:, 1:] > 0
        logits_NV = model.lm_head(hidden_BTH[counts_BT])
        nll = torch.nn.functional.cross_entropy(logits_NV, ids_BT[:, 1:][counts_BT], reduction="none")
        weights = weights_BT[:, 1:][counts_BT]
        loss = (nll * weights).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        if progress is not None:
            progress(len(losses), losses[-1])
    model.eval()
    return losses


def _share_of_peak(step: int, schedule: Schedule) -> float:
    """Return the learning rate of a step as a fraction of its peak."""
    warmup = min(schedule.warmup_steps, schedule.steps // 2)
    if step < warmup:
        return (step + 1) / warmup
    falling = 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / (schedule.steps - warmup)))
    return schedule.final_share + (1.0 - schedule.final_share) * falling


def weigh_tokens(
    tokenizer: Any, texts: Sequence[str], context_weight: float, opening: str
) -> list[tuple[list[int], list[float]]]:
    """Return token ids and loss weights of each rendered conversation.

    Tokens that the assistant writes, including its end of turn, have weight 1, all others `context_weight`: a rollout
    never samples what opens a turn, nor the line break after its end.
    """
    [opens, *encoded] = tokenizer([opening, *texts])["input_ids"]
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    return [(ids, _weights(ids, opens, end, context_weight)) for ids in encoded]


def _weights(ids: list[int], opening: list[int], end: int, context_weight: float) -> list[float]:
    weights, speaking = [], False
    for place, token in enumerate(ids, start=1):
        weights.append(1.0 if speaking else context_weight)
        if token == end:
            speaking = False
        elif token == opening[-1] and ids[max(0, place - len(opening)) : place] == opening:
            speaking = True
    return weights


def pad(weighed: Sequence[tuple[list[int], list[float]]], pad_token: int) -> tuple[Tensor, Tensor]:
    """Return token ids and loss weights of a batch, both (batch, time), padded on the right."""
    width = max(len(ids) for ids, _ in weighed)
    ids_BT = torch.full((len(weighed), width), pad_token)
    weights_BT = torch.zeros(len(weighed), width)
    for i, (ids, weights) in enumerate(weighed):
        ids_BT[i, : len(ids)] = torch.tensor(ids)
        weights_BT[i, : len(weights)] = torch.tensor(weights)
    return ids_BT, weights_BT
