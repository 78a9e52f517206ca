"""How vLLM is found and started, and how its output is quoted when it ends."""

import os
import socket
import sys

import anyio
import msgspec
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from stream.errors import EngineError, SettingsError
from workers.engine_api.discovery import normalize_engine_url
from workers.engine_api.http_server import listen
from workers.settings.toml_file import parse_settings
from workers.vllm import process as server
from workers.vllm.launch_command import (
    VllmInstallation,
    build_command,
    build_environment,
    check_interpreter,
    find_interpreter,
    resolve_interpreter,
)
from workers.vllm.process import OutputTail, serve_vllm


def settings_with(**engine):
    return parse_settings(
        {
            "model": {"path": "model", "dtype": "bfloat16"},
            "data": {"path": "prompts.jsonl"},
            "rewards": [{"ref": "module:function"}],
            "engine": {"server": "vllm", **engine},
        }
    )


def a_python(folder, answer):
    """Write a script that answers as an interpreter would."""
    file = folder / "python"
    file.write_text(f"#!/bin/sh\n{answer}\n")
    file.chmod(0o755)
    return file


def test_a_users_flag_overrides_penstocks(tmp_path):
    words = build_command(settings_with(flags=["--dtype", "float16"]), tmp_path, "127.0.0.1", 8000, is_cpu_build=False)
    assert [words[i + 1] for i, word in enumerate(words) if word == "--dtype"] == ["bfloat16", "float16"]
    assert "--enforce-eager" not in words


def test_vllm_inherits_the_environment_except_for_python_variables():
    ours = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "PYTHONPATH": "/x",
        "PYTHONDONTWRITEBYTECODE": "1",
        "VLLM_SERVER_DEV_MODE": "0",
    }
    result = build_environment(ours, threads=2, is_cpu_build=True)
    assert result["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert result["OMP_NUM_THREADS"] == "2"
    assert result["VLLM_SERVER_DEV_MODE"] == "1"
    assert not {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE"} & result.keys()
    assert "TORCHDYNAMO_DISABLE" not in build_environment(ours, threads=2, is_cpu_build=False)


def test_engine_python_is_an_interpreter_a_virtual_environment_or_unset(tmp_path):
    assert resolve_interpreter("") == resolve_interpreter(sys.executable)
    assert resolve_interpreter(str(tmp_path)) == tmp_path / "bin" / "python"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ('echo \'{"version": "", "is_cpu_build": false, "plugins": []}\'', "has no vLLM: install it there"),
        ('echo \'{"version": "0.32.0", "is_cpu_build": true, "plugins": ["other"]}\'', "but not Penstock's plugin"),
        ("echo broken >&2; exit 3", "does not run as an interpreter: broken; install it there"),
        ("printf %999s x >&2; exit 3", r"does not run as an interpreter:[ ]+x?; install it there"),
        ("echo hello", "cannot run vLLM"),
    ],
)
def test_an_unsuitable_interpreter_is_reported_with_the_remedy(tmp_path, answer, message):
    python = a_python(tmp_path, answer)
    with pytest.raises(SettingsError, match=message) as caught:
        check_interpreter(python)
    assert str(python) in str(caught.value)
    assert "checkout of Penstock" in str(caught.value)


def test_no_plugin_is_needed_where_vllm_transfers_weights_itself(tmp_path):
    python = a_python(tmp_path, 'echo \'{"version": "0.32.0", "is_cpu_build": false, "plugins": []}\'')
    assert check_interpreter(python, needs_plugin=False) == VllmInstallation("0.32.0", False, [])


def test_the_current_interpreter_reports_its_installation():
    with pytest.raises(SettingsError, match="has no vLLM"):
        check_interpreter(resolve_interpreter(""))


