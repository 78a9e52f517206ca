"""compose.yaml in a clean clone, on a real Docker engine: `make test-compose`. The tests run in order, on one run."""

import json
import re
import time
import urllib.parse
import urllib.request

import pytest

from tests.compose.conftest import LOCAL_IMAGES, PYTHON, has_image

pytestmark = [pytest.mark.compose, pytest.mark.timeout(2400)]

LIGHT_MB = 180
"""Most that the light image may add to its base."""
PROMETHEUS, GRAFANA = "prom/prometheus:v3.5.0", "grafana/grafana:12.0.0"
LIGHT_ROLES = ("feed", "rollout", "score", "dashboard")


def size_mb(stack, image):
    return int(stack.run("docker", "image", "inspect", "--format", "{{.Size}}", image)) / 1e6


def image_of(stack, name):
    return stack.environment.get(LOCAL_IMAGES[name][0], name)


def answers(url):
    try:
        return bool(fetch(url))
    except (OSError, ValueError):
        return False


def dashboard_page(stack, path):
    log = stack.compose("logs", "--no-log-prefix", "dashboard")
    token = re.findall(r"\?token=(\S+)", log)[-1]
    request = urllib.request.Request(f"http://127.0.0.1:7077{path}", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read().decode()


def test_the_light_image_has_no_torch_and_is_small(stack):
    base, light, train = (
        size_mb(stack, name) for name in (image_of(stack, PYTHON), "penstock-light", "penstock-train")
    )
    print(f"base {base:.0f} MB; penstock-light {light - base:.0f} MB above it; penstock-train {train - base:.0f} MB")
    found = stack.run(
        "docker",
        "run",
        "--rm",
        "penstock-light",
        "python",
        "-c",
        ("from importlib.util import find_spec; print(find_spec('torch'), find_spec('pip'))"),
    )
    assert found.split() == ["None", "None"]
    assert light - base < LIGHT_MB
    for role in LIGHT_ROLES:
        assert stack.run("docker", "run", "--rm", "penstock-light", "penstock", role, "--help")
    for image in ("penstock-light", "penstock-train"):
        config = json.loads(stack.run("docker", "image", "inspect", image))[0]["Config"]
        assert config["User"] == "penstock"
        assert config["Labels"]["org.opencontainers.image.title"] == "Penstock"


def test_up_starts_the_demo_with_its_dashboard_and_nobody_is_root(stack):
    stack.give_redis_its_folder()
    stack.compose("up", "--wait", timeout_s=600)
    for service in (*LIGHT_ROLES, "train", "engine", "redis"):
        assert stack.compose("exec", "-T", service, "id", "-u").strip() != "0", service
    for container in stack.containers():
        host = container["HostConfig"]
        assert host["ReadonlyRootfs"], container["Name"]
        assert host["Memory"], container["Name"]
        assert host["CapDrop"] == ["ALL"], container["Name"]
    page = dashboard_page(stack, "/runs/demo")
    assert "limited by" in page
    assert re.search(r"\d+ fed", re.sub(r"<[^>]*>", "", page)), "the page shows no figures of the run"


def test_rollout_workers_are_added_and_removed_while_the_run_goes_on(stack):
    for count in (4, 1):
        stack.compose("up", "-d", "--no-recreate", "--scale", f"rollout={count}")
        stack.wait_until(
            lambda count=count: sum(c["State"]["Running"] for c in stack.containers("rollout")) == count, f"{count}"
        )
        time.sleep(5)


def fetch(url, **query):
    with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
        return json.load(answer)


def test_prometheus_scrapes_every_role_and_every_panel_of_grafana_has_data(stack):
    missing = [image for image in (PROMETHEUS, GRAFANA) if not has_image(image)]
    if PROMETHEUS in missing:
        pytest.skip(f"{PROMETHEUS} cannot be pulled")
    services = ["prometheus", *([] if GRAFANA in missing else ["grafana"])]
    stack.compose("--profile", "cpu", "--profile", "monitoring", "up", "-d", "--no-deps", *services)
    targets = "http://127.0.0.1:9090/api/v1/targets"
    up = lambda: {t["labels"]["job"] for t in fetch(targets)["data"]["activeTargets"] if t["health"] == "up"}  # noqa: E731
    stack.wait_until(lambda: answers(targets) and up() == {"feed", "rollout", "score", "train", "engine"}, "targets")
    panels = json.loads((stack.folder / "deploy/monitoring/grafana/dashboards/penstock.json").read_text())["panels"]
    left = {panel["title"]: panel["targets"] for panel in panels if panel["type"] != "row"}

    def all_have_data():
        for title, queries in list(left.items()):
            for query in queries:
                expression = query["expr"].replace("$run", "demo")
                if fetch("http://127.0.0.1:9090/api/v1/query", query=expression)["data"]["result"]:
                    left.pop(title, None)
        return not left

    stack.wait_until(all_have_data, f"no data for panels: {left}")
    if GRAFANA in missing:
        print(f"{GRAFANA} cannot be pulled: the queries were asked of Prometheus itself")
        return
    stack.wait_until(lambda: answers("http://127.0.0.1:3000/api/health"), "Grafana does not answer")
    assert [found["uid"] for found in fetch("http://127.0.0.1:3000/api/search", type="dash-db")] == ["penstock"]


@pytest.mark.parametrize("service", ["rollout", "train"])
def test_a_killed_container_is_started_again(stack, service):
    stack.compose("exec", "-T", service, "sh", "-c", "kill -9 -1", check=False)
    stack.wait_until(lambda: stack.containers(service)[0]["RestartCount"] >= 1, f"{service} was not started again")


def test_down_and_up_resume_to_the_end_and_the_audit_is_clean(stack):
    steps = stack.queues()["step"]
    stack.compose("down", timeout_s=120)
    stack.compose("up", "-d", timeout_s=300)
    assert stack.wait_until(lambda: stack.queues()["step"] >= steps, "the run was not resumed")
    stack.wait_until(
        lambda: not any(c["State"]["Running"] for c in stack.containers("train")), "the run does not end", 900
    )
    print(stack.penstock("audit", "/runs/demo"))
    lines = stack.compose("run", "--rm", "--no-deps", "-T", "score", "cat", "/runs/demo/metrics.jsonl").splitlines()
    rewards = [json.loads(line)["reward/mean"] for line in lines if "reward/mean" in line]
    early, late = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    print(f"mean reward of the first and last three steps: {early:.3f}, {late:.3f}")
    assert late - early >= 0.15
