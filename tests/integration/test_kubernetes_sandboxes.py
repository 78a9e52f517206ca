"""The provider `kubernetes` when its cluster fails, and what a fresh Pod has of another one's files."""

import time

import anyio
import pytest

from envs.sandboxes.contract import (
    BEGUN_LABEL,
    RUN_LABEL,
    FailureKind,
    Network,
    ProviderOptions,
    SandboxEndedError,
    SandboxFailure,
    SandboxSpec,
)
from envs.sandboxes.kubernetes import KubernetesProvider
from tests.cases.kubernetes_api import BUSYBOX, DASH, NAMESPACE, ROLE, TOKEN, cluster, policy  # noqa: F401  (a fixture)
from tests.cases.sandboxes import needs_sandbox  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.usefixtures("needs_sandbox"), pytest.mark.timeout(60)]
LABELS = {RUN_LABEL: "run-1", BEGUN_LABEL: "1700000000.5"}
SPEC = SandboxSpec(image=BUSYBOX, memory_mb=128, disk_mb=32, max_life_s=600)
NAME = "penstock-run1-1-0-abcdefgh"
QUICK = ProviderOptions(create_timeout_s=5, call_timeout_s=3)


@pytest.fixture
async def provider(cluster):  # noqa: F811
    async with KubernetesProvider(QUICK) as result:
        yield result


@pytest.fixture
async def sandbox(provider):
    return await provider.create(NAME, SPEC, LABELS)


async def output(sandbox, script, **options):
    result = await sandbox.exec(["sh", "-c", script], **({"timeout_s": 10} | options))
    return result.stdout.decode()


async def failure(call):
    with pytest.raises(SandboxFailure) as raised:
        await call
    return raised.value


def changed(files):
    return {(one.path, one.kind) for one in files}


# What a Pod is.


async def test_a_pod_has_limits_a_deadline_and_no_token(cluster, provider):  # noqa: F811
    spec = SandboxSpec(image=BUSYBOX, cpus=0.5, memory_mb=128, disk_mb=32, gpus=1, workdir="/srv", max_life_s=99.5)
    await provider.create(NAME, spec, LABELS)
    body = cluster.pods[NAME].body
    assert body["metadata"]["labels"] == {**LABELS, "penstock.network": "off"} | {
        key: value for key, value in body["metadata"]["labels"].items() if key == "penstock.image"
    }
    pod = body["spec"]
    assert (pod["activeDeadlineSeconds"], pod["restartPolicy"]) == (100, "Never")
    assert pod["automountServiceAccountToken"] is pod["enableServiceLinks"] is False
    assert (pod["dnsPolicy"], pod["dnsConfig"]) == ("None", {"nameservers": ["127.0.0.1"]})
    (container,) = pod["containers"]
    amounts = {"cpu": "500m", "memory": "128Mi", "ephemeral-storage": "32Mi", "nvidia.com/gpu": "1"}
    assert container["resources"] == {"limits": amounts, "requests": amounts}
    assert container["workingDir"] == "/srv"
    security = container["securityContext"]
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["NET_RAW", "MKNOD"]}
    assert "runtimeClassName" not in pod


async def test_the_runtime_is_a_runtime_class(cluster):  # noqa: F811
    async with KubernetesProvider(ProviderOptions(runtime="gvisor")) as provider:
        await provider.create(NAME, SPEC, LABELS)
    assert cluster.pods[NAME].body["spec"]["runtimeClassName"] == "gvisor"


async def test_a_run_whose_id_is_no_label_is_listed_by_its_annotation(provider):
    await provider.create(NAME, SPEC, {**LABELS, BEGUN_LABEL: "a time, with spaces"})
    (listed,) = await provider.list("run-1")
    assert (listed.run_id, listed.begun) == ("run-1", 0.0)


@pytest.mark.parametrize(
    ("spec", "kind", "words"),
    [
        (SandboxSpec(image=""), FailureKind.IMAGE, "needs an image"),
        (SandboxSpec(image=BUSYBOX, network=Network.ENDPOINT), FailureKind.CREATE, "off or open"),
        (SandboxSpec(image="penstock-changes-of-another"), FailureKind.IMAGE, "end with their worker"),
    ],
)
async def test_what_no_pod_can_be_is_refused_by_name(cluster, provider, spec, kind, words):  # noqa: F811
    error = await failure(provider.create(NAME, spec, LABELS))
    assert error.kind is kind
    assert words in str(error)
    assert not cluster.pods


# Getting to the cluster.