def test_the_interpreter_is_looked_up_in_the_variable_the_checkout_and_the_current_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_VLLM", "/nowhere")
    with pytest.raises(SettingsError, match=r"/nowhere: there is no interpreter"):
        find_interpreter()
    monkeypatch.delenv("PENSTOCK_VLLM")
    (tmp_path / ".cache" / "vllm" / "bin").mkdir(parents=True)
    python = a_python(
        tmp_path / ".cache/vllm/bin", 'echo \'{"version": "1", "is_cpu_build": true, "plugins": ["penstock"]}\''
    )
    assert find_interpreter() == python
    with pytest.raises(SettingsError, match=r"/else: there is no interpreter"):
        find_interpreter("/else")


OUT_OF_MEMORY = """
(EngineCore pid=3) ERROR 11-21 22:48:31 [core.py:1] Traceback (most recent call last):
(EngineCore pid=3) ERROR 11-21 22:48:31 [core.py:1]     raise RuntimeError(
(EngineCore pid=3) ERROR 11-21 22:48:31 [core.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB
(APIServer pid=2) Traceback (most recent call last):
(APIServer pid=2) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
NO_MODEL = """
(APIServer pid=2) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
(APIServer pid=2)   Value error, Invalid repository ID or local directory specified: '/tmp'.
(APIServer pid=2) Please verify the following requirements:
"""

CORE_KILLED = """
(APIServer pid=2) fastapi.exceptions.RequestValidationError: 2 validation errors: {'type': 'missing'}
(APIServer pid=2) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.
"""


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (CORE_KILLED, "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."),
        (OUT_OF_MEMORY, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
        (
            NO_MODEL,
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig Value error, Invalid",
        ),
        (
            "usage: x\napi_server.py: error: unrecognized arguments: --no\n",
            "api_server.py: error: unrecognized arguments",
        ),
        ("INFO 11-21 22:48:31 [core.py:1] so far so good\n", "so far so good"),
        ("(EngineCore pid=3) EngineDeadError: it died\n", "EngineDeadError: it died"),
        ("", "it said nothing"),
    ],
)
def test_the_root_error_of_the_log_is_quoted(output, message):
    words = OutputTail()
    for line in output.encode().splitlines():
        words.add(line)
    assert words.last_error.startswith(message)


READY = 'echo \'{"version": "0.32.0", "is_cpu_build": true, "plugins": ["penstock"]}\''


async def test_a_missing_model_is_reported_before_vllm_starts(tmp_path):
    settings = settings_with(python=str(a_python(tmp_path, READY)))
    with pytest.raises(EngineError, match=r"model: no config\.json there; model\.path must be"):
        await serve_vllm(settings, host="127.0.0.1", port=0, ready=pytest.fail)


async def test_another_process_at_the_port_is_not_mistaken_for_the_server(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    settings = settings_with(python=str(a_python(tmp_path, READY)))
    model = msgspec.structs.replace(settings.model, path=str(tmp_path))
    async with listen(web.Application(), "127.0.0.1", 0) as url:
        port = int(url.rpartition(":")[2])
        with pytest.raises(EngineError, match=f"cannot listen on 127.0.0.1:{port}: .*in use"):
            await serve_vllm(
                msgspec.structs.replace(settings, model=model), host="127.0.0.1", port=port, ready=pytest.fail
            )


@pytest.mark.parametrize("every_s", [server._LOG_EVERY_S, 0.0])
async def test_a_server_that_loads_for_long_is_logged_with_its_last_line(monkeypatch, every_s):
    monkeypatch.setattr(server, "_HEALTH_EVERY_S", 0.01)
    monkeypatch.setattr(server, "_LOG_EVERY_S", every_s)
    tail, asked = OutputTail(), []
    tail.add(b"loading shard 2 of 7")

    async def health(_):
        asked.append("/health")
        is_ready = logs if every_s == 0 else len(asked) == 3
        return web.Response(status=200 if is_ready else 503)

    app = web.Application()
    app.router.add_get("/health", health)
    with capture_logs() as logs, anyio.fail_after(30):
        async with listen(app, "127.0.0.1", 0) as url:
            await server._wait_healthy(url, 60.0, tail)
    said = [each["said"] for each in logs if each["event"] == "engine.loading"]
    assert set(said) == (set() if every_s else {"loading shard 2 of 7"})


DEAF = """
import http.server, sys, threading, time

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        threading.Thread(target=self.server.shutdown).start()

