"""The package's logger. It imports structlog when the first event is logged.

That import takes as long as all that `penstock queues` does with a server, and most commands log nothing.
"""

from collections.abc import Callable
from typing import Any

_setups: list[Callable[[], None]] = []


class _Logger:
    """structlog's logger, imported at its first use."""

    def __getattr__(self, name: str) -> Any:
        import structlog

        while _setups:
            _setups.pop()()
        return getattr(structlog.get_logger(), name)


log: Any = _Logger()
"""Used as structlog's: `log.warning("lease.lost", stage=name, prompt=prompt_id)`."""


def set_up_at_first_event(setup: Callable[[], None]) -> None:
    """Call `setup` before the first event is logged through `log`; it configures structlog."""
    _setups.append(setup)