async def test_the_place_is_the_namespace_with_its_id(provider):
    assert await provider.place() == f"kubernetes:{NAMESPACE}:6c9f0b7e-0000-4000-8000-000000000001"


async def test_without_a_policy_that_denies_everything_no_pod_is_made(cluster):  # noqa: F811
    open_policy = policy()
    open_policy["spec"]["egress"] = [{}]
    cluster.policies = [open_policy, policy("open")]
    error = await failure(KubernetesProvider(QUICK).__aenter__())
    assert "NetworkPolicy" in str(error)


async def test_a_context_that_does_not_exist_is_named(cluster):  # noqa: F811
    error = await failure(KubernetesProvider(ProviderOptions(address="other/space")).__aenter__())
    assert error.kind is FailureKind.UNREACHABLE
    assert "other" in str(error)


async def test_a_namespace_can_be_another_one_than_the_contexts(cluster):  # noqa: F811
    error = await failure(KubernetesProvider(ProviderOptions(address="elsewhere", call_timeout_s=1)).__aenter__())
    assert "elsewhere" in str(error)


async def test_a_role_that_is_missing_is_named(cluster, provider):  # noqa: F811
    cluster.answers["create", "pods"] = [(403, "pods is forbidden")]
    error = await failure(provider.create(NAME, SPEC, LABELS))
    assert error.kind is FailureKind.CREATE
    assert "Role" in str(error)


async def test_no_secret_of_a_command_is_in_a_request(cluster, sandbox):  # noqa: F811
    assert await output(sandbox, 'echo "$KEY"', env={"KEY": "hidden's"}) == "hidden's\n"
    assert not [url for url in cluster.seen_urls if "hidden" in url]


async def test_a_wrong_name_of_a_variable_is_refused(sandbox):
    with pytest.raises(ValueError, match="a b"):
        await output(sandbox, "true", env={"a b": "1"})


