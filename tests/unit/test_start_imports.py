"""What a start imports: a command loads what it needs. Counted in modules, since seconds depend on the machine."""

import json
import subprocess
import sys

import pytest

from workers.demo.base_models import FOLDERS

HEAVY = {"aiohttp", "huggingface_hub", "jinja2", "numpy", "prometheus_client", "pydantic", "tokenizers", "torch"} | {
    "transformers",
    "uvloop",
}
STAGES = {
    "help": "from click.testing import CliRunner; from workers.cli import penstock;"
    " assert 'queues' in CliRunner().invoke(penstock, ['--help']).output",
    "penstock": "import penstock",
    "queues": "import workers.terminal.queues",
    "adapters": "import envs.adapters.openenv, envs.adapters.verifiers, envs.adapters.mcp_tools,"
    " envs.adapters.gymnasium_text",
    "rollout": "import workers.launch.role_process, workers.rollout.worker, tokenizers",
    "chat": "from workers.rollout.chat.chat_tokenizer import ChatTokenizer as Chat; from pathlib import Path;"
    f" Chat.load(Path({str(FOLDERS['calculator'])!r}), {{}}, None).check_history()",
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
    absent = HEAVY | {"anyio", "asyncio", "envs", "msgspec", "psutil", "redis", "rich", "stream", "structlog", "vllm"}
    assert packages(loaded["help"]) & absent == set()
    assert len(foreign(loaded["help"])) < 170


def test_the_face_loads_neither_a_library_nor_what_it_names(loaded):
    assert {"penstock", "stream", "envs", "workers"} <= packages(loaded["penstock"])
    assert packages(loaded["penstock"]) & (HEAVY | {"anyio", "msgspec", "redis", "rich", "structlog"}) == set()


def test_queues_needs_a_redis_client_and_a_table(loaded):
    assert packages(loaded["queues"]) & (HEAVY | {"pyarrow"}) == set()
    assert len(foreign(loaded["queues"])) < 600


def test_adapters_load_nothing_until_they_are_used(loaded):
    assert packages(loaded["adapters"]) & {"aiohttp", "mcp", "gymnasium", "zmq", "pydantic"} == set()


def test_a_rollout_worker_needs_no_model(loaded):
    assert packages(loaded["rollout"]) & HEAVY == {"aiohttp", "jinja2", "prometheus_client", "tokenizers"}
    assert len(foreign(loaded["rollout"])) < 730  # Python 3.12 and 3.13 load three more than 3.11


def test_loading_a_chat_loads_no_torch(loaded):
    assert packages(loaded["chat"]) & {"torch", "transformers"} == set()
