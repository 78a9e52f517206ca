"""What a start imports: a command loads what it needs. Counted in modules, since seconds depend on the machine."""

import json
import subprocess
import sys

import pytest

HEAVY = {"aiohttp", "huggingface_hub", "jinja2", "numpy", "prometheus_client", "pydantic", "tokenizers", "torch"} | {
    "transformers",
    "uvloop",
}
STAGES = {
    "help": "from click.testing import CliRunner; from workers.cli import penstock;"
    " assert 'queues' in CliRunner().invoke(penstock, ['--help']).output",
    "queues": "import workers.terminal.queues",
    "rollout": "import workers.launch.role_process, workers.rollout.worker, tokenizers",
}


@pytest.fixture(scope="module")
def loaded():
    """Return the top-level packages after each stage, and the number of modules."""
    code = "import json, sys\ndef show(): print(json.dumps(sorted(sys.modules)))\n"
    code += "\n".join(f"{statement}\nshow()" for statement in STAGES.values())
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout
    return {name: set(json.loads(line)) for name, line in zip(STAGES, out.splitlines(), strict=True)}


def packages(modules):
    return {name.partition(".")[0] for name in modules}


def foreign(modules):
    """Return the modules that are not Penstock's own, which are small and grow in number."""
    return {name for name in modules if name.partition(".")[0] not in {"stream", "envs", "workers"}}


def test_the_help_text_needs_only_the_parser(loaded):
    absent = HEAVY | {"anyio", "asyncio", "msgspec", "psutil", "redis", "rich", "stream", "structlog"}
    assert packages(loaded["help"]) & absent == set()
    assert len(foreign(loaded["help"])) < 170


def test_queues_needs_a_redis_client_and_a_table(loaded):
    assert packages(loaded["queues"]) & (HEAVY | {"pyarrow"}) == set()
    assert len(foreign(loaded["queues"])) < 600


def test_a_rollout_worker_needs_no_model(loaded):
    assert packages(loaded["rollout"]) & HEAVY == {"aiohttp", "jinja2", "prometheus_client", "tokenizers"}
    assert len(foreign(loaded["rollout"])) < 725