async def test_neither_the_token_nor_the_workers_variables_are_in_a_pod(sandbox, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CANARY", TOKEN)
    seen = await output(sandbox, "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline; find / -name '*token*' -type f")
    assert TOKEN not in seen
    assert "serviceaccount" not in seen


# Creation.


async def test_a_server_that_is_busy_is_asked_again(cluster, provider):  # noqa: F811
    cluster.answers["create", "pods"] = [(429, "slow down"), (503, "busy"), (0, "")]
    cluster.answers["get", "pods"] = [(500, "broken"), (0, "")]
    sandbox = await provider.create(NAME, SPEC, LABELS)
    assert await output(sandbox, "echo made") == "made\n"


async def test_a_lost_reply_to_create_makes_no_second_pod(cluster, provider):  # noqa: F811
    cluster.lost_replies.append(("create", "pods"))
    sandbox = await provider.create(NAME, SPEC, LABELS)
    assert await output(sandbox, "echo made") == "made\n"
    assert cluster.requests.count(("create", "pods")) == 2
    assert list(cluster.pods) == [NAME]


async def test_a_pod_that_appears_late_is_found_by_name_and_removed(cluster, provider):  # noqa: F811
    cluster.create_delay_s = 1.0
    with anyio.move_on_after(0.3):  # the client dies during create
        await provider.create(NAME, SPEC, LABELS)
    assert await provider.remove(NAME) is False
    with anyio.fail_after(10):
        while not await provider.remove(NAME):
            await anyio.sleep(0.2)
    assert await provider.list("run-1") == []


async def test_watches_that_are_too_old_are_begun_anew(cluster, provider):  # noqa: F811
    cluster.watch_is_too_old = True
    cluster.start_delay_s = 0.5
    assert await output(await provider.create(NAME, SPEC, LABELS), "echo made") == "made\n"
    assert cluster.requests.count(("watch", "pods")) >= 2


async def test_a_watch_sees_the_start_without_polling(cluster, provider):  # noqa: F811
    cluster.start_delay_s = 2.0
    await provider.create(NAME, SPEC, LABELS)
    assert cluster.requests.count(("get", "pods")) <= 4  # more if this machine is so busy that an exec is repeated


async def test_history_that_is_compacted_during_a_watch(cluster, provider):  # noqa: F811
    cluster.start_delay_s = 0.6

    async def compact():
        await anyio.sleep(0.3)
        cluster.forget_events()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(compact)
        sandbox = await provider.create(NAME, SPEC, LABELS)
    assert await output(sandbox, "echo made") == "made\n"


async def test_an_image_that_does_not_exist_is_named(provider):
    error = await failure(provider.create(NAME, SandboxSpec(image="none:1", memory_mb=64), LABELS))
    assert error.kind is FailureKind.IMAGE
    assert "none:1" in str(error)


@pytest.mark.parametrize("tool", ["setsid", "tar", "stat"])
async def test_an_image_without_a_tool_is_refused_by_the_tool(cluster, provider, tool):  # noqa: F811
    (cluster.images[DASH] / "bin" / tool).unlink()
    error = await failure(provider.create(NAME, SandboxSpec(image=DASH, memory_mb=64), LABELS))
    assert error.kind is FailureKind.IMAGE
    assert f"no {tool}" in str(error)


async def test_a_quota_that_is_used_up_is_a_full_place(cluster, provider):  # noqa: F811
    cluster.answers["create", "pods"] = [(403, 'pods "x" is forbidden: exceeded quota: pods=10')]
    assert (await failure(provider.create(NAME, SPEC, LABELS))).kind is FailureKind.FULL


async def test_a_pod_that_no_node_takes_is_a_full_place(cluster):  # noqa: F811
    cluster.start_delay_s = 60
    async with KubernetesProvider(ProviderOptions(create_timeout_s=1)) as provider:
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                errors = []

                async def create():
                    errors.append(await failure(provider.create(NAME, SPEC, LABELS)))

                tasks.start_soon(create)
                await anyio.sleep(0.3)
                condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3"}
                cluster.pods[NAME].body["status"]["conditions"] = [condition]
                await cluster.note_change(NAME)
    assert errors[0].kind is FailureKind.FULL
    assert "0/3" in str(errors[0])


async def test_a_pod_that_starts_too_late_names_the_setting(cluster):  # noqa: F811
    cluster.start_delay_s = 60
    async with KubernetesProvider(ProviderOptions(create_timeout_s=0.5)) as provider:
        error = await failure(provider.create(NAME, SPEC, LABELS))
    assert error.kind is FailureKind.CREATE
    assert "sandboxes.create_timeout_s" in str(error)


# Commands.


@pytest.mark.parametrize("cut", [0, 1, 30, 5000])
async def test_a_cut_connection_costs_nothing_and_repeats_nothing(cluster, sandbox, cut):  # noqa: F811
    cluster.cuts = [cut]
    script = "echo x >>/tmp/effects; head -c 9000 /dev/zero | tr '\\0' y; exit 7"
    result = await sandbox.exec(["sh", "-c", script], timeout_s=10)
    assert (result.code, result.stdout) == (7, b"y" * 9000)
    assert await sandbox.read("/tmp/effects", 100) == b"x\n"
    assert cluster.cuts == []


async def test_a_connection_that_is_cut_in_every_reply_is_unreachable(cluster, sandbox):  # noqa: F811
    cluster.cuts = [0] * 1000
    begun = time.monotonic()
    error = await failure(output(sandbox, "true", timeout_s=1))
    assert error.kind is FailureKind.UNREACHABLE
    assert time.monotonic() - begun < 10


async def test_a_read_and_a_write_that_are_cut_are_made_again(cluster, sandbox):  # noqa: F811
    cluster.cuts = [0]
    await sandbox.write({"/tmp/large": bytes(range(256)) * 4000})
    cluster.cuts = [100_000]
    assert await sandbox.read("/tmp/large", 1 << 20) == bytes(range(256)) * 4000


async def test_the_former_worker_neither_runs_nor_writes(provider, sandbox):
    second = await provider.attach(NAME, SPEC, 2)
    assert (await failure(output(sandbox, "true"))).kind is FailureKind.FENCED
    assert (await failure(sandbox.write({"/tmp/a": b"x"}))).kind is FailureKind.FENCED
    assert (await failure(provider.attach(NAME, SPEC, 1))).kind is FailureKind.FENCED
    assert await output(second, "ls /tmp") == ""


async def test_commands_run_as_a_user_who_owns_what_is_written_for_him(sandbox):
    if await output(sandbox, "id -u") != "0\n":
        pytest.skip("this machine's sandboxes have one user")
    await sandbox.write({"/home/worker/task": b"text"}, user="worker")
    assert await output(sandbox, "id -u; id -g; echo $HOME; cat task", user="worker", cwd="/home/worker") == (
        "1234\n1234\n/home/worker\ntext"
    )
    assert await output(sandbox, "stat -c %u /home/worker/task") == "1234\n"
    assert "denied" in (await sandbox.exec(["sh", "-c", "echo >/etc/motd"], timeout_s=5, user="1234")).stderr.decode()


# Ends.


async def test_an_evicted_pod_is_lost(cluster, sandbox):  # noqa: F811
    await cluster.evict(NAME)
    error = await failure(output(sandbox, "true"))
    assert error.kind is FailureKind.LOST
    assert "low" in str(error)


async def test_a_pod_whose_node_is_gone_is_lost_in_the_middle_of_a_command(cluster, sandbox):  # noqa: F811
    async with anyio.create_task_group() as tasks:
        errors = []

        async def run():
            errors.append(await failure(output(sandbox, "sleep 30", timeout_s=40)))

        tasks.start_soon(run)
        await anyio.sleep(0.5)
        await cluster.lose_node(NAME)
    assert errors[0].kind is FailureKind.LOST


async def test_a_node_that_is_silent_is_unreachable(cluster, sandbox):  # noqa: F811
    await cluster.silence_node(NAME)
    assert (await failure(output(sandbox, "true"))).kind is FailureKind.UNREACHABLE


async def test_a_pod_that_others_delete_is_lost(cluster, sandbox, provider):  # noqa: F811
    assert await provider.remove(NAME)
    assert (await failure(output(sandbox, "true"))).kind is FailureKind.LOST
    assert (await failure(provider.attach(NAME, SPEC, 2))).kind is FailureKind.LOST


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("x=0123456789abcdef; while :; do x=$x$x; done", "memory"),
        ("dd if=/dev/zero of=/tmp/a bs=1M count=90; sleep 30", "ephemeral"),
    ],
    ids=["memory", "disk"],
)
async def test_a_policy_that_uses_up_its_pod_has_ended_it_itself(sandbox, script, words):
    with pytest.raises(SandboxEndedError, match=words):
        await output(sandbox, script, timeout_s=30)
    with pytest.raises(SandboxEndedError):
        await sandbox.snapshot()


