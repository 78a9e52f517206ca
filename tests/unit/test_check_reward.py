"""`penstock check` calls a reward function with sample rows, as a scorer would."""

import textwrap

import pytest

from stream.validity import Measured, RewardReason, Unmeasured
from tests.cases.checks import tried
from workers.check.check import check, is_reward_function
from workers.check.report_text import schema_summary


@pytest.fixture
def function(tmp_path):
    """Write a file with this code; return a reference to its function `f`."""

    def write(code):
        path = tmp_path / "reward.py"
        path.write_text(textwrap.dedent(code))
        return f"{path}:f"

    return write


def rewards(report):
    (trial,) = report.report.rewards.values()
    return [sample.reward for sample in trial.samples]


EXACT = """
def f(completions, answer, **columns):
    return [float(str(a) in str(c)) for c, a in zip(completions, answer)]
"""


def test_a_good_function_is_called_with_texts_and_messages(function):
    report = tried(function(EXACT), {"answer": 7})
    assert report.report.ok
    assert (report.errors, report.warnings) == ([], [])
    assert rewards(report) == [Measured(value) for value in (0.0, 0.0, 1.0, 1.0)] * 2
    text = str(report.report)
    assert "It asks for completions, answer." in text
    assert "The answer is \\boxed{7}." in text
    assert "It is usable: no errors, no warnings." in text


def test_a_missing_column_is_requested(function):
    report = tried(function(EXACT), {})
    assert report.errors == ["it asks for a column 'answer'; give its value with --field answer=VALUE"]
    assert "It is not usable" in str(report.report)


def test_a_function_that_reads_environments_gets_snapshots(function):
    ref = function("def f(environments, **columns):\n    return [float(len(e.guesses)) for e in environments]\n")
    assert "give one with --env REF" in (tried(ref, {})).errors[0]
    report = tried(ref, {"secret": 3}, environment="guess")
    assert report.report.ok
    assert set(rewards(report)) == {Measured(0.0)}
    assert any("every row got the reward 0" in warning for warning in report.warnings)
    failed = tried(ref, {"secret": 0}, environment="guess")
    assert "the row's secret 0 is not between 1 and 100" in failed.errors[0]


@pytest.mark.parametrize(
    ("code", "reason", "error"),
    [
        ("def f(completions, **c): return None", RewardReason.SHAPE, "measured nothing: shape: returned None"),
        ("def f(completions, **c): return [1.0]", RewardReason.SHAPE, "3 numbers expected"),
        (
            "def f(completions, **c): return [None] * len(completions)",
            RewardReason.MISSING,
            "for the answer '' as text, and 2 more",
        ),
        ("def f(completions, **c): return [float('nan')] * len(completions)", RewardReason.NOT_FINITE, "not_finite"),
        ("def f(completions, **c): raise SystemExit(3)", RewardReason.RAISED, "SystemExit: 3"),
        ("def f(completions, **c):\n    import time\n    time.sleep(60)", RewardReason.TIMEOUT, "within 0.1 s"),
    ],
)
def test_a_function_that_measures_nothing_is_not_usable(function, code, reason, error):
    timeout_s = 0.1 if reason is RewardReason.TIMEOUT else 60.0
    report = tried(function(code), overrides=[f"rollout.call_timeout_s={timeout_s}"])
    assert not report.report.ok
    assert error in report.errors[0]
    assert all(isinstance(reward, Unmeasured) and reward.reason is reason for reward in rewards(report))


@pytest.mark.parametrize(
    ("code", "warning"),
    [
        (
            "def f(completions, **c): return [float(c[0]['content'] != '') for c in completions]",
            "as text, and 2 more",
        ),
        (
            "def f(completions, **c): return [None if not x else len(x) for x in completions]",
            "returned None, for",
        ),
        (
            "import random\ndef f(completions, **c): return [random.random() for _ in completions]",
            "two calls on the same",
        ),
        ("def f(completions, **c): return [i / len(completions) for i, _ in enumerate(completions)]", "scored alone"),
    ],
)
def test_surprising_behaviour_is_a_warning(function, code, warning):
    report = tried(function(code), {})
    assert report.report.ok
    assert any(warning in message for message in report.warnings), report.warnings


@pytest.mark.parametrize(
    ("code", "is_one"),
    [
        ("def f(completions, **columns): ...", True),
        ("def f(answer, **columns): ...", True),
        ("def f(): ...", False),
        ("def f(size=3): ...", False),
        ("from typing import Callable\ndef f(size=3) -> Callable: ...", True),
        ("class f:\n    def reset(self): ...", False),
        ("class f:\n    def __call__(self, completions): ...", True),
        ("async def f(prompts, completions): ...", True),
        ("f = 3", False),
    ],
)
def test_reward_functions_and_factories_are_distinguished(function, code, is_one):
    assert is_reward_function(function(code)) is is_one


FACTORY = """
from collections.abc import Callable

def f(limit: int = 3) -> Callable:
    return lambda completions, trainer_state, log_metric, **kwargs: [float(len(c) < limit) for c in completions]
"""


def test_a_factory_of_a_reward_function_is_called_and_its_function_checked(function):
    ref = function(FACTORY)
    report = tried(ref, {"answer": 7}, args={"limit": 5})
    assert (report.report.ok, report.errors) == (True, [])
    assert rewards(report)[0] == Measured(1.0)


def test_a_machine_without_sandboxes_is_a_warning_for_a_function_that_wants_one(monkeypatch):
    monkeypatch.setattr("workers.check.rewards.sandbox_problem", lambda: "bwrap: No permissions")
    (warning,) = tried("math", {"answer": "7"}).warnings
    assert warning.startswith("this machine makes no sandboxes: bwrap: No permissions; so its child processes can read")


def test_environments_and_reward_functions_are_told_apart(function):
    assert "a reward function found as entry point" in str(check("calculator_answer", fields={"answer": 3}))
    assert "an environment found as entry point" in str(check("guess", fields={"secret": 3}))
    assert check(function(EXACT), fields={"answer": 1}).kind == "reward function"


def test_arguments_reach_the_factory_and_the_function(tmp_path):
    path = tmp_path / "sized.py"
    path.write_text(
        "class World:\n    def __init__(self, size): self.size = size\n    def reset(self): return 'x' * self.size\n\n"
        "def reward(completions, worth): return [worth] * len(completions)\n"
    )
    assert tried(f"{path}:World", args={"size": 3}).trial.observation == "xxx"
    assert not check(f"{path}:World", args={"width": 3}).ok
    assert check(f"{path}:reward", args={"worth": 2.5}).ok


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer", "minimum": 0}, "integer >= 0"),
        ({"type": "string", "enum": ["a", "b"]}, '"a" | "b"'),
        ({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]}, "[string, ...] | null"),
        ({"type": "array", "prefixItems": [{"type": "integer"}, {}]}, "[integer, anything]"),
        (
            {"type": "object", "properties": {"a": {"$ref": "#/$defs/T"}, "b": {"type": "number"}}, "required": ["a"]},
            "{a: T, b?: number}",
        ),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, "{...: integer}"),
        ({"type": ["string", "null"]}, "string | null"),
    ],
)
def test_a_schema_is_summarized_in_one_line(schema, text):
    assert schema_summary(schema) == text
