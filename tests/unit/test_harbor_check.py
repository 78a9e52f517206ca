"""`penstock check harbor`: which tasks are sound, on sandboxes of the tests' own."""

import json
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio import to_thread
from anyio.from_thread import BlockingPortal
from click.testing import CliRunner

from envs.harbor.check_results import read_checks
from envs.harbor.environment import Harbor
from tests.cases.folder_sandboxes import FolderProvider
from tests.cases.harbor_tasks import write_files, write_steps, write_task
from tests.cases.sandboxes import needs_sandbox  # noqa: F401  (a fixture)
from workers.check import harbor
from workers.cli import penstock
from workers.rollout.sandbox_host import SandboxHost
from workers.settings.sandboxes import SandboxSettings

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("needs_sandbox")]

WORK = '[environment]\ndocker_image = "base"\nworkdir = "/work"\nnetwork_mode = "no-network"\n'


class Tasks:
    """A folder of tasks, and what checks them."""

    def __init__(self, folder, provider):
        self.folder, self.provider = folder, provider

    def write(self, name: str, settings: str = WORK, **files: str):
        return write_task(self.folder / name, settings, **files)

    async def check(self, **options):
        return await harbor.check_tasks(self.folder, SandboxSettings(provider="folders"), **options)


@pytest.fixture
def tasks(tmp_path, monkeypatch) -> Tasks:
    provider = FolderProvider(tmp_path / "place")
    provider.make_image("base")

    @asynccontextmanager
    async def open_host(settings):
        async with anyio.create_task_group() as group, BlockingPortal() as portal:
            yield SandboxHost(provider, settings, "check", None, group, portal)

    monkeypatch.setattr(SandboxHost, "open", open_host)
    return Tasks(tmp_path / "tasks", provider)


async def test_a_task_is_sound_if_its_solution_gets_1_and_an_empty_episode_does_not(tasks):
    tasks.write("good")
    report = await tasks.check()
    (check,) = report.tasks.values()
    assert (check.sound, check.oracle, check.nop) == (True, [1.0] * 3, [0.0] * 3)
    assert report.ok
    assert [path.name for path in (tasks.provider.folder / "sandboxes").glob("*")] == []


@pytest.mark.parametrize(
    ("files", "finding"),
    [
        ({"solution/solve.sh": "#!/bin/sh\ntrue\n"}, "the solution gives 0, which is not the best reward"),
        (
            {"tests/test.sh": "#!/bin/sh\necho 1 >/logs/verifier/reward.txt\n"},
            "an episode without a call gives the best",
        ),
        ({"tests/test.sh": "#!/bin/sh\nexit 1\n"}, "the solution is unmeasured: neither"),
        (
            {"tests/test.sh": "#!/bin/sh\nod -A n -N 2 -t u2 /dev/urandom >/logs/verifier/reward.txt\n"},
            "flaky: the solution gives",
        ),
    ],
)
async def test_a_task_that_is_not_sound_says_why(tasks, files, finding):
    tasks.write("bad", **files)
    report = await tasks.check()
    assert report.tasks["bad"].finding.startswith(finding)
    assert not report.ok


async def test_a_task_without_a_solution_is_not_sound(tasks):
    (tasks.write("bad") / "solution" / "solve.sh").unlink()
    report = await tasks.check()
    assert "has no solution/solve.sh" in report.tasks["bad"].finding


async def test_a_solution_that_changes_system_files_is_shown(tasks):
    solution = "#!/bin/sh\necho /x >/etc/ld.so.preload\ntouch /work/done\n"
    tasks.write("good", **{"solution/solve.sh": solution})
    report = await tasks.check()
    assert (report.tasks["good"].sound, report.tasks["good"].tampered) == (True, ["/etc/ld.so.preload"])
    assert "changes system files" in "\n".join(harbor.report_lines(report))


async def test_each_number_counts_if_there_is_no_reward(tasks):
    numbers = '"{\\"a\\": 1, \\"b\\": ${b:-0}}"'
    test = f"#!/bin/sh\nif [ -e /work/done ]; then b=1; fi\necho {numbers} >/logs/verifier/reward.json\n"
    tasks.write("good", **{"tests/test.sh": test})
    report = await tasks.check()
    assert (report.tasks["good"].sound, report.tasks["good"].nop) == (True, [1.0] * 3)


async def test_all_steps_are_solved(tasks):
    steps = WORK + '[[steps]]\nname = "one"\nmin_reward = 1\n[[steps]]\nname = "two"\n'
    folder = write_steps(tasks.folder / "steps", steps, ("one", "two"))
    write_files(folder, {"steps/two/workdir/setup.sh": "rm done\n"})
    report = await tasks.check()
    assert (report.tasks["steps"].sound, report.tasks["steps"].oracle) == (True, [1.0] * 3)


async def test_only_what_has_changed_is_tried_again_and_only_sound_tasks_are_fed(tasks):
    good, bad = tasks.write("good"), tasks.write("bad", **{"solution/solve.sh": "#!/bin/sh\n"})
    assert (await tasks.check()).tried == 2
    assert (await tasks.check()).tried == 0
    env = Harbor(str(tasks.folder))
    assert [row["name"] for row in await to_thread.run_sync(env.rows)] == ["good"]
    write_files(bad, {"solution/solve.sh": "#!/bin/sh\ntouch /work/done\n"})
    write_files(good, {"instruction.md": "Other words."})
    with pytest.raises(Exception, match="none was found sound"):
        await to_thread.run_sync(env.rows)
    report = await tasks.check()
    assert (report.tried, report.ok) == (2, True)
    assert len(await to_thread.run_sync(env.rows)) == 2
    assert (await tasks.check(again=True)).tried == 2


async def test_refused_tasks_unknown_keys_and_cut_networks_are_counted(tasks):
    tasks.write("gpu", "[environment]\ngpus = 1")
    tasks.write("good", "colour = 1\n" + WORK.replace("no-network", "public"))
    report = await tasks.check()
    text = "\n".join(harbor.report_lines(report))
    assert (report.ok, report.unknown_keys) == (False, {"colour": 1})
    assert "refused, environment.gpus: 1; for example" in text
    assert "network cut: 1" in text
    assert "not read: colour (1)" in text


async def test_a_sample_is_spread_over_the_folder(tasks):
    for name in "abcdef":
        tasks.write(name)
    report = await tasks.check(sample=2)
    assert (list(report.tasks), report.not_sampled) == (["a", "d"], 4)


async def test_a_place_that_makes_no_sandbox_is_named_and_nothing_is_sound(tasks):
    tasks.write("good", WORK.replace("base", "missing"))
    report = await tasks.check()
    assert "there is no image missing" in report.tasks["good"].finding


def test_the_command_prints_and_writes_the_report(tasks, tmp_path):
    tasks.write("good")
    report = tmp_path / "report.json"
    found = CliRunner().invoke(penstock, ["check", "harbor", str(tasks.folder), "--report", str(report)])
    assert (found.exit_code, "1 of 1 tasks are sound" in found.stdout) == (0, True)
    assert json.loads(report.read_text())["tasks"]["good"]["sound"]
    assert read_checks(tasks.folder)["good"].sound
    wrong = CliRunner().invoke(penstock, ["check", "calculator", str(tasks.folder)])
    assert (wrong.exit_code, "for REF harbor" in wrong.output) == (2, True)
