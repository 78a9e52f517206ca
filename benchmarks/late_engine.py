"""A scripted engine whose answers have lognormal lengths: `late_engine.py --port PORT --seed S --median TOKENS`.

A prompt is a number, in digits. A completion takes its length times the time per token.
"""

import argparse
import math
import random
import sys
from collections import Counter
from pathlib import Path

import anyio

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tests.scripted_engine.engine import ScriptedEngine
from tests.soak.project import END
from workers.engine_api.wire import GenerateRequest

SIGMA = 1.0


def length(seed: int, median: float, number: int, draw: int) -> int:
    """Return the length of a completion of prompt `number`: lognormal, deterministic."""
    return max(1, round(median * math.exp(random.Random(f"{seed}/{number}/{draw}").gauss(0.0, SIGMA))))


async def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", help="the run's settings, which are not read")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--median", type=float, default=64.0)
    parser.add_argument("--token-ms", type=float, default=2.0)
    parser.add_argument("--group-size", type=int, default=2)
    parser.add_argument("--draw-anew", action="store_true", help="another attempt at a prompt has other lengths")
    options = parser.parse_args()
    asked: Counter[int] = Counter()
    lengths: dict[int, int] = {}

    def delay(request: GenerateRequest) -> float:
        number = int("".join(map(str, request.token_ids)))
        draw, asked[number] = asked[number], asked[number] + 1
        if not options.draw_anew:
            draw %= options.group_size
        lengths[id(request)] = length(options.seed, options.median, number, draw)
        return lengths[id(request)] * options.token_ms / 1000

    def reply(_prompt: list[int], request: GenerateRequest) -> list[int]:
        return [0] * (lengths.pop(id(request)) - 1) + [END]

    async with ScriptedEngine(reply, delay_s=delay, max_length=1 << 20, port=options.port) as engine:
        print(f"listening on {engine.url}", flush=True)
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main)
