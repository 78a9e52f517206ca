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
from tests.e2e.by_hand import cast
from tests.e2e.harness import trained
from tests.e2e.test_late_start import with_one_of_each
from tests.scripted_engine.engine import ScriptedEngine
from tests.soak import project
from tests.soak.audit import acquitted, audit
from tests.soak.engine import reply
from workers.launch.specs import ProcessSpec
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


def with_file(spec: ProcessSpec, file: str) -> list[str]:
    """Return the role's command line with another settings file as its argument."""
    return [file if part.endswith(".toml") else part for part in spec.command]


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
    async with ScriptedEngine(reply) as engine, cast(tmp_path) as roles, AsyncExitStack() as stack:
        url = stack.enter_context(served(dump_settings(msgspec.structs.replace(elsewhere, data=data))))
        feed, rollout, score, train = project.roles(settings, file, server.url, (engine.url,))
        commands = [with_file(feed, str(feeder_file)), with_file(rollout, url), with_file(score, url), train.command]
        connection = await stack.enter_async_context(connect(server.url, settings.run.name))

        first = [await roles.start(command) for command in commands[:3]]
        await first[1].logs("trainer.waiting")  # for the tokenizer
        first.append(await roles.start(commands[3]))
        with anyio.fail_after(60):
            while await trained(connection) < GROUPS // 3:
                await anyio.sleep(0.02)
        for role in first:
            os.kill(role.pid, signal.SIGKILL)
            await role.process.wait()
        assert (await anyio.Path(settings.folder / "ledger.jsonl").stat()).st_size
        await connection.redis.flushall()

        second = [await roles.start(command) for command in commands]
        for role in second:
            assert await role.ended(90) == 0, role.said()
        verdict = await anyio.to_thread.run_sync(audit, settings.folder, GROUPS)
        # Prompts that had ended were passed by. A dead letter that was lost with the server is of another stage now.
        assert verdict.forgotten == 0
        assert acquitted(msgspec.structs.replace(verdict, astray=0), GROUPS), verdict

        # The trainer's machine has no prompts either.
        await anyio.Path(tmp_path / "prompts.jsonl").unlink()
        report = await anyio.to_thread.run_sync(lambda: open_run(settings.folder).audit())
        assert report.clean
        assert report.fed == GROUPS