server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Health)
server.serve_forever()
server.server_close()
print("RuntimeError: the core is dead", flush=True)
time.sleep(600)
"""


async def test_the_last_output_of_a_server_is_quoted_even_if_it_is_read_after_the_exit(tmp_path, monkeypatch):
    copy = server._copy_output

    async def late(process, words):
        await process.wait()
        await anyio.sleep(0.02)
        await copy(process, words)

    monkeypatch.setattr(server, "_copy_output", late)
    settings = settings_of(tmp_path, "import sys; sys.exit('RuntimeError: no such device')")
    with anyio.fail_after(30), pytest.raises(EngineError, match="exited with code 1: RuntimeError: no such device"):
        await serve_vllm(settings, host="127.0.0.1", port=0, ready=pytest.fail)


STEADY = """
import http.server, socket, sys

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

host, port = (sys.argv[sys.argv.index(flag) + 1] for flag in ("--host", "--port"))
http.server.HTTPServer.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
http.server.HTTPServer((host, int(port)), Health).serve_forever()
"""


def settings_of(folder, script):
    """Return settings of a run whose vLLM is this script."""
    (folder / "config.json").write_text("{}")
    (folder / "vllm.py").write_text(script)
    python = a_python(folder, f'if [ "$1" = -I ]; then {READY}; else exec {sys.executable} {folder}/vllm.py "$@"; fi')
    settings = settings_with(python=str(python))
    return msgspec.structs.replace(settings, model=msgspec.structs.replace(settings.model, path=str(folder)))


@pytest.fixture
def begun(monkeypatch):
    """Record every process that is started: vLLM, then its watchdog."""
    processes = []
    open_process = anyio.open_process

    async def noted(*command, **options):
        processes.append(await open_process(*command, **options))
        return processes[-1]

    monkeypatch.setattr("anyio.open_process", noted)
    return processes


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_server_that_stopped_listening_without_exiting_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("workers.vllm.process._CHECK_EVERY_S", 0.1)
    urls = []
    with (
        anyio.fail_after(60),
        pytest.raises(EngineError, match=r"stopped listening without exiting.*RuntimeError: the core is dead"),
    ):
        await serve_vllm(settings_of(tmp_path, DEAF), host="127.0.0.1", port=0, ready=urls.append)
    assert len(urls) == 1


async def test_vllm_ends_when_its_watchdog_is_killed(tmp_path, begun):
    settings = settings_of(tmp_path, STEADY)
    with anyio.fail_after(60), pytest.raises(ExceptionGroup) as caught:
        await serve_vllm(settings, host="127.0.0.1", port=0, ready=lambda _: begun[1].kill())
    assert caught.group_contains(EngineError, match=r"watchdog of vLLM was killed by SIGKILL.*start it again")
    assert not lives(begun[0].pid)


async def test_no_vllm_process_stays_behind_if_its_watchdog_cannot_start(tmp_path, monkeypatch, begun):
    open_process = anyio.open_process

    async def only_one(*command, **options):
        if begun:
            raise BlockingIOError("no process is left for it")
        return await open_process(*command, **options)

    monkeypatch.setattr("anyio.open_process", only_one)
    with anyio.fail_after(60), pytest.raises(BlockingIOError):
        await serve_vllm(settings_of(tmp_path, STEADY), host="127.0.0.1", port=0, ready=pytest.fail)
    assert not lives(begun[0].pid)


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
async def test_a_server_at_an_ipv6_address_is_found_healthy_and_announced_by_url(tmp_path):
    urls = []
    with anyio.move_on_after(30) as scope:
        settings = settings_of(tmp_path, STEADY)
        await serve_vllm(settings, host="::1", port=0, ready=lambda url: (urls.append(url), scope.cancel()))
    assert [normalize_engine_url(url) for url in urls] == urls
    assert urls[0].startswith("http://[::1]:")
