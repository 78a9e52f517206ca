"""The learner's whole path of a batch, in float64 through a small network, optionally with junk in undefined places.

Masks, filters, a pass without gradient, rejection, weights, advantages, the objective by micro-batches, gradients of
every parameter, metrics. Two updates: the policy has moved before the second one, so that its ratios differ from 1.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor
from transformers import PretrainedConfig

from tests.cases.completions import VERSION, VOCABULARY, Made
from workers.settings import Settings
from workers.train.algorithms.correction import Rejection
from workers.train.algorithms.masks import NONE, Masks
from workers.train.model.logprobs import LogprobModel
from workers.train.ranks import Ranks
from workers.train.step.batch import Batch, ForwardStatistics
from workers.train.step.estimation import Advantages, estimate_advantages
from workers.train.step.group_checks import drop_groups, filter_reasons, mask_batch
from workers.train.step.micro_batches import MicroBatch
from workers.train.step.model_runner import ModelRunner
from workers.train.step.prepared_batch import PreparedBatch, compare_policies, prepare, weigh_tokens
from workers.train.step.step_metrics import Metrics, correction_step_metrics, step_metrics

torch.set_num_threads(1)

SEED = 7
COUNTERS = (
    *("rows/", "groups/", "truncated/", "valid_fraction", "branches/discarded/"),
    *("tokens/sampled", "tokens/not_finite", "tokens/too_old", "tokens/branch_"),
)
"""Prefixes of metrics that also count invalid completions, except `truncated/*_mean` and `pass@K/valid`."""
OF_THE_LEARNER = (
    "step",
    "version",
    "learning_rate",
    "trained",
    "seconds",
    "grad_norm",
    "tokens/forwarded",
    "tokens/shared",
)
"""Metrics that the learner adds."""


class Network(torch.nn.Module):
    """A causal language model with a critic head: each token's distribution depends on all tokens before it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.config, self.device = PretrainedConfig(), torch.device("cpu")
        self.embedding = torch.nn.Embedding(VOCABULARY, 5)
        self.mixing = torch.nn.Linear(5, 5)
        self.head = torch.nn.Linear(5, VOCABULARY)
        self.critic = torch.nn.Linear(5, 1)
        source = torch.Generator().manual_seed(seed)
        self.double()
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=source, dtype=torch.float64) * 0.7
        self.initial = [parameter.data.clone() for parameter in self.parameters()]

    @classmethod
    @cache
    def made(cls, seed: int) -> "Network":
        """Return the network of a seed, made once; `reset` undoes updates of it."""
        return cls(seed)

    def reset(self) -> "Network":
        """Set the parameters to what they were in the beginning, without gradients."""
        for parameter, initial in zip(self.parameters(), self.initial, strict=True):
            parameter.data, parameter.grad = initial.clone(), None
        return self

    def get_input_embeddings(self) -> torch.nn.Embedding:
        """Return the embeddings, as models of transformers do."""
        return self.embedding

    def value(self, hidden_NH: Tensor) -> Tensor:
        return self.critic(hidden_NH).squeeze(-1)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def hidden(self, tokens_RT: Tensor) -> Tensor:
        return self.mixing(self.embedding(tokens_RT).cumsum(dim=1)).tanh()

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.hidden(input_ids)))


@dataclass(frozen=True)
class Result:
    """Result of one path. Tensors over completions or tokens are ordered by key, whatever the batch's order."""

    batch: Batch
    masks: Masks
    rejection: Rejection | None
    advantages: Advantages
    values: Tensor
    """Advantages of completions in B or L."""
    tokens: Tensor
    """Advantages of tokens that bear loss."""
    losses: list[Tensor]
    gradients: list[Tensor]
    """Gradients of every parameter, after each update."""
    metrics: Metrics


