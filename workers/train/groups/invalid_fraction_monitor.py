"""Stops a run in which too many completions bear no loss.

Invalid completions are excluded from training. A policy could learn to exploit that, and a verifier that fails would go
unnoticed. So this monitor counts completions without loss by environment and reason over a window of groups, and ends
the run above a limit. It makes no difference why: the reward is unmeasured, the rollout failed, the completion is
truncated under the policy `exclude` or `baseline_only`, it has no row, or no token is left (too old, log-probs not
finite, branch discarded, rejected by a rule of the correction). A greedy completion counts if it cannot be a baseline.
"""

from collections import Counter, deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from stream.causes import ErrorCause
from stream.errors import RunFailedError

_REMEDIES: Final = {
    "reward": "fix the reward function",
    "failed": "fix the environment or the engine",
    "truncated": "raise the limit that truncates, or choose another policy in algorithm.truncation",
    "rejected:too_old": "raise pacing.max_token_age, or publish more often",
    "rejected:not_finite": "find out why the engine's log-probs are not finite",
    "rejected:no_token": "find out why nothing was sampled",
    "rejected:branch_role": "name the roles of its branches in agents.train",
    "rejected:branch_program": "find out why the program wants none of its branches trained",
    "rejected:branch_superseded": "find out why the program continued none of its branches",
    "rejected": "widen the bounds in correction.reject",
}
"""By the reason, or what precedes its colon."""


class InvalidFractionMonitor:
    """Counts completions without loss in the last groups of each environment.

    Args:
        max_invalid_fraction: largest fraction of completions that may bear no loss for one reason.
        window: number of groups counted together.
    """

    def __init__(self, max_invalid_fraction: float, window: int) -> None:
        self._max_invalid_fraction = max_invalid_fraction
        self._window = window
        self._recent: dict[str, deque[tuple[int, Counter[str]]]] = {}
        self._causes: dict[tuple[str, str], ErrorCause] = {}
        """The last cause of each environment and reason."""

    def observe(
        self,
        environment: str | None,
        completions: int,
        without_loss: Mapping[str, int],
        causes: Mapping[str, ErrorCause] = MappingProxyType({}),
    ) -> None:
        """Count one group.

        Args:
            environment: of the group.
            completions: their number.
            without_loss: completions that bear no loss, by reason.
            causes: exceptions behind them, by reason.

        Raises:
            RunFailedError: over a full window, one reason exceeds the limit.
        """
        environment = environment or "no environment"
        self._causes.update({(environment, reason): cause for reason, cause in causes.items()})
        recent = self._recent.setdefault(environment, deque(maxlen=self._window))
        recent.append((completions, Counter(without_loss)))
        if len(recent) == self._window:
            self._check(environment, recent)

    def _check(self, environment: str, recent: deque[tuple[int, Counter[str]]]) -> None:
        completions = sum(n for n, _ in recent)
        reasons = sum((counts for _, counts in recent), Counter[str]())
        for reason, n in reasons.most_common(1):
            if n > self._max_invalid_fraction * completions:
                cause = self._causes.get((environment, reason))
                why = f" ({cause.short_headline})" if cause else ""
                raise RunFailedError(
                    f"{n} of the last {completions} completions of {environment} bear no loss for one reason, {reason}"
                    f"{why}, more than abort.max_invalid_fraction = {self._max_invalid_fraction:g} allows. The run "
                    f"stops instead of training on the rest; {_remedy(reason)}, or raise the limit",
                    cause,
                )


def _remedy(reason: str) -> str:
    return _REMEDIES.get(reason) or _REMEDIES[reason.partition(":")[0]]
