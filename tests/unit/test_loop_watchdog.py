"""The log names code that blocks the event loop."""

import time
from types import SimpleNamespace

import anyio
import pytest
from anyio import CapacityLimiter
from structlog.testing import capture_logs

from envs.call import CallRunner
from workers.role import watchdogs
from workers.role.watchdogs import LoopWatchdog


class Rude:
    async def nap(self, until):
        while not until():
            time.sleep(0.01)  # noqa: ASYNC251  (what this is about)

    async def deep(self, until):
        await self.nap(until)


@pytest.mark.parametrize("method", ["nap", "deep"])
async def test_blocking_code_is_logged_once(method, blockbuster):
    results = []
    rude = getattr(Rude(), method)
    with capture_logs() as logs:

        def until():
            results[:] = [line for line in logs if line["event"] == "event_loop.blocked"]
            return results

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(LoopWatchdog(0.1).watch)
            await anyio.wait_all_tasks_blocked()
            blockbuster.deactivate()  # a user's blocking call is the subject of this test
            try:
                await CallRunner(CapacityLimiter(1)).call(rude, {"until": until}, 60)
            finally:
                blockbuster.activate()
            tasks.cancel_scope.cancel()
    (line,) = results
    assert "test_loop_watchdog.py:" in line["by"]
    assert line["by"].endswith(f"Rude.{method}")


@pytest.mark.parametrize(
    ("late_look", "reports"),
    [((31.0, 0.0), 0), ((0.9, 0.0), 0), ((31.0, 30.0), 1)],
    ids=["suspended", "suspended for less than is reported", "busy"],
)
def test_a_late_look_reports_a_busy_process_but_not_a_suspended_one(monkeypatch, late_look, reports):
    """A suspended process runs neither the loop nor the thread that watches it; both wake at the same moment."""
    clock, passing = SimpleNamespace(wall=100.0, cpu=1.0), [(0.25, 0.0), (0.25, 0.0), (0.25, 0.0), late_look]

    class Stopped:
        def wait(self, timeout):
            if not passing:
                return True
            wall, cpu = passing.pop(0)
            clock.wall, clock.cpu = clock.wall + wall, clock.cpu + cpu
            return False

    times = SimpleNamespace(monotonic=lambda: clock.wall, process_time=lambda: clock.cpu)
    monkeypatch.setattr(watchdogs, "time", times)
    results = []
    watch = LoopWatchdog(1.0, lambda by, so_far_s: results.append((by, so_far_s)))
    watch._beats, watch._stopped = 5, Stopped()
    watch._check()
    assert len(results) == reports


async def test_a_free_loop_is_not_logged():
    with capture_logs() as logs:
        async with anyio.create_task_group() as tasks:
            watch = LoopWatchdog(0.01)
            tasks.start_soon(watch.watch)
            while watch._beats < 20:
                await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()
    assert [line for line in logs if line["event"] == "event_loop.blocked" and "test_loop_watchdog" in line["by"]] == []
