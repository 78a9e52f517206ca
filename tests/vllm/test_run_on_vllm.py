"""`penstock run` with real vLLM: tools over several turns, new weights at each step, the server killed in mid-run."""

import json
import os
import shutil
import signal
import threading
from array import array
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from stream.archive import ArchivedGroups
from stream.ledger import read_lines
from stream.records import Group, Row
from tests.e2e.harness import Project, balanced, children, stop, wait_for_trained
from tests.vllm.policies import Judge
from tests.vllm.server import vllm_python
from workers.cli import penstock
from workers.demo.model import END_OF_TURN, make_model, make_tokenizer
from workers.demo.task import training_rows
from workers.demo.warmstart import warm_start

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

CLOSE = 1e-4
PROMPTS, SIZE, TURN = 24, 4, 32
KILLED_AFTER = 4
"""Groups."""


class Kept(threading.Thread):
    """Keeps every version of the weights, of which the run itself keeps the last few."""

    def __init__(self, weights: Path, kept: Path) -> None:
        super().__init__(daemon=True)
        self.weights, self.kept, self.over = weights, kept, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.02):
            self.look(all_but=1)  # the newest may be being written
        self.look(all_but=0)

    def look(self, all_but: int) -> None:
        found = sorted(self.weights.glob("v*"))
        for folder in found[: len(found) - all_but]:
            if not (self.kept / folder.name).exists():
                shutil.copytree(folder, self.kept / folder.name, copy_function=os.link)


class Played:
    """A run that was killed in mid-run, and went to its end."""

    def __init__(self, project: Project, summary: dict, kept: Path) -> None:
        self.project, self.summary, self.kept = project, summary, kept
        lines, broken = read_lines(project.run_folder / "ledger.jsonl")
        assert not broken
        archived = ArchivedGroups(project.run_folder / "groups")
        self.trained: list[Group] = [
            archived.read(written.line.prompt, written.line.hash) for written in lines if written.line.end == "trained"
        ]

    def events(self, role: str) -> list[dict]:
        lines = (self.project.run_folder / "logs" / f"{role}.log").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def rows(self) -> list[Row]:
        return [row for group in self.trained for completion in group.completions for row in completion.rows]


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> Played:
    folder = tmp_path_factory.mktemp("vllm-run")
    model = folder / "model"
    make_model(model, seed=1)
    warm_start(model, 1, 150)  # enough to call tools
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
    project.table["engine"] |= {"server": "vllm", "python": str(vllm_python()), "max_length": 384}
    project.table["train"] |= {"learning_rate": 1e-3}  # so that versions differ
    weights, kept = project.run_folder / "weights", folder / "kept"
    keeping = Kept(weights, kept)
    keeping.start()
    process = project.start("run", str(project.write()), "--json")
    try:
        wait_for_trained(project, KILLED_AFTER, process, 300)
        os.kill(server_of(children(process.pid)["serve"]), signal.SIGKILL)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, f"{err[-2000:]}\n{project.logs()}"
    finally:
        stop(process)
        keeping.over.set()
        keeping.join()
    return Played(project, json.loads(out), kept)


def server_of(launcher: int) -> int:
    """vLLM's own process."""
    found = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    (pid,) = [int(each) for each in found if b"vllm.entrypoints" in Path(f"/proc/{each}/cmdline").read_bytes()]
    return pid


def test_nothing_is_lost_and_nothing_counts_twice(played):
    assert balanced(played.summary)
    assert played.summary["fed"] == played.summary["groups_trained"] == PROMPTS
    assert played.summary["dead"] == played.summary["outstanding"] == 0
    result = CliRunner().invoke(penstock, ["audit", str(played.project.run_folder)])
    assert result.exit_code == 0, result.output


def test_the_killed_server_came_back_at_its_address_and_was_given_the_current_weights(played):
    events = played.events("supervisor")
    assert [e["name"] for e in events if e["event"] == "role.restarted"] == ["engine-0"]
    urls = [e["url"] for e in events if e["event"] == "engine.announced"]
    assert len(urls) == 2
    assert urls[0] == urls[1]
    log = (played.project.run_folder / "logs" / "engine-0.log").read_text()
    assert "vLLM was killed by SIGKILL" in log
    # Versions before and after it went on to be sampled from; what they were worth, the next test says.
    versions = {span.version for row in played.rows() for span in row.spans}
    assert len(versions) >= 3


def test_tools_were_called_over_several_turns(played):
    completions = [completion for group in played.trained for completion in group.completions]
    turns = Counter(completion.turns for completion in completions)
    assert sum(completion.tool_calls for completion in completions) > PROMPTS, turns
    assert any(len(row.sampled) > 1 for row in played.rows())


def test_each_token_has_the_log_prob_of_the_version_that_its_span_names(played):
    judges: dict[int, Judge] = {}
    worst, others = 0.0, []
    for row in played.rows():
        logprobs, place = array("f", row.logprobs), {}
        for start, end in row.sampled:
            for token in range(start, end):
                place[token] = len(place)
        tokens = list(row.tokens)
        for span in row.spans:
            told = [logprobs[place[token]] for token in range(span.start, span.end)]
            ours = _judge(judges, played.kept, span.version).logprobs(
                [*row.prompt, *tokens[: span.start]], tokens[span.start : span.end]
            )
            worst = max(worst, *(abs(a - b) for a, b in zip(told, ours, strict=True)))
            if span.version > 0:
                first = _judge(judges, played.kept, 0).logprobs(
                    [*row.prompt, *tokens[: span.start]], tokens[span.start : span.end]
                )
                others.append(max(abs(a - b) for a, b in zip(told, first, strict=True)))
    print(f"largest difference {worst:.2e}; to version 0, of later ones: {max(others):.2e}")
    assert worst < CLOSE
    assert max(others) > 100 * CLOSE  # the test can tell versions apart


def _judge(judges: dict[int, Judge], kept: Path, version: int) -> Judge:
    if version not in judges:
        judges[version] = Judge(kept / f"v{version:06d}")
    return judges[version]


def test_nothing_that_an_engine_gave_up_was_trained(played):
    """Each turn ended by itself, or at a limit: an aborted one ends anywhere."""
    (end,) = make_tokenizer().encode(END_OF_TURN, add_special_tokens=False)
    cut = 0
    for group in played.trained:
        for completion in group.completions:
            assert completion.failure is None
            for row in completion.rows:
                for first, last in row.sampled:
                    whole = row.tokens[last - 1] == end
                    cut += not whole
                    assert whole or last - first == TURN or completion.truncated is not None, (group.prompt.id, first)
    told = [e for e in [*played.events("rollout-0")] if e["event"] == "engine.awaited"]
    assert told, "the kill met no request"
