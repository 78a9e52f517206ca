"""The provider `docker` on an engine with faults: what is the policy's doing, what is not, and what is asked again."""

import anyio
import pytest

from envs.sandboxes import engine as engine_module
from envs.sandboxes.contract import FailureKind, ProviderOptions, SandboxEndedError, SandboxFailure, SandboxSpec
from envs.sandboxes.docker import DockerProvider
from envs.sandboxes.engine import find_address
from tests.cases.faulty_engine import RUNNING, Answer, error, faulty_engine, reply, state

NAME = "penstock-1"
DELETE, INSPECT = f"DELETE containers/{NAME}", f"GET containers/{NAME}/json"
CREATE, START, KILL = "POST containers/create", f"POST containers/{NAME}/start", f"POST containers/{NAME}/kill"
EXEC, RUN = f"POST containers/{NAME}/exec", "POST exec/e/start"
SPEC = SandboxSpec(image="box")
LABELS = {"penstock.run": "r"}


@pytest.fixture
async def engine(tmp_path):
    async with faulty_engine(tmp_path) as engine:
        engine.on(CREATE, Answer(201, {"Id": "1"}))
        engine.on(START, Answer(204))
        engine.on(KILL, Answer(204))
        engine.on(INSPECT, Answer(body=RUNNING))
        engine.on(EXEC, Answer(201, {"Id": "e"}))
        yield engine


@pytest.fixture
async def provider(engine):
    async with DockerProvider(ProviderOptions(address=engine.address, call_timeout_s=0.6)) as provider:
        yield provider


async def run(sandbox, **options):
    return await sandbox.exec(["true"], **({"timeout_s": 0.2} | options))


@pytest.mark.parametrize(
    ("answers", "was_there"),
    [
        ([Answer(204), error(404, "No such container")], True),
        ([error(409, "removal is already in progress"), error(409, "in progress"), error(404, "No such")], True),
        ([error(404, "No such container")], False),
    ],
    ids=["there", "in progress", "not there"],
)
async def test_a_removal_says_whether_it_was_there_and_waits_until_it_is_gone(answers, was_there, engine, provider):
    engine.on(DELETE, *answers)
    assert await provider.remove(NAME) is was_there
    assert engine.count(DELETE) == len(answers)


@pytest.mark.parametrize(
    "answer", [error(500, "device busy"), error(409, "in progress"), Answer(after_s=5.0)], ids=["error", "busy", "slow"]
)
async def test_a_removal_that_is_not_known_to_have_happened_raises(answer, engine, provider):
    engine.on(DELETE, answer)
    with pytest.raises(SandboxFailure):
        await provider.remove(NAME)


async def test_a_command_whose_reply_was_cut_is_asked_for_again_by_its_id(engine, provider):
    sandbox = await provider.create(NAME, SPEC, LABELS)
    whole = reply(out=b"done\n", code=3)
    cut = Answer(stream=(whole.stream[0][:-2], b""))
    engine.on(RUN, cut, cut, whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(sandbox), "_without_reply", nothing)
        result = await run(sandbox, id="call-7")
    assert (result.code, result.stdout, result.seconds) == (3, b"done\n", 1.5)
    commands = [body["Cmd"] for body in engine.bodies(EXEC)]
    assert len(commands) == 3
    assert commands[0][5:7] == commands[2][5:7] == ["call-7", "0"]


async def nothing(*_):
    return None


async def test_a_reply_that_is_cut_once_is_asked_for_again(engine, provider):
    sandbox = await provider.create(NAME, SPEC, LABELS)
    engine.on(RUN, Answer(stream=(b"", b"")), reply(code=4))
    assert (await run(sandbox)).code == 4


ENDS = {
    "out of memory": (state("exited", code=137, oom=True), "memory"),
    "life over": (state("exited", code=3), "seconds are over"),
    "could not start processes": (state("exited", code=2), "could not go on"),
    "killed": (state("exited", code=137), FailureKind.LOST),
    "engine restarted": (state("exited", code=255), FailureKind.LOST),
    "engine restarted, as some engines report it": (state("exited", code=0), FailureKind.LOST),
    "dead": (state("dead", code=1), FailureKind.LOST),
    "never started": (state("created"), FailureKind.LOST),
    "without setsid": (state("exited", code=5), FailureKind.IMAGE),
}


@pytest.mark.parametrize(("found", "expected"), ENDS.values(), ids=ENDS)
async def test_a_sandbox_that_has_ended_is_the_policys_doing_only_if_it_ended_by_itself(
    found, expected, engine, provider
):
    sandbox = await provider.create(NAME, SPEC, LABELS)
    engine.on(EXEC, error(409, "Container 1 is not running"))
    engine.on(INSPECT, Answer(body=found))
    if isinstance(expected, FailureKind):
        with pytest.raises(SandboxFailure) as caught:
            await run(sandbox)
        assert caught.value.kind == expected
    else:
        with pytest.raises(SandboxEndedError, match=expected):
            await run(sandbox)


async def test_a_sandbox_that_is_gone_is_lost(engine, provider):
    sandbox = await provider.create(NAME, SPEC, LABELS)
    engine.on(EXEC, error(404, "No such container"))
    engine.on(INSPECT, error(404, "No such container"))
    with pytest.raises(SandboxFailure) as caught:
        await run(sandbox)
    assert caught.value.kind == FailureKind.LOST


@pytest.mark.parametrize("shares", [0, 1026], ids=["forged", "true"])
async def test_a_refusal_is_believed_if_the_engine_has_noted_a_larger_fence(shares, engine, provider):
    sandbox = await provider.create(NAME, SPEC, LABELS)
    engine.on(RUN, reply("fenced", 75))
    engine.on(INSPECT, Answer(body=state("running", shares=shares)))
    if shares:
        with pytest.raises(SandboxFailure) as caught:
            await run(sandbox)
        assert (caught.value.kind, engine.count(KILL)) == (FailureKind.FENCED, 0)
    else:
        with pytest.raises(SandboxEndedError):
            await run(sandbox)
        assert engine.count(KILL) == 1


