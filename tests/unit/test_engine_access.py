"""What commands the machine of a worker, as deploy/ and the chart give it, is what the tool `python` is kept from."""

from pathlib import Path

import yaml
from kubernetes_asyncio.config import incluster_config

from envs.sandboxes.python_runner import ENGINE_ACCESS

ROOT = Path(__file__).parents[2]


def test_rollout_alone_has_the_engines_socket_at_a_place_that_python_is_kept_from():
    services = yaml.safe_load((ROOT / "deploy/sandboxes.yaml").read_text())["services"]
    (volume,) = services.pop("rollout")["volumes"]
    assert volume.rpartition(":")[2] in ENGINE_ACCESS
    assert not services
    base = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert not [name for name, service in base.items() if ".sock" in str(service)]


def test_the_token_that_the_provider_reads_is_one_that_python_is_kept_from():
    assert incluster_config.SERVICE_TOKEN_FILENAME in ENGINE_ACCESS
