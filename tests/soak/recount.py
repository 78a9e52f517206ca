"""A second count of a soak run, which shares no code with Penstock: JSON lines, raw tensors, no server.

python -m tests.soak.recount FOLDER GROUPS
"""

import json
import struct
import sys
from array import array
from pathlib import Path


def recount(folder: Path, groups: int) -> dict[str, int]:
    """Count the prompts that are lost and those that ended twice, from the ledger's lines and the weights alone."""
    ended: dict[int, list[str]] = {row: [] for row in range(groups)}
    dead: set[int] = set()
    for text in (folder / "ledger.jsonl").read_bytes().splitlines():
        line = json.loads(text)
        if "event" in line:  # about the run, and no prompt
            continue
        row, outcome = int(line["prompt"].split(":")[-1]), line["outcome"]
        if outcome.startswith("dead:"):
            dead.add(row)
        elif outcome == "retried":
            dead.discard(row)
        else:
            ended[row].append(outcome)
    weights = _weights(folder)
    dead = {row for row in dead if not ended[row]}
    return {
        "trained": sum(outcomes == ["trained"] for outcomes in ended.values()),
        "dead": len(dead),
        "lost": sum(not outcomes and row not in dead for row, outcomes in ended.items()),
        "twice": sum(len(outcomes) > 1 for outcomes in ended.values())
        + sum(weights[row] != (outcomes == ["trained"]) for row, outcomes in ended.items()),
    }


def _weights(folder: Path) -> array:
    """Return how often each row was trained, from the newest checkpoint's only tensor."""
    newest = max(folder.glob("checkpoints/*/checkpoint.json"), key=lambda path: path.stat().st_mtime_ns)
    content = (newest.parent / "model" / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    begin, end = json.loads(content[8 : 8 + size])["counts"]["data_offsets"]
    return array("f", content[8 + size + begin : 8 + size + end])


if __name__ == "__main__":
    print(json.dumps(recount(Path(sys.argv[1]), int(sys.argv[2]))))
