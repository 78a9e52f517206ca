"""Which engines a run has, now."""

from collections.abc import Sequence


class Roster:
    """The engines of a run; whoever holds it sees every change.

    Args:
        urls: the engines that the settings name.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = tuple(dict.fromkeys(url.rstrip("/") for url in urls))

    @property
    def urls(self) -> tuple[str, ...]:
        """Base URLs without a slash at their end, each once."""
        return self._urls
