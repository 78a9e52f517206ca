"""A chaos run as a test: it ends as it would without kills."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.chaos.ends import intended

_RUN = Path(__file__).with_name("run.py")


def survives(
    *, kills: int, groups: int, seed: int, limit_s: float, server_kills: int = 0, fsync: str = "everysec"
) -> None:
    """Assert that a run with these kills ends as it would without them."""
    command = [sys.executable, str(_RUN), "--kills", str(kills), "--groups", str(groups), "--seed", str(seed)]
    command += ["--server-kills", str(server_kills), "--fsync", fsync, "--limit", str(limit_s), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=limit_s + 30, check=False)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr[-3000:]}"
    report = json.loads(result.stdout)
    meant = Counter(intended(row) for row in range(groups))
    dropped = {end.partition(":")[2]: n for end, n in meant.items() if end.startswith("dropped:")}
    assert report["fed"] == groups
    assert report["trained"] == meant["trained"]
    assert report["dropped"] == dropped
    assert report["dead"] == meant["dead:prompts"] + meant["dead:scored"]
    assert report["lost"] == report["twice"] == report["contradicted"] == 0
    assert sum(report["kills"].values()) == kills + server_kills
    assert report["kills"].get("server", 0) == server_kills
