"""Feed, rollout and score without the run's folder and the model's: only the trainer has them.

Their folders are below `/proc`, where nobody can create anything, so a role that touches its folder fails.
"""

import os
import signal
from contextlib import AsyncExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import anyio
import msgspec
import pytest

from stream.connection.run_connection import connect
from tests.chaos import project
from tests.chaos.audit import acquitted, audit
from tests.chaos.engine import reply
from tests.e2e.harness import trained
from tests.e2e.test_late_start import Watched, ended, with_one_of_each
from tests.scripted_engine.engine import ScriptedEngine
from workers.runs.find import open_run
from workers.runs.folder import write_settings
from workers.settings import Settings
from workers.settings.toml_file import dump_settings

pytestmark = [pytest.mark.usefixtures("preloaded"), pytest.mark.timeout(150)]

GROUPS = 48
NOWHERE = "/proc/nowhere"


def without_folders(settings: Settings) -> Settings:
    """Return the settings of a machine that has neither the run's folder nor the model's."""
    replace = msgspec.structs.replace
    return replace(
        settings,
        run=replace(settings.run, folder=f"{NOWHERE}/run"),
        model=replace(settings.model, path=f"{NOWHERE}/model"),
    )


@contextmanager
def served(text: str):
    """Serve a text by HTTP, and yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/run.toml?key=secret"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def with_file(role: Watched, file: str) -> Watched:
    """Return the role with another settings file as its argument."""
    command = role.spec.command
    at = next(i for i, part in enumerate(command) if part.endswith(".toml"))
    return Watched(
        msgspec.structs.replace(role.spec, command=(*command[:at], file, *command[at + 1 :])), role.log.parent
    )


@pytest.mark.full
async def test_light_roles_work_without_a_folder_and_after_the_server_was_emptied(tmp_path, make_server):
    settings = project.write_project(tmp_path, GROUPS, seed=1)
    server = make_server()
    server.start()
    settings = with_one_of_each(settings, server.url, reconnect_s=60)
    settings.folder.mkdir()
    file = await anyio.to_thread.run_sync(write_settings, settings)
    elsewhere = without_folders(settings)
    feeder_file = tmp_path / "feeder.toml"  # the feeder alone has the prompts
    feeder_file.write_text(dump_settings(elsewhere))
    data = msgspec.structs.replace(elsewhere.data, path=f"{NOWHERE}/prompts.jsonl")
    async with ScriptedEngine(reply) as engine, AsyncExitStack() as stack:
        url = stack.enter_context(served(dump_settings(msgspec.structs.replace(elsewhere, data=data))))
        specs = project.roles(settings, file, server.url, (engine.url,))
        feed, rollout, score, train = roles = [Watched(spec, tmp_path) for spec in specs]
        roles = [with_file(feed, str(feeder_file)), with_file(rollout, url), with_file(score, url), train]
        connection = await stack.enter_async_context(connect(server.url, "chaos"))

        for role in roles[:3]:
            await role.start()
        async with ended(roles):
            await roles[1].said("trainer.waiting")  # for the tokenizer
            await train.start()
            with anyio.fail_after(60):
                while await trained(connection) < GROUPS // 3:
                    await anyio.sleep(0.02)
            for role in roles:
                os.kill(role.pid, signal.SIGKILL)
                await role.process.wait()
        assert (await anyio.Path(settings.folder / "ledger.jsonl").stat()).st_size
        await connection.redis.flushall()

        for role in roles:
            await role.start()
        async with ended(roles):
            with anyio.fail_after(90):
                for role in roles:
                    assert await role.process.wait() == 0, role.log.read_text()
        verdict = await anyio.to_thread.run_sync(audit, settings.folder, GROUPS)
        # Prompts that had ended were passed by. A dead letter that was lost with the server is of another stage now.
        assert verdict.forgotten == 0
        assert acquitted(msgspec.structs.replace(verdict, astray=0), GROUPS), verdict

        # The trainer's machine has no prompts either.
        await anyio.Path(tmp_path / "prompts.jsonl").unlink()
        report = await anyio.to_thread.run_sync(lambda: open_run(settings.folder).audit())
        assert report.clean
        assert report.fed == GROUPS
