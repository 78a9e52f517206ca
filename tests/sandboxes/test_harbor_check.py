"""The twelve tasks of examples/harbor on a real engine: nine are sound, and what is wrong with the others is said."""

import shutil
from pathlib import Path

import pytest

from workers.check.harbor import check_tasks
from workers.settings.sandboxes import SandboxSettings

pytestmark = [pytest.mark.anyio, pytest.mark.sandboxes, pytest.mark.full, pytest.mark.timeout(900)]

TASKS = Path(__file__).parents[2] / "examples" / "harbor" / "tasks"
UNSOUND = {"flaky": "flaky: ", "forged-reward": "the solution gives 0", "unsolvable": "the solution gives 0"}


async def test_each_of_the_twelve_tasks_is_what_it_is_meant_to_be(engine_address, tasks_images, tmp_path):
    shutil.copytree(TASKS, tmp_path / "tasks", ignore=shutil.ignore_patterns(".penstock-check.json"))
    report = await check_tasks(tmp_path / "tasks", SandboxSettings(provider="docker", address=engine_address))
    assert (len(report.tasks), report.refused, report.unknown_keys) == (12, [], {})
    findings = {name: task.finding for name, task in report.tasks.items() if not task.sound}
    assert findings.keys() == UNSOUND.keys()
    assert all(findings[name].startswith(begin) for name, begin in UNSOUND.items())
    assert {name: task.tampered for name, task in report.tasks.items() if task.tampered} == {
        "replaced-tool": ["/bin/grep"]
    }
    assert report.tasks["three-steps"].oracle == [1.0] * 3
    assert not any(task.cut_network for task in report.tasks.values())
