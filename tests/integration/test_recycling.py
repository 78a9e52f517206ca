"""Workers that user code wears out: hung threads, memory, floods of output. Real processes, a real server."""

import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from stream.operator.status import read_status
from stream.queue.feed import Feed
from stream.records import Group, Prompt
from tests.e2e.by_hand import send
from tests.e2e.harness import environment
from tests.integration.test_supervisor import FINISH, Pipeline
from tests.scripted_engine.engine import ScriptedEngine
from tests.soak.project import END, write_project
from workers.launch import children, restarts
from workers.role.exit_codes import ExitCode

pytestmark = pytest.mark.usefixtures("preloaded")

OLD_WORKER = """
from envs.call import abandoned_threads

for _ in range(60):  # 4 more, and the worker is recycled
    abandoned_threads.add()
"""
STICKY = """
import sys, time

LEAK = []

class Sticky:
    def reset(self, number, **row):
        sys.stdout.write("x" * 300_000 + "\\n")
        if number % 3 == 0:
            time.sleep(3600)
        if number % 3 == 1:
            LEAK.append(b"leak" * {leak})
            time.sleep({leak} / 1e7)  # memory is looked at once a second: the run must take longer than that

    def get_reward(self):
        return 1.0
"""


@pytest.fixture
def make_pipeline(tmp_path, run_name, redis_url):
    return lambda scripts, **delivery: Pipeline(tmp_path, run_name, redis_url, scripts, **delivery)


async def test_a_recycled_worker_is_restarted_and_does_not_count_as_a_crash(make_pipeline, monkeypatch):
    monkeypatch.setattr(restarts, "QUICK_EXIT_S", 0.0)
    monkeypatch.setattr(restarts, "MAX_RESTARTS", 1)
    worn = f"if len(lives('rollout')) < 5: print('worn out'); sys.exit({int(ExitCode.RECYCLE)})\nstay()"
    train = "until(lambda: len(lives('rollout')) == 5);" + FINISH
    outcome = await make_pipeline({"rollout": worn, "train": train}).run()
    assert outcome.failure is None


async def test_a_worker_that_is_recycled_immediately_every_time_fails_the_run(make_pipeline):
    outcome = await make_pipeline({"rollout": f"print('all threads hang'); sys.exit({int(ExitCode.RECYCLE)})"}).run()
    assert "3 times in a row: all threads hang" in str(outcome.failure)


async def test_a_flood_of_output_neither_fills_the_disk_nor_stops_the_role(make_pipeline, monkeypatch):
    monkeypatch.setattr(children, "_MAX_LOG_BYTES", 1_000_000)
    monkeypatch.setattr(children, "_TRIMMED_LOG_BYTES", 10_000)
    flood = (
        "for i in range(200): print('x' * 50_000)\n"
        "print('error: the last word', flush=True)\n"
        "until(lambda: os.stat({log!r}).st_size < 1_000_000); sys.exit(2)"
    )
    pipeline = make_pipeline({})
    log = pipeline.settings.folder / "logs" / "score-0.log"
    pipeline.scripts["score"] = flood.format(log=str(log))
    outcome = await pipeline.run()
    assert "the last word" in str(outcome.failure)
    text = log.read_bytes()
    assert len(text) < 100_000
    assert b" bytes were removed here" in text.splitlines()[0]


def worker(file: Path, url: str, engine: str, *settings: str) -> list[str]:
    sets = [part for setting in settings for part in ("--set", setting)]
    return [sys.executable, "-m", "penstock", "rollout", str(file), "--redis", url, "--engine", engine, *sets]


def resident_mb(folder: Path) -> int:
    """Return the memory of a process that has a worker's modules and does nothing."""
    script = folder / "resident.py"
    script.write_text("import psutil, workers.rollout.worker\nprint(psutil.Process().memory_info().rss >> 20)\n")
    return int(subprocess.run([sys.executable, str(script)], check=True, capture_output=True).stdout)


@pytest.mark.parametrize(
    ("leak", "limit_s", "bound", "why"),
    [
        (0, 0.2, "queue.max_memory_mb=0", "64 threads hang"),
        (10_000_000, 30, "queue.max_memory_mb={limit}", "MiB of memory, the limit is {limit}"),
    ],
    ids=["threads", "memory"],
)
async def test_a_recycled_worker_drains_and_nothing_is_lost(
    tmp_path, pipe, redis_url, run_name, leak, limit_s, bound, why
):
    limit = await anyio.to_thread.run_sync(resident_mb, tmp_path) + 100
    bound, why = bound.format(limit=limit), why.format(limit=limit)
    prompts = 12 if leak == 0 else 9
    write_project(tmp_path, 1, seed=1)
    (tmp_path / "sticky.py").write_text((OLD_WORKER if leak == 0 else "") + STICKY.replace("{leak}", str(leak)))
    file = tmp_path / "run.toml"
    file.write_text(
        f'[run]\nname = "{run_name}"\nfolder = "{tmp_path}/run"\n[model]\npath = "{tmp_path}/model"\n'
        f'[data]\npath = "{tmp_path}/prompts.jsonl"\n[environments]\nsticky = "{tmp_path}/sticky.py:Sticky"\n'
        f"[rollout]\ngroup_size = 2\ngroups_in_flight = 2\ncall_timeout_s = {limit_s}\nmax_tokens = 8\n"
        "max_tokens_per_turn = 8\n"
    )
    fed = [
        Prompt(
            id=f"p{i}", messages=[{"role": "user", "content": "1"}], fields={"number": i if leak == 0 else i % 2 + 1}
        )
        for i in range(prompts)
    ]
    for prompt in fed:
        prompt.environment, prompt.group_size = "sticky", 2
    feed = Feed(pipe.connection, max_queued_prompts=100)
    await pipe.connection.write_hash("meta", {"capacity": "1000"})
    await feed.put(fed, "", "1")
    lives = []
    async with ScriptedEngine(lambda prompt_ids, _: [*prompt_ids, END], version="0") as engine:
        while (await read_status(pipe.connection)).stages["groups"].lag < prompts:
            log = tmp_path / f"worker-{len(lives)}.log"
            command = worker(file, redis_url, engine.url, bound)
            with log.open("wb") as out:
                process = await anyio.open_process(command, stdout=out, stderr=subprocess.STDOUT, env=environment())
            async with process:
                with anyio.fail_after(40):
                    is_asked = False  # a second signal would end the drain
                    while process.returncode is None:
                        if not is_asked and (await read_status(pipe.connection)).stages["groups"].lag == prompts:
                            is_asked = True
                            send(process, signal.SIGTERM)
                        with anyio.move_on_after(0.1):
                            await process.wait()
            status = await read_status(pipe.connection)
            assert status.stages["prompts"].claimed == 0, "it left holding something"
            lives.append((process.returncode, log.read_text()[-3000:]))
            assert len(lives) < 6
    worn = [text for code, text in lives if code == ExitCode.RECYCLE]
    assert worn
    assert all(why in text.splitlines()[-1] for text in worn)
    assert lives[-1][0] in (0, ExitCode.RECYCLE)
    stage = pipe.stage("groups")
    groups = [lease.group() for lease in (await stage.claim(100)).leases]
    assert sorted(group.prompt.id for group in groups) == sorted(prompt.id for prompt in fed)
    assert {_end(group) for group in groups} == ({"ok", "env_reset"} if leak == 0 else {"ok"})


def _end(group: Group) -> str:
    (end,) = {"ok" if c.failure is None else str(c.failure.reason.value) for c in group.completions}
    return end