async def test_a_silent_server_leaves_it_unknown_whether_a_pod_was_removed(cluster, sandbox, provider):  # noqa: F811
    cluster.answers["delete", "pods"] = [(0, "")] * 1000
    assert (await failure(provider.remove(NAME))).kind is FailureKind.UNREACHABLE
    cluster.answers.clear()
    assert await provider.remove(NAME) is True
    assert await provider.remove(NAME) is False


async def test_a_long_list_is_read_page_by_page_and_anew_when_it_is_too_old(cluster, provider):  # noqa: F811
    for number in range(450):
        cluster.add_listed(f"penstock-{number:03}", {**LABELS, RUN_LABEL: f"run-{number % 2}"})
    cluster.answers["list", "pods"] = [(503, "busy"), (410, "too old")]
    assert len(await provider.list()) == 450
    names = [one.name for one in await provider.list("run-1")]
    assert names == [f"penstock-{number:03}" for number in range(1, 450, 2)]


# Files.


async def test_a_fresh_pod_has_what_changed_and_what_was_deleted(provider, sandbox):
    await output(
        sandbox,
        "echo new >/srv/data/new; echo changed >/etc/motd; rm /srv/data/one; mkdir -p /opt/a/b; echo deep >/opt/a/b/c;"
        "ln -s /etc/motd /srv/link; chmod 700 /srv/data/two; echo a >'/srv/a name; with $signs'; mkfifo /srv/pipe",
    )
    files = await sandbox.changed_files()
    assert changed(files) >= {
        ("/srv/data/new", "added"),
        ("/etc/motd", "modified"),
        ("/srv/data/one", "deleted"),
        ("/opt/a/b/c", "added"),
        ("/srv/link", "added"),
        ("/srv/data/two", "modified"),
        ("/srv/a name; with $signs", "added"),
    }
    assert not [one for one in files if one.path.startswith(("/run/penstock", "/proc", "/bin"))]
    snapshot = await sandbox.snapshot()
    await output(sandbox, "echo later >/srv/data/new")
    fresh = await provider.create("penstock-fresh", SandboxSpec(image=snapshot, memory_mb=128), LABELS)
    seen = await output(
        fresh,
        "cat /srv/data/new /etc/motd /opt/a/b/c; ls /srv/data; readlink /srv/link; stat -c %a /srv/data/two; ls /srv;"
        "test -p /srv/pipe && echo pipe",
    )
    assert seen == "new\nchanged\ndeep\nnew\ntwo\n/etc/motd\n700\na name; with $signs\ndata\nlink\npipe\npipe\n"
    again = await provider.create("penstock-fresh", SandboxSpec(image=snapshot, memory_mb=128), LABELS)
    assert await output(again, "cat /srv/data/new") == "new\n"
    assert ("/srv/data/new", "added") in changed(await fresh.changed_files())


