"""The scripted engine of soak runs as a separate process: `engine.py --port PORT [--asked FILE] [--delay SECONDS]`.

Each prompt is its number in digits, which the answer repeats; FILE receives one line per requested prompt. With
`--evaluated MODEL` the answers are those of `evaluation.py`, and the delay is that of held-out prompts alone.
"""

import argparse
import os
import sys
from pathlib import Path

import anyio

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.scripted_engine.engine import ScriptedEngine
from tests.scripted_engine.state import DelayFunction, ReplyFunction
from tests.soak.ends import UNREADABLE, VOCABULARY, intended
from tests.soak.project import END


def reply(prompt_ids: list[int], _request: object) -> list[int]:
    """Repeat the prompt, or return a token that the model does not know."""
    return [VOCABULARY + 1, END] if intended(_number(prompt_ids)) == UNREADABLE else [*prompt_ids, END]


def _number(prompt_ids: list[int]) -> int:
    return int("".join(map(str, prompt_ids)))


async def main() -> None:
    """Serve until the process is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", help="the run's settings, which are not read")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--asked", type=Path, default=Path(os.devnull))
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--evaluated", type=Path, metavar="MODEL")
    options = parser.parse_args()
    asked = os.open(options.asked, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def noted(prompt_ids: list[int], request: object) -> list[int]:
        os.write(asked, f"{_number(prompt_ids)}\n".encode())
        return reply(prompt_ids, request)

    answers: ReplyFunction = noted
    delay_s: float | DelayFunction = options.delay
    if options.evaluated is not None:
        from tests.soak.evaluation import delay_of_held_out, scripted

        answers, delay_s = scripted(options.evaluated), delay_of_held_out(options.evaluated, options.delay)
    async with ScriptedEngine(answers, delay_s=delay_s, port=options.port) as engine:
        print(f"listening on {engine.url}", flush=True)
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main)