@contextmanager
def _in_float64() -> Iterator[None]:
    """Make float64 the default type as well, for tensors that are made without one."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


@_in_float64()
def evaluate(
    case: Sequence[Made],
    batch: Batch,
    settings: Settings,
    *,
    junk: float | None = None,
    split: Callable[[Tensor], list[Tensor]] | None = None,
) -> Result:
    """Compute the path.

    Args:
        case: the completions, whose keys order the results.
        batch: the batch of the case.
        settings: settings of the run.
        junk: value to put wherever nothing may read; None puts none.
        split: splits rows into micro-batches; by default all rows are one.
    """
    network, after = Network.made(0).reset(), Network.made(2)
    reference = Network.made(1) if settings.algorithm.kl_coefficient else None
    critic = network.value if settings.estimator.name == "gae" else None
    runner = ModelRunner(
        LogprobModel.from_whole(network), reference and LogprobModel.from_whole(reference), critic, settings, Ranks()
    )
    masks = mask_batch(batch, settings, VERSION)
    batch, _ = drop_groups(batch, masks, filter_reasons(batch, masks, settings))
    if junk is None:
        prepared = prepare(batch, settings, VERSION, compute_statistics=runner.forward_statistics, seed=SEED)
    else:
        prepared = _prepare_with_junk(batch, settings, runner, junk)
    masks, advantages = prepared.masks, prepared.advantages
    metrics = dict(step_metrics(prepared.batch, masks, advantages.values_C, settings=settings, version=VERSION))
    losses, gradients = [], []
    rows_R = masks.loss_rows_R.nonzero().squeeze(1)
    parts = [MicroBatch(part) for part in (split(rows_R) if split else [rows_R]) if len(part)]
    tokens = prepared.loss_weights.loss_tokens
    for update in range(2):
        network.zero_grad(set_to_none=False)
        total, sums, maxima = torch.zeros((), dtype=torch.float64), dict[str, float](), dict[str, float]()
        for part in parts:
            output = runner.backward(prepared, part, first=update == 0)
            total = total + output.loss.detach()
            for name, value in output.sums.items():
                sums[name] = sums.get(name, 0.0) + float(value)
            for name, value in output.maxima.items():
                maxima[name] = max(maxima.get(name, -math.inf), float(value))
        losses.append(total)
        gradients += [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in network.parameters()]
        metrics |= {f"{name} {update}": value / tokens for name, value in sums.items()}
        metrics |= {f"{name} {update}": value for name, value in maxima.items()}
        if update == 0:
            if parts:
                metrics |= correction_step_metrics(prepared, settings)
            with torch.no_grad():
                for parameter, other in zip(network.parameters(), after.parameters(), strict=True):
                    parameter.add_(other, alpha=0.2)
    keys = [made.key for made in case]
    return Result(
        batch=prepared.batch,
        masks=masks,
        rejection=prepared.rejection,
        advantages=advantages,
        values=_by_key(advantages.values_C, keys, masks.used_C),
        tokens=_tokens_by_key(advantages.tokens_RT, keys, prepared.batch, masks),
        losses=losses,
        gradients=gradients,
        metrics=metrics,
    )


def _prepare_with_junk(batch: Batch, settings: Settings, runner: ModelRunner, junk: float) -> PreparedBatch:
    """Prepare a batch full of junk, then prepare it again with junk in everything that the first run masked out."""
    seen: list[ForwardStatistics] = []

    def statistics(batch: Batch, mask_RT: Tensor) -> ForwardStatistics:
        seen.append(_littered_statistics(runner.forward_statistics(batch, mask_RT), batch, mask_RT, junk))
        return seen[0]

    batch = _littered(batch, mask_batch(batch, settings, VERSION), junk)
    prepared = prepare(batch, settings, VERSION, compute_statistics=statistics, seed=SEED)
    masks, policies, weights_RT = prepared.masks, prepared.policies, None
    mask_RT = masks.loss_tokens_RT
    # The metrics of a rule read all tokens that it judged, including the rejected ones.
    judged_RT = mask_RT if prepared.rejection is None else prepared.rejection.log_ratios.mask_RT
    batch = _littered(prepared.batch, masks, junk, known_RT=judged_RT)
    again = _littered_statistics(seen[0], batch, mask_RT, junk) if seen else None
    if again is not None:
        policies = compare_policies(batch, prepared.sequences, again.old_logprobs_RT, VERSION, settings)
        policies = replace(
            policies,
            old_logprobs_RT=torch.where(judged_RT, seen[0].old_logprobs_RT, junk),
            proximal_RT=torch.where(mask_RT, policies.proximal_RT, junk),
            weights_RT=torch.where(mask_RT, policies.weights_RT, junk),
        )
        weights_RT = policies.weights_RT
    advantages = estimate_advantages(batch, masks, settings, statistics=again, weights_RT=weights_RT)
    advantages = replace(
        advantages,
        tokens_RT=torch.where(mask_RT, advantages.tokens_RT, junk),
        returns_RT=None if advantages.returns_RT is None else torch.where(mask_RT, advantages.returns_RT, junk),
    )
    return replace(
        prepared,
        batch=batch,
        policies=policies,
        advantages=advantages,
        loss_weights=weigh_tokens(batch, prepared.sequences, policies, advantages, settings, SEED),
    )


def measured(metrics: Metrics) -> dict[str, float]:
    """Return the metrics that are not counters."""
    return {name: float(value) for name, value in metrics.items() if not counts(name)}


def counts(name: str) -> bool:
    """Whether a metric counts invalid completions as well."""
    if name.endswith("_mean"):
        return False
    return name.startswith(COUNTERS) or (name.startswith("pass@") and name.endswith("/all"))


def close(left: Tensor, right: Tensor) -> bool:
    """Whether both are equal up to 1e-12 of the largest value, or of 1."""
    if left.shape != right.shape:
        return False
    scale = max(1.0, *(float(x.abs().max()) for x in (left, right))) if left.numel() else 1.0
    return torch.allclose(left, right, rtol=0, atol=1e-12 * scale)


def assert_same(left: Result, right: Result, *, exactly: bool = False) -> None:
    """Assert that advantages, losses, gradients and metrics are equal, bit by bit or up to rounding."""
    same = torch.equal if exactly else close
    assert same(left.values, right.values), (left.values, right.values)
    assert same(left.tokens, right.tokens), (left.tokens, right.tokens)
    pairs = zip([*left.losses, *left.gradients], [*right.losses, *right.gradients], strict=True)
    for number, (one, other) in enumerate(pairs):
        assert same(one, other), (number, one, other)
    one, other = measured(left.metrics), measured(right.metrics)
    assert one.keys() == other.keys()
    different = {n: (v, other[n]) for n, v in one.items() if v != other[n]}
    if not exactly:
        different = {
            n: (a, b) for n, (a, b) in different.items() if not math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-10)
        }
    assert not different, different


def _littered(batch: Batch, masks: Masks, junk: float, known_RT: Tensor | None = None) -> Batch:
    """Return the batch with junk in every number outside of B and L, or outside of the tokens that bear loss."""
    known_RT = masks.loss_tokens_RT if known_RT is None else known_RT
    facts = batch.facts
    # A version may be the reason for a rejection.
    lost_R = (~masks.used_C & (masks.rejected_by_C == NONE))[batch.completion_ids_R]
    turn_rewards_RT = torch.where(masks.loss_tokens_RT, batch.turn_rewards_RT, junk)
    return replace(
        batch,
        facts=replace(facts, rewards_C=torch.where(masks.used_C, facts.rewards_C, junk)),
        rollout_logprobs_RT=torch.where(known_RT, batch.rollout_logprobs_RT, junk),
        versions_RT=torch.where(lost_R.unsqueeze(1), 2**31 - 1, batch.versions_RT),
        parts_PC=torch.where(masks.baseline_C, batch.parts_PC, junk),
        turn_rewards_RT=turn_rewards_RT,
    )


def _littered_statistics(
    statistics: ForwardStatistics, batch: Batch, mask_RT: Tensor, junk: float
) -> ForwardStatistics:
    """Return the statistics with junk outside of the mask; a completion's end counts if any of its tokens does."""
    bears_C = torch.zeros_like(batch.facts.measured_C)
    bears_C[batch.completion_ids_R[mask_RT.any(dim=1)]] = True
    loss_R = bears_C[batch.completion_ids_R]
    return ForwardStatistics(
        old_logprobs_RT=torch.where(mask_RT, statistics.old_logprobs_RT, junk),
        sum_pi_squared_RT=torch.where(mask_RT, statistics.sum_pi_squared_RT, junk),
        values_RT=torch.where(mask_RT, statistics.values_RT, junk),
        end_values_R=torch.where(loss_R, statistics.end_values_R, junk),
    )


def _by_key(values_C: Tensor, keys: Sequence[int], valid_C: Tensor) -> Tensor:
    order = sorted(range(len(keys)), key=keys.__getitem__)
    return values_C[order][valid_C[order]]


def _tokens_by_key(values_RT: Tensor, keys: Sequence[int], batch: Batch, masks: Masks) -> Tensor:
    owners = batch.completion_ids_R.tolist()
    order = sorted(range(len(owners)), key=lambda row: (keys[owners[row]], row))
    return values_RT[order][masks.loss_tokens_RT[order]]
