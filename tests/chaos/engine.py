"""Run the scripted engine as a separate process: `engine.py --port PORT --asked FILE`.

Each prompt is its row number in digits; FILE receives one line per requested prompt.
"""

import argparse
import os
import sys
from pathlib import Path

import anyio

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.chaos.ends import UNREADABLE, VOCABULARY, intended
from tests.chaos.project import END
from tests.scripted_engine.engine import ScriptedEngine

DELAY_S = 0.01


def reply(prompt_ids: list[int], _request: object) -> list[int]:
    """Repeat the prompt, or return a token that the model does not know."""
    return [VOCABULARY + 1, END] if intended(_row(prompt_ids)) == UNREADABLE else [*prompt_ids, END]


def _row(prompt_ids: list[int]) -> int:
    return int("".join(map(str, prompt_ids)))


async def main() -> None:
    """Serve until the process is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", help="the run's settings, which are not read")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--asked", type=Path, required=True)
    options = parser.parse_args()
    asked = os.open(options.asked, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def noted(prompt_ids: list[int], request: object) -> list[int]:
        os.write(asked, f"{_row(prompt_ids)}\n".encode())
        return reply(prompt_ids, request)

    async with ScriptedEngine(noted, delay_s=DELAY_S, port=options.port) as engine:
        print(f"listening on {engine.url}", flush=True)
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main)
