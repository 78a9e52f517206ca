"""The package's logger. It imports structlog when the first event is logged.

That import takes as long as all that `penstock queues` does with a server, and most commands log nothing.
"""

from collections.abc import Callable
from typing import Any


class _Logger:
    """structlog's logger, imported at its first use."""

    setup: Callable[[], None] | None = None
    """Called before the next event, once."""

    def __getattr__(self, name: str) -> Any:
        import structlog

        if self.setup is not None:
            setup, self.setup = self.setup, None
            setup()
        return getattr(structlog.get_logger(), name)


log: Any = _Logger()
"""Used as structlog's: `log.warning("lease.lost", stage=name, prompt=prompt_id)`."""


def set_up_at_first_event(setup: Callable[[], None] | None) -> None:
    """Call `setup` before the next event is logged through `log`; it configures structlog.

    It replaces one that has not been called yet. None: call nothing.
    """
    log.setup = setup
