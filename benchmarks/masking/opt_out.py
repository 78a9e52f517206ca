"""How often a policy opts out if that makes its completion invalid, by estimator.

A toy: the first token opts out, and the completion is invalid, or acts; the second token is a good or a bad answer. In
the variant `late` the answer comes first, and the policy opts out when it has seen its own answer. Everything after
sampling is the trainer's code (masks, filters, estimator, loss, gradient); only the network is a table of logits.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from stream.validity import RewardReason
from workers.settings import Settings
from workers.settings.toml_file import parse_settings
from workers.train.algorithms.advantages import ESTIMATORS
from workers.train.algorithms.masks import NONE, REWARD_REASONS, CompletionFacts
from workers.train.model.logprobs import TokenLogprobs
from workers.train.step.batch import Batch, ForwardStatistics
from workers.train.step.branches import BranchFacts
from workers.train.step.group_checks import drop_groups, filter_reasons, mask_batch
from workers.train.step.loss import micro_batch_loss
from workers.train.step.prepared_batch import PreparedBatch, prepare

GROUP_SIZE = 8
START = 0.18
"""Probability of opting out before training."""
_RATE = 4.0
_CRITIC_RATE = 0.2
_LEAST = {"model": {"path": "m"}, "data": {"path": "d"}, "environments": {"toy": "calculator"}}


@dataclass(frozen=True)
class Scenario:
    """Rewards and lengths of the two answers, and the prompts."""

    rewards: tuple[float, float] = (1.0, 0.0)
    """Of a good and of a bad answer."""
    lengths: tuple[int, int] = (8, 2)
    """Tokens of a good and of a bad answer, the first two decisions included."""
    success: tuple[float, ...] = (0.5,)
    """Probability of a good answer to each prompt before training; groups take the prompts in turn."""
    late: bool = False
    """The policy opts out when it has seen its own answer."""


SCENARIOS = {
    "0/1, good answers long": Scenario(),
    "0/1, good answers short": Scenario(lengths=(2, 8)),
    "-1/0, good answers long": Scenario(rewards=(0.0, -1.0)),
    "-1/0, good answers short": Scenario(rewards=(0.0, -1.0), lengths=(2, 8)),
    "an easy and a hard prompt": Scenario(success=(0.9, 0.1)),
}


def opt_out_curve(
    scenario: Scenario, sections: Mapping[str, Any], *, steps: int, groups: int = 16, seed: int = 0
) -> Tensor:
    """Train the toy and return the probability of opting out before each step, and at the end: (steps + 1, prompts).

    In the variant `late` it is the probability after a bad answer.

    Args:
        scenario: what is trained on.
        sections: of the settings file; default settings otherwise.
        steps: optimizer steps, plain gradient descent.
        groups: of each batch.
        seed: of sampling.
    """
    rollout = {"group_size": GROUP_SIZE, "max_tokens": 16, "max_tokens_per_turn": 16}
    toy = _Toy(scenario, parse_settings({**_LEAST, "rollout": rollout, **sections}), groups, seed)
    curve = [toy.opt_out]
    for _ in range(steps):
        toy.step()
        curve.append(toy.opt_out)
    return torch.stack(curve)


@dataclass(frozen=True, eq=False)
class _Sampled:
    """Completions of one batch."""

    acts_C: Tensor
    good_C: Tensor
    lengths_C: Tensor


class _Toy:
    """A policy with two decisions, and a critic by prompt, answer and position."""

    def __init__(self, scenario: Scenario, settings: Settings, groups: int, seed: int) -> None:
        self._scenario, self._settings, self._groups = scenario, settings, groups
        self._random = torch.Generator().manual_seed(seed)
        self._group_ids_C = torch.arange(groups).repeat_interleave(GROUP_SIZE)
        self._prompts_C = self._group_ids_C % len(scenario.success)
        self._width = 1 + max(scenario.lengths)  # with one token of the prompt
        act = torch.full((len(scenario.success), 2), math.log((1 - START) / START), dtype=torch.float64)
        self._act_logits = act.requires_grad_()
        """(prompts, answers): of acting; before the answer is known, only the first column counts."""
        success = torch.tensor(scenario.success, dtype=torch.float64)
        self._good_logits = success.logit().requires_grad_()
        self._values = torch.zeros(len(scenario.success), 3, self._width, dtype=torch.float64)

    @property
    def opt_out(self) -> Tensor:
        """Probability by prompt."""
        return torch.sigmoid(-self._act_logits.detach()[:, 1 if self._scenario.late else 0])

    def step(self) -> None:
        """Sample a batch and take one gradient step."""
        sampled = self._sample()
        with torch.no_grad():
            logprobs_RT = self._logprobs(sampled)
        batch = self._batch(sampled, logprobs_RT)
        reasons = filter_reasons(batch, mask_batch(batch, self._settings, 0), self._settings)
        batch = drop_groups(batch, mask_batch(batch, self._settings, 0), reasons)[0]
        states = self._states(sampled)
        statistics = ForwardStatistics(
            old_logprobs_RT=logprobs_RT,
            sum_pi_squared_RT=self._sum_pi_squared(logprobs_RT),
            values_RT=self._values[states],
            end_values_R=torch.zeros(len(batch.lengths_R), dtype=torch.float64),
        )
        prepared = prepare(batch, self._settings, 0, compute_statistics=lambda *_: statistics, seed=0)
        if prepared.masks.loss_rows_R.any():
            self._descend(prepared, sampled)
            self._train_critic(prepared, states)

    def _sample(self) -> _Sampled:
        uniform = torch.rand(2, len(self._prompts_C), generator=self._random, dtype=torch.float64)
        good_C = uniform[0] < torch.sigmoid(self._good_logits.detach())[self._prompts_C]
        acts_C = uniform[1] < torch.sigmoid(self._act_logits_of(good_C).detach())
        good, bad = self._scenario.lengths
        lengths_C = torch.where(good_C, good, bad)
        opted_out = 2 if self._scenario.late else 1
        return _Sampled(acts_C, good_C, torch.where(acts_C, lengths_C, opted_out))

    def _act_logits_of(self, good_C: Tensor) -> Tensor:
        return self._act_logits[self._prompts_C, (~good_C).long() if self._scenario.late else 0]

    def _logprobs(self, sampled: _Sampled) -> Tensor:
        """Log-probs of the two decisions in the order in which they are taken; tokens after them are certain."""
        act_C, good_C = self._act_logits_of(sampled.good_C), self._good_logits[self._prompts_C]
        decisions = [
            logsigmoid(torch.where(sampled.acts_C, act_C, -act_C)),
            logsigmoid(torch.where(sampled.good_C, good_C, -good_C)),
        ]
        if self._scenario.late:
            decisions.reverse()
        later = torch.zeros(len(act_C), self._width - 3, dtype=torch.float64)
        logprobs_RT = torch.cat([torch.zeros(len(act_C), 1), torch.stack(decisions, dim=1), later], dim=1)
        return torch.where(self._sampled_RT(sampled), logprobs_RT, 0.0)

    def _sampled_RT(self, sampled: _Sampled) -> Tensor:
        position_T = torch.arange(self._width)
        return (position_T >= 1) & (position_T <= sampled.lengths_C.unsqueeze(1))

    def _sum_pi_squared(self, logprobs_RT: Tensor) -> Tensor:
        probability_RT = logprobs_RT.exp()
        return probability_RT.square() + (1 - probability_RT).square()

    def _states(self, sampled: _Sampled) -> tuple[Tensor, Tensor, Tensor]:
        """Prompt, answer (2: not known yet) and position before each token."""
        position_T = torch.arange(self._width)
        answer_RT = torch.where(position_T <= (1 if self._scenario.late else 2), 2, sampled.good_C.long().unsqueeze(1))
        shape = answer_RT.shape
        return self._prompts_C.unsqueeze(1).expand(shape), answer_RT, position_T.expand(shape)

    def _batch(self, sampled: _Sampled, logprobs_RT: Tensor) -> Batch:
        good, bad = self._scenario.rewards
        rewards_C = torch.where(sampled.acts_C, torch.where(sampled.good_C, good, bad), 0.0).double()
        # The greedy completion takes the likelier way of each decision.
        prompts_G = torch.arange(self._groups) % len(self._scenario.success)
        greedy_good_G = self._good_logits.detach()[prompts_G] >= 0
        greedy_column_G = (~greedy_good_G).long() if self._scenario.late else torch.zeros_like(prompts_G)
        greedy_acts_G = self._act_logits.detach()[prompts_G, greedy_column_G] >= 0
        none_C, sampled_RT = torch.full_like(self._prompts_C, NONE), self._sampled_RT(sampled)
        facts = CompletionFacts(
            group_ids_C=self._group_ids_C,
            num_groups=self._groups,
            rewards_C=rewards_C,
            measured_C=sampled.acts_C,
            reward_reason_C=torch.where(sampled.acts_C, NONE, REWARD_REASONS.index(RewardReason.RAISED)),
            rollout_reason_C=none_C,
            truncation_reason_C=none_C,
            drop_reason_C=none_C,
            turns_C=torch.ones_like(none_C),
        )
        return Batch(
            tokens_RT=torch.zeros(sampled_RT.shape, dtype=torch.int64),
            sampled_RT=sampled_RT,
            rollout_logprobs_RT=logprobs_RT,
            versions_RT=torch.where(sampled_RT, 0, -1).int(),
            lengths_R=sampled.lengths_C + 1,
            completion_ids_R=torch.arange(len(none_C)),
            facts=facts,
            branches=BranchFacts.unbranched(len(none_C), len(none_C)),
            prompt_ids=tuple(map(str, range(self._groups))),
            greedy_rewards_G=torch.where(greedy_good_G, good, bad).double(),
            greedy_measured_G=greedy_acts_G,
            greedy_lengths_G=torch.where(greedy_good_G, *self._scenario.lengths),
            greedy_truncated_G=torch.full((self._groups,), NONE),
            part_keys=(("toy", 1.0),),
            parts_PC=rewards_C.unsqueeze(0),
            has_part_PC=sampled.acts_C.unsqueeze(0),
            part_weights_P=torch.ones(1, dtype=torch.float64),
            turn_rewards_RT=torch.zeros(sampled_RT.shape, dtype=torch.float64),
        )

    def _descend(self, prepared: PreparedBatch, sampled: _Sampled) -> None:
        rows_R = prepared.masks.loss_rows_R.nonzero().squeeze(1)
        width = int(prepared.batch.lengths_R[rows_R].max())
        mask = prepared.masks.loss_tokens_RT[rows_R, :width]
        logprobs_N = self._logprobs(sampled)[rows_R, :width][mask]
        output = micro_batch_loss(prepared, self._settings, rows_R, TokenLogprobs(logprobs_N), first=True)
        logits = (self._act_logits, self._good_logits)
        gradients = torch.autograd.grad(output.loss, logits)
        with torch.no_grad():
            for logit, gradient in zip(logits, gradients, strict=True):
                logit.sub_(_RATE * gradient)

    def _train_critic(self, prepared: PreparedBatch, states: Sequence[Tensor]) -> None:
        """Move the value of each visited state towards the mean of its returns."""
        returns_RT, mask_RT = prepared.advantages.returns_RT, prepared.masks.loss_tokens_RT
        if returns_RT is None:
            return
        visited = tuple(state[mask_RT] for state in states)
        returns_N = returns_RT[mask_RT]
        zeros = torch.zeros_like(self._values)
        sums = zeros.index_put(visited, returns_N, accumulate=True)
        counts = zeros.index_put(visited, torch.ones_like(returns_N), accumulate=True)
        self._values += _CRITIC_RATE * torch.where(counts > 0, sums / counts.clamp(min=1) - self._values, 0.0)


def main() -> None:
    """Print the probability of opting out after 100 steps, by estimator and scenario."""
    torch.set_num_threads(1)
    late = Scenario(lengths=(8, 8), late=True)
    print("| estimator |", " | ".join(SCENARIOS), "| late |")
    variants: list[tuple[str, dict[str, Any]]] = [(name, {"name": name}) for name in ESTIMATORS]
    variants += [
        (f'{name}, `center = "tokens"`', {"name": name, "center": "tokens"})
        for name, entry in ESTIMATORS.items()
        if "center" in entry.option_names
    ]
    for label, estimator in variants:
        ends = [
            opt_out_curve(scenario, {"estimator": estimator}, steps=100)[-1] for scenario in (*SCENARIOS.values(), late)
        ]
        print(f"| {label} |", " | ".join(" / ".join(f"{p:.2f}" for p in end) for end in ends), "|", flush=True)


if __name__ == "__main__":
    main()
