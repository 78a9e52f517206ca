"""A run serves metrics, health and readiness in every process, each at a port of its own."""

import json
import os
import random
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request

import pytest

from tests.e2e.harness import finish, running

pytestmark = [pytest.mark.full, pytest.mark.timeout(200), pytest.mark.usefixtures("preloaded")]

PROCESSES = 6
PROMTOOL = shutil.which(os.environ.get("PROMTOOL", "promtool"))
VLLM_NAMES = "metric names should not contain ':'"


def free_ports(count):
    """Return the first of several consecutive free ports."""
    starts = range(21000, 32000, 97)  # below the ports that the system hands out; other tests look for some, too
    for first in random.sample(starts, len(starts)):
        try:
            for port in range(first, first + count):
                with socket.socket() as listener:
                    listener.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


def get(address, page):
    try:
        with urllib.request.urlopen(f"http://{address}{page}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def wait_until(condition, what):
    deadline = time.monotonic() + 100
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return found


def value(text, name):
    return next((float(line.split()[-1]) for line in text.splitlines() if line.startswith(name + " ")), None)


def check_with_promtool(role, text):
    if PROMTOOL is None:
        return
    check = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    problems = [line for line in check.stderr.splitlines() if not (role == "engine" and VLLM_NAMES in line)]
    assert not problems, f"{role}: {problems}"


def test_every_process_of_a_run_is_scraped_and_says_that_it_is_ready(project):
    first = free_ports(PROCESSES)
    project.table["run"]["metrics_address"] = f"127.0.0.1:{first}"
    project.table["rollout"]["workers"] = 2
    project.prompts(400)
    with running(project) as process:
        roles = ("supervisor", "feed", "rollout", "rollout", "score", "train")
        found = [(role, f"127.0.0.1:{port}") for port, role in enumerate(roles, first)]
        for role, address in found:
            wait_until(lambda address=address: get(address, "/ready")[0] == 200, f"{role} is never ready")
            assert get(address, "/health")[0] == 200, role
            assert f'role="{role}"' in get(address, "/metrics")[1]
        (engine,) = json.loads((project.run_folder / "live.json").read_text())["engines"]
        found.append(("engine", engine.removeprefix("http://")))
        by_role = dict(found)
        wait_until(
            lambda: (value(get(by_role["feed"], "/metrics")[1], "penstock_groups_trained_total") or 0) >= 4,
            "no step was trained",
        )
        pages = {role: get(address, "/metrics")[1] for role, address in found}
        for role, text in pages.items():
            check_with_promtool(role, text)
        assert value(pages["train"], "penstock_steps_total") >= 1
        assert value(pages["train"], "penstock_published_version") >= 1
        assert value(pages["rollout"], "penstock_sampled_tokens_total") > 0
        assert value(pages["rollout"], "penstock_engines_healthy") == 1
        assert value(pages["score"], 'penstock_rewards_total{state="measured"}') > 0
        assert value(pages["supervisor"], 'penstock_processes{role="rollout"}') == 2
        assert value(pages["feed"], "penstock_trainer_lease_held") == 1
        assert value(pages["engine"], "vllm:generation_tokens_total") > 0
        if PROMTOOL is None:
            pytest.skip("promtool is missing, so `promtool check metrics` did not run: apt-get install prometheus")
        process.terminate()
        finish(process, project)
