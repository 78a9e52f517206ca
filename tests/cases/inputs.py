"""Inputs that registered functions request by name, made from a case, with junk wherever values are undefined."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stream.validity import TruncationReason
from tests.cases.completions import REWARDS, Made, drawn
from workers.train.algorithms.grouping import Grouping

torch.set_num_threads(1)

Inputs = dict[str, Any]

RICH = [
    Made(
        key=100 + n,
        group=n % 3,
        reward=REWARDS[(5 * n + n // 4) % 6],
        turns=((1, 3), (2,), (4,), (2, 2))[n % 4],
        gap=n % 2,
    )
    for n in range(13)
]
RICH += [Made(key=200 + n, group=n, reward=0.25, turns=(7 + n,)) for n in range(3)]
"""A case in which every option has an effect."""


def policy(reason: TruncationReason) -> str:
    """Return the truncation policy that the cases use."""
    return {"length": "exclude", "tool_calls": "baseline_only"}.get(reason, "keep")


def baseline(case: Sequence[Made]) -> Tensor:
    """bool (C): completions in B."""
    return torch.tensor([made.voting(policy) for made in case], dtype=torch.bool)


def bearing(case: Sequence[Made]) -> Tensor:
    """bool (C): completions in L."""
    return baseline(case) & torch.tensor([made.state != "tool_calls" for made in case], dtype=torch.bool)


def sampled(case: Sequence[Made], width: int = 0) -> Tensor:
    """bool (C, T): sampled tokens, one row per completion, tool tokens between them; `width` adds columns."""
    lines = [
        [True] * made.turns[0] + [x for n in made.turns[1:] for x in [False] * made.gap + [True] * n] for made in case
    ]
    wide = max(map(len, lines), default=0) + width
    return torch.tensor([line + [False] * (wide - len(line)) for line in lines], dtype=torch.bool).view(len(case), wide)


def tokens(case: Sequence[Made], width: int = 0) -> Tensor:
    """bool (C, T): the sampled tokens that bear loss."""
    return sampled(case, width) & bearing(case).unsqueeze(1)


def of_completions(case: Sequence[Made], what: str) -> Tensor:
    """float64 (C), in [0, 1), from the completion's key."""
    return torch.tensor([drawn(made.key, what, 0) for made in case], dtype=torch.float64)


def of_tokens(case: Sequence[Made], what: str, mask_CT: Tensor) -> Tensor:
    """float64 (C, T), in [0, 1), from the completion's key and the token's number."""
    numbers = mask_CT.cumsum(dim=1).tolist()
    lines = [[drawn(made.key, what, n) for n in line] for made, line in zip(case, numbers, strict=True)]
    return torch.tensor(lines, dtype=torch.float64).view(mask_CT.shape)


def rewards(case: Sequence[Made]) -> Tensor:
    return torch.tensor([made.reward for made in case], dtype=torch.float64)


def inputs_of(case: Sequence[Made], junk: float = 0.0, *, width: int = 0, sign: int = 1) -> Inputs:
    """Return everything that an estimator, a normaliser, a shaping or a filter may request.

    Args:
        case: the completions.
        junk: value at undefined positions.
        width: extra columns of padding.
        sign: -1 gives the groups other ids.
    """
    valid_C, loss_C, mask_CT = baseline(case), bearing(case), tokens(case, width)
    ids_C = torch.tensor([sign * made.group * 10**9 for made in case], dtype=torch.int64)
    line_C = mask_CT.any(dim=1)
    parts = torch.stack([of_completions(case, "part 0"), rewards(case) + of_completions(case, "part 1")])
    pi_CT = of_tokens(case, "pi", mask_CT).clamp(min=0.05)

    def known(values: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, values, junk)

    rewards_C = known(rewards(case), valid_C)
    dirty = junk != 0
    return {
        "rewards_C": rewards_C,
        "groups": Grouping(ids_C, valid_C),
        "lengths_C": torch.where(valid_C, sampled(case).sum(dim=1), 10**15 if dirty else 0),
        "loss_lengths_C": mask_CT.sum(dim=1),
        "parts_PC": known(parts, valid_C),
        "has_part_PC": torch.where(valid_C, torch.tensor([[True], [True]]), dirty),
        "part_weights_P": torch.tensor([0.5, 1.0], dtype=torch.float64),
        "correct_C": torch.where(valid_C, rewards(case) >= 1.0, dirty),
        "token_rewards_CT": known(of_tokens(case, "token reward", mask_CT) - 0.25, mask_CT),
        "mask_CT": mask_CT,
        "values_CT": known(of_tokens(case, "value", mask_CT), mask_CT),
        "bootstrap_C": known(of_completions(case, "bootstrap"), line_C),
        "greedy_C": known(of_completions(case, "greedy"), line_C),
        "old_logprobs_CT": known(pi_CT.log(), mask_CT),
        "sum_pi_squared_CT": known(pi_CT.square() + (1 - pi_CT).square() / 3, mask_CT),
        "weights_CT": known(0.5 + of_tokens(case, "weight", mask_CT), mask_CT),
        # normalisers
        "values": rewards_C,
        "mask": valid_C,
        "weights": known(mask_CT.sum(dim=1).double(), valid_C),
        "values_C": rewards_C,
        "loss_C": torch.where(valid_C, loss_C, dirty),
        "values_RT": known(of_tokens(case, "token value", mask_CT), mask_CT),
        "mask_RT": mask_CT,
        "group_ids_R": ids_C,
        # shapings
        "baseline_C": valid_C,
        "penalised_C": torch.tensor([made.state == "tool_errors" for made in case], dtype=torch.bool),
        # filters
        "advantages_C": known(rewards(case) - 0.5, valid_C),
    }
