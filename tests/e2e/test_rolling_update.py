"""Workers of this version and of the next one in one run, as in a rolling update: nothing is lost or counted twice."""

import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from stream import codec
from stream.codec import decode
from stream.errors import PenstockError
from stream.operator.status import read_status
from stream.records import SCHEMA, Group
from stream.trainer.archive import scan_archive
from tests.e2e.by_hand import cast, until
from tests.scripted_engine.engine import ScriptedEngine
from tests.soak.project import ROLE_PROGRAM

HERE = Path(__file__).parent
PROMPTS = 24

pytestmark = [pytest.mark.usefixtures("preloaded"), pytest.mark.timeout(150)]


@pytest.mark.full
@pytest.mark.parametrize("step", [0, 1], ids=["a new field", "a new schema"])
async def test_two_versions_work_in_one_run(project, connection, redis_url, run_name, tmp_path, monkeypatch, step):
    """With a new schema the newest reader has to be the trainer, so it is updated first, as the page says."""
    project.prompts(PROMPTS)
    project.table["run"]["name"] = run_name
    project.table["rollout"] |= {"group_size": 2, "groups_in_flight": 2}
    project.table["filter"] = {"zero_variance": False}
    cannot_read = f"this version reads up to {SCHEMA}"
    file = str(await anyio.to_thread.run_sync(project.write))

    async with ScriptedEngine(lambda ids, _: [*ids[-4:], 2], version="0") as engine, cast(tmp_path) as roles:
        addresses = (file, "--redis", redis_url, "--engine", engine.url)

        def ours(role: str) -> list[str]:
            return project.command(role, *(addresses if role != "feed" else addresses[:3]))

        def theirs(role: str) -> list[str]:
            return [sys.executable, str(HERE / "next_version.py"), str(step), role, *addresses]

        trainer = await roles.start(theirs("trainer") if step else [sys.executable, ROLE_PROGRAM, "train", *addresses])
        await roles.start(ours("feed"))
        old = {role: await roles.start(ours(role)) for role in ("rollout", "score")}
        new = {"rollout": await roles.start(theirs("rollout"))}
        if step:
            await old["score"].says(cannot_read)
        new["score"] = await roles.start(theirs("score"))

        async def has_trained(n: int) -> bool:
            with suppress(PenstockError):  # no role has joined the run yet
                return (await read_status(connection)).counts.get("trained", 0) >= n
            return False

        await until(connection, lambda: has_trained(PROMPTS // 3), within_s=60)
        for each in old.values():
            await each.drain()
        await until(connection, lambda: has_trained(PROMPTS), within_s=60)
        assert await trainer.ended() == 0, trainer.said()
        assert [await each.ended() for each in new.values()] == [0, 0]
    assert (await read_status(connection)).dead == 0
    monkeypatch.setattr(codec, "SCHEMA", SCHEMA + step)  # to read what the newer ones wrote
    by = await anyio.to_thread.run_sync(check_ledger_and_count_workers, project)
    assert len(by) == 2, by
    newer = (await anyio.to_thread.run_sync(old["score"].said)).count(cannot_read)
    assert (0 < newer < 50) if step else newer == 0  # given back after a pause, for a scorer that can read them


def check_ledger_and_count_workers(project) -> Counter[str]:
    """Check that each prompt was trained once; return how many groups each worker rolled out."""
    trained = Counter(line["prompt"] for line in project.ledger() if line.get("outcome") == "trained")
    assert sorted(trained.values()) == [1] * PROMPTS
    archive = scan_archive(project.run_folder / "groups")
    return Counter(decode(place.read_payload(), Group).worker for _, place in archive)
