"""The scripted engine as a process of its own: `engine.py --port PORT`. Each prompt is its row's number, in digits."""

import argparse
import sys
from pathlib import Path

import anyio

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.chaos.ends import UNREADABLE, VOCABULARY, intended
from tests.chaos.project import END
from workers.testing.scripted_engine import ScriptedEngine

DELAY_S = 0.01


def reply(prompt_ids: list[int], _request: object) -> list[int]:
    """Repeat the prompt, or say a token that nobody knows."""
    row = int("".join(map(str, prompt_ids)))
    return [VOCABULARY + 1, END] if intended(row) == UNREADABLE else [*prompt_ids, END]


async def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    async with ScriptedEngine(reply, delay_s=DELAY_S, port=parser.parse_args().port) as engine:
        print(f"listening on {engine.url}", flush=True)
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main)
