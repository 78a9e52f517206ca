"""What the updates of one batch add up to."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True, eq=False)
class StepAccumulator:
    """What the updates of one batch add up to."""

    updates: int = 0
    """Updates that were computed, finite or not."""
    sums: dict[str, float] = field(default_factory=dict)
    """Of `loss` and `grad_norm` over updates, of all others over loss tokens and updates."""
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, sums: Mapping[str, Tensor | float], maxima: Mapping[str, Tensor | float]) -> None:
        """Add a share."""
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)
        for name, value in maxima.items():
            self.maxima[name] = max(float(value), self.maxima.get(name, float("-inf")))

    def metrics(self, tokens: int) -> dict[str, float]:
        """Means; entropy is known of the first update alone."""
        over = {"loss": self.updates, "grad_norm": self.updates, "entropy": tokens}
        means = {name: value / over.get(name, tokens * self.updates) for name, value in self.sums.items()}
        return {"loss": 0.0, **means, **self.maxima}
