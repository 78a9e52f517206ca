"""The aclfile of docs/redis.md: each user may do its role's work, and the worker and the reader nothing else."""

from contextlib import AsyncExitStack

import anyio
import pytest
from redis import Redis
from redis.exceptions import NoPermissionError, ResponseError

from stream.connection.model_files import download_model_files, upload_model_files
from stream.connection.run_connection import connect
from stream.errors import ServerError
from stream.operator.audit import scan_run
from stream.operator.control import pause, resume, stop
from stream.operator.dead_letters import drop_dead_letters, list_dead_letters, retry_dead_letters
from stream.operator.status import groups_in_flight, read_status
from stream.private_server import find_server
from stream.queue.evaluation import create_evaluation_streams, read_evaluation_progress, replace_evaluation_prompts
from stream.queue.feed import Feed
from stream.queue.in_flight import GroupInFlight
from stream.records import Prompt
from stream.trainer.ledger import Ledger
from stream.trainer.ledger_ends import download_ends
from stream.trainer.ledger_records import Dropped, Duplicate, LedgerRecord, Trained
from stream.trainer.trainer_lease import EndedGroup, TrainerLease
from tests.cases.aclfile import USERS, aclfile, url_of
from tests.cases.cluster import wheel_server

PASSWORD = "a?c/d#e@f"
ESCAPED = "a%3Fc%2Fd%23e%40f"


@pytest.fixture(params=[find_server, pytest.param(wheel_server, marks=pytest.mark.full)], ids=["path", "wheel"])
def server(request, make_server, tmp_path, run_name):
    (tmp_path / "users.acl").write_text(aclfile(run_name, PASSWORD))
    return make_server("--aclfile", str(tmp_path / "users.acl"), binary=request.param()).start()


@pytest.fixture
def admin(server):
    """The server's user `default`, which may do everything."""
    with Redis.from_url(server.url) as redis:
        yield redis


@pytest.fixture
async def links(server, run_name):
    """A connection for each user."""
    async with AsyncExitStack() as stack:
        yield {
            user: await stack.enter_async_context(
                connect(url_of(server.url, run_name, user, ESCAPED), run_name, create=user != "reader")
            )
            for user in USERS
        }


async def test_groups_pass_all_stages(links, admin, pipe_on, tmp_path):
    trainer, worker, reader = (links[user] for user in USERS)
    pipes = {user: pipe_on(link) for user, link in links.items()}
    feeder = Feed(trainer, max_queued_prompts=100)
    await pipes["trainer"].feed("a", "b", "c", "d", "e", "f")
    await feeder.finish()

    rollout = pipes["worker"].stage("prompts", "r", capacity=8)
    first = (await rollout.claim(6)).leases
    for lease in first[:4]:
        await rollout.complete(lease, "groups", pipes["worker"].group(lease.prompt_id))
    assert await rollout.release(first[4], "infra", "no engine answers") is False
    await rollout.dead_letter(first[5], "unreadable", "altered")
    await anyio.sleep(0.02)
    (again,) = (await rollout.claim(1)).leases
    await worker.run_script("renew_leases", "prompts", "r", 30_000, again.id)
    await rollout.report_in_flight([GroupInFlight(entry=again.id, prompt="e", claimed_at=1.0)])
    assert groups_in_flight(await read_status(reader, with_in_flight=True))
    await rollout.complete(again, "groups", pipes["worker"].group(again.prompt_id))

    score = pipes["worker"].stage("groups", "s", data_attempts=1)
    leases = (await score.claim(5)).leases
    for lease in leases[:4]:
        await score.complete(lease, "scored", pipes["worker"].group(lease.prompt_id))
    assert await score.release(leases[4], "data", "no such image") is True

    ledger = await anyio.to_thread.run_sync(Ledger, tmp_path / "ledger.jsonl")
    trainer_lease = await TrainerLease.acquire(trainer, 30.0)
    await trainer_lease.recover(ledger)
    train = pipes["trainer"].stage("scored", "t")
    leases = (await train.claim(10)).leases
    endings = (Trained(), Trained(), Dropped("stale"), Duplicate("1-1"))
    ended = [EndedGroup(lease, ending) for lease, ending in zip(leases, endings, strict=True)]
    assert await trainer_lease.commit(train, ended, release_version=1) == []
    await trainer_lease.publish(await trainer_lease.reserve_version(0), tmp_path, 1, {"reward": 1.0})
    await trainer_lease.acknowledge([leases[0].id])
    await anyio.to_thread.run_sync(ledger.append, [LedgerRecord("a", Trained(), 1, 0, "")])
    await trainer_lease.recover(ledger)

    assert (await read_status(reader)).counts["fed"] == 6
    assert len((await scan_run(reader)).dead) == 2
    await pause(trainer, "me")
    assert (await rollout.claim(1)).paused
    await resume(trainer, "me")
    (unreadable, image) = await list_dead_letters(trainer)
    await retry_dead_letters(trainer, [image.id])
    await drop_dead_letters(trainer, [unreadable.id])
    await stop(trainer, "me")
    await worker.poll_stop()
    assert worker.stopping.is_set()
    await trainer_lease.finish_run("enough")
    await trainer_lease.release()
    ledger.close()
    assert admin.acl_log() == []


