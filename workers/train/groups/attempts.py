"""How long attempts at groups took: those that are trained beside those that were begun."""

from collections.abc import Sequence

from stream.records import Group


def attempt_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """How long the attempts took that are trained, beside the first ones at the same prompts, cancelled or not.

    A cancelled attempt counts with the time that it had run: at least so long it would have taken. How many tokens it
    had is known to nobody, since an aborted request returns none.
    """
    trained = [group.rolled_out_at - group.claimed_at for group in groups]
    first = [
        g.cancelled_attempts_s[0] if g.cancelled_attempts_s else seconds
        for g, seconds in zip(groups, trained, strict=True)
    ]
    if not groups:
        return {}
    return {
        "attempt/seconds": sum(trained) / len(trained),
        "attempt/seconds_first": sum(first) / len(first),
        "attempt/cancelled": sum(len(group.cancelled_attempts_s) for group in groups),
    }
