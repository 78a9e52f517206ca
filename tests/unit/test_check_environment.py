"""`check REF` plays an episode without a model and warns about problems."""

import json
import subprocess
import sys
import textwrap
import time

import pytest
from click.testing import CliRunner

from stream.validity import Measured
from tests.cases.checks import tried
from workers.check.scripted import call
from workers.cli import penstock
from workers.demo.base_models import write_base_model

pytestmark = pytest.mark.usefixtures("preloaded")


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """Write a file with an environment `Env`; return its reference."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(code):
        path = tmp_path / "checked.py"
        path.write_text(textwrap.dedent(code), encoding="utf-8")
        return f"{path}:Env"

    return write


def penstock_check(*arguments):
    command = [sys.executable, "-m", "penstock", "check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


def test_a_good_environment_is_played_and_rendered():
    report = tried("guess", {"secret": 1})
    assert report.report.ok
    assert (report.warnings, report.errors) == ([], [])
    (tool,) = report.trial.tools
    assert (tool.arguments, tool.reply, tool.is_error) == ({"number": 1}, "correct", False)
    assert report.trial.reward == Measured(1.0)
    assert report.trial.snapshot_bytes
    text = str(report.report)
    for expected in (
        "envs.builtin.guess:Guess",
        "I am thinking of",
        "Guess the number.",
        "get_reward: env: 1",
        "It is usable: no errors",
    ):
        assert expected in text


def test_an_environment_that_needs_a_reward_function_says_so():
    report = tried("calculator", {})
    assert report.report.ok
    assert report.trial.parts == []
    assert report.warnings == ["it has no get_reward: a run needs a reward function under [[rewards]]"]


def test_a_file_without_a_name_is_answered_with_the_names_in_it(environment):
    path = environment("class Env:\n    def reset(self): pass\n\ndef reward(completions): ...\n\ndef _own(): ...\n")
    path = path.removesuffix(":Env")
    (error,) = tried(path).errors
    assert error.endswith(f"it has {path}:Env, {path}:reward")


def test_a_field_that_reset_needs_is_asked_for(environment):
    report = tried(environment("class Env:\n    def reset(self, word): pass\n"))
    assert not report.report.ok
    assert report.errors == ["reset needs 'word'; give its value with --field word=VALUE"]


BY_TURN = """
    class Env:
        def reset(self): self.calls = []

        def step(self):
            "Take a step."
            self.calls.append(0.25)
            return "ok"

        def look(self):
            "Look."
            self.calls.append(0.5)
            return "ok"

        def get_reward(self, {messages}): return {returns}
"""


@pytest.mark.parametrize(
    "reset",
    [
        "@staticmethod\n    def reset(secret): return secret",
        "@classmethod\n    def reset(cls, secret): return secret",
        "def __getattr__(self, name): return getattr(Inner(), name)",
    ],
    ids=["static", "of the class", "by __getattr__"],
)
def test_a_reset_that_is_no_plain_method_gets_its_fields(environment, reset):
    inner = "class Inner:\n    def reset(self, secret): return secret\n\n"
    ref = environment(f"{inner}class Env:\n    {reset}\n    def get_reward(self): return 1.0\n")
    assert tried(ref, {"secret": "s"}).trial.observation == "s"
    assert "secret" in tried(ref).errors[0]


def test_rewards_by_turn_are_shown_by_turn_and_together(environment):
    by_message = "[float(len(m.get('tool_calls', ()))) for m in messages if m['role'] == 'assistant']"
    report = tried(environment(BY_TURN.format(messages="messages", returns=by_message)), {})
    assert (report.report.ok, report.warnings) == (True, [])
    assert [(part.turn, part.reward) for part in report.trial.parts] == [
        (i, Measured(v)) for i, v in enumerate((1, 1, 0))
    ]
    assert report.trial.reward == Measured(2.0)
    text = str(report.report)
    for expected in ("env, turn 0", "env, turn 2", "together"):
        assert expected in text


def test_an_environment_that_counts_turns_by_its_calls_is_warned(environment):
    report = tried(environment(BY_TURN.format(messages="", returns="[*self.calls, 1.0]")), {})
    assert report.trial.reward == Measured(1.75)
    assert len(report.warnings) == 1
    assert "takes no messages" in report.warnings[0]


def test_a_list_without_the_turn_that_calls_nothing_is_of_the_wrong_length(environment):
    report = tried(environment(BY_TURN.format(messages="", returns="self.calls")), {})
    assert "returned 2 values; a list of 3 numbers expected, one for each model turn" in report.warnings[0]
    assert "takes no messages" in report.warnings[1]


MESSY = """
    import threading

    SHARED = []

    class Env:
        history = []
        LIMITS = {"a": 1}

        def __init__(self):
            self.shared = SHARED
            self.lock = threading.Lock()

        def __copy__(self):
            return self

        def reset(self): return "say [bold]it[/bold]"

        def tool(self, n): return n

        def boom(self):
            "Raise."
            raise KeyError("x")

        def get_reward(self): return {"a": 1.0, "b": None}
