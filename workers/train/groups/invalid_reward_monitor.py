"""The farming guard: a run whose rewards are not measured any more stops, and says so.

Invalid rows are left out, which a policy could learn to exploit, and a dead verifier would go unnoticed. So the
fraction of completions that are invalid, by environment and reason, is watched over a window of groups; beyond the
bound the run stops. Nothing is turned into 0 to get there. A greedy completion counts like any other: it is a rollout
too.
"""

from collections import Counter, deque

from stream.errors import RunFailedError
from stream.records import Completion, Group
from stream.validity import Unmeasured


class InvalidRewardMonitor:
    """Watches the last groups of each environment.

    Args:
        max_invalid_fraction: fraction of completions that may be invalid for one reason.
        window: groups looked at together.
    """

    def __init__(self, max_invalid_fraction: float, window: int) -> None:
        self._max_invalid_fraction = max_invalid_fraction
        self._window = window
        self._recent: dict[str, deque[tuple[int, Counter[str]]]] = {}

    def observe(self, group: Group) -> None:
        """Take one group into account.

        Raises:
            RunFailedError: one reason is over the bound, over a full window.
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
                    f"more than abort.max_invalid_fraction = {self._max_invalid_fraction:g} allows. Nobody measured what they are "
                    "worth, so the run stops instead of training on the rest; mend the reward, or raise the bound"
                )


def _invalid_state(completion: Completion) -> str | None:
    failure, reward = completion.failure, completion.reward
    if failure is not None:
        return f"failed:{failure.reason}"
    if reward is None or isinstance(reward, Unmeasured):
        return f"reward:{reward.reason if reward else 'missing'}"
    return None
