"""`penstock run` on an external server with the users of docs/redis.md; its password appears nowhere."""

import json
import stat
import time
from pathlib import Path

import pytest
from redis import Redis

from tests.cases.aclfile import aclfile
from tests.cases.ports import free_port
from tests.e2e.harness import children, environment, finish, stop

HUSH = "opensesame"


@pytest.mark.full
@pytest.mark.timeout(200)
def test_a_run_as_an_acl_user_never_shows_its_password(project, make_server, tmp_path):
    assert HUSH not in str(environment())
    port = free_port()
    (tmp_path / "users.acl").write_text(aclfile("test", HUSH))
    server = make_server("--port", str(port), "--aclfile", str(tmp_path / "users.acl")).start()
    with Redis.from_url(server.url) as admin:
        project.table["run"]["redis"] = f"redis://test-trainer:{HUSH}@127.0.0.1:{port}"
        process = project.start("run", str(project.write()), "--json")
        try:
            deadline = time.monotonic() + 100
            while not {"feed", "rollout", "score", "train"} <= children(process.pid).keys():
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < deadline, project.logs()
                time.sleep(0.05)
            for pid in children(process.pid).values():
                assert HUSH not in Path(f"/proc/{pid}/cmdline").read_text()
            for name in ("live.json", "run.toml"):
                assert stat.S_IMODE((project.run_folder / name).stat().st_mode) == 0o600
            looking = f"redis://test-reader:{HUSH}@127.0.0.1:{port}"
            result = project.run("queues", "test", "--redis", looking, "--json")
            assert json.loads(result.stdout)["run"] == "test", result.stderr
            refused = project.run("pause", "test", "--redis", looking)
            assert (refused.returncode, HUSH in refused.stderr) == (1, False)
            assert "ACL refuses access" in refused.stderr
            refusals = admin.acl_log()
            summary = finish(process, project)
        finally:
            stop(process)
        assert summary["groups_trained"] + sum(summary["groups_dropped"].values()) == summary["fed"] == 10
        assert {entry["username"] for entry in refusals} == {"test-reader"}
        assert len(admin.acl_log()) == len(refusals)
    secretive = [
        path for path in project.run_folder.rglob("*") if path.is_file() and HUSH.encode() in path.read_bytes()
    ]
    assert secretive == [project.run_folder / "run.toml"]