"""


def test_every_problem_of_an_environment_is_a_warning(environment):
    report = tried(environment(MESSY), {"unseen": 1})
    assert report.report.ok
    warnings = "\n".join(report.warnings)
    for expected in (
        "Env.history is a list on the class",
        "attribute shared is the same object in two instances",
        "__copy__ returns the environment itself",
        "attribute lock is not in snapshots",
        "tool tool: it has no docstring",
        "tool tool: parameter n: it has no type hint",
        "get_reward measured nothing",
        "reset takes no 'unseen'",
    ):
        assert expected in warnings
    assert "LIMITS" not in warnings
    assert list(report.trial.omitted) == ["lock"]
    replies = {tool.name: tool.reply for tool in report.trial.tools}
    assert replies["boom"] == "Error: KeyError: 'x'"
    assert "say [bold]it[/bold]" in str(report.report)


BROKEN = """
    from envs.contract import EnvironmentFailure
    class Env:
        def reset(self): self.calls = 0
        def broken(self):
            "A tool."
            raise EnvironmentFailure("the server is gone")
        def look(self):
            "Look."
            self.calls += 1
            return [{"type": "text", "text": "\\x1b[31mred"}, {"type": "image", "image": "data:,"}]
        def draw(self):
            "Draw."
            self.calls += 1
            return Env
        def get_reward(self): return self.calls
"""


DRAWING = """
    import random

    class Env:
        def __init__(self): self.generator, self.episodes = random.Random({born}), 0

        def reset(self, seed, completion_seed, completion_index):
            self.episodes += 1
            self.noise = random.Random(completion_seed).random()
            self.secret = {draws}
            return f"Guess. {shown}"

        def get_reward(self): return 1.0
