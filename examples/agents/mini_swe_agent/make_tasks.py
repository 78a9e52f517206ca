"""Write train.jsonl and held_out.jsonl: each ordered pair of two numbers from 1 to 9 is in one of them.

python make_tasks.py
"""

import json
import random
from itertools import permutations
from pathlib import Path

HELD_OUT = 16


def main() -> None:
    """Write the files, always the same."""
    pairs = list(permutations(range(1, 10), 2))
    random.Random(0).shuffle(pairs)
    for name, part in (("held_out", pairs[:HELD_OUT]), ("train", pairs[HELD_OUT:])):
        rows = [{"prompt": f"Write the larger of {a} and {b} to answer.txt.", "answer": max(a, b)} for a, b in part]
        Path(f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


if __name__ == "__main__":
    main()
