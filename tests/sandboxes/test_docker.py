"""Containers on a real engine: what is the policy's doing and what is not, what they may do, images and networks."""

import anyio
import pytest

from envs.contract import ToolError
from envs.sandboxes import images as images_module
from envs.sandboxes.contract import (
    FailureKind,
    ImageBuildError,
    Network,
    ProviderOptions,
    SandboxEndedError,
    SandboxFailure,
)
from envs.sandboxes.docker import DockerProvider
from envs.sandboxes.images import BUILD_LABEL
from tests.cases.docker_engine import IMAGE

pytestmark = [pytest.mark.sandboxes, pytest.mark.timeout(120)]


async def engine_call(place, path, method="POST", **more):
    return await place.provider._engine.call(path, method, **more)


@pytest.mark.parametrize("by_hand", ["kill", "stop", "remove"])
async def test_what_is_ended_by_hand_is_lost(by_hand, place, sh):
    sandbox = await place.create()
    if by_hand == "remove":
        await engine_call(place, f"containers/{sandbox.name}", "DELETE", force=True)
    else:
        await engine_call(place, f"containers/{sandbox.name}/{by_hand}", **({"t": 0} if by_hand == "stop" else {}))
    with pytest.raises(SandboxFailure) as caught:
        await sh(sandbox, "true")
    assert caught.value.kind == FailureKind.LOST


async def test_what_is_killed_during_a_command_is_lost(place, sh):
    sandbox = await place.create()
    async with anyio.create_task_group() as tasks:

        async def kill():
            await anyio.sleep(1)
            await engine_call(place, f"containers/{sandbox.name}/kill")

        tasks.start_soon(kill)
        with pytest.raises(SandboxFailure) as caught:
            await sh(sandbox, "sleep 30")
    assert caught.value.kind == FailureKind.LOST


FORGERIES = {
    "a larger fence": "mkdir /run/penstock/fence/99",
    "a runner that refuses": "echo 'echo fenced 75 0 0 0 0 0' >/run/penstock/runner",
}


@pytest.mark.parametrize("script", FORGERIES.values(), ids=FORGERIES)
async def test_a_policy_that_forges_a_refusal_ends_its_sandbox_and_is_measured(script, place, sh):
    sandbox = await place.create()
    await sandbox.write({"/tmp/kept": b"kept"})
    await sh(sandbox, script)
    with pytest.raises(SandboxEndedError, match="changed the files"):
        await sh(sandbox, "true")
    assert await sandbox.read("/tmp/kept", 10) == b"kept"
    fresh = await place.create(image=await sandbox.snapshot())
    assert (await sh(fresh, "cat /tmp/kept")).stdout == b"kept"


BREAKAGES = {
    "no runner": "rm /run/penstock/runner",
    "a runner that says nothing": "echo exit 0 >/run/penstock/runner",
    "no state": "rm -rf /run/penstock/calls; echo >/run/penstock/calls",
    "no shell": "rm /bin/sh",
    "full state": "cat /dev/zero >/run/penstock/full",
}
ENDLESS = "echo 'while :; do echo more; done' >/run/penstock/runner"


@pytest.mark.parametrize(
    "script", [*BREAKAGES.values(), pytest.param(ENDLESS, marks=pytest.mark.full)], ids=[*BREAKAGES, "endless output"]
)
async def test_a_policy_that_breaks_its_runner_reads_a_result_and_is_measured(script, place, sh):
    sandbox = await place.create()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place.provider._engine, "call_timeout_s", 10)
        await sh(sandbox, script)
        result = await sh(sandbox, "true")
    assert result.code != 0
    await sandbox.check_alive()


async def test_a_command_whose_runner_never_ends_is_the_policys_doing(place, sh):
    sandbox = await place.create()
    await sh(sandbox, "echo 'sleep 600' >/run/penstock/runner")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place.provider._engine, "call_timeout_s", 2)
        with pytest.raises(SandboxEndedError, match="could not be stopped"):
            await sh(sandbox, "true", timeout_s=1)


async def test_a_full_disk_that_only_measuring_shows_ends_the_sandbox(place, sh):
    sandbox = await place.create(disk_mb=20)
    await sandbox.end_if_over_disk()
    await sh(sandbox, "head -c 40000000 /dev/zero >/tmp/large")
    with pytest.raises(SandboxEndedError, match="20 MB"):
        await sandbox.end_if_over_disk()
    with pytest.raises(SandboxEndedError, match="20 MB"):
        await sh(sandbox, "true")


async def test_endless_output_is_bounded_by_the_sandboxs_own_memory(place, sh):
    sandbox = await place.create(memory_mb=64)
    result = await sh(sandbox, "head -c 100000000 /dev/zero", max_bytes=1000)
    assert (result.truncated, len(result.stdout), result.code == 0) == (True, 1000, False)
    assert (await sh(sandbox, "echo alive")).stdout == b"alive\n"


async def test_a_fork_bomb_ends_no_first_process(place, sh):
    sandbox = await place.create()
    await sh(sandbox, "bomb() { bomb | bomb & }; while :; do bomb; done", timeout_s=3)
    await sh(sandbox, "kill -9 -1")
    assert (await sh(sandbox, "echo alive")).stdout == b"alive\n"


async def test_an_ended_sandbox_is_not_started_again_by_a_repeated_create(place, sh):
    sandbox = await place.create()
    await engine_call(place, f"containers/{sandbox.name}/kill")
    again = await place.create(sandbox.name)
    with pytest.raises(SandboxFailure):
        await sh(again, "true")


