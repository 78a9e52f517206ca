"""Stops a run whose rewards are no longer measured.

Invalid completions are excluded from training. A policy could learn to exploit that, and a verifier that fails would go
unnoticed. So this monitor counts invalid completions by environment and reason over a window of groups, and ends the
run above a limit. Greedy completions count like all others.
"""

from collections import Counter, deque

from stream.errors import RunFailedError
from stream.records import Completion, Group
from stream.validity import Unmeasured


class InvalidRewardMonitor:
    """Counts invalid completions in the last groups of each environment.

    Args:
        max_invalid_fraction: largest fraction of completions that may be invalid for one reason.
        window: number of groups counted together.
    """

    def __init__(self, max_invalid_fraction: float, window: int) -> None:
        self._max_invalid_fraction = max_invalid_fraction
        self._window = window
        self._recent: dict[str, deque[tuple[int, Counter[str]]]] = {}

    def observe(self, group: Group) -> None:
        """Count one group.

        Raises:
            RunFailedError: over a full window, one reason exceeds the limit.
        """
        environment = group.prompt.environment or "no environment"
        recent = self._recent.setdefault(environment, deque(maxlen=self._window))
        recent.append((len(group.completions), Counter(filter(None, map(_invalid_state, group.completions)))))
        if len(recent) == self._window:
            self._check(environment, recent)

    def _check(self, environment: str, recent: deque[tuple[int, Counter[str]]]) -> None:
        completions = sum(n for n, _ in recent)
        reasons = sum((counts for _, counts in recent), Counter[str]())
        for reason, n in reasons.most_common(1):
            if n > self._max_invalid_fraction * completions:
                raise RunFailedError(
                    f"{n} of the last {completions} completions of {environment} are invalid for one reason, {reason}, "
                    f"more than abort.max_invalid_fraction = {self._max_invalid_fraction:g} allows. Their rewards "
                    "are unmeasured, "
                    "so the run stops instead of training on the rest; fix the reward function, or raise the limit"
                )


def _invalid_state(completion: Completion) -> str | None:
    failure, reward = completion.failure, completion.reward
    if failure is not None:
        return f"failed:{failure.reason}"
    if reward is None or isinstance(reward, Unmeasured):
        return f"reward:{reward.reason if reward else 'missing'}"
    return None
