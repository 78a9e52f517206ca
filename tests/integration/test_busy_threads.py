"""User code that computes in many threads leaves the event loop its turns, so that leases are renewed."""

import json
import sys
import threading
import time

import anyio

from workers.run.role_process import run_role
from workers.runtime.exit_codes import ExitCode
from workers.settings.toml_file import dump_settings, parse_settings

THREADS = 8


def spin(ended: threading.Event) -> None:
    while not ended.is_set():
        sum(range(1000))


async def turns(seconds: float) -> int:
    """Count how often a task gets its turn beside threads that compute."""
    ended, count = threading.Event(), 0
    threads = [threading.Thread(target=spin, args=(ended,), daemon=True) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        await anyio.sleep(0.001)
        count += 1
    ended.set()
    for thread in threads:
        await anyio.to_thread.run_sync(thread.join)
    return count


def test_the_event_loop_of_a_worker_gets_its_turn_beside_computing_threads(tmp_path, redis_url, run_name):
    counted = []

    async def main(_context) -> None:
        counted.append(await turns(0.4))
        sys.setswitchinterval(0.005)  # Python's default
        counted.append(await turns(0.4))

    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "1?"}) + "\n")
    (tmp_path / "reward.py").write_text("def exact(completions): return [1.0]\n")
    table = {
        "run": {"name": run_name, "folder": str(tmp_path / "run"), "redis": redis_url},
        "model": {"path": "m"},
        "data": {"path": str(tmp_path / "train.jsonl")},
        "rewards": [{"ref": f"{tmp_path / 'reward.py'}:exact"}],
    }
    (tmp_path / "run.toml").write_text(dump_settings(parse_settings(table)))
    before = sys.getswitchinterval()
    try:
        assert run_role("score", tmp_path / "run.toml", (), "", (), main) == ExitCode.SUCCESS
    finally:
        sys.setswitchinterval(before)
    with_ours, with_default = counted
    assert with_ours >= 2 * with_default
