"""Run the scripted engine as a separate process: `engine.py --port PORT`. It repeats the prompt."""

import argparse
import sys
from pathlib import Path

import anyio

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.chaos.project import END
from tests.scripted_engine.engine import ScriptedEngine


async def main() -> None:
    """Serve until the process is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", help="the run's settings, which are not read")
    parser.add_argument("--port", type=int, required=True)
    async with ScriptedEngine(lambda prompt_ids, _: [*prompt_ids, END], port=parser.parse_args().port) as engine:
        print(f"listening on {engine.url}", flush=True)
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main)
