"""The disk of a run becomes full while it trains: it is named within seconds, the run waits, and goes on with room."""

import subprocess
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from msgspec.structs import replace

from stream.connection.run_connection import connect
from stream.errors import PenstockError
from stream.operator.status import read_status
from tests.chaos import project
from tests.chaos.audit import acquitted, audit
from tests.chaos.recount import recount
from workers.cli.errors import as_command_error
from workers.dashboard.live_view import LiveView
from workers.dashboard.run_pages import render_state
from workers.dashboard.templating import load_templates
from workers.launch.supervisor import RunOutcome, Supervisor
from workers.role import log_setup as logs
from workers.runs.find import open_run
from workers.runs.folder import lock_folder, write_settings
from workers.runs.live_run import read_live
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
    folder = tmp_path / "run"
    folder.mkdir()
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder)], check=True, capture_output=True
        )
    except (subprocess.CalledProcessError, FileNotFoundError):
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Write until there is no room."""
    with (folder / "ballast").open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 10, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue


async def wait_for(condition, within_s=NAMED_WITHIN_S):
    with anyio.fail_after(within_s):
        while not await anyio.to_thread.run_sync(condition):
            await anyio.sleep(0.1)


async def wait_ended(folder, prompts):
    while (here := await anyio.to_thread.run_sync(read_live, folder)) is None or not here.engines:
        await anyio.sleep(0.05)
    async with connect(here.redis, here.run, create=False) as connection:
        while True:
            try:
                counts = (await read_status(connection)).prompt_counts
            except PenstockError:  # no role has started
                counts = {}
            if sum(counts.get(name, 0) for name in ("trained", "dropped", "dead")) >= prompts:
                return
            await connection.wait_for_change("$", 0.2)


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


async def run_with_full_disk(supervisor: Supervisor, folder: Path, lines: list[str]) -> RunOutcome:
    """Run to the end; meanwhile the disk is full for a while."""
    outcomes = []

    async def fill_and_clear() -> None:
        await wait_ended(folder, GROUPS // 4)
        await anyio.to_thread.run_sync(fill, folder)
        began = anyio.current_time()
        await wait_for(lambda: any("No space left" in line and str(folder) in line for line in lines))
        assert anyio.current_time() - began < NAMED_WITHIN_S
        said = await anyio.to_thread.run_sync(queues_disk, folder)
        assert "No space left" in said
        assert str(folder) in said
        assert "No space left" in await dashboard_state(folder)
        await anyio.sleep(FULL_S)
        assert not outcomes, outcomes
        await anyio.Path(folder / "ballast").unlink()
        await wait_for(lambda: any("can be written again" in line for line in lines), within_s=WRITABLE_WITHIN_S)

    with anyio.fail_after(150):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fill_and_clear)
            outcomes.append(await supervisor.run())
    return outcomes[0]


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
    settings = project.write_project(tmp_path, GROUPS, 1, "always" if "forces" in full else "everysec")
    run = replace(settings.run, redis=redis_url) if full == "folder" else settings.run
    settings = replace(settings, run=run, queue=replace(settings.queue, reconnect_timeout_s=3.0))
    display = RecordingDisplay()
    (small_disk / "logs").mkdir()
    with logs.log_to_file("full", small_disk / "logs" / "supervisor.log"), lock_folder(small_disk):
        supervisor = Supervisor(settings, write_settings(settings), display)
        with project.commands(settings):
            outcome = anyio.run(run_with_full_disk, supervisor, small_disk, display.lines)
    said = "\n".join([*display.lines, *(path.read_text()[-3000:] for path in small_disk.glob("logs/*.log"))])
    assert outcome.failure is None, said
    counts, verdict = recount(small_disk, GROUPS), audit(small_disk, GROUPS)
    assert (counts["lost"], counts["twice"]) == (0, 0), f"{counts}\n{said}"
    assert acquitted(verdict, GROUPS), f"{verdict}\n{said}"


@pytest.mark.full
@pytest.mark.timeout(170)
@pytest.mark.parametrize("fsync", ["everysec", "always"])
def test_a_disk_that_stays_full_ends_the_run_with_one_line_and_with_room_it_resumes(small_disk, tmp_path, fsync):
    settings = project.write_project(tmp_path, GROUPS, 1, fsync)
    short = replace(settings, abort=replace(settings.abort, stall_timeout_s=8.0))
    (small_disk / "logs").mkdir()

    async def stay_full(supervisor: Supervisor) -> None:
        async def fill_it() -> None:
            await wait_ended(small_disk, GROUPS // 4)
            await anyio.to_thread.run_sync(fill, small_disk)

        with anyio.fail_after(100):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(fill_it)
                outcome = await supervisor.run()
                if outcome.failure is not None:
                    raise outcome.failure

    display = RecordingDisplay()
    with logs.log_to_file("full", small_disk / "logs" / "supervisor.log"), lock_folder(small_disk):
        supervisor = Supervisor(short, write_settings(short), display)
        # Alone, or in a group as it left the task groups.
        with project.commands(settings), pytest.raises(BaseException) as caught:  # noqa: PT011
            anyio.run(stay_full, supervisor)
    error = as_command_error(caught.value)
    assert error is not None, caught.value
    assert "No space left on device" in error.message
    assert str(small_disk) in error.message
    (small_disk / "ballast").unlink()
    with logs.log_to_file("full", small_disk / "logs" / "supervisor.log"), lock_folder(small_disk):
        supervisor = Supervisor(settings, write_settings(settings), display)
        with project.commands(settings):
            outcome = anyio.run(supervisor.run)
    assert outcome.failure is None, outcome.failure
    counts, verdict = recount(small_disk, GROUPS), audit(small_disk, GROUPS)
    assert (counts["lost"], counts["twice"]) == (0, 0), counts
    assert acquitted(verdict, GROUPS), verdict