async def test_an_evaluation_runs(links, admin, pipe_on):
    trainer, worker, reader = (links[user] for user in USERS)
    for link in (trainer, worker):
        await create_evaluation_streams(link)
    prompts = [Prompt(id=f"h:0:{number}", messages=[]) for number in range(3)]
    await replace_evaluation_prompts(trainer, prompts, settings_digest="one", data_fingerprint="file")
    trainer_lease = await TrainerLease.acquire(trainer, 30.0)
    assert not await trainer_lease.begin_evaluation(0, 0, "one")
    pipe = pipe_on(worker)
    sampling, scoring = pipe.stage("eval:prompts"), pipe.stage("eval:groups", data_attempts=1)
    one, other, dying = (await sampling.claim(9)).leases
    for lease in (one, other):
        await sampling.complete(lease, "eval:groups", pipe.group(lease.prompt_id))
    await sampling.dead_letter(dying, "unreadable", "no record")
    scored, failed = (await scoring.claim(9)).leases
    await scoring.record_evaluation(scored, b"{}")
    await scoring.release(failed, "data", "no such reward")
    assert (await read_evaluation_progress(trainer)).unfinished == 0
    assert (await read_status(reader)).evaluation.results == 1
    await trainer_lease.end_evaluation(b"{}")
    assert admin.acl_log() == []


async def test_a_worker_reads_what_the_trainer_uploads(links, admin, tmp_path):
    await anyio.Path(tmp_path / "config.json").write_text("{}")
    await upload_model_files(links["trainer"], tmp_path)
    assert await download_model_files(links["worker"]) == {"config.json": b"{}"}
    assert await download_ends(links["trainer"], 7) is None
    assert [user for user, link in links.items() if not await link.ping()] == []  # else /ready is 503 for ever
    assert admin.acl_log() == []


async def test_a_worker_extends_the_leases_after_a_restart_of_the_server(links, admin, run_name, pipe_on):
    await pipe_on(links["trainer"]).scored("a")
    await pipe_on(links["trainer"]).feed("b")
    assert (await pipe_on(links["trainer"]).stage("scored", "t").claim(1)).leases
    worker = pipe_on(links["worker"]).stage("prompts", "r", lease_s=0.05)
    assert (await worker.claim(1)).leases
    admin.hset(f"{{{run_name}}}:server", "id", "another process")
    await anyio.sleep(0.06)
    assert (await worker.claim(1)).leases == []
    assert admin.acl_log() == []


REFUSED = {
    "trainer": [],
    "worker": [
        ("HSET", "{run}:policy", "version", "9"),
        ("HSET", "{run}:meta", "finished", "now"),
        ("HSET", "{run}:latest", "metrics", "{}"),
        ("HSET", "{run}:eval", "version", "9"),
        ("HSET", "{run}:feed", "cursor", "0"),
        ("HSET", "{run}:scored:marked", "1-1", "a"),
        ("ZREM", "{run}:unpublished", "1-1"),
        ("XADD", "{run}:published", "*", "version", "9"),
        ("SREM", "{run}:dropped_dead", "a"),
    ],
    "reader": [
        ("SET", "{run}", "x"),
        ("HSET", "{run}:meta", "paused", "me"),
        ("HDEL", "{run}:unfinished", "a"),
        ("XADD", "{run}:wake", "*", "e", ""),
        ("XGROUP", "CREATE", "{run}:prompts", "g", "0"),
        ("XREADGROUP", "GROUP", "penstock", "l", "STREAMS", "{run}:prompts", ">"),
        ("DEL", "{run}:prompts"),
    ],
}
FOR_NOBODY = [
    *(("FLUSHALL",), ("FLUSHDB",), ("SHUTDOWN",), ("MONITOR",), ("ROLE",), ("CLIENT", "LIST"), ("CLUSTER", "RESET")),
    *(("KEYS", "*"), ("SCAN", "0"), ("RANDOMKEY",), ("SCRIPT", "FLUSH"), ("PUBLISH", "x", "y")),
    *(("ACL", "LIST"), ("CONFIG", "GET", "requirepass"), ("CONFIG", "SET", "appendonly", "no")),
    *(("HGETALL", "{other}:meta"), ("XADD", "{other}:wake", "*", "e", ""), ("XRANGE", "{run}-2:prompts", "-", "+")),
    *(("SET", "{other}", "x"), ("COPY", "{run}:meta", "{other}:meta")),
]


@pytest.mark.parametrize("user", USERS)
def test_forbidden_commands_are_refused(user, server, run_name):
    with Redis.from_url(url_of(server.url, run_name, user, ESCAPED), protocol=2) as redis:
        for command in (*REFUSED[user], *FOR_NOBODY):
            actual = [part.replace("{run}", f"{{{run_name}}}") for part in command]
            with pytest.raises(NoPermissionError):
                print(actual, redis.execute_command(*actual))


def test_a_script_may_do_no_more_than_its_caller(server, admin, run_name):
    key = f"{{{run_name}}}"
    with Redis.from_url(url_of(server.url, run_name, "worker", ESCAPED)) as redis:
        sha = redis.script_load("return redis.call('HSET', KEYS[1] .. ':latest', 'metrics', '{}')")
        with pytest.raises(ResponseError, match=r"ACL failure in script|The user executing the script"):
            redis.evalsha(sha, 1, key)
    assert admin.exists(f"{key}:latest") == 0


async def test_a_missing_permission_is_reported_immediately_with_the_remedy(links):
    with anyio.fail_after(5):
        for user in ("worker", "reader"):
            with pytest.raises(ServerError, match=r"ACL refuses access.*docs/redis\.md"):
                await pause(links[user], "me")
    assert (await links["reader"].read_hash("meta")).get("paused") is None


async def test_an_unknown_user_and_a_user_without_a_password_are_refused(server, admin, run_name):
    admin.execute_command("ACL", "SETUSER", f"{run_name}-worker", "resetpass")
    for user in ("worker", "nobody"):
        with anyio.fail_after(5), pytest.raises(ServerError, match="wrong user or password"):
            async with connect(url_of(server.url, run_name, user, ESCAPED), run_name):
                pass