async def test_an_adoption_is_noted_outside_before_the_runner_hears_of_it(engine, provider):
    engine.on(f"POST containers/{NAME}/update", Answer(200, {}))
    engine.on(RUN, reply("fence"))
    await provider.attach(NAME, SPEC, 2)
    made = [route for route, _ in engine.requests if route.startswith("POST")]
    assert made == [f"POST containers/{NAME}/update", EXEC, RUN]
    assert engine.bodies(made[0]) == [{"CpuShares": 1026}]
    engine.on(INSPECT, Answer(body=state("running", shares=1027)))
    with pytest.raises(SandboxFailure) as caught:
        await provider.attach(NAME, SPEC, 2)
    assert caught.value.kind == FailureKind.FENCED


async def test_what_the_engine_fails_at_is_no_result_of_a_command(engine, provider):
    sandbox = await provider.create(NAME, SPEC, LABELS)
    engine.on(EXEC, error(500, "containerd: deadline exceeded"))
    with pytest.raises(SandboxFailure):
        await run(sandbox)


@pytest.mark.parametrize(
    "answer",
    [error(400, "unable to find user agent"), error(500, "OCI runtime exec failed: exec failed: no sh")],
    ids=["user", "shell"],
)
async def test_what_a_sandbox_has_broken_is_a_result(answer, engine, provider):
    sandbox = await provider.create(NAME, SPEC, LABELS)
    engine.on(EXEC, answer)
    result = await run(sandbox)
    assert (result.code, result.stderr.decode()) == (126, answer.body["message"])


async def test_a_command_that_nothing_stops_ends_its_sandbox(engine, provider):
    sandbox = await provider.create(NAME, SPEC, LABELS)
    engine.on(RUN, Answer(after_s=30.0, stream=(b"", b"")))
    with pytest.raises(SandboxEndedError, match="could not be stopped"):
        await run(sandbox)
    assert engine.count(KILL) == 1


async def test_an_engine_that_is_away_is_unreachable_after_the_deadline(engine, provider, tmp_path):
    sandbox = await provider.create(NAME, SPEC, LABELS)
    (tmp_path / "docker.sock").unlink()
    with anyio.fail_after(10), pytest.raises(SandboxFailure, match="is it running") as caught:
        await run(sandbox)
    assert caught.value.kind == FailureKind.UNREACHABLE


async def test_without_quotas_the_disk_is_not_asked_for_a_second_time(engine, provider):
    engine.on(CREATE, error(500, "--storage-opt is supported only for overlay over xfs"), Answer(201, {"Id": "1"}))
    for _ in range(2):
        await provider.create(NAME, SPEC, LABELS)
    asked = ["StorageOpt" in body["HostConfig"] for body in engine.bodies(CREATE)]
    assert asked == [True, False, False]


@pytest.mark.parametrize(("found", "starts"), [("created", 1), ("running", 0), ("exited", 0)])
async def test_a_repeated_create_starts_only_what_was_never_started(found, starts, engine, provider):
    engine.on(CREATE, error(409, "the name is in use"))
    engine.on(INSPECT, Answer(body=state(found)))
    await provider.create(NAME, SPEC, LABELS)
    assert engine.count(START) == starts


@pytest.mark.parametrize(
    ("route", "answer", "kind"),
    [
        (CREATE, error(500, "mkdir: no space left on device"), FailureKind.FULL),
        (CREATE, error(400, "invalid runtime"), FailureKind.CREATE),
        (CREATE, error(404, "No such image: box"), FailureKind.IMAGE),
        (START, error(400, 'exec: "sh": executable file not found in $PATH'), FailureKind.IMAGE),
        (START, error(500, "cgroups: out of luck"), FailureKind.CREATE),
        ("GET images/box/json", error(404, "No such image"), FailureKind.IMAGE),
    ],
    ids=["full", "refused", "image gone", "no sh", "not started", "no image"],
)
async def test_a_sandbox_that_cannot_be_made_says_why(route, answer, kind, engine, provider):
    engine.on(route, answer)
    with pytest.raises(SandboxFailure) as caught:
        await provider.create(NAME, SPEC, LABELS)
    assert caught.value.kind == kind


@pytest.mark.parametrize("name", ["Engine", "Podman Engine"])
async def test_a_place_is_the_same_each_time(name, engine):
    engine.on("GET version", Answer(body={"ApiVersion": "1.41", "Components": [{"Name": name}]}))
    info = {"Name": "host", "DockerRootDir": "/var/lib/containers"}
    engine.on("GET info", Answer(body=info | {"ID": "one"}), Answer(body=info | {"ID": "two"}))
    async with DockerProvider(ProviderOptions(address=engine.address)) as provider:
        first, second = [await provider.place() for _ in range(2)]
    assert (first == second) is (name == "Podman Engine")
    assert first.startswith("host/")


def test_the_engine_is_looked_for_where_its_own_tools_look(monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", "tcp://engine:2375")
    assert find_address() == "tcp://engine:2375"
    monkeypatch.delenv("DOCKER_HOST")
    monkeypatch.setattr(engine_module.Path, "is_socket", lambda path: str(path) == "/run/podman/podman.sock")
    assert find_address() == "unix:///run/podman/podman.sock"
    monkeypatch.setattr(engine_module.Path, "is_socket", lambda _: False)
    with pytest.raises(SandboxFailure, match=r"set sandboxes\.address"):
        find_address()
