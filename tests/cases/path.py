"""The whole path of a batch, as the learner takes it, through a small network in float64, with junk wherever it is asked for.

Masks, filters, a pass without gradient, rejection, weights, advantages, the objective by micro-batches, every parameter's
gradient, metrics. Two updates: at the second one the policy has moved, so that ratios are not 1.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch import Tensor

from tests.cases.completions import VERSION, VOCABULARY, Made
from workers.settings import Settings
from workers.train.algorithms.advantages import ESTIMATORS
from workers.train.algorithms.losses import LOSSES
from workers.train.algorithms.masks import Masks
from workers.train.algorithms.rejection import Rejection, Rule, reject
from workers.train.batch import Batch
from workers.train.estimation import NEEDS_SURVEY, Advantages, estimate_advantages
from workers.train.logprobs import token_logprobs
from workers.train.metrics import Metrics, step_metrics
from workers.train.objective import Objective, Settled, correction_report, settle
from workers.train.selection import derive_masks, verdicts, without
from workers.train.survey import Survey

torch.set_num_threads(1)

COUNTERS = ("rows/", "groups/", "truncated/", "tokens/sampled", "tokens/not_finite", "tokens/too_old", "valid_fraction")
"""Metrics that count what is invalid too, by how they begin; `truncated/*_mean` and `pass@K/valid` are none."""
OF_THE_LEARNER = ("step", "version", "learning_rate", "trained", "seconds", "grad_norm")
"""Metrics that the learner adds."""


class Network(torch.nn.Module):
    """A causal language model: each token's distribution hangs on all before it. With a critic's head."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 5)
        self.mixing = torch.nn.Linear(5, 5)
        self.head = torch.nn.Linear(5, VOCABULARY)
        self.critic = torch.nn.Linear(5, 1)
        source = torch.Generator().manual_seed(seed)
        self.double()
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=source, dtype=torch.float64) * 0.7

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.mixing(self.embedding(input_ids).cumsum(dim=1)).tanh()))


@dataclass(frozen=True)
class Result:
    """Tensors that speak of completions or tokens are in the order of keys, whatever the batch's."""

    batch: Batch
    masks: Masks
    advantages: Advantages
    values: Tensor
    """Advantages of completions in B."""
    tokens: Tensor
    """Advantages of tokens that bear loss."""
    losses: list[Tensor]
    gradients: list[Tensor]
    """Of every parameter, after each update."""
    metrics: Metrics


