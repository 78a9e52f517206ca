"""`penstock pause`, `resume` and `stop` on a run in progress, with every role in a separate process."""

import json
import subprocess
import time
from contextlib import AsyncExitStack

import anyio
import pytest
from anyio.abc import Process

from stream.connection.run_connection import RunConnection, connect
from stream.operator.status import RunStatus, read_status
from tests.e2e.harness import (
    assert_all_trained_once,
    balanced,
    environment,
    stop,
    summary_of,
    trained,
    wait_for_trained,
)
from tests.scripted_engine.engine import ScriptedEngine

pytestmark = [pytest.mark.timeout(280), pytest.mark.usefixtures("preloaded")]

PROMPTS, AT_A_STEP = 90, 4

SLOW = """
import time, zlib
from pathlib import Path

def by_chance(completions, **columns):
    if Path(__file__).with_name("slowly").exists():
        time.sleep(0.4)
    return [float(zlib.crc32(text.encode()) % 2) for text in completions]
"""


def see(project) -> RunStatus:
    async def main() -> RunStatus:
        live = json.loads((project.run_folder / "live.json").read_text())
        async with connect(live["redis"], "test", create=False) as connection:
            return await read_status(connection)

    return anyio.run(main)


def in_hand(status: RunStatus) -> int:
    """Count the groups whose prompt is claimed and that are not committed yet."""
    prompts, groups, scored = (status.stages[name] for name in ("prompts", "groups", "scored"))
    return prompts.claimed + groups.depth + scored.depth - scored.marked


def until_idle(project) -> RunStatus:
    """Wait until all groups in progress are finished, except for a step that is not full; returns the status."""
    deadline = time.monotonic() + 60
    while True:
        status = see(project)
        if in_hand(status) < AT_A_STEP and status.stages["prompts"].claimed == status.stages["groups"].depth == 0:
            return status
        assert time.monotonic() < deadline, status
        time.sleep(0.1)


@pytest.mark.full
def test_a_run_can_be_paused_resumed_stopped_and_restarted(project):
    project.prompts(PROMPTS)
    project.table["filter"] = {"zero_variance": False}
    project.table["data"]["max_queued_prompts"] = 32
    project.table["score"] = {"workers": 1}
    (project.folder / "rewards.py").write_text(SLOW)
    slowly = project.folder / "slowly"
    slowly.touch()
    folder = str(project.run_folder)
    process = project.start("run", str(project.write()))
    try:
        wait_for_trained(project, AT_A_STEP, process, 120)

        paused = project.run("pause", folder)
        assert paused.returncode == 0, paused.stderr
        assert paused.stdout.startswith("run 'test' is paused: ")
        before = until_idle(project)
        time.sleep(3)
        after = see(project)
        report = json.loads(project.run("queues", folder, "--json").stdout)
        assert after.paused is not None
        assert (report["paused_by"], report["paused_at"]) == (after.paused.paused_by, after.paused.paused_at)
        for status in (before, after):
            assert status.prompt_counts["fed"] < PROMPTS, "the feeder was to be caught in the middle"
            assert status.stages["prompts"].depth > 0, "there was nothing left to claim"
        assert after.prompt_counts == before.prompt_counts
        assert after.stages["prompts"].depth == before.stages["prompts"].depth
        assert in_hand(after) == in_hand(before)
        again = project.run("pause", folder)
        assert again.returncode == 1
        assert again.stderr.startswith("error: run 'test' is paused by ")

        assert project.run("resume", folder).stdout == "run 'test' continues\n"
        assert project.run("resume", folder).stderr == "error: run 'test' is not paused\n"
        wait_for_trained(project, after.prompt_counts["trained"] + AT_A_STEP, process, 60)

        assert "is stopping" in project.run("stop", folder).stdout
        _, report = process.communicate(timeout=60)
    finally:
        stop(process)
    assert process.returncode == 0, f"{report}\n{project.logs()}"
    assert f"| {after.paused} |" in report
    assert report.rstrip().endswith(f"stopped; `penstock run {folder}` resumes")
    summary = json.loads((project.run_folder / "summary.json").read_text())
    assert balanced(summary)
    assert summary["outstanding"] > 0
    assert len(project.ledger()) == summary["groups_trained"], "what was trained is in a checkpoint"
    events = [json.loads(line) for line in (project.run_folder / "logs" / "supervisor.log").read_text().splitlines()]
    assert not [e for e in events if e["event"] in {"role.restarted", "role.killed"}]
    at_rest = project.run("pause", folder)
    assert at_rest.returncode == 1
    assert "run 'test' is not running" in at_rest.stderr

    slowly.unlink()
    resumed = summary_of(project.run("run", f"{folder}/run.toml", "--json"), project)
    assert_all_trained_once(project, resumed, PROMPTS)
    assert resumed["outstanding"] == 0


async def test_roles_without_a_supervisor_stop_and_a_later_start_is_not_stopped(project, redis_url, run_name):
    """There is no supervisor and no signal is sent, as in containers."""
    project.table["run"]["name"] = run_name
    project.table["filter"] = {"zero_variance": False}
    project.table["data"] |= {"max_queued_prompts": 8, "epochs": 1000}
    file = str(await anyio.to_thread.run_sync(project.write))
    async with ScriptedEngine(lambda ids, request: ids[:1]) as engine, connect(redis_url, run_name) as connection:
        for _start in range(2):
            async with AsyncExitStack() as stack:
                roles: dict[str, Process] = {}
                for role in ("feed", "rollout", "score", "train"):
                    command = project.command(role, file, "--redis", redis_url, "--engine", engine.url)
                    roles[role] = await stack.enter_async_context(
                        await anyio.open_process(command, env=environment(), stdout=None, stderr=subprocess.STDOUT)
                    )
                stack.callback(kill_all, roles)  # if the test fails
                await until_trained(connection, await trained(connection) + 2 * AT_A_STEP)
                result = await anyio.to_thread.run_sync(project.run, "stop", run_name, "--redis", redis_url)
                assert result.stdout.startswith(f"run '{run_name}' is stopping: "), result.stderr
                with anyio.fail_after(30):
                    assert {role: await process.wait() for role, process in roles.items()} == dict.fromkeys(roles, 0)
            status = await read_status(connection)
            assert "finished" not in status.meta
            assert status.prompt_counts["outstanding"] > 0
            assert status.stages["scored"].marked == 0, "the trainer kept a checkpoint, and acknowledged what is in it"
            assert status.stages["prompts"].claimed == status.stages["groups"].claimed == 0, (
                "they let go of what they held"
            )


def kill_all(roles: dict[str, Process]) -> None:
    for process in roles.values():
        if process.returncode is None:
            process.kill()


async def until_trained(connection: RunConnection, n: int) -> None:
    with anyio.fail_after(60):
        while await trained(connection) < n:
            await anyio.sleep(0.1)