async def test_a_container_that_was_never_started_is_lost(place):
    sandbox = await place.create()
    name = place.name()
    config = {"Image": IMAGE, "Labels": place.labels(), "Entrypoint": ["sh"]}
    await engine_call(place, "containers/create", body=config, name=name)
    assert {one.name: one.state for one in await place.provider.list(place.run_id)} == {
        sandbox.name: "running",
        name: "created",
    }
    with pytest.raises(SandboxFailure) as caught:
        await place.provider.attach(name, place.spec(), fence=2)
    assert caught.value.kind == FailureKind.LOST


async def test_a_sandbox_has_few_rights(place, sh):
    sandbox = await place.create()
    details = await place.provider._engine.inspect(sandbox.name)
    status = (await sh(sandbox, "cat /proc/self/status")).stdout.decode()
    words = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    net_raw, mknod, sys_admin = 1 << 13, 1 << 27, 1 << 21
    assert int(words["CapBnd"], 16) & (net_raw | mknod | sys_admin) == 0
    assert (words["NoNewPrivs"], words["Seccomp"]) == ("1", "2")
    host = details["HostConfig"]
    assert (host["Binds"], host["LogConfig"]["Type"], host["Memory"]) == (None, "none", host["MemorySwap"])
    assert (host["NetworkMode"], host["Privileged"], details["Mounts"]) == ("none", False, [])


async def test_a_user_writes_what_it_may(place, sh):
    sandbox = await place.create(user="agent", workdir="/home/agent")
    await sandbox.write({"/home/agent/new/file": b"text", "/tmp/other": b"text"})
    result = await sh(sandbox, "id -un; pwd; stat -c %U /home/agent/new /home/agent/new/file; ls -d /.penstock-*")
    assert result.stdout == b"agent\n/home/agent\nagent\nagent\n"
    with pytest.raises(ToolError, match="Permission denied"):
        await sandbox.write({"/etc/passwd": b"root::0:0::/:/bin/sh"})
    await sandbox.write({"/root/secret": b"text"}, user="root")
    assert (await sh(sandbox, "cat /root/secret")).code == 1
    assert not [one.path for one in await sandbox.changed_files() if "penstock" in one.path]


async def test_a_sandbox_joins_the_network_of_another_and_not_its_files(place, sh):
    first = await place.create()
    await sh(first, "mkdir /tmp/www; echo served >/tmp/www/index.html; httpd -p 127.0.0.1:8080 -h /tmp/www")
    second = await place.create(joins_network_of=first.name)
    assert (await sh(second, "wget -qO- http://127.0.0.1:8080/")).stdout == b"served\n"
    assert (await sh(second, "ls /tmp; pidof httpd")).stdout == b""
    third = await place.create()
    assert (await sh(third, "wget -qO- http://127.0.0.1:8080/")).code != 0


async def test_a_network_whose_sandbox_ended_by_itself_is_none(place, sh):
    first = await place.create(max_life_s=1.0)
    await anyio.sleep(2.5)
    second = await place.create(joins_network_of=first.name)
    assert (await sh(second, "echo alive")).stdout == b"alive\n"


async def test_networks_that_it_does_not_have_are_refused(place):
    for network in (Network.ENDPOINT, Network.ALLOWLIST):
        with pytest.raises(SandboxFailure, match=network):
            await place.create(network=network)


async def test_an_image_that_is_missing_or_has_no_shell_is_named(place, tmp_path):
    with pytest.raises(SandboxFailure, match=r"localhost:1/none") as caught:
        await place.create(image="localhost:1/none:1")
    assert caught.value.kind == FailureKind.IMAGE
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /\n")
    empty = await place.provider.build(tmp_path, 60)
    with pytest.raises(SandboxFailure, match="needs sh and setsid") as caught:
        await place.create(image=empty)
    assert caught.value.kind == FailureKind.IMAGE


async def test_a_folder_is_built_once_for_each_content(place, sh, tmp_path):
    (tmp_path / "Dockerfile").write_text(f'FROM {IMAGE}\nCOPY . /task\nWORKDIR /task\nENTRYPOINT ["/bin/false"]\n')
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_text("one")
    first, second = [await place.provider.build(tmp_path, 60) for _ in range(2)]
    assert first == second
    sandbox = await place.create(image=first)
    assert (await sh(sandbox, "pwd; cat deep/file")).stdout == b"/task\none"
    (tmp_path / "deep" / "file").write_text("two")
    assert await place.provider.build(tmp_path, 60) != first


async def test_a_build_that_fails_says_its_last_lines(place, tmp_path):
    (tmp_path / "Dockerfile").write_text(f"FROM {IMAGE}\nRUN echo this is why; exit 3\n")
    with pytest.raises(ImageBuildError, match=r"(?s)this is why.*non-zero code: 3") as caught:
        await place.provider.build(tmp_path, 60)
    assert caught.value.kind == FailureKind.IMAGE


@pytest.mark.full
async def test_built_images_beyond_the_bound_are_removed_and_those_in_use_are_kept(
    engine_address, place, tmp_path, monkeypatch
):
    monkeypatch.setattr(images_module, "BUILD_LABEL", f"{BUILD_LABEL}-{place.run_id}")  # others use this engine too
    async with DockerProvider(ProviderOptions(address=engine_address, image_cache_gb=0.0)) as provider:
        images = []
        for number in range(3):
            (tmp_path / "Dockerfile").write_text(f"FROM {IMAGE}\nRUN echo {number} {place.run_id} >/number\n")
            images.append(await provider.build(tmp_path, 60))
            if number == 0:
                await place.create(image=images[0])
        left = await provider._engine.client.images.list(filters={"label": [images_module.BUILD_LABEL]})
    assert {images[0], images[2]} <= {image["Id"] for image in left}
    assert images[1] not in {image["Id"] for image in left}
