"""The Helm chart, rendered: manifests are valid, every value reaches one, the scaler reads a real run's figures."""

import math
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import anyio
import pytest
import redis as redis_client
import yaml
from prometheus_client.parser import text_string_to_metric_families

from envs.sandboxes.pod_api import denies_everything
from stream.connection.run_connection import connect
from tests.cases.aclfile import aclfile, url_of
from tests.cases.kubernetes_api import ROLE
from tests.cases.ports import free_port
from tests.chart.rendered import CHART, EXAMPLES, KUBERNETES, ROOT, leaves
from workers.settings.toml_file import load_settings
from workers.vllm.launch_command import build_command

pytestmark = [pytest.mark.full, pytest.mark.timeout(200)]

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
RANKS = '[run]\nname = "other"\nfolder = "/runs/other"\n[model]\npath = "/m"\n[train]\nranks = 8\n'
IN_PODS = RANKS + '[sandboxes]\nprovider = "kubernetes"\n'
OTHER = {
    "run.settings": RANKS,
    "image.pullPolicy": "Always",
    "storage.accessModes": ["ReadWriteOnce"],
    "engine.server": "external",
    "engine.urls": ["http://other:8000"],
    "train.nodes": 4,
}
"""Other values where any other value of the same type would be wrong."""
NEEDS = {
    "engine.server": {"engine": {"urls": ["http://other:8000"]}},
    "train.nodes": {"run": {"settings": RANKS}},
    "rollout.replicas": {"rollout": {"autoscaling": {"enabled": False}}},
    "score.replicas": {"score": {"autoscaling": {"enabled": False}}},
    "metrics.podMonitor.engines": {"metrics": {"podMonitor": {"enabled": True}}},
    "metrics.prometheusRule.labels": {"metrics": {"prometheusRule": {"enabled": True}}},
}
"""What a value needs to have an effect."""


def nested(path, value):
    for key in reversed(path):
        value = {key: value}
    return value


def merged(one, other):
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return other
    return {**one, **{key: merged(one.get(key), value) for key, value in other.items()}}


