"""Registries of pure functions by name, with the properties that each function declares.

Estimators are defined in `advantages` (one value per completion) and `token_advantages` (one per token); importing
`advantages` registers all of them.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Literal, TypeVar

from torch import Tensor

Traits = TypeVar("Traits")
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class RegistryEntry(Generic[Traits]):
    """A registered function with its formula, source and declared properties."""

    name: str
    function: Callable[..., Any]
    formula: str
    """One line, as the docs show it."""
    source: str
    """Origin of the formula: a paper, or a file of another project."""
    input_names: tuple[str, ...]
    """Names of its positional parameters: inputs that the registry knows."""
    option_names: tuple[str, ...]
    """Names of its keyword-only parameters: settings."""
    traits: Traits
    """Declared properties, which the property tests check."""

    def __call__(self, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        """Call the function with the inputs and options that it names; others are ignored.

        Raises:
            KeyError: an input or option is missing.
        """
        return self.function(
            *(inputs[name] for name in self.input_names), **{name: options[name] for name in self.option_names}
        )


class Registry(Mapping[str, RegistryEntry[Traits]]):
    """Functions of one kind by name.

    Args:
        noun: name of the kind, for error messages.
        inputs: inputs that a function may ask for, by name, each with its meaning and shape.

    Example:
        >>> ESTIMATORS["rloo"]({"rewards_C": rewards_C, "groups": groups}, {})
    """

    def __init__(self, noun: str, inputs: Mapping[str, str]) -> None:
        self.noun = noun
        self.inputs = inputs
        self._entries: dict[str, RegistryEntry[Traits]] = {}

    def register(self, name: str, traits: Traits, *, formula: str, source: str) -> Callable[[Function], Function]:
        """Return a decorator that registers a function and leaves it callable as it is.

        Raises:
            ValueError: the name is taken, or a positional parameter is not one of `inputs`.
        """

        def add(function: Function) -> Function:
            if name in self._entries:
                raise ValueError(f"a {self.noun} named {name!r} is registered already")
            parameters = inspect.signature(function).parameters.values()
            input_names = tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
            unknown = [need for need in input_names if need not in self.inputs]
            if unknown:
                raise ValueError(f"{self.noun} {name!r} needs {unknown[0]!r}; there is {', '.join(self.inputs)}")
            self._entries[name] = RegistryEntry(
                name=name,
                function=function,
                formula=formula,
                source=source,
                input_names=input_names,
                option_names=tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY),
                traits=traits,
            )
            return function

        return add

    def __getitem__(self, name: str) -> RegistryEntry[Traits]:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(frozen=True, slots=True)
class EstimatorTraits:
    """Declared properties of an estimator, which the property tests check."""

    level: Literal["completion", "token"]
    """`completion`: returns float64 (C), one per completion. `token`: returns `TokenAdvantages`."""
    mean_centred: bool = False
    """The advantages of a group's completions in B sum to 0."""
    shift_invariant: bool = False
    """Adding a constant to all rewards of a group changes nothing."""
    scale_invariant: bool = False
    """Multiplying all rewards by a positive number changes nothing, if the estimator divides by the group's standard
    deviation and that is far above epsilon."""
    affine: bool = False
    """Within a group, advantages lie on a straight line over the rewards, so that they are known for the reward 0."""
    within_group: bool = True
    """True if a group's advantages depend on that group only; False if they depend on the batch, on values or on a
    greedy rollout as well."""
    whitened: bool = False
    """Ends in whitening over the batch's tokens, or may (option `whiten`)."""


ESTIMATORS: Final[Registry[EstimatorTraits]] = Registry(
    "estimator",
    {
        "rewards_C": "float64, reward of each completion; anything outside B",
        "groups": "Grouping of the completions; its valid members are B",
        "lengths_C": "int64, tokens of each completion that no rule rejected; anything outside B",
        "loss_lengths_C": "int64, tokens of each completion that bear loss; 0 outside L",
        "parts_PC": "float64, parts of the rewards; anything outside B",
        "has_part_PC": "bool, parts that each completion has; anything outside B",
        "part_weights_P": "float64, weight of each part",
        "correct_C": "bool, completions whose reward reaches the success threshold; anything outside B",
        "token_rewards_CT": "float, reward credited to each token; anything outside the mask",
        "mask_CT": "bool, tokens that count; a completion's tokens in order, tool tokens between them",
        "values_CT": "float, the critic's value before each token; anything outside the mask",
        "bootstrap_C": "float, the critic's value after a truncated end; 0 after a real end",
        "greedy_C": "float, reward of the greedy rollout of each completion's prompt",
        "old_logprobs_CT": "float, log-prob of each token under the policy that is differentiated",
        "sum_pi_squared_CT": "float, sum over the vocabulary of the squared probabilities at each token",
        "weights_CT": "float, importance weights; 1 where there are none",
    },
)
"""Estimators by the name in `[estimator] name`."""


@dataclass(frozen=True, slots=True)
class LossTraits:
    """Declared properties of a loss."""

    aggregation: str = ""
    """The only aggregation that the loss is defined with; empty for any."""
    on_policy: bool = False
    """True if the loss has no ratio to the proximal policy, so it is correct only for the first update of a batch."""
    selector: str = ""
    """Name in `token_selection.SELECTORS` of the function that makes `selected_RT`, once per optimizer batch."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenLoss:
    """Loss of each token before aggregation, and before importance weights unless the loss applies them itself."""

    loss_RT: Tensor
    """Outside the mask it is finite and ignored."""
    token_metrics: dict[str, Tensor] = field(default_factory=dict)
    """(R, T), bool or numbers; their mean over loss tokens is a metric of that name."""


LOSSES: Final[Registry[LossTraits]] = Registry(
    "loss",
    {
        "logprobs_RT": "log-probs of the policy in training, with gradient; 0 outside the mask",
        "proximal_RT": "log-probs that the ratio is taken against; 0 outside the mask",
        "advantages_RT": "advantages; 0 outside the mask",
        "weights_RT": "importance weights, 1 outside the mask; a loss that takes them applies them",
        "sequences": "Sequences over the loss tokens of each completion",
        "selected_RT": "bool, tokens chosen by the loss's selector; False outside the mask",
    },
)
"""Losses by the name in `[loss] name`. `workers.train.algorithms.losses` fills the registry; import it from there.

In formulas: r = exp(logprobs - proximal), A the advantage, lp the log-prob, sg stops the gradient.
"""