def evaluate(
    case: Sequence[Made],
    batch: Batch,
    settings: Settings,
    *,
    junk: float | None = None,
    split: Callable[[Tensor], list[Tensor]] | None = None,
) -> Result:
    """Take the path.

    Args:
        case: whose keys give the order of results.
        batch: the batch of it.
        settings: of the run.
        junk: what to put wherever nothing may look; nothing unless given.
        split: the micro-batches of these rows; all in one unless given.
    """
    network, before, after = Network(0), Network(1), Network(2)
    batch = without(batch, verdicts(batch, derive_masks(batch, settings, VERSION), settings))
    if junk is not None:
        batch = _littered(batch, derive_masks(batch, settings, VERSION), junk)
    masks = derive_masks(batch, settings, VERSION)
    survey, rejection, settled = None, None, None
    seen = None
    if _needs_survey(settings):
        survey = seen = _survey(network, batch, masks, settings, junk)
        judged_RT = masks.tokens_RT
        batch, masks, rejection = _rejected(batch, masks, survey, settings)
        if junk is not None:
            # What the rules judged is measured as such, and kept for that.
            batch = _littered(batch, masks, junk, known_RT=judged_RT)
            seen = _littered_survey(survey, batch, masks, junk)
        settled = settle(batch, masks.tokens_RT, seen.logprobs_RT, VERSION, settings)
        if junk is not None:
            keep = (judged_RT, masks.tokens_RT, masks.tokens_RT)
            settled = Settled(*(torch.where(mask, x, junk) for mask, x in zip(keep, settled, strict=True)))
    weights_RT = None if settled is None else settled.weights_RT
    advantages = estimate_advantages(batch, masks, settings, survey=seen, weights_RT=weights_RT)
    found, given = advantages, advantages
    if junk is not None:
        outside = [
            None if x is None else torch.where(masks.tokens_RT, x, junk) for x in (found.tokens_RT, found.returns_RT)
        ]
        given = replace(advantages, tokens_RT=outside[0], returns_RT=outside[1])
    objective = Objective(batch, masks, given, VERSION, settings, settled=settled, survey=survey, seed=7)
    metrics = dict(step_metrics(batch, masks, found.values_C, settings=settings, version=VERSION))
    losses, gradients = [], []
    rows_R = masks.loss_R.nonzero().squeeze(1)
    parts = [part for part in (split(rows_R) if split else [rows_R]) if len(part)]
    for update in range(2):
        network.zero_grad(set_to_none=False)
        total, sums, maxima = torch.zeros((), dtype=torch.float64), dict[str, float](), dict[str, float]()
        for part in parts:
            output = _share(network, before, objective, part, settings, first=update == 0)
            output.loss.backward()
            total = total + output.loss.detach()
            for name, value in output.sums.items():
                sums[name] = sums.get(name, 0.0) + float(value)
            for name, value in output.maxima.items():
                maxima[name] = max(maxima.get(name, -math.inf), float(value))
        losses.append(total)
        gradients += [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in network.parameters()]
        tokens = objective.totals.tokens
        metrics |= {f"{name} {update}": value / tokens for name, value in sums.items()}
        metrics |= {f"{name} {update}": value for name, value in maxima.items()}
        if update == 0:
            if parts:
                metrics |= correction_report(objective, rejection)
            with torch.no_grad():
                for parameter, step in zip(network.parameters(), after.parameters(), strict=True):
                    parameter += 0.2 * step
    keys = [made.key for made in case]
    return Result(
        batch=batch,
        masks=masks,
        advantages=found,
        values=_by_key(found.values_C, keys, masks.baseline_C),
        tokens=_tokens_by_key(found.tokens_RT, keys, batch, masks),
        losses=losses,
        gradients=gradients,
        metrics=metrics,
    )


def measured(metrics: Metrics) -> dict[str, float]:
    """Metrics that are no counters."""
    return {name: float(value) for name, value in metrics.items() if not counts(name)}


def counts(name: str) -> bool:
    """Whether a metric counts what is invalid too."""
    if name.endswith("_mean"):
        return False
    return name.startswith(COUNTERS) or (name.startswith("pass@") and name.endswith("/all"))


def close(left: Tensor, right: Tensor) -> bool:
    """Equal to 1e-12 of the largest value, or of 1."""
    if left.shape != right.shape:
        return False
    scale = max(1.0, *(float(x.abs().max()) for x in (left, right))) if left.numel() else 1.0
    return torch.allclose(left, right, rtol=0, atol=1e-12 * scale)


def assert_same(left: Result, right: Result, *, exactly: bool = False) -> None:
    """The same advantages, losses, gradients and metrics, to the bit or but for rounding."""
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


def _needs_survey(settings: Settings) -> bool:
    correction = settings.correction.resolved()
    return bool(
        correction.reject
        or correction.normalize
        or LOSSES[settings.loss.name].declared.selector
        or set(ESTIMATORS[settings.estimator.name].needs) & set(NEEDS_SURVEY)
    )


def _survey(network: Network, batch: Batch, masks: Masks, settings: Settings, junk: float | None) -> Survey:
    mask_RT, rows = masks.tokens_RT, masks.loss_R
    zeros_RT = torch.zeros_like(batch.behaviour_logprobs_RT)
    found = dict.fromkeys(("logprobs_RT", "squares_RT", "values_RT"), zeros_RT)
    ends_R = zeros_RT.new_zeros(len(rows))
    if rows.any():
        with torch.no_grad():
            read = token_logprobs(
                network,
                batch.tokens_RT,
                mask_RT,
                temperature=settings.rollout.temperature,
                squares=True,
                lengths_M=batch.lengths_R,
            )
            values_N = network.critic(read.hidden_NH).squeeze(-1)
            ends_R = torch.where(rows, network.critic(read.end_hidden_MH).squeeze(-1), 0.0)
        laid = zip(found, (read.logprobs_N, read.squares_N, values_N), strict=True)
        found = {name: zeros_RT.masked_scatter(mask_RT, values) for name, values in laid}
    survey = Survey(**found, end_values_R=ends_R)
    return survey if junk is None else _littered_survey(survey, batch, masks, junk)


