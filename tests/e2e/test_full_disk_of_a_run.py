"""The disk of a run becomes full while it trains: it is named within seconds, the run waits, and goes on with room."""

from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from msgspec.structs import replace

from stream.connection.run_connection import RunConnection
from stream.errors import PenstockError
from tests.cases.disks import BALLAST, fill, skip_without_disk
from tests.soak.audit import acquitted, audit
from tests.soak.project import write_project
from tests.soak.recount import recount
from tests.soak.run import Beside, log_ends, supervise, wait_ended
from workers.cli.errors import as_command_error
from workers.dashboard.live_view import LiveView
from workers.dashboard.run_pages import render_state
from workers.dashboard.templating import load_templates
from workers.runs.find import open_run
from workers.runs.run import Run
from workers.terminal.progress import SilentDisplay

pytestmark = pytest.mark.usefixtures("preloaded")

GROUPS = 120
NAMED_WITHIN_S = 10.0
WRITABLE_WITHIN_S = 30.0
"""Waits grow to 5 s, of the trainer and of the server, before the supervisor looks."""
FULL_S = 6.0
"""How long the disk stays full: longer than workers wait for a server that is down for another reason."""


class RecordingDisplay(SilentDisplay):
    """Keeps the lines that stay in the terminal."""

    def __init__(self):
        self.lines = []

    def print_lines(self, lines):
        self.lines += [line.plain for line in lines]


@pytest.fixture
def small_disk(tmp_path):
    """The run's folder is a file system of its own, with room for a part of the run."""
    yield from skip_without_disk(tmp_path / "run", "32m")


async def wait_for(condition, within_s=NAMED_WITHIN_S):
    with anyio.fail_after(within_s):
        while not await anyio.to_thread.run_sync(condition):
            await anyio.sleep(0.1)


def queues_disk(folder):
    """What `penstock queues` says about the run's disks."""
    try:
        return "; ".join(open_run(folder, must_have_begun=True).status().disk)
    except PenstockError as error:
        return str(error)


async def dashboard_state(folder):
    """The line at the top of the dashboard's pages."""
    await anyio.to_thread.run_sync(load_templates)
    async with anyio.create_task_group() as tasks:
        view = LiveView(Run("run", folder), tasks, {"state": render_state})
        frame = await view.read(("state",))
        tasks.cancel_scope.cancel()
    return str(frame.part("state"))


def fill_and_clear(folder: Path, lines: list[str], named: list[str]) -> Beside:
    """Make the disk full for a while; `named` has the folder once it was named everywhere and has room again."""

    async def beside(connection: RunConnection) -> None:
        await wait_ended(connection, GROUPS // 4)
        await anyio.to_thread.run_sync(fill, folder)
        began = anyio.current_time()
        await wait_for(lambda: any("No space left" in line and str(folder) in line for line in lines))
        assert anyio.current_time() - began < NAMED_WITHIN_S
        said = await anyio.to_thread.run_sync(queues_disk, folder)
        assert "No space left" in said
        assert str(folder) in said
        assert "No space left" in await dashboard_state(folder)
        await anyio.sleep(FULL_S)
        await anyio.Path(folder / BALLAST).unlink()
        named.append(str(folder))
        await wait_for(lambda: is_writable_again(lines), within_s=WRITABLE_WITHIN_S)

    return beside


def is_writable_again(lines: list[str]) -> bool:
    return any("can be written again" in line for line in lines)


def nothing_is_lost(folder: Path, said: str = "") -> bool:
    counts, verdict = recount(folder, GROUPS), audit(folder, GROUPS)
    assert (counts["lost"], counts["twice"]) == (0, 0), f"{counts}\n{said}"
    assert acquitted(verdict, GROUPS), f"{verdict}\n{said}"
    return True


@pytest.mark.timeout(170)
@pytest.mark.parametrize(
    "full",
    [
        "folder and server",
        pytest.param("folder and server that forces each write", marks=pytest.mark.full),
        pytest.param("folder", marks=pytest.mark.full),
    ],
)
def test_a_run_on_a_full_disk_names_it_waits_and_goes_on_when_there_is_room(small_disk, tmp_path, full, redis_url):
    server = {"redis": redis_url} if full == "folder" else {}
    queue = {"fsync": "always" if "forces" in full else "everysec", "reconnect_timeout_s": 3.0}
    settings = write_project(tmp_path, GROUPS, run=server, queue=queue)
    display, named = RecordingDisplay(), []
    outcome = supervise(settings, fill_and_clear(small_disk, display.lines, named), limit_s=150, display=display)
    said = "\n".join([*display.lines, log_ends(small_disk)])
    assert outcome is not None, said
    assert outcome.failure is None, said
    assert named, "the run ended while the disk was full"
    assert is_writable_again(display.lines), said
    assert nothing_is_lost(small_disk, said)


@pytest.mark.full
@pytest.mark.timeout(170)
@pytest.mark.parametrize("fsync", ["everysec", "always"])
def test_a_disk_that_stays_full_ends_the_run_with_one_line_and_with_room_it_resumes(small_disk, tmp_path, fsync):
    settings = write_project(tmp_path, GROUPS, queue={"fsync": fsync})
    short = replace(settings, abort=replace(settings.abort, stall_timeout_s=8.0))

    async def fill_it(connection: RunConnection) -> None:
        await wait_ended(connection, GROUPS // 4)
        await anyio.to_thread.run_sync(fill, small_disk)

    def run_into_it() -> None:
        outcome = supervise(short, fill_it, limit_s=100)
        if outcome is not None and outcome.failure is not None:
            raise outcome.failure

    with pytest.raises(BaseException) as caught:  # noqa: PT011  (alone, or in a group as it left the task groups)
        run_into_it()
    error = as_command_error(caught.value)
    assert error is not None, caught.value
    assert "No space left on device" in error.message
    assert str(small_disk) in error.message
    (small_disk / BALLAST).unlink()
    outcome = supervise(settings, limit_s=100)
    assert outcome is not None
    assert outcome.failure is None, outcome.failure
    assert nothing_is_lost(small_disk)
