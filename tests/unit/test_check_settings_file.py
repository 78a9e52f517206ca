"""`check FILE`: thirty mistakes, each with the message that answers it before an engine starts."""

import json
import shutil
import socket
from functools import partial
from pathlib import Path

import anyio
import pytest
import structlog
import tomli_w
from structlog.testing import capture_logs

from envs.sandboxes import bubblewrap
from stream.errors import SettingsError
from tests.base_models.demo_model import make_model
from tests.cases.ports import has_ipv6
from tests.reward_server import reward_server
from workers.check.check import check
from workers.check.machine import check_disk, check_memory
from workers.check.model import ModelFacts
from workers.check.report import Checker, CheckReport
from workers.settings.toml_file import load_settings

ENVIRONMENT = """
class Counter:
    def reset(self, target: int, **row) -> str:
        self.n, self.target = 0, target
        return f"Count to {target}."

    def increment(self, by: int = 1) -> int:
        "Add to the counter."
        self.n += by
        return self.n

    def get_reward(self) -> float:
        return float(self.n == self.target)
"""
ROWS = "        return [{'target': n, 'answer': split} for n in range(5)]\n"
REWARD = """
def exact(completions, answer, **_):
    return [float(text == gold) for text, gold in zip(completions, answer)]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "policy"
    make_model(folder, seed=0)
    return folder


class Project:
    """A user's folder that works, to make one mistake in."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = folder / "policy"
        shutil.copytree(model, self.model)
        self.table = {
            "run": {"folder": str(folder / "run")},
            "model": {"path": str(self.model)},
            "data": {"path": str(folder / "prompts.jsonl"), "prompt": "question"},
            "environments": {"counter": f"{folder}/world.py:Counter"},
            "rewards": [{"ref": f"{folder}/rewards.py:exact"}],
            "rollout": {"max_tokens": 64, "max_tokens_per_turn": 32, "call_timeout_s": 0.3},
            "engine": {"max_model_len": 500},
            "train": {"batch_size": 2},
        }
        self.rows([{"question": f"Say {i}.", "answer": str(i), "target": i} for i in range(4)])
        (folder / "world.py").write_text(ENVIRONMENT)
        (folder / "rewards.py").write_text(REWARD)

    def rows(self, rows: list) -> None:
        (self.folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.folder / file
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    def check(self) -> CheckReport:
        file = self.folder / "run.toml"
        file.write_text(tomli_w.dumps(self.table))
        return check(file)


@pytest.fixture
def project(tmp_path, model, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return Project(tmp_path, model)


def set_key(section: str, key: str, value: object, project: Project) -> None:
    project.table.setdefault(section, {})[key] = value


def set_reward(code: str, project: Project) -> None:
    (project.folder / "rewards.py").write_text(code)


def edit_world(old: str, new: str, project: Project) -> None:
    project.edit("world.py", old, new)


def only_adapter(project: Project) -> None:
    (project.model / "config.json").rename(project.model / "adapter_config.json")


def edit_config(project: Project, **changed: object) -> None:
    config = json.loads((project.model / "config.json").read_text())
    (project.model / "config.json").write_text(json.dumps(config | changed))


def classifier(project: Project) -> None:
    config = json.loads((project.model / "config.json").read_text())
    (project.model / "config.json").write_text(
        json.dumps(config | {"architectures": ["BertForSequenceClassification"]})
    )


def cut_weights(project: Project) -> None:
    file = next(project.model.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])


def lfs_pointer(project: Project) -> None:
    next(project.model.glob("*.safetensors")).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")


def pickled_weights(project: Project) -> None:
    file = next(project.model.glob("*.safetensors"))
    file.rename(project.model / "pytorch_model.bin")


def no_template(project: Project) -> None:
    (project.model / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((project.model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (project.model / "tokenizer_config.json").write_text(json.dumps(config))


def broken_template(project: Project) -> None:
    (project.model / "chat_template.jinja").write_text("{{ messages[0].nothing.at_all }}")


def long_prompt(project: Project) -> None:
    project.rows([{"question": "word " * 900, "answer": "1", "target": 1}] * 4)


def environment_rows(code: str, project: Project) -> None:
    project.edit("world.py", "    def reset", f"    def rows(self):\n        {code}\n\n    def reset")


def without_reward(project: Project) -> None:
    project.table["rewards"] = []
    project.edit("world.py", "def get_reward", "def _reward")


MISTAKES = {
    "a model of the hub that is not here": (
        partial(set_key, "model", "path", "Qwen/Qwen3-0.6B"),
        ["model.path", "HF_HUB_OFFLINE is set", "lacks files of model Qwen/Qwen3-0.6B at main", "there is none in"],
    ),
    "code of its own": (
        partial(edit_config, model_type="odd", auto_map={"AutoModel": "modeling_odd.Odd"}),
        ["no architecture 'odd'", "modeling_odd.py", "trust_remote_code=True"],
    ),
    "no such model folder": (partial(set_key, "model", "path", "/nowhere/model"), ["/nowhere/model", "no such folder"]),
    "a LoRA adapter as model": (only_adapter, ["LoRA adapter", "merge"]),
    "a classifier as policy": (classifier, ["BertForSequenceClassification", "causal"]),
    "weights cut off": (cut_weights, ["is cut off", "bytes are missing", "copy or download"]),
    "a Git LFS pointer": (lfs_pointer, ["git lfs pull"]),
    "weights as pickle": (pickled_weights, ["pytorch_model.bin", "safetensors"]),
    "no chat template": (no_template, ["no chat template", "instruction-tuned", "chat_template.jinja"]),
    "a template that fails": (broken_template, ["chat template", "UndefinedError"]),
    "no such data file": (partial(set_key, "data", "path", "a.jsonl"), ["a.jsonl", "no such file", "data.path"]),
    "a CSV file": (partial(set_key, "data", "path", __file__), ["data.path", ".jsonl or .parquet"]),
    "no data and no rows()": (lambda project: project.table.pop("data"), ["counter has no method rows()", "data.path"]),
    "rows that raise": (
        lambda project: (project.table.pop("data"), environment_rows("return open('gone.csv')", project)),
        ["environments.counter: rows() raised FileNotFoundError", "world.py:4"],
    ),
    "held-out rows that are trained on": (
        lambda project: (
            set_key("eval", "rows", 5, project),
            environment_rows("return [{'target': 1}]", project),
        ),
        ["rows() of environments.counter has no parameter `split`", "eval.path"],
    ),
    "an empty data file": (lambda project: project.rows([]), ["prompts.jsonl", "has no rows"]),
    "a wrong prompt column": (
        partial(set_key, "data", "prompt", "prompt"),
        ["no column 'prompt'", "data.prompt", "question, answer, target"],
    ),
    "rows that are not objects": (lambda project: project.rows([1, 2]), ["prompts.jsonl:", "not an object"]),
    "an unknown environment in the data": (
        lambda project: project.rows([{"question": "a", "environment": "maze", "answer": "1", "target": 1}]),
        ["environment 'maze' is unknown", "'counter'"],
    ),
    "a renamed column that is missing": (
        partial(set_key, "data", "columns", {"gold": "solution"}),
        ["no column 'solution'", "data.columns"],
    ),
    "a misspelt class": (partial(edit_world, "class Counter", "class Count"), ["no 'Counter'", "did you mean Count?"]),
    "an import that fails": (
        partial(edit_world, "class Counter", "import nothing_here\nclass Counter"),
        ["nothing_here", "world.py"],
    ),
    "a syntax error": (partial(edit_world, "class Counter", "class = Counter"), ["SyntaxError", "world.py"]),
    "a constructor that raises": (
        partial(edit_world, "    def reset", "    def __init__(self):\n        {}['a']\n\n    def reset"),
        ["KeyError: 'a'", "world.py:4"],
    ),
    "a reset that raises": (partial(edit_world, "self.n, self.target = 0", "self.n, self.target = 0 / 0"), [
        "reset", "ZeroDivisionError", "world.py:4"]),
    "a reset that hangs": (
        partial(edit_world, "self.n, self.target = 0", "__import__('time').sleep(1); self.n, self.target = 0"),
        ["reset", "did not return within 0.3 s", "world.py:4"],
    ),
    "a reset that needs another column": (
        partial(edit_world, "target: int, **row", "goal: int"),
        ["reset needs 'goal'", "answer, target", "data.columns"],
    ),
    "a reset that needs the prompt": (
        partial(edit_world, "target: int, **row", "prompt: str, target: int"),
        ["reset needs 'prompt'", "'question' is the prompt", 'data.columns = { prompt = "question" } gives it'],
    ),
    "a reset that reads the prompt's column": (
        partial(edit_world, "self.n, self.target = 0", "row['question']; self.n, self.target = 0"),
        ["KeyError: 'question'", "only the model reads", 'data.columns = { question = "question" }', "world.py:4"],
    ),
    "a reset that returns an object": (
        partial(edit_world, 'return f"Count to {target}."', "return object()"),
        ["reset", "object returned", "a string"],
    ),
    "no reward at all": (without_reward, ["no get_reward and there are no [[rewards]]"]),
    "a reward that does not exist": (partial(set_reward, "def exact_match(): pass"), ["no 'exact'", "exact_match"]),
    "a reward that asks for another column": (
        partial(set_reward, "def exact(completions, solution): return [1.0]"),
        ["a column 'solution'", "answer, target", "data.columns"],
    ),
    "a reward that asks for the prompt's column": (
        partial(set_reward, "def exact(completions, question): return [1.0] * len(completions)"),
        ["a column 'question'", "is the prompt (data.prompt)", 'data.columns = { question = "question" }'],
    ),
    "a reward for one completion": (
        partial(set_reward, "def exact(completion, answer): return 1.0"),
        ["it takes 'completion'", "called with lists", "write completions"],
    ),
    "a reward that raises": (
        partial(set_reward, "def exact(completions, **_):\n    return [1 / 0 for _ in completions]\n"),
        ["ZeroDivisionError: division by zero", "rewards.py:2"],
    ),
    "a reward of the wrong length for more than one answer": (
        partial(set_reward, "def exact(completions, **_): return [1.0]"),
        ["a call with 2 answers measured nothing", "a list of 2 numbers expected", "all completions of one prompt"],
    ),
    "prompts longer than the context": (long_prompt, ["leaves no room for an answer", "engine.max_model_len"]),
    "a server that is not there": (
        partial(set_key, "run", "redis", "redis://127.0.0.1:1"),
        ["Redis at redis://127.0.0.1:1", "run.redis"],
    ),
}  # fmt: skip


def test_a_run_without_a_mistake_has_no_findings(project):
    report = project.check()
    assert not report.findings, str(report)
    assert {"environment counter", "reward exact", "Redis", "chat template with the tools of counter"} <= set(
        report.checked
    )


def test_a_check_from_python_prints_and_logs_nothing_but_a_process_that_logs_gets_the_events(project, capfd):
    project.check()
    assert capfd.readouterr() == ("", "")
    assert not structlog.is_configured()
    with capture_logs() as events:
        project.check()
    assert "template.inspected" in [event["event"] for event in events]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_an_error_with_place_and_remedy(project, mistake):
    make, words = MISTAKES[mistake]
    make(project)
    report = project.check()
    text = "\n".join(f"{each.subject} ({each.place}): {each.text}" for each in report.errors)
    assert [word for word in words if word not in text] == [], text or str(report)


def test_a_machine_without_sandboxes_is_a_warning_for_each_environment_that_wants_one(project, monkeypatch):
    monkeypatch.setattr(bubblewrap, "sandbox_problem", lambda: "bwrap: No permissions")
    project.table["environments"] = {"code": "python", "counter": project.table["environments"]["counter"]}
    project.rows([{"question": "a", "environment": "code", "answer": "1", "target": 1}])
    (warning,) = [each for each in project.check().findings if "sandbox" in each.text]
    assert warning.place == "environments.code"
    assert "bwrap: No permissions" in warning.text
    assert "use the network" in warning.text


def test_an_environment_with_rows_of_its_own_needs_no_data(project):
    project.table.pop("data")
    project.table["eval"] = {"rows": 2}
    project.edit("world.py", "    def reset", "    def rows(self, split):\n" + ROWS + "\n    def reset")
    report = project.check()
    assert not report.errors, str(report)
    assert "5 rows of the data" in report.checked


def test_all_faults_are_found_at_once(project):
    project.table["model"]["path"] = "Qwen/Qwen3-0.6B"
    edit_world("self.n, self.target = 0", "self.n, self.target = 0 / 0", project)
    set_reward("def exact(completions, **_):\n    raise ValueError('bad')\n", project)
    report = project.check()
    assert [each.subject for each in report.errors] == ["model", "environment counter", "reward exact"]
    text = str(report)
    assert 'rewards.py", line 2, in exact' in text
    assert "/envs/" not in text.replace(str(project.folder), ""), "the traceback has frames of Penstock"
    assert "The run cannot start: 3 errors, no warnings." in text


def test_several_wrong_combinations_are_reported_together(project):
    project.table["rollout"] |= {"sampling": {"min_tokens": 100}, "temperature": 0.0}
    with pytest.raises(SettingsError) as caught:
        project.check()
    assert "min_tokens (100)" in str(caught.value)
    assert "rollout.temperature is 0" in str(caught.value)


def test_a_completion_that_is_cut_off_is_a_warning(project):
    project.table["rollout"]["max_tokens"] = 480
    report = project.check()
    assert not report.errors
    assert "so completions are cut at" in report.warnings[0].text


def test_code_that_loads_slowly_is_a_warning_for_a_run_which_waits_and_an_error_for_a_reference(project, monkeypatch):
    for limit in ("_LOAD_TIMEOUT_S", "_PATIENT_LOAD_TIMEOUT_S"):
        monkeypatch.setattr(f"workers.check.report.{limit}", 0.2)
    edit_world("class Counter", "import time; time.sleep(1)\nclass Counter", project)
    shutil.copy(project.folder / "world.py", project.folder / "alone.py")
    reports = project.check(), check(f"{project.folder}/alone.py:Counter")
    levels = [
        [each.level for each in report.findings if "0.2 s" in each.text and "environment" in each.subject]
        for report in reports
    ]
    assert levels == [["warning"], ["error"]]


def test_a_reward_of_the_wrong_length_that_is_called_with_one_answer_at_a_time_is_no_finding(project):
    set_reward("def exact(completions, **_): return [1.0]", project)
    project.table["rewards"][0]["granularity"] = "row"
    assert not project.check().findings


@pytest.mark.parametrize(
    ("sections", "warned"),
    [
        ({}, True),
        ({"estimator": {"name": "gae"}}, False),
        ({"rollout": {"group_size": 1}, "filter": {"min_valid_rows": 1}}, False),
    ],
    ids=["groups", "no baseline of a group", "groups of one"],
)
def test_an_environment_that_draws_its_task_at_random_is_a_warning(project, sections, warned):
    edit_world("self.n, self.target = 0, target", "import random; self.n, self.target = 0, random.random()", project)
    for name, section in sections.items():
        project.table[name] = project.table.get(name, {}) | section
    report = project.check()
    assert not report.errors, str(report)
    found = [each.text for each in report.warnings if "a group compares completions of one task" in each.text]
    assert len(found) == warned, str(report)
    assert all("left other values in target (with" in text and "(with the row prompts:0:0)" in text for text in found)


def test_each_port_of_the_run_is_tried(project):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        project.table["run"] |= {"address": f"127.0.0.1:{port}", "metrics_address": f"127.0.0.1:{port - 1}"}
        project.table["weights"] = {"transport": "http"}
        report = project.check()
    found = [each for each in report.errors if f"cannot listen on 127.0.0.1:{port}" in each.text]
    assert [each.place for each in found] == ["run.address", "run.metrics_address"]
    assert all("name another port, or none" in each.text for each in found)


def test_the_prompt_reaches_reset_and_rewards_under_the_name_that_the_message_gives(project):
    edit_world("target: int, **row", "prompt: str, target: int", project)
    edit_world("self.n, self.target = 0", "assert prompt.startswith('Say'); self.n, self.target = 0", project)
    set_reward(
        "def exact(completions, prompt, answer): return [float(a in p) for a, p in zip(answer, prompt)]", project
    )
    project.table["data"]["columns"] = {"prompt": "question"}
    assert not project.check().findings


def test_a_port_of_the_dashboard_that_is_in_use_is_a_warning(project):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        project.table["run"]["dashboard"] = port
        report = project.check()
    assert not report.errors
    (warning,) = report.warnings
    assert warning.place == "run.dashboard"
    assert f"cannot listen on 127.0.0.1:{port}: address already in use, so the run has no dashboard" in warning.text
    assert '"on"' in warning.text


def test_an_address_of_another_machine_is_an_error(project):
    project.table["run"]["address"] = "192.0.2.7"
    (error,) = project.check().errors
    assert "cannot listen on 192.0.2.7" in error.text
    assert error.place == "run.address"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def exact(completions, **_):\n    return [None for _ in completions]\n", "returned None"),
        (
            "def exact(environments, **_):\n    return [float(env.calls[0]) for env in environments]\n",
            "for the answer 'I do not know.' without a tool call",
        ),
    ],
)
def test_a_reward_that_may_measure_other_completions_is_a_warning(project, code, words):
    set_reward(code, project)
    edit_world("self.n, self.target = 0, target", "self.n, self.target, self.calls = 0, target, []", project)
    report = project.check()
    assert not report.errors
    assert words in report.warnings[0].text


@pytest.mark.parametrize(
    ("context", "args", "level", "words"),
    [
        (400, {}, "error", ["takes 400 tokens", "may have 500", "could choose", "set args.worst_score"]),
        (400, {"worst_score": -9}, "warning", ["longer ones get -9"]),
        (500, {}, "", []),
    ],
)
def test_a_reward_model_that_cannot_take_the_longest_conversation_is_reported(project, context, args, level, words):
    async def check_with_server() -> CheckReport:
        async with reward_server() as server:
            server.models = {"data": [{"id": "m", "max_model_len": context}]}
            project.table["rewards"] = [{"ref": "reward_model", "args": {"urls": server.url, **args}}]
            return await anyio.to_thread.run_sync(project.check)

    report = anyio.run(check_with_server)
    assert [each.level for each in report.findings] == ([level] if level else []), str(report)
    assert [word for word in words if word not in report.findings[0].text] == []


def test_a_snapshot_that_is_too_large_already_after_reset_is_a_warning(project):
    edit_world("self.n, self.target = 0, target", "self.n, self.target, self.map = 0, target, 'x' * 5000", project)
    project.table["rollout"]["max_snapshot_bytes"] = 2000
    (finding,) = project.check().findings
    assert (finding.level, finding.place) == ("warning", "rollout.max_snapshot_bytes")
    assert "map exceeds rollout.max_snapshot_bytes = 2000" in finding.text


def test_a_reward_without_a_part_in_a_completion_is_no_finding(project):
    set_reward("def exact(completions, **_):\n    return [None for _ in completions]\n", project)
    project.table["rewards"][0]["none"] = "not_applicable"
    assert not project.check().findings


def test_an_engine_that_does_not_answer_is_a_warning(project):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        project.table["engine"]["urls"] = [f"http://127.0.0.1:{taken.getsockname()[1]}"]
        report = project.check()
    assert not report.errors
    assert "does not answer" in report.warnings[0].text


def test_a_file_of_engines_that_does_not_exist_is_a_warning(project):
    project.table["engine"]["urls"] = ["file:engines.txt", "dns+http://no.such.host.invalid:8000"]
    report = project.check()
    assert not report.errors
    (warning,) = report.warnings
    assert warning.text == "engines.txt: No such file or directory; the run waits until it names engines"


@pytest.mark.parametrize(("has_gpu", "is_cpu_build"), [(False, True), (False, False), (True, True), (True, False)])
def test_gpus_that_are_not_there_are_an_error_and_not_the_cpu(project, monkeypatch, has_gpu, is_cpu_build):
    python = project.folder / "python"
    answer = json.dumps({"version": "0.32.0", "is_cpu_build": is_cpu_build, "plugins": ["penstock"]})
    python.write_text(f"#!/bin/sh\necho '{answer}'\n")
    python.chmod(0o755)
    files = [project.folder / "no-driver", project.folder if has_gpu else project.folder / "none"]
    monkeypatch.setattr("workers.check.machine._GPU_FILES", files)
    project.table["engine"] |= {"server": "vllm", "python": str(python), "devices": ["0"]}
    problems = [error.text for error in project.check().errors]
    assert any("this machine has none" in problem for problem in problems) is not has_gpu
    assert any("was built for CPUs" in problem for problem in problems) is is_cpu_build
    assert all("leave engine.devices out" in problem for problem in problems)


def test_a_disk_and_a_memory_that_are_too_small_are_errors(project, monkeypatch):
    (project.folder / "run.toml").write_text(tomli_w.dumps(project.table))
    checker = Checker(load_settings(project.folder / "run.toml"))
    facts = ModelFacts(parameters=10**15, max_positions=512)
    check_disk(checker, facts)
    monkeypatch.setattr("workers.check.memory._HAS_GPU", False)
    check_memory(checker, facts)
    assert [each.place for each in checker.findings] == ["run.folder", "model.path"]


def test_thirty_mistakes_are_answered():
    assert len(MISTAKES) >= 30


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("127.0.0.1:65535", "127.0.0.1:65536"),
        pytest.param("[::1]:0", "", marks=pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")),
    ],
)
def test_ports_beyond_the_last_one_are_an_error_and_ipv6_is_none(project, address, problem):
    project.table["run"]["metrics_address"] = address
    errors = [each.text for each in project.check().errors]
    assert bool(errors) is bool(problem)
    assert all(f"cannot listen on {problem}"[:-1] in each for each in errors)
