"""`penstock run` on two vLLM servers: tools over several turns, new weights at each step, one server killed."""

import json
import os
import shutil
import signal
import threading
import time
import urllib.request
from array import array
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.error import URLError

import msgspec
import pytest
from click.testing import CliRunner

from stream.records import Group, Row
from stream.trainer.archive import ArchivedGroups
from stream.trainer.ledger_records import Trained, read_ledger
from tests.base_models.demo_model import make_tokenizer
from tests.base_models.small_model import END_OF_TURN
from tests.e2e.harness import Project, balanced, stop, wait_for_trained
from tests.vllm.policies import Judge
from tests.vllm.served import CLOSE, difference
from tests.vllm.server import vllm_python
from workers.cli import penstock
from workers.demo.base_models import write_base_model
from workers.demo.task import training_rows
from workers.engine_api.wire import GenerateRequest, GenerateResponse, SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

PROMPTS, SIZE, TURN = 192, 4, 32  # enough that work is left when the killed server is back
KILLED_AFTER, WITHOUT = 8, 8
"""Groups until one of the two servers is killed, and groups that the other one then serves alone."""
USED_S = 10
"""Longest time, in seconds, from a restarted server's health until it samples for the run again."""


class Server:
    """One of the run's servers, through its public interface."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(self.url + path, body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()

    def count(self, metric: str) -> float:
        lines = self.get("/metrics").decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{metric}{{"))

    def kill(self) -> None:
        """Send SIGKILL to the process that listens."""
        port = self.url.rpartition(":")[2].encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if port in words and b"vllm.entrypoints.openai.api_server" in words:
                    return os.kill(int(folder.name), signal.SIGKILL)
        raise AssertionError(f"no process of vLLM's listens at {self.url}")

    def is_healthy(self) -> bool:
        try:
            return self.get("/health") == b""
        except (URLError, OSError):
            return False

    def sample(self) -> tuple[list[int], list[int], list[float], set[int]]:
        """Sample; returns the prompt, the sampled tokens, their log-probs and their versions."""
        prompt = list(range(20, 60))
        params = SamplingParams(max_tokens=12, logprobs=1, ignore_eos=True, seed=1)
        body = msgspec.json.encode(GenerateRequest(token_ids=prompt, sampling_params=params))
        answer = msgspec.json.decode(self.get("/inference/v1/generate", body), type=GenerateResponse)
        (choice,) = answer.choices
        logprobs = [entry.logprob for entry in choice.logprobs.content]
        return prompt, choice.token_ids, logprobs, {int(span.version) for span in choice.weight_versions}


class Back(NamedTuple):
    """Observations of the killed server."""

    url: str
    busy: float
    """Number of its requests in progress just before it was killed."""
    used_s: float
    waited_s: float
    """Part of these seconds in which some process of this machine waited for a core."""
    newest: int
    """Version published before the server was back."""
    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]
    version: int
    """Version that the server reported."""


class Kept(threading.Thread):
    """Copies every version of the weights; the run itself keeps only the last few."""

    def __init__(self, weights: Path, kept: Path) -> None:
        super().__init__(daemon=True)
        self.weights, self.kept, self.over = weights, kept, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.02):
            self.look(all_but=1)  # the newest may still be written
        self.look(all_but=0)

    def look(self, all_but: int) -> None:
        result = sorted(self.weights.glob("v*"))
        for folder in result[: len(result) - all_but]:
            if not (self.kept / folder.name).exists():
                shutil.copytree(folder, self.kept / folder.name, copy_function=os.link)


class Played:
    """A run with one server killed, after its end."""

    def __init__(self, project: Project, summary: dict, kept: Path, back: Back) -> None:
        self.project, self.summary, self.kept, self.back = project, summary, kept, back
        lines, broken = read_ledger(project.run_folder / "ledger.jsonl")
        assert not broken
        archived = ArchivedGroups(project.run_folder / "groups")
        self.trained: list[Group] = [
            archived.read(written.record.prompt, written.record.hash)
            for written in lines
            if written.record.outcome == Trained()
        ]

    def rows(self) -> list[Row]:
        return [row for group in self.trained for completion in group.completions for row in completion.rows]


def events(project: Project, role: str) -> list[dict]:
    lines = (project.run_folder / "logs" / f"{role}.log").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def until(what, within_s: float = 600.0) -> None:
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.05)


def say(project: Project, word: str) -> None:
    result = CliRunner().invoke(penstock, [word, str(project.run_folder)])
    assert result.exit_code == 0, result.output


def waiting_for_cores() -> float:
    """Return the seconds so far in which some process waited for a core; 0 if the system does not report it."""
    try:
        return int(Path("/proc/pressure/cpu").read_text().split()[4].partition("=")[2]) / 1e6
    except OSError:
        return 0.0


def kill_one_and_wait_for_its_restart(project: Project, process) -> Back:
    wait_for_trained(project, KILLED_AFTER, process, 600)
    urls = [event["url"] for event in events(project, "supervisor") if event["event"] == "engine.announced"]
    server = Server(urls[1])
    while not (busy := server.count("num_requests_running")):  # one answer: a second one may come between requests
        assert process.poll() is None, f"the run ended first: {project.logs()}"
        time.sleep(0.02)
    server.kill()
    wait_for_trained(project, len(project.ledger()) + WITHOUT, process, 600)
    # Otherwise the start takes a minute longer on so few cores, and the other server finishes all the work.
    say(project, "pause")
    until(server.is_healthy)
    began, waited = time.monotonic(), waiting_for_cores()
    newest = max(int(folder.name[1:]) for folder in (project.run_folder / "weights").glob("v*"))
    say(project, "resume")
    until(lambda: server.count("generation_tokens_total") > 200)  # probes sample a few tokens as well
    used_s, waited_s = time.monotonic() - began, waiting_for_cores() - waited
    versions: set[int] = set()
    while len(versions) != 1:  # new weights may arrive in between
        prompt, token_ids, logprobs, versions = server.sample()
    return Back(urls[1], busy, used_s, waited_s, newest, prompt, token_ids, logprobs, *versions)


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> Played:
    folder = tmp_path_factory.mktemp("vllm-run")
    model = folder / "model"
    write_base_model("calculator", model)
    project = Project(folder, model)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in training_rows(PROMPTS, 1)))
    (folder / "chance.py").write_text(
        "import zlib\n\n\n"
        "def chance(completions, **columns):\n"
        "    return [float(zlib.crc32(repr(each).encode()) % 2) for each in completions]\n"
    )
    project.table |= {
        "environments": {"calculator": "calculator"},
        "rewards": [{"ref": f"{folder / 'chance.py'}:chance"}],
        "filter": {"zero_variance": False},
        "archive": {"keep": "all"},
    }
    project.table["rollout"] |= {
        "group_size": SIZE, "max_turns": 4, "max_tokens_per_turn": TURN, "max_tokens": 128, "groups_in_flight": 8,
    }  # fmt: skip
    project.table["engine"] |= {"server": "vllm", "count": 2, "python": str(vllm_python()), "max_model_len": 384}
    project.table["train"] |= {"learning_rate": 1e-3}  # so that versions differ
    weights, kept = project.run_folder / "weights", folder / "kept"
    keeping = Kept(weights, kept)
    keeping.start()
    process = project.start("run", str(project.write()), "--json")
    try:
        back = kill_one_and_wait_for_its_restart(project, process)
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, f"{err[-2000:]}\n{project.logs()}"
    finally:
        stop(process)
        keeping.over.set()
        keeping.join()
    return Played(project, json.loads(out), kept, back)


def test_nothing_is_lost_and_nothing_counts_twice(played):
    assert balanced(played.summary)
    assert played.summary["fed"] == played.summary["groups_trained"] == PROMPTS
    assert played.summary["dead"] == played.summary["outstanding"] == 0
    assert played.summary["groups_dropped"] == {}
    assert set(played.summary["completion_states"]) == {"valid"}
    result = CliRunner().invoke(penstock, ["audit", str(played.project.run_folder)])
    assert result.exit_code == 0, result.output


def test_the_killed_server_restarts_at_its_address(played):
    assert played.back.busy > 0, "the kill met no request"
    logged = events(played.project, "supervisor")
    announced = [(event["name"], event["url"]) for event in logged if event["event"] == "engine.announced"]
    assert len(announced) == 3
    (name,) = [event["name"] for event in logged if event["event"] == "role.restarted" and "engine" in event["name"]]
    assert announced[2] == (name, played.back.url) == announced[1]
    log = (played.project.run_folder / "logs" / f"{name}.log").read_text()
    assert "vLLM was killed by SIGKILL" in log
    of_it = [event["event"] for event in events(played.project, "rollout-0") if event.get("url") == played.back.url]
    assert "engine.ejected" in of_it
    assert "engine.recovered" in of_it


def test_a_restarted_server_samples_within_seconds_at_the_right_version(played, measured):
    back = played.back
    measured(f"used {back.used_s:.1f} s after its health; in {back.waited_s:.1f} s of these somebody waited for a core")
    # Only waiting for a core counts: it shows how busy the machine is. All other waiting is limited by timers.
    assert back.used_s - back.waited_s < USED_S
    assert back.version >= back.newest
    judge = Judge(played.kept / f"v{back.version:06d}")
    assert difference(judge.logprobs(back.prompt, back.token_ids), back.logprobs) < CLOSE


def test_episodes_call_tools_over_several_turns(played):
    completions = [completion for group in played.trained for completion in group.completions]
    turns = Counter(completion.turns for completion in completions)
    # The number falls over time: the rewards are random.
    assert sum(completion.tool_calls for completion in completions) >= 10, turns
    assert any(len(row.sampled_ranges) > 1 for row in played.rows())


def test_each_token_has_the_log_prob_of_the_version_that_its_span_names(played, measured):
    judges: dict[int, Judge] = {}
    worst, others = 0.0, []
    for row in played.rows():
        logprobs, place = array("f", row.logprobs), {}
        for start, end in row.sampled_ranges:
            for token in range(start, end):
                place[token] = len(place)
        tokens = list(row.tokens)
        for span in row.spans:
            expected = [logprobs[place[token]] for token in range(span.start, span.end)]
            ours = _judge(judges, played.kept, span.version).logprobs(
                [*row.prompt, *tokens[: span.start]], tokens[span.start : span.end]
            )
            worst = max(worst, *(abs(a - b) for a, b in zip(expected, ours, strict=True)))
            if span.version > 0:
                first = _judge(judges, played.kept, 0).logprobs(
                    [*row.prompt, *tokens[: span.start]], tokens[span.start : span.end]
                )
                others.append(max(abs(a - b) for a, b in zip(expected, first, strict=True)))
    measured(f"largest difference {worst:.1e}; of later versions to version 0 {max(others):.1e}")
    assert worst < CLOSE
    assert len({span.version for row in played.rows() for span in row.spans}) >= 3
    assert max(others) > 100 * CLOSE  # the test can tell versions apart


def _judge(judges: dict[int, Judge], kept: Path, version: int) -> Judge:
    if version not in judges:
        judges[version] = Judge(kept / f"v{version:06d}")
    return judges[version]


def test_no_aborted_sample_is_trained(played):
    """Each turn ended by itself or at a limit; an aborted turn would end anywhere."""
    (end,) = make_tokenizer().encode(END_OF_TURN, add_special_tokens=False)
    cut = 0
    for group in played.trained:
        for completion in group.completions:
            assert completion.failure is None
            for row in completion.rows:
                for first, last in row.sampled_ranges:
                    whole = row.tokens[last - 1] == end
                    cut += not whole
                    assert whole or last - first == TURN or completion.truncated is not None, (group.prompt.id, first)