def _rejected(batch: Batch, masks: Masks, survey: Survey, settings: Settings) -> tuple[Batch, Masks, Rejection | None]:
    rules = settings.correction.resolved().reject
    if not rules:
        return batch, masks, None
    rejection = reject(
        [Rule(rule.rule, rule.lower, rule.upper) for rule in rules],
        survey.logprobs_RT,
        batch.behaviour_logprobs_RT,
        masks.tokens_RT,
        batch.completion_ids_R,
    )
    taken = {rule.name: masks.tokens_RT & ~kept for rule, kept in zip(rejection.rules, rejection.by_rule, strict=True)}
    batch = without(batch, verdicts(batch, derive_masks(batch, settings, VERSION, taken), settings))
    return batch, derive_masks(batch, settings, VERSION, taken), rejection


def _share(network: Network, before: Network, objective: Objective, part: Tensor, settings: Settings, *, first: bool):
    batch, mask = objective.batch, objective.masks.tokens_RT[part]
    width = int(batch.lengths_R[part].max())
    tokens, mask = batch.tokens_RT[part, :width], mask[:, :width]
    temperature = settings.rollout.temperature
    entropy = "gradient" if settings.algorithm.entropy_coefficient else "value" if first else ""
    found = token_logprobs(network, tokens, mask, temperature=temperature, entropy=entropy)
    reference_N = None
    if settings.algorithm.kl_coefficient:
        with torch.no_grad():
            reference_N = token_logprobs(before, tokens, mask, temperature=temperature).logprobs_N
    values_N = network.critic(found.hidden_NH).squeeze(-1) if settings.estimator.name == "gae" else None
    return objective.share(part, found, first=first, reference_N=reference_N, values_N=values_N)


def _littered(batch: Batch, masks: Masks, junk: float, known_RT: Tensor | None = None) -> Batch:
    """With junk in every number that belongs to what is outside of B, or of the tokens that bear loss."""
    known_RT = masks.tokens_RT if known_RT is None else known_RT
    facts, lost_R = batch.facts, ~masks.baseline_C[batch.completion_ids_R]
    turn_rewards_RT = torch.where(masks.tokens_RT, batch.turn_rewards_RT, junk)
    return replace(
        batch,
        facts=replace(facts, rewards_C=torch.where(masks.baseline_C, facts.rewards_C, junk)),
        behaviour_logprobs_RT=torch.where(known_RT, batch.behaviour_logprobs_RT, junk),
        versions_RT=torch.where(lost_R.unsqueeze(1), 2**31 - 1, batch.versions_RT),
        parts_PC=torch.where(masks.baseline_C, batch.parts_PC, junk),
        turn_rewards_RT=turn_rewards_RT,
        outcome_C=torch.where(masks.baseline_C, batch.outcome_C, junk),
    )


def _littered_survey(survey: Survey, batch: Batch, masks: Masks, junk: float) -> Survey:
    mask_RT, loss_R = masks.tokens_RT, masks.loss_C[batch.completion_ids_R]
    return Survey(
        logprobs_RT=torch.where(mask_RT, survey.logprobs_RT, junk),
        squares_RT=torch.where(mask_RT, survey.squares_RT, junk),
        values_RT=torch.where(mask_RT, survey.values_RT, junk),
        end_values_R=torch.where(loss_R, survey.end_values_R, junk),
    )


def _by_key(values_C: Tensor, keys: Sequence[int], valid_C: Tensor) -> Tensor:
    order = sorted(range(len(keys)), key=keys.__getitem__)
    return values_C[order][valid_C[order]]


def _tokens_by_key(values_RT: Tensor, keys: Sequence[int], batch: Batch, masks: Masks) -> Tensor:
    owners = batch.completion_ids_R.tolist()
    order = sorted(range(len(owners)), key=lambda row: (keys[owners[row]], row))
    return values_RT[order][masks.tokens_RT[order]]
