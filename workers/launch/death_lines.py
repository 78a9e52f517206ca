"""Tells people which entries workers died with."""

from collections.abc import Callable, Sequence
from typing import Final

import structlog

from stream.operator.control import HeldEntry

log = structlog.get_logger()

_MAX_LINES: Final = 20
_MAX_PROMPTS: Final = 3
"""Prompts that a line names."""


class DeathLines:
    """Logs each death of a worker that held entries, and prints the first ones.

    Args:
        show: prints a line.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._lines = 0

    def tell(self, name: str, how: str, held: Sequence[HeldEntry]) -> None:
        """Tell that a worker ended while it held entries.

        Args:
            name: of the process.
            how: it ended: `was killed by SIGKILL`.
            held: what it held; nothing is printed if that is empty.
        """
        if not held:
            return
        charged = next((entry for entry in held if entry.is_charged), None)
        prompts = [entry.prompt_id for entry in ([charged] if charged else held)]
        deaths = max(entry.deaths for entry in held)
        is_dead = charged is not None and charged.is_dead
        log.warning(
            "worker.died", name=name, how=how, prompts=prompts[:_MAX_PROMPTS], deaths=deaths, dead_letter=is_dead
        )
        self._print(f"{name} {how} {_describe(charged, prompts)}")

    def _print(self, line: str) -> None:
        self._lines += 1
        if self._lines <= _MAX_LINES:
            self._show(f"warning: {line}")
        if self._lines == _MAX_LINES:
            self._show("warning: further deaths of workers are in logs/supervisor.log (worker.died)")


def _describe(charged: HeldEntry | None, prompts: Sequence[str]) -> str:
    if charged is not None:
        end = ", which is a dead letter now" if charged.is_dead else ""
        ran = f" ({charged.ran})" if charged.ran else ""
        return f"while it worked on prompt {charged.prompt_id} alone{ran}: death {charged.deaths} in a row{end}"
    more = f" and {len(prompts) - _MAX_PROMPTS} more" if len(prompts) > _MAX_PROMPTS else ""
    named = ", ".join(prompts[:_MAX_PROMPTS]) + more
    noun = "prompt" if len(prompts) == 1 else "prompts"
    return f"while it worked on {noun} {named}; after two deaths in a row each is worked on alone"
