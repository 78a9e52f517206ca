"""`penstock check` of an agent program: what it asked for, where it wanted to go, and whether its reward measures."""

import json

import pytest

from envs.sandboxes.bubblewrap import sandbox_problem
from tests.cases.families import FAMILIES, chat_of, template_of, tokenizer_of
from tests.cases.models import write_small_qwen3
from tests.unit.test_agent_program import ASK
from workers.check.check import check

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(bool(sandbox_problem()), reason=f"needs sandboxes: {sandbox_problem()}"),
]


def checked(tmp_path, program, measure="print(0.25)"):
    folder = tmp_path / "task"
    folder.mkdir()
    (folder / "agent.py").write_text(ASK + program)
    (folder / "check.py").write_text(measure)
    args = {"command": ["/usr/bin/python3", "agent.py", "{endpoint}"], "folder": str(folder)}
    reward = {"command": ["/usr/bin/python3", "-I", "check.py"]}
    report = check("agent:command", args=args | {"reward": reward}, fields={"prompt": "Go."})
    return report, report.environments["agent:command"].program


def test_requests_fields_rows_and_the_reward_of_the_untouched_folder_are_told(tmp_path):
    report, program = checked(tmp_path, "ask('a')\nask('a', 'b')\nask('c')")
    assert report.ok
    assert program.routes == {"POST /v1/chat/completions": 3}
    assert 0 < program.first_s < 60
    assert (program.refused, program.ignored, program.unknown) == ([], ["chat.model"], [])
    assert (program.turns, len(program.rows), program.exit_code, program.untouched_reward) == (3, 3, 0, 0.25)
    assert [each.message for each in report.warnings if "3 turns made 3 rows" in each.message]
    assert "POST /v1/chat/completions        3 requests, the first after" in str(report)
    assert "reward of the untouched folder   0.25" in str(report)


def test_a_host_that_the_program_wants_to_reach_is_named(tmp_path):
    program = "ask('a')\ntry: urllib.request.urlopen('https://telemetry.example/v1', timeout=5)\nexcept OSError: pass"
    assert checked(tmp_path, program)[1].elsewhere == ["telemetry.example:443"]


def test_a_refused_and_an_unknown_field_are_named(tmp_path):
    program = """
for more in ({"n": 2}, {"new_field": 1}):
    body = json.dumps({"messages": [{"role": "user", "content": "a"}]} | more).encode()
    request = urllib.request.Request(sys.argv[1] + "/chat/completions", body, {"content-type": "application/json"})
    try: urllib.request.urlopen(request, timeout=20).read()
    except OSError: pass
"""
    report, trial = checked(tmp_path, program)
    assert trial.refused == ["POST /v1/chat/completions: n: one answer to a request"]
    assert trial.unknown == ["chat.new_field"]
    assert [each.message for each in report.warnings if "new_field" in each.message]


@pytest.mark.parametrize(("measure", "said"), [("print(1", "SyntaxError"), ("print('fine')", "fine"), ("", "nothing")])
def test_a_reward_command_that_prints_no_number_is_named_with_its_last_words(measure, said, tmp_path):
    report, trial = checked(tmp_path, "ask('a')", measure)
    (warning,) = [each for each in report.warnings if "printed no number" in each.message]
    assert said in warning.message
    assert trial.untouched_reward is None


def checked_file(tmp_path, monkeypatch, program, more=""):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(ASK + program)
    (tmp_path / "run.toml").write_text(
        f"""
[model]
path = "model"
[data]
rows = 10
[environments.fix]
ref = "agent:command"
[environments.fix.args]
command = ["/usr/bin/python3", "agent.py", "{{endpoint}}"]
reward = {{ command = ["/usr/bin/python3", "-c", "print(1)"] }}
folder = "{tmp_path}"
{more}
"""
    )
    return check("run.toml")


def write_model(folder, family):
    tokenizer = tokenizer_of(family)
    write_small_qwen3(folder, tokenizer.get_vocab_size(), layers=1, tied=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"chat_template": template_of(family).source, "bos_token": FAMILIES[family].bos}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | {"eos_token": FAMILIES[family].eos}))


def test_a_settings_file_with_a_program_plays_it(tmp_path, monkeypatch):
    report = checked_file(tmp_path, monkeypatch, "ask('a')")
    assert report.environments["fix"].program.routes == {"POST /v1/chat/completions": 1}, str(report)
    assert "environment fix\nan agent program in a sandbox" in str(report)
    assert not report.environments["fix"].program.has_model


SAY = """
body = {"messages": [{"role": role, "content": "a"} for role in sys.argv[3:] or ("system", "user", "system")]}
request = urllib.request.Request(
    sys.argv[1] + "/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
)
urllib.request.urlopen(request, timeout=20).read()
"""


@pytest.mark.parametrize(
    ("family", "refused"), [("gemma-2", ["system", "user after system", "system after user"]), ("qwen3", [])]
)
def test_roles_that_the_runs_chat_template_refuses_are_named(family, refused, tmp_path, monkeypatch):
    write_model(tmp_path / "model", family)
    report = checked_file(tmp_path, monkeypatch, SAY)
    program = report.environments["fix"].program
    assert program.has_model, str(report)
    assert program.roles == refused
    assert not [each for each in report.errors if "context" in each.message]
    row = chat_of(family, None).prompt_ids([{"role": "user", "content": "a"}])
    assert program.rows[0] > len(row)


def test_a_first_request_that_is_longer_than_the_runs_context_is_an_error(tmp_path, monkeypatch):
    write_model(tmp_path / "model", "qwen3")
    report = checked_file(tmp_path, monkeypatch, "ask('a' * 600)", "[engine]\nmax_model_len = 512")
    (error,) = [each for each in report.errors if "leave no room" in each.message]
    assert error.place == "engine.max_model_len"
