"""Junk bytes put into each stream by hand: a dead letter each, and the run goes on."""

import json

import anyio
import pytest

from stream.keys import STAGES
from stream.link import connect
from tests.e2e.harness import balanced, finish, stop, wait_for_trained

pytestmark = pytest.mark.timeout(200)


def test_junk_in_every_stream_is_a_dead_letter_and_the_run_goes_on(project):
    prompts = 60
    project.prompts(prompts)
    project.table["filter"] = {"zero_variance": False}
    process = project.start("run", str(project.write()), "--json")

    async def throw_junk() -> None:
        live = json.loads((project.run_folder / "live.json").read_text())
        async with connect(live["redis"], "test", create=False) as link:
            for stage in STAGES:
                await link.redis.xadd(link.key(stage), {"payload": b"\x00\xffjunk"})
                await link.redis.xadd(link.key(stage), {"whatever": "junk"})

    try:
        wait_for_trained(project, 4, process, 120)
        anyio.run(throw_junk)
        summary = finish(process, project)
    finally:
        stop(process)
    assert balanced(summary)
    assert summary["groups_trained"] == prompts
    letters = project.run("dead", "list", str(project.run_folder), "--json")
    assert letters.returncode == 0, letters.stderr
    assert [letter["reason"] for letter in json.loads(letters.stdout)] == ["unreadable"] * 6