async def test_what_a_policy_hides_is_not_in_the_fresh_pod(cluster, provider):  # noqa: F811
    sandbox = await provider.create(NAME, SandboxSpec(image=DASH, memory_mb=128), LABELS)
    await output(
        sandbox, "echo evil >/bin/evil; rm /bin/find; printf '#!/bin/sh\\necho\\n' >/bin/find; chmod 755 /bin/find"
    )
    assert changed(await sandbox.changed_files()) == set()
    fresh = await provider.create("penstock-fresh", SandboxSpec(image=await sandbox.snapshot(), memory_mb=128), LABELS)
    assert await output(fresh, "ls /bin/evil 2>/dev/null; readlink /bin/find") == "busybox\n"


async def test_what_a_policys_own_tar_smuggles_in_is_a_changed_file(provider, cluster):  # noqa: F811
    sandbox = await provider.create(NAME, SandboxSpec(image=DASH, memory_mb=128), LABELS)
    script = """mkdir -p /tmp/x/bin; echo evil >/tmp/x/bin/cat; ln -s /etc /tmp/x/link; echo evil >/tmp/x/file
    busybox tar -cf /tmp/a.tar -C /tmp/x bin/cat link; rm /tmp/x/link; mkdir /tmp/x/link; echo evil >/tmp/x/link/motd
    busybox tar -cf /tmp/b.tar -C /tmp/x link/motd; rm /bin/tar
    printf '#!/bin/sh\\nhead -c 2048 /tmp/a.tar; cat /tmp/b.tar\\n' >/bin/tar; chmod 755 /bin/tar"""
    await output(sandbox, script)
    snapshot = await sandbox.snapshot()
    await output(
        sandbox, "printf '#!/bin/sh\\necho\\n' >/tmp/find; chmod 755 /tmp/find; rm /bin/find; mv /tmp/find /bin/find"
    )
    assert {one for one in changed(await sandbox.changed_files()) if one[0].startswith("/bin")} == {
        ("/bin/cat", "modified")
    }
    fresh = await provider.create("penstock-fresh", SandboxSpec(image=snapshot, memory_mb=128), LABELS)
    assert await fresh.read("/etc/motd", 100) == b"of the image\n"
    assert await output(fresh, "readlink /link; ls /etc") == "/etc\ngroup\nmotd\npasswd\n"


async def test_processes_stand_still_during_a_snapshot_and_go_on_after_it(provider, sandbox):
    writer = "i=0; while :; do i=$((i + 1)); for f in a b; do echo $i >/srv/$f.new; mv /srv/$f.new /srv/$f; done; done"
    await output(sandbox, f"setsid sh -c '{writer}' >/dev/null 2>&1 &")
    await anyio.sleep(0.3)
    snapshot = await sandbox.snapshot()
    fresh = await provider.create("penstock-fresh", SandboxSpec(image=snapshot, memory_mb=128), LABELS)
    one, two = map(int, (await output(fresh, "cat /srv/a /srv/b")).split())
    assert 0 <= one - two <= 1
    before = await sandbox.read("/srv/a", 100)
    await anyio.sleep(0.3)
    assert await sandbox.read("/srv/a", 100) != before


async def test_a_sandbox_with_more_files_than_its_disk_has_no_snapshot(sandbox):
    await output(sandbox, "truncate -s 200M /srv/sparse")
    with pytest.raises(SandboxEndedError, match="32 MB"):
        await sandbox.snapshot()
    assert await output(sandbox, "echo alive") == "alive\n"


async def test_snapshots_end_with_their_sandbox(provider, sandbox):
    snapshot = await sandbox.snapshot()
    await provider.remove(NAME)
    error = await failure(provider.create("penstock-fresh", SandboxSpec(image=snapshot), LABELS))
    assert error.kind is FailureKind.IMAGE


async def test_without_a_list_of_the_images_paths_every_change_may_be_one_of_them(cluster, sandbox):  # noqa: F811
    await output(sandbox, "echo new >/srv/new")
    async with KubernetesProvider(QUICK) as other:
        adopted = await other.attach(NAME, SPEC, 2)
        assert changed(await adopted.changed_files()) == {("/srv/new", "modified")}


async def test_all_requests_are_those_of_the_role(cluster, provider, sandbox):  # noqa: F811
    await sandbox.snapshot()
    await provider.list()
    await provider.remove(NAME)
    assert set(cluster.requests) == ROLE
