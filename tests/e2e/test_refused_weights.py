"""Engines that, as started, cannot accept the trainer's weights; a restart with the same options would not help."""

from functools import partial

import anyio
import anyio.to_thread
import pytest

from tests.scripted_engine.engine import ScriptedEngine

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("preloaded")]


async def test_a_run_whose_engines_cannot_take_weights_ends_immediately_with_the_reason(project):
    async with ScriptedEngine(lambda *_: [1]) as engine, ScriptedEngine(lambda *_: [1]) as other:
        engine.transfer_config, other.transfer_config = None, {"backend": "nccl"}
        project.table["engine"]["urls"] = [engine.url, other.url]
        project.table["queue"]["shutdown_timeout_s"] = 1.0
        result = await anyio.to_thread.run_sync(partial(project.run, "run", str(project.write()), timeout=90))
    assert result.returncode == 1, result.stderr
    assert ", and a restart would not help: no engine took version" in " ".join(result.stderr.split())
    for engine_said in ("without --weight-transfer-config; start it with", "with backend 'nccl'; start it with"):
        assert engine_said in result.stderr
    log = (project.run_folder / "logs" / "train-0.log").read_text()
    assert log.count('"event": "trainer.started"') == 1