"""
SECRET = "{self.secret}"


def drawn(report):
    return [warning for warning in report.warnings if "not in snapshots" not in warning]


@pytest.mark.parametrize(
    ("born", "draws", "shown", "words"),
    [
        ("0", "random.randrange(10**9)", SECRET, ["reset returned 'Guess. ", "the same row and seeds", "`seed`"]),
        ("0", "random.randrange(10**9)", "", ["other values in secret;", "`seed`"]),
        ("0", "self.generator.randrange(10**9)", SECRET, ["reset returned 'Guess. ", "the same row and seeds"]),
        ("0", "random.Random(completion_seed).random()", SECRET, ["for completions of one group", "`seed`"]),
        ("0", "completion_index", "x" * 99 + SECRET, ["'.. xxxxxxxxxxxxxxxxxxxx0' and '.. xxxxxxxxxxxxxxxxxxxx1'"]),
    ],
    ids=["shown", "hidden", "by a generator that goes on", "by the completion's seed", "by its index"],
)
def test_a_reset_that_gives_completions_of_a_group_different_tasks_is_a_warning(environment, born, draws, shown, words):
    report = tried(environment(DRAWING.format(born=born, draws=draws, shown=shown)), {})
    assert report.report.ok
    (warning,) = drawn(report)
    assert [word for word in words if word not in warning] == [], warning


@pytest.mark.parametrize("draws", ["random.Random(seed).random()", "7"])
def test_a_task_that_is_drawn_from_the_seed_of_the_group_is_no_warning(environment, draws):
    report = tried(environment(DRAWING.format(born="0", draws=draws, shown=SECRET)), {})
    assert drawn(report) == []


def test_the_check_of_a_slow_reset_takes_no_more_resets_than_it_needs(environment, tmp_path, monkeypatch):
    monkeypatch.setattr("workers.check.instances._ENOUGH_S", -1.0)
    code = f"""
        class Env:
            def reset(self):
                with open({str(tmp_path / "resets")!r}, "a") as file: file.write("x")
            def get_reward(self): return 1.0
    """
    tried(environment(code), {})
    assert (tmp_path / "resets").read_text() == "x" * (1 + 2 + 2)


def test_a_tool_that_breaks_the_environment_is_an_error_and_the_others_are_tried_in_a_new_one(environment):
    report = tried(environment(BROKEN), {})
    assert [tool.name for tool in report.trial.tools] == ["broken", "look", "draw"]
    assert "the server is gone" in report.trial.tools[0].failure
    assert [error for error in report.errors if "tool broken broke the environment" in error] == report.errors
    assert not report.report.ok
    assert report.trial.reward == Measured(2.0)  # of the new instance
    assert [tool.returned for tool in report.trial.tools[1:]] == [
        "content parts: text, image",
        "an object of type builtins.type",
    ]
    assert any("tool draw returned an object of type builtins.type" in warning for warning in report.warnings)
    text = str(report.report)
    assert "\\x1b[31mred" in text
    assert "\x1b[31mred" not in text


def test_given_turns_are_played_in_order_until_the_episode_is_over():
    turns = ["hm", call("open", key=1), "Sesame", "Sesame", "unused"]
    report = tried("tests.cases.answering:Cave", {}, turns=turns)
    assert [(trial.said, trial.reply, trial.ends) for trial in report.trial.turns] == [
        ("hm", "A rumble.", False),
        ("Sesame", "A rumble.", False),
        ("Sesame", "", True),
    ]
    roles = ["assistant", "user", "assistant", "tool", "assistant", "user", "assistant"]
    assert [m["role"] for m in report.trial.messages] == roles
    assert (report.trial.reward, report.report.ok) == (Measured(1.0), True)
    assert any("1 given turns were not played" in warning for warning in report.warnings)
    report = tried("tests.cases.answering:Cave", {}, turns=[call("shut")])
    assert "there is no tool 'shut'; the tools are: open" in report.trial.tools[0].reply


def test_without_given_turns_respond_is_called_once():
    report = tried("tests.cases.answering:Cave", {})
    assert [(tool.name, tool.reply) for tool in report.trial.tools] == [("open", "No lock.")]
    assert [(trial.said, trial.reply) for trial in report.trial.turns] == [("I do not know.", "A rumble.")]
    assert "a turn without a call" in str(report.report)


def test_calls_and_turns_keep_their_order_on_the_command_line():
    turns = ("--say", "Sesame", "--call", 'open={"key": 2}', "--say=Sesame")
    report = json.loads(penstock_check("tests.cases.answering:Cave", "--json", *turns).stdout)
    trial = report["environments"]["tests.cases.answering:Cave"]
    roles = [message["role"] for message in trial["messages"]]
    assert roles == ["assistant", "user", "assistant", "tool", "assistant"]
    assert (trial["tools"][0]["arguments"], trial["reward"]["value"]) == ({"key": 2}, 1.0)
    wrong = CliRunner().invoke(penstock, ["check", "tests.cases.answering:Cave", "--call", "open=key"])
    assert "the arguments are not JSON" in wrong.output


def test_a_coroutine_that_blocks_is_named_with_the_remedy(environment, monkeypatch, blockbuster):
    monkeypatch.setattr("workers.check.check._BLOCK_S", 0.05)
    ref = environment("""
        import time
        class Env:
            def reset(self, **row): pass
            async def look(self) -> str:
                time.sleep(0.2)
                return "around"
        """)
    blockbuster.deactivate()
    (warning,) = (each for each in tried(ref, {"a": 1}).warnings if "event loop" in each)
    assert "Env.look blocks the event loop" in warning
    assert "checked.py:6" in warning
    assert "write `def`" in warning


def test_an_environment_with_its_own_loop_is_run_with_a_scripted_model():
    report = tried("tests.cases.answering:Agent", {}, turns=["Four", "Five"])
    assert (report.report.ok, report.trial.reward) == (True, Measured(1.0))
    assert [m["content"] for m in report.trial.messages] == ["2 + 2?", "Four", "And 2 + 3?", "Five"]
    assert "its own loop, with a scripted model" in str(report.report)
    broken = tried("tests.cases.answering:Agent", {"fail": True})
    assert any("its own loop failed" in error and "no route" in error for error in broken.errors)


@pytest.mark.parametrize("code", ["'good'", "{'a': 1.0, 'b': 'good'}", "self.never_set"])
def test_a_get_reward_that_can_measure_no_episode_is_an_error(environment, code):
    reference = environment(f"""
        class Env:
            def reset(self): self.calls = 0
            def look(self):
                "Look."
                self.calls += 1
            def get_reward(self): return {code}
    """)
    report = tried(reference, {})
    assert not report.report.ok
    assert "get_reward measures nothing" in report.errors[0]
    assert "every completion would be invalid" in report.errors[0]


def test_a_reset_that_needs_the_prompt_of_its_own_rows_learns_how_a_run_gives_it(environment):
    reference = environment("""
        class Env:
            def rows(self): return [{"prompt": "3?", "answer": 3}]
            def reset(self, prompt, answer): self.prompt = prompt
            def get_reward(self): return 1.0
    """)
    report = tried(reference, {})
    assert 'data.columns = { prompt = "prompt" }' in report.errors[0]
    assert (tried(reference, {"prompt": "3?", "answer": 3})).report.ok


def test_a_get_reward_that_raises_in_one_of_the_episodes_is_a_warning(environment):
    reference = environment("""
        class Env:
            def reset(self): self.calls = 0
            def look(self):
                "Look."
                self.calls += 1
            def get_reward(self): return [1.0][self.calls]
    """)
    report = tried(reference, {})
    assert report.report.ok
    assert "get_reward measured nothing in this episode (raised IndexError" in report.warnings[0]


@pytest.mark.parametrize(("idle", "warned"), [("0.0", True), ("None", True), ("-2.0", False)])
def test_a_reward_for_not_acting_above_those_for_acting_is_a_warning(environment, idle, warned):
    reference = environment(f"""
        class Env:
            def reset(self): self.reward = {idle}
            def guess(self):
                "Guess."
                self.reward = -1.0
            def get_reward(self): return self.reward
    """)
    report = tried(reference, {})
    assert report.trial.reward == Measured(-1.0)
    assert [warning for warning in report.warnings if "not acting would pay" in warning] == report.warnings
    assert bool(report.warnings) is warned


def test_a_call_that_hangs_does_not_hang_the_check(environment):
    reference = environment("""
        import time
        class Env:
            def reset(self): pass
            def tool(self):
                "Never returns, as far as we are concerned."
                time.sleep(2)
    """)
    report = tried(reference, overrides=["rollout.call_timeout_s=0.05"])
    assert "did not answer within 0.05 s" in report.trial.tools[0].reply


@pytest.mark.parametrize("is_file", [True, False])
def test_what_user_code_prints_is_not_among_the_json(environment, tmp_path, is_file):
    reference = environment("def Env(completions, **row):\n    print('hello')\n    return [1.0] * len(completions)\n")
    target = reference
    if is_file:
        write_base_model("calculator", tmp_path / "model")
        (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
        file = tmp_path / "my.toml"
        file.write_text(
            f'[model]\npath = "{tmp_path}/model"\n[data]\npath = "{tmp_path}/prompts.jsonl"\n'
            f'[[rewards]]\nref = "{reference}"\n'
        )
        target = str(file)
    result = penstock_check(target, "--json")
    assert json.loads(result.stdout), result.stderr
    assert "hello" in result.stderr


def test_the_command_prints_json_and_exits_with_0_or_1():
    ran = penstock_check("guess", "--json", "--field", "secret=3", "--field", "name=abc", "--field", "empty=")
    report = json.loads(ran.stdout)
    assert (ran.returncode, report["ok"], report["kind"]) == (0, True, "environment")
    guess = report["environments"]["guess"]
    assert guess["fields"] == {"secret": 3, "name": "abc", "empty": ""}
    assert guess["tools"][0]["schema"]["function"]["name"] == "guess"
    ran = penstock_check("nonsense", "--json")
    assert (ran.returncode, json.loads(ran.stdout)["findings"][0]["level"]) == (1, "error")
    wrong = CliRunner().invoke(penstock, ["check", "guess", "--field", "secret"])
    assert "--field secret: write it as name=value" in wrong.output


def test_a_thread_that_hangs_does_not_keep_the_command_from_ending(environment):
    reference = environment("""
        import time
        class Env:
            def reset(self): time.sleep(60)
    """)
    began = time.monotonic()
    ran = penstock_check(reference, "--set", "rollout.call_timeout_s=0.1")
    assert ran.returncode == 1
    assert "0.1 s" in ran.stdout
    assert time.monotonic() - began < 30


def test_an_observation_is_said_to_follow_the_prompt(environment):
    ref = environment("class Env:\n    def reset(self, **row):\n        return 'Tea, please.'\n")
    assert "reset returned, which follows the prompt's last message without a blank" in str(tried(ref, {"a": 1}).report)


SHEET = """
class Env:
    def reset(self, size: int = 2, **row):
        self.cells = list(range(size))

    def rows(self):
        \"\"\"Return the rows of the sheet.\"\"\"
        return {value}

    def get_reward(self):
        return 0.0
"""


@pytest.mark.parametrize(("value", "why"), [("self.cells", "AttributeError"), ("['a', 'b']", "not a mapping")])
def test_a_tool_that_is_taken_for_the_data_is_named_with_the_remedy(environment, value, why):
    ref = environment(SHEET.format(value=value))
    (warning,) = (tried(ref, {"size": 3})).warnings
    (error,) = (tried(ref, {})).errors
    for text in (warning, error):
        assert why in text
        assert "is the environment's data, and no tool" in text
        assert "give it another name" in text
