"""The floor of `rollout.py`: the same requests by bare aiohttp and msgspec, their answers decoded, and nothing else.

python -m benchmarks.rollout_floor CASE.json --engine URL --api generate --concurrency 64
"""

import argparse
import asyncio
import json
from pathlib import Path

import aiohttp
import msgspec
import uvloop

_PATHS = {"generate": "/inference/v1/generate", "completions": "/v1/completions"}


class _Entry(msgspec.Struct):
    logprob: float


class _Content(msgspec.Struct):
    content: list[_Entry] = []
    token_logprobs: list[float] = []


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _Content


class _Answer(msgspec.Struct):
    choices: list[_Choice]


async def play(session: aiohttp.ClientSession, url: str, case: dict[str, list[int]], api: str) -> None:
    """Play episodes forever: the context grows by each turn and by what follows a tool's result."""
    encoder, decoder = msgspec.json.Encoder(), msgspec.json.Decoder(_Answer)
    sampling = {"temperature": 1.0, "max_tokens": 64, "logprobs": 0, "seed": 1, "stop_token_ids": [2]}
    timeout = aiohttp.ClientTimeout(total=120)
    while True:
        ids = list(case["prompt"])
        for _ in case["turns"]:
            body = {"token_ids": ids, "sampling_params": sampling} if api == "generate" else {"prompt": ids, **sampling}
            async with session.post(url + _PATHS[api], data=encoder.encode(body), timeout=timeout) as response:
                choice = decoder.decode(await response.read()).choices[0]
            ids += choice.token_ids + case["continuation"]


async def run(url: str, case: dict[str, list[int]], api: str, concurrency: int) -> None:
    """Play as many episodes at a time."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers={"Content-Type": "application/json"}) as session:
        await asyncio.gather(*(play(session, url, case, api) for _ in range(concurrency)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", type=Path)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--api", choices=tuple(_PATHS), default="generate")
    parser.add_argument("--concurrency", type=int, default=64)
    arguments = parser.parse_args()
    case = json.loads(arguments.case.read_text())
    uvloop.run(run(arguments.engine, case, arguments.api, arguments.concurrency))


if __name__ == "__main__":
    main()
