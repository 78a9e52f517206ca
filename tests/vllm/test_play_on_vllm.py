"""`penstock play` against real vLLM, the local engine, and a server that is neither ours nor vLLM (transformers')."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager, suppress
from urllib.error import URLError

import pytest

from tests.vllm.server import free_port, vllm_python, vllm_server
from workers.demo.base_models import write_base_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
START_S = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The shipped model that calls a calculator, though not always rightly."""
    folder = tmp_path_factory.mktemp("play") / "calculator"
    write_base_model("calculator", folder)
    return folder


def play(model, *options):
    """Play the calculator; returns the report and checks what holds against every server."""
    arguments = ["calculator", "-n", "6", "--prompt", "Start with 97, times 7, then minus 46.", "--field", "answer=633"]
    arguments += ["--reward", "calculator_answer", "--set", "data.chat_template_kwargs={tools=false}", "--json"]
    arguments += ["--set", "rollout.max_tokens_per_turn=60", *options]
    command = [sys.executable, "-m", "penstock", "play", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["episodes"], report["valid"]) == (6, 6)
    assert report["tool_calls"] > 0
    results = [m["content"] for c in report["completions"] for m in c["messages"] if m["role"] == "tool"]
    assert "679" in results  # 97 times 7, by the tool
    rewards = [completion["reward"] for completion in report["completions"]]
    assert report["mean"] == pytest.approx(sum(rewards) / 6)
    return report


def test_a_model_folder_is_played_by_the_local_engine(model):
    report = play(model, "--policy", str(model))
    assert all(completion["sampled_tokens"] > 0 for completion in report["completions"])


def test_real_vllm_is_played_by_messages_and_by_tokens(model, tmp_path):
    flags = ("--max-model-len", "512", "--max-logprobs", "20", "--logprobs-mode", "processed_logprobs")
    with vllm_server(model, tmp_path / "vllm.log", *flags) as url:
        by_messages = play(model, "--endpoint", url)
        by_tokens = play(model, "--endpoint", url, "--policy", str(model), "--set", "engine.max_model_len=512")
    assert all(completion["sampled_tokens"] == 0 for completion in by_messages["completions"])
    assert all(completion["sampled_tokens"] > 0 for completion in by_tokens["completions"])


def test_the_tool_caller_is_served_by_vllm_and_played_by_messages_and_by_tokens(tmp_path):
    """As on the page: `penstock base-model`, `penstock serve`, `penstock play`."""
    folder = tmp_path / "base"
    write_base_model("tool-caller", folder)
    with served_by_vllm(folder) as url:
        reports = [
            play_guess("--endpoint", url, "--model", str(folder)),
            play_guess("--endpoint", url, "--policy", str(folder), "--set", "engine.max_model_len=512"),
        ]
    for report in reports:
        assert (report["episodes"], report["valid"]) == (6, 6)
        assert report["tool_calls"] > report["tool_errors"], report
    by_messages, by_tokens = ({each["sampled_tokens"] > 0 for each in report["completions"]} for report in reports)
    assert (by_messages, by_tokens) == ({False}, {True})


def play_guess(*options):
    command = [
        sys.executable,
        "-m",
        "penstock",
        "play",
        "guess",
        "--field",
        "secret=3",
        "--prompt",
        "Guess.",
        "-n",
        "6",
    ]
    command += ["--json", "--set", "rollout.max_tokens_per_turn=48", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@contextmanager
def served_by_vllm(model):
    """Serve a model with `penstock serve` on vLLM; yields the URL that it prints."""
    command = [sys.executable, "-m", "penstock", "serve", str(model), "--port", "0", "--set", "engine.server=vllm"]
    command += ["--set", f"engine.python={vllm_python()}", "--set", "engine.max_model_len=512"]
    with (model.parent / "vllm.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()  # once vLLM is healthy
        assert line.startswith("listening on "), (model.parent / "vllm.log").read_text()
        yield line.split()[-1]
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_the_server_of_transformers_is_played(model, tmp_path):
    with transformers_server(model, tmp_path) as url:
        play(model, "--endpoint", url, "--model", str(model))


@contextmanager
def transformers_server(model, folder):
    """Serve a model with `transformers serve`, from vLLM's virtual environment; yields the URL."""
    (folder / "hub").mkdir()
    port = free_port()
    code = "from transformers.cli.transformers import main; main()"
    command = [vllm_python(), "-c", code, "serve", str(model), "--port", str(port), "--device", "cpu"]
    environment = os.environ | {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, process_group=0)
    try:
        _wait_until_healthy(f"http://127.0.0.1:{port}", process, folder)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def _wait_until_healthy(url, process, folder):
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, (folder / "server.log").read_text()
        with suppress(URLError, OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.2)
    raise AssertionError((folder / "server.log").read_text())
