"""A scripted engine whose answers depend only on prompt, completion and turn, distinguished by the request's seed.

    engine.py --port PORT --model FOLDER [--delay SECONDS]

Most first turns call the calculator; every other turn is an answer.
"""

import argparse
import sys
import zlib
from array import array
from pathlib import Path

import anyio
from tokenizers import Tokenizer

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.scripted_engine.engine import ScriptedEngine
from tests.scripted_engine.state import ReplyFunction
from workers.engine_api.wire import GenerateRequest


def scripted(model: Path) -> ReplyFunction:
    """Return the reply function: it calls `add(A, B)`, or answers with a digit."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    called = tokenizer.token_to_id("<tool_call>")
    assert called is not None

    def reply(prompt_ids: list[int], request: GenerateRequest) -> list[int]:
        seed = request.sampling_params.seed
        assert seed is not None, "the request has no seed"
        drawn = zlib.crc32(array("q", [*prompt_ids, seed]).tobytes())
        if drawn % 3 and called not in prompt_ids:
            call = f'{{"name": "add", "arguments": {{"a": {drawn % 50}, "b": {drawn % 7}}}}}'
            text = f"<tool_call>{call}</tool_call><|im_end|>"
        else:
            text = f"Answer: {drawn % 5}<|im_end|>"
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    return reply


def held_out_starts(model: Path) -> list[list[int]]:
    """Return the token prefixes of held-out prompts; no other prompt has a number of four digits."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ask = "<|im_start|>user\nSay 1"
    return [tokenizer.encode(f"{ask}{digit:03d}", add_special_tokens=False).ids for digit in range(100)]


async def main() -> None:
    """Serve until the process is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", help="the run's settings, which are not read")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--delay", type=float, default=0.0, help="of an answer to a held-out prompt")
    options = parser.parse_args()
    held_out = held_out_starts(options.model)

    def delay_s(request: GenerateRequest) -> float:
        return options.delay * any(request.token_ids[: len(start)] == start for start in held_out)

    async with ScriptedEngine(scripted(options.model), delay_s=delay_s, port=options.port) as engine:
        print(f"listening on {engine.url}", flush=True)
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main)