def another(path, value):
    """Return another valid value."""
    name = ".".join(path)
    if name in OTHER:
        return OTHER[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value * 2 or 1
    if isinstance(value, str):
        return {"size": "7Gi"}.get(path[-1], "51%" if value.endswith("%") else f"{value}another")
    if path[-1] in ("requests", "limits"):
        return {"cpu": "7"}
    if path[-1] == "affinity":
        return {"podAntiAffinity": {}}
    if isinstance(value, dict):
        return {"another": "value"}
    return ["another"] if path[-1] == "pullSecrets" else [{"name": "another"}]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_manifests_are_valid_and_secure(chart, example):
    assert chart.run("lint", "--strict", str(CHART), "--values", str(example)).returncode == 0
    for suspend in (False, True):
        manifests = chart.render(example, {"suspend": suspend})
        names = [(each["kind"], each["metadata"]["name"]) for each in manifests]
        assert len(set(names)) == len(names)
        for manifest in manifests:
            for version in KUBERNETES:
                assert not chart.problems(manifest, version), (version, manifest)
        pods = [pod for manifest in manifests for pod in pods_of(manifest)]
        assert len(pods) >= 5
        for pod in pods:
            check_security(pod, has_token="sandboxes" in example.name)
        roles = {pod["containers"][0]["name"] for pod in pods}
        assert roles | {"engine"} == {"feed", "rollout", "score", "dashboard", "train", "engine"}
        assert running_replicas(manifests) == (1 if suspend else pytest.approx(len(pods), abs=9))


def pods_of(manifest):
    """Return the pods' specifications in a manifest."""
    template = manifest.get("spec", {}).get("template")
    jobs = manifest.get("spec", {}).get("replicatedJobs", [])
    return ([template["spec"]] if template else []) + [job["template"]["spec"]["template"]["spec"] for job in jobs]


def running_replicas(manifests):
    """Return how many pods are asked for without a scaler; of a suspended run only the dashboard's."""
    count = 0
    for manifest in manifests:
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            count += manifest["spec"].get("replicas", 1)
        if manifest["kind"] in ("Job", "JobSet"):
            count += not manifest["spec"]["suspend"]
        if manifest["kind"] == "ScaledObject" and manifest["metadata"].get("annotations"):
            assert manifest["metadata"]["annotations"] == {"autoscaling.keda.sh/paused-replicas": "0"}
    return count


def check_security(pod, has_token):
    assert pod["securityContext"]["runAsNonRoot"] is True
    speaks = has_token and pod["containers"][0]["name"] == "rollout"
    assert pod["automountServiceAccountToken"] is speaks
    assert pod["serviceAccountName"] == ("my-run-rollout" if speaks else "my-run")
    for container in pod["containers"]:
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"]["memory"]
        assert container["resources"]["limits"]["memory"]
        probes = {
            name: container.get(f"{name}Probe", {}).get("httpGet", {}).get("path") for name in ("liveness", "readiness")
        }
        if container["command"][0] == "torchrun":
            assert set(probes.values()) == {None}
        else:
            assert probes["liveness"] == "/health"
            assert probes["readiness"] == ("/health" if container["name"] in ("dashboard", "engine") else "/ready")


def test_the_schemas_notice_a_wrong_manifest(chart):
    manifests = chart.render(CHART / "ci" / "nodes-values.yaml")
    for manifest in manifests:
        manifest["spec" if "spec" in manifest else "metadata"]["notAField"] = 1
        assert chart.problems(manifest, KUBERNETES[-1]) or "spec" not in manifest, manifest["kind"]


@pytest.mark.parametrize(
    ("path", "value"), leaves(VALUES), ids=lambda value: ".".join(value) if isinstance(value, tuple) else ""
)
def test_every_value_reaches_its_manifest(chart, path, value):
    name = ".".join(path)
    needed = NEEDS.get(name, {})
    for example in EXAMPLES:
        before = chart.render(example, needed)
        given = yaml.safe_load(example.read_text())
        for key in path:
            given = given.get(key) if isinstance(given, dict) else None
        changed = another(path, value if given is None else given)
        if chart.render(example, merged(needed, nested(path, changed))) != before:
            return
    raise AssertionError(f"{name} changes no manifest")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rollout": {"maxReplica": 3}}, "maxReplica"),
        ({"rollout": {"autoscaling": {"maxReplicas": "many"}}}, "maxReplicas"),
        ({"engine": {"server": "sglang"}}, "server"),
        ({"train": {"nodes": 0}}, "nodes"),
        ({"redis": {"secret": ""}}, "secret"),
        ({"networkPolicy": {"egress": ["all"]}}, "egress"),
        ({"storage": {"size": "large"}}, "size"),
        ({"engine": {"server": "external", "urls": []}}, "engine.urls is empty"),
        ({"run": {"settings": ""}}, "run.settings is empty"),
        ({"run": {"settings": "run = "}}, "not TOML"),
        ({"run": {"settings": '[run]\nfolder = "/runs/x"'}}, "run.name is empty"),
        ({"run": {"settings": '[run]\nname = "x"\nfolder = "runs/x"'}}, 'set it to "/runs/x"'),
        ({"train": {"nodes": 3}}, "does not divide"),
        ({"run": {"settings": IN_PODS}}, "set the value sandboxes.enabled"),
        ({"sandboxes": {"namespace": "Not_One"}}, "namespace"),
        ({"sandboxes": {"enabled": True, "namespace": "default"}, "run": {"settings": IN_PODS}}, "the release's own"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_by_name(chart, values, message):
    result = chart.run(
        "template", "my-run", str(CHART), "--values", str(CHART / "ci" / "vllm-values.yaml"), values=values
    )
    assert result.returncode != 0
    assert message in result.stderr


@pytest.mark.parametrize(
    "more",
    [
        "",
        "[engine]\nserver = 'vllm'\nmax_batch_size = 7\nflags = ['--a=b']\n",
        "[lora]\nrank = 9\n[weights]\ntransport = 'adapter'\n",
    ],
)
def test_vllm_has_the_flags_with_which_a_run_starts_it(chart, more, tmp_path):
    text = RANKS + '[data]\npath = "p"\n[[rewards]]\nref = "math"\n' + more
    (tmp_path / "run.toml").write_text(text)
    settings = load_settings(tmp_path / "run.toml")
    ours = build_command(settings, Path("python"), "0.0.0.0", 8000, is_cpu_build=False)[5:]
    ours = [word for word in ours if word not in ("--max-model-len", str(settings.max_model_len))]  # else vLLM's choice
    manifests = chart.render(CHART / "ci" / "vllm-values.yaml", {"run": {"settings": text}})
    (pod,) = (pod for each in manifests if each["kind"] == "StatefulSet" for pod in pods_of(each))
    theirs = [part for word in pod["containers"][0]["command"][3:] for part in word.split("=", 1)]
    assert theirs == [part for word in ours for part in word.split("=", 1)]


def allowed_verbs(manifests, namespace):
    """Return (verb, resource) of what the account of rollout workers may do, all of it in one namespace."""
    rules = []
    for each in manifests:
        assert each["kind"] not in ("ClusterRole", "ClusterRoleBinding")
        if each["kind"] == "RoleBinding":
            assert each["subjects"] == [{"kind": "ServiceAccount", "name": "my-run-rollout", "namespace": "rl"}]
        if each["kind"] in ("Role", "RoleBinding"):
            assert each["metadata"]["namespace"] == namespace
            rules += each.get("rules", [])
    return {(verb, resource) for rule in rules for verb in rule["verbs"] for resource in rule["resources"]}


def test_a_rollout_workers_token_allows_what_its_provider_asks_for_and_nothing_else(chart):
    allowed = allowed_verbs(chart.render(CHART / "ci" / "sandboxes-values.yaml"), "my-run-sandboxes")
    assert allowed == ROLE | {("create", "pods/exec")}
    assert not allowed_verbs(chart.render(CHART / "ci" / "vllm-values.yaml"), "")


def test_the_policy_of_the_sandboxes_namespace_is_one_that_the_provider_accepts(chart):
    manifests = chart.render(CHART / "ci" / "sandboxes-values.yaml")
    policies = [each for each in manifests if each["metadata"].get("namespace") == "my-run-sandboxes"]
    specs = [each["spec"] for each in policies if each["kind"] == "NetworkPolicy"]
    assert [denies_everything(spec, "off") for spec in specs] == [True, False]
    assert not any(denies_everything(spec, "open") for spec in specs)


def test_sandboxes_can_be_in_a_namespace_that_is_there(chart):
    values = {"sandboxes": {"namespace": "theirs"}}
    manifests = chart.render(CHART / "ci" / "sandboxes-values.yaml", values)
    assert "Namespace" not in {each["kind"] for each in manifests}
    assert allowed_verbs(manifests, "theirs")
    commands = [pod["containers"][0]["command"] for each in manifests for pod in pods_of(each)]
    assert [command[1] for command in commands if '--set=sandboxes.address="theirs"' in command] == ["rollout"]


def test_a_release_with_other_settings_makes_another_job(chart):
    example = CHART / "ci" / "vllm-values.yaml"

    def job(values):
        return next(each["metadata"]["name"] for each in chart.render(example, values) if each["kind"] == "Job")

    assert job({}) == job({"rollout": {"autoscaling": {"maxReplicas": 3}}, "suspend": True})
    assert job({}) != job({"image": {"train": "penstock-train:2"}})


def test_the_alert_rules_are_those_of_compose(chart):
    manifests = chart.render(CHART / "ci" / "nodes-values.yaml")
    (rules,) = (each for each in manifests if each["kind"] == "PrometheusRule")
    mounts = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["prometheus"]["volumes"]
    (file,) = (mount.split(":")[0] for mount in mounts if mount.split(":")[1] == "/etc/prometheus/alerts.yml")
    assert rules["spec"] == yaml.safe_load((ROOT / file).read_text())
    assert rules["metadata"]["labels"]["release"] == "prometheus"


def value_at(page, location):
    """Return what KEDA's metrics-api trigger reads at a location: one sample whose labels are equal."""
    name, labels = re.fullmatch(r"(\w+)(?:\{(.*)\})?", location).groups()
    wanted = dict(re.findall(r'(\w+)="([^"]*)"', labels or ""))
    found = [
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and wanted.items() <= sample.labels.items()
    ]
    assert len(found) == 1, f"{location}: {found}"
    return found[0]


def workers_wanted(scaler, port):
    """Return how many workers the scaler asks for, from the feeder's real page."""
    values = {}
    for trigger in scaler["spec"]["triggers"]:
        assert trigger["type"] == "metrics-api"
        assert trigger["metadata"]["format"] == "prometheus"
        url = re.sub(r"//my-run-feed\.rl\.svc:9464/", f"//127.0.0.1:{port}/", trigger["metadata"]["url"])
        with urllib.request.urlopen(url, timeout=5) as answer:
            values[trigger["name"]] = value_at(answer.read().decode(), trigger["metadata"]["valueLocation"])
    modifiers = scaler["spec"]["advanced"].get("scalingModifiers")
    if modifiers is None:
        (trigger,) = scaler["spec"]["triggers"]
        return math.ceil(values[trigger["name"]] / float(trigger["metadata"]["targetValue"]))
    return math.ceil(eval(modifiers["formula"], {"min": min}, values) / float(modifiers["target"]))


SETTINGS = """
[run]
name = "{name}"
folder = "/runs/{name}"
[model]
path = "/models/policy"
[data]
path = "prompts.jsonl"
[[rewards]]
ref = "rewards.py:f"
[rollout]
groups_in_flight = 4
group_size = 2
[train]
batch_size = 8
[pacing]
max_staleness = 1
"""


async def test_the_scaler_reads_the_feeders_metrics_and_counts_the_workers_that_have_work(
    chart, make_server, run_name, pipe_on, tmp_path
):
    (tmp_path / "users.acl").write_text(aclfile(run_name, "secret"))
    server = make_server("--aclfile", str(tmp_path / "users.acl")).start()
    users = redis_client.Redis.from_url(server.url)
    (tmp_path / "redis-url").write_text(url_of(server.url, run_name, "trainer", "secret"))
    settings = SETTINGS.format(name=run_name)
    manifests = chart.render(CHART / "ci" / "vllm-values.yaml", {"run": {"settings": settings}})
    found = {(each["kind"], each["metadata"]["name"]): each for each in manifests}
    config = found["ConfigMap", "my-run-settings"]["data"]
    for name, text in {**config, "prompts.jsonl": '{"prompt": "Say it."}\n' * 40}.items():
        (tmp_path / name).write_text(text)
    (pod,) = pods_of(found["Deployment", "my-run-feed"])
    port = free_port()
    environment = {**os.environ, "PENSTOCK_REDIS_FILE": str(tmp_path / "redis-url"), "POD_IP": "127.0.0.1"}
    words = [word.replace("0.0.0.0:9464", f"127.0.0.1:{port}") for word in pod["containers"][0]["command"]]
    process = subprocess.Popen(  # noqa: ASYNC220  (starts at once)
        [sys.executable, "-m", "penstock", *words[1:]],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.DEVNULL,
    )
    users.hset(f"{{{run_name}}}:policy", "ledger", "0")  # as the trainer's start does: the feeder waits for it
    rollout, score = (found["ScaledObject", f"my-run-{role}"] for role in ("rollout", "score"))
    try:
        await ready(port, process)
        queues = [sys.executable, "-m", "penstock", "queues", "run.toml"]  # as the chart's notes say
        assert subprocess.run(queues, cwd=tmp_path, env=environment, capture_output=True, check=True).stdout  # noqa: ASYNC221
        assert await scaled(rollout, port) == 4  # 16 groups may start: (1 + 1) x 8; a worker plays 4
        assert await scaled(score, port) == 0
        async with connect(server.url, run_name) as connection:
            pipe = pipe_on(connection)
            worker = pipe.stage("prompts", "one", capacity=16)
            leases = (await worker.claim(16)).leases
            assert len(leases) == 16
            assert await scaled(rollout, port) == 4  # no headroom, but those that play stay
            for lease in leases[:9]:
                await worker.complete(lease, "groups", pipe.group(lease.prompt_id))
            assert await scaled(rollout, port) == 2  # the trainer is behind: 7 groups are played, none may start
            assert await scaled(score, port) == 3  # 9 groups for scorers of 4
            await connection.write_hash("meta", {"capacity": "64"})
            more = (await pipe.stage("prompts", "two").claim(23)).leases
            assert len(more) == 23
            assert await scaled(rollout, port) == 8  # 30 groups are played; there is room for 25 more, but one prompt
        server.kill()
        with pytest.raises(AssertionError):  # no figure is an error to KEDA, and it keeps the number of workers
            await scaled(rollout, port)
    finally:
        process.terminate()
        process.wait(30)


async def ready(port, process):
    with anyio.fail_after(60):
        while True:
            assert process.poll() is None
            try:
                page = await anyio.to_thread.run_sync(
                    lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
                )
                if "penstock_prompts_left" in page and "penstock_prompts_fed_total 40.0" in page:
                    return
            except OSError:
                pass
            await anyio.sleep(0.1)


async def scaled(scaler, port):
    await anyio.sleep(1.1)  # a page is at most a second old
    return await anyio.to_thread.run_sync(workers_wanted, scaler, port)
