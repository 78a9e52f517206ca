"""The chart's containers, as processes of this machine, are a run: it ends, and its audit is clean."""

import os
import shutil
import signal

import anyio
import pytest
import redis as redis_client

from stream.connection.run_connection import connect
from stream.operator.control import pause, resume
from tests.base_models.demo_model import make_model
from tests.cases.aclfile import USERS, aclfile, url_of
from tests.chart.pods import Pod
from tests.chart.rendered import CHART
from tests.e2e.harness import trained

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]

PROMPTS = 160
SETTINGS = """
[run]
name = "first"
folder = "/runs/first"
[model]
path = "/runs/models/policy"
[data]
path = "prompts.jsonl"
chat_template_kwargs = { tools = false }
[[rewards]]
ref = "rewards.py:by_chance"
[rollout]
group_size = 4
max_tokens_per_turn = 6
max_tokens = 12
groups_in_flight = 4
[engine]
max_model_len = 256
max_batch_size = 32
[train]
batch_size = 8
learning_rate = 1e-4
save_every = 4
[weights]
transport = "http"
[queue]
lease_s = 3.0
"""
REWARDS = """
import zlib

def by_chance(completions, **columns):
    return [float(zlib.crc32(text.encode()) % 2) for text in completions]
"""


class Cluster:
    """Pods of a release on this machine, each with its own address."""

    def __init__(self, manifests, folder, redis_url, secret):
        self.redis_url = redis_url
        self.manifests = {
            each["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]: each
            for each in manifests
            if "template" in each.get("spec", {})
        }
        (config,) = (each["data"] for each in manifests if each["kind"] == "ConfigMap")
        net = f"127.{1 + os.getpid() % 250}.{os.getpid() // 250 % 250}"
        self._addresses = iter(f"{net}.{number}" for number in range(2, 250))
        at = {role: next(self._addresses) for role in ("engine", "train")}
        replaced = {
            "dns+http://my-run-engine:": f"http://{at['engine']}:",
            "my-run-weights:": f"{at['train']}:",
            "/runs/": f"{folder}/runs/",
        }
        self._make = lambda role, address, name: Pod(
            self.manifests[role], folder / name, address, replaced, config, secret
        )
        self._fixed = at
        self.pods = []

    def start(self, role):
        """Start another pod of a role."""
        address = self._fixed.get(role) or next(self._addresses)
        self.pods.append(self._make(role, address, f"{role}-{len(self.pods)}"))
        return self.pods[-1]

    def close(self):
        for pod in self.pods:
            if pod.process.poll() is None:
                pod.process.kill()
                pod.process.wait()


@pytest.fixture
def cluster(chart, make_server, tmp_path):
    (tmp_path / "users.acl").write_text(aclfile("first", "secret"))
    server = make_server("--aclfile", str(tmp_path / "users.acl")).start()
    secret = {user: url_of(server.url, "first", user, "secret") for user in USERS}
    make_model(tmp_path / "runs" / "models" / "policy", seed=0)
    rows = "".join(f'{{"prompt": "Say {number}."}}\n' for number in range(PROMPTS))
    values = {"run": {"settings": SETTINGS, "files": {"rewards.py": REWARDS, "prompts.jsonl": rows}}}
    manifests = chart.render(CHART / "ci" / "local-values.yaml", {**values, "dashboard": {"tokenSecret": ""}})
    result = Cluster(manifests, tmp_path, server.url, secret)
    yield result
    result.close()
    shutil.rmtree(tmp_path / "runs", ignore_errors=True)


async def test_the_pods_of_the_chart_are_a_run_that_survives_losing_pods(cluster):
    async with connect(cluster.redis_url, "first") as connection:
        await pause(connection, "the test")  # until every pod is ready
        engine, train, feed, score = (cluster.start(role) for role in ("engine", "train", "feed", "score"))
        one, two = cluster.start("rollout"), cluster.start("rollout")
        dashboard = cluster.start("dashboard")
        for pod in cluster.pods:
            await pod.ready()
        await resume(connection, "the test")
        await reached(connection, 16, train)
        one.signal(signal.SIGKILL)
        two.signal(signal.SIGTERM)  # as when the scaler removes it
        assert await two.ended() == 0, two.log()
        assert "drain.started" in two.log()
        three = cluster.start("rollout")
        await reached(connection, 40, train)
        train.signal(signal.SIGKILL)
        again = cluster.start("train")
        for pod in (again, feed, score, three):
            assert await pod.ended() == 0, pod.log()
    assert dashboard.process.poll() is None
    audit = dashboard.start(["penstock", "audit", "run.toml"])
    assert await anyio.to_thread.run_sync(audit.wait, 60) == 0, dashboard.log()
    assert not redis_client.Redis.from_url(cluster.redis_url).acl_log()
    engine.signal(signal.SIGTERM)
    assert await engine.ended() == 0, engine.log()


async def reached(connection, count, train):
    with anyio.fail_after(120):
        while await trained(connection) < count:
            assert train.process.poll() is None, train.log()
            await anyio.sleep(0.05)
