"""compose.yaml says nothing that our own command line, image and settings do not know."""

import shlex
from pathlib import Path

import click
import pytest
import yaml

from workers.cli import penstock

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]


def commands():
    """Every `penstock ...` command line in the file."""
    for name, service in SERVICES.items():
        words = service["command"]
        if isinstance(words, str):
            words = shlex.split(words)
        if words[0] == "sh":
            parts = words[2].replace("exec ", "").split("&&")
            yield from ((name, shlex.split(part)) for part in parts)
        elif words[0] == "penstock":
            yield name, words


def test_every_role_of_the_demo_is_a_service():
    assert set(SERVICES) == {"redis", "engine", "feed", "rollout", "score", "train"}


@pytest.mark.parametrize(
    ("service", "words"), list(commands()), ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else value
)
def test_a_command_line_is_one_that_the_command_takes(service, words, tmp_path):
    assert words[0] == "penstock"
    context = click.Context(penstock)
    name, command, rest = penstock.resolve_command(context, words[1:])
    existing = tmp_path / "run.toml"
    existing.touch()
    command.make_context(name, [str(existing) if word.endswith("run.toml") else word for word in rest])


def test_addresses_name_services_of_the_file():
    for service, words in commands():
        for word in words:
            if "://" in word:
                host = word.split("://")[1].split(":")[0]
                assert host in SERVICES, f"{service}: {word}"


def test_dependencies_exist_and_are_healthy_only_where_health_is_checked():
    for name, service in SERVICES.items():
        for other, how in (service.get("depends_on") or {}).items():
            assert other in SERVICES, f"{name} depends on {other}"
            assert how["condition"] == "service_healthy"
            assert "healthcheck" in SERVICES[other], f"{other} has no health check"


def test_volumes_are_declared():
    for name, service in SERVICES.items():
        for mount in service.get("volumes", ()):
            volume = mount.split(":")[0]
            assert volume.startswith((".", "/")) or volume in COMPOSE["volumes"], f"{name}: {mount}"


def test_redis_keeps_what_it_is_given():
    words = shlex.split(SERVICES["redis"]["command"])
    assert words[words.index("--appendonly") + 1] == "yes"
    assert words[words.index("--maxmemory-policy") + 1] == "noeviction"


def test_one_service_builds_the_image_that_all_use():
    built = [name for name, service in SERVICES.items() if "build" in service]
    assert built == ["engine"]
    assert {service["image"] for name, service in SERVICES.items() if name != "redis"} == {"penstock"}


def test_the_image_holds_every_package():
    text = (ROOT / "Dockerfile").read_text()
    for package in ("stream", "envs", "workers"):
        assert f"COPY {package} {package}" in text
