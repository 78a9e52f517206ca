"""`penstock pause`, `resume` and `stop`: an operator's word to a run that goes on, wherever its roles are."""

import getpass
import os
import socket

from stream.errors import PenstockError
from stream.link import Link
from stream.steering import Word, pause, resume, stop
from workers.run.live import locate, visit

_SAY = {"pause": pause, "resume": resume, "stop": stop}
_SAID = {
    "pause": "is paused: what is in hand is finished, scored and trained; `penstock resume` lets it go on",
    "resume": "goes on",
    "stop": "was asked to stop: its workers finish or give back what they hold, its trainer keeps a checkpoint",
}


def steer(word: Word, target: str | None, redis: str) -> None:
    """Say a word to a run, and print what comes of it.

    Raises:
        PenstockError: no such run, it does not go on, or there is nothing to do.
    """
    place = locate(target, redis)
    if not place.url:
        raise PenstockError(
            f"run {place.run!r} does not go on, so there is nothing to {word}; `penstock run "
            f"{place.folder}/run.toml` starts it"
        )
    who = whoever_asks()

    async def main(link: Link) -> bool:
        return await _SAY[word](link, who)

    trained = visit(place, main)
    nobody = "" if trained else " (no trainer holds it at the moment)"
    print(f"run {place.run!r} {_SAID[word]}{nobody}", flush=True)  # noqa: T201  (this is the command's output)


def whoever_asks() -> str:
    """USER@HOST, as the others shall read it."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run as a number that has no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
