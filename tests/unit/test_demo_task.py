import random
import re
import subprocess
import sys
from itertools import islice

import pytest

from envs.builtin.calculator import Calculator
from tests.base_models.demo_transcripts import HABIT_SHARES, Behavior, build_transcript, transcripts
from workers.demo.task import MAX_ROWS, Operation, held_out_rows, is_held_out, training_problems, training_rows


def problems(n=500, seed=7):
    return list(islice(training_problems(seed), n))


def test_the_answer_solves_the_text():
    words = {"plus": lambda a, b: a + b, "minus": lambda a, b: a - b, "times": lambda a, b: a * b}
    for row in training_rows(500, 3) + held_out_rows(200, 3):
        number = r"(\d+)"
        text = rf"Start with {number}, (plus|minus|times) {number}, then (plus|minus|times) {number}\."
        a, first, b, second, c = re.fullmatch(text, row["problem"]).groups()
        assert row["answer"] == words[second](words[first](int(a), int(b)), int(c))
        assert row["prompt"] == [{"role": "user", "content": row["problem"]}]


def test_numbers_are_within_their_ranges():
    for problem in problems():
        first, second = problem.steps
        assert 50 <= first.a <= 99
        assert second.a == first.result >= 0
        assert problem.answer == second.result >= 0
        for step in problem.steps:
            assert 2 <= step.b <= (9 if step.tool == "multiply" else 49)


def test_the_built_in_calculator_agrees_with_every_step():
    calculator = Calculator()
    for step in (step for problem in problems(200) for step in problem.steps):
        assert getattr(calculator, step.tool)(step.a, step.b) == step.result


def test_no_held_out_problem_is_in_the_training_set():
    unseen = {row["problem"] for row in held_out_rows(2000, 1)}
    trained = {row["problem"] for row in training_rows(20_000, 1)}
    imitated = {
        conversation[0]["content"]
        for habit in (False, True)
        for conversation in islice(transcripts(1, habit=habit), 5000)
    }
    assert all(is_held_out(text) for text in unseen)
    assert not unseen & (trained | imitated)
    assert not any(is_held_out(text) for text in trained | imitated)


def test_an_epoch_of_sixty_steps_has_no_repeated_problem():
    rows = training_rows(60 * 16, 0)
    assert len({row["problem"] for row in rows}) == len(rows) == 960


def test_a_seed_gives_the_same_rows_in_another_process():
    code = (
        "from workers.demo.task import held_out_rows, training_rows; print(training_rows(50, 5), held_out_rows(50, 5))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50).stdout
    assert output == f"{training_rows(50, 5)} {held_out_rows(50, 5)}\n"
    assert training_rows(50, 5) != training_rows(50, 6)


def test_more_rows_than_can_be_drawn_quickly_are_refused():
    with pytest.raises(ValueError, match="at most 100000"):
        training_rows(MAX_ROWS + 1, 0)
    with pytest.raises(ValueError, match="at most 10000"):
        held_out_rows(MAX_ROWS)


def test_the_clean_script_solves_the_problem_and_each_other_script_has_its_own_error():
    rng = random.Random(2)
    for problem in problems(200):
        solved = said(problem, Behavior.CLEAN, rng)
        assert solved == ([*problem.steps], problem.answer)
        first, second = problem.steps
        assert said(problem, Behavior.HASTY, rng) == ([first], first.result)
        assert said(problem, Behavior.NO_TOOL, rng)[0] == []
        calls, answer = said(problem, Behavior.WRONG_TOOL, rng)
        assert [call.tool for call in calls] != [first.tool, second.tool]
        assert [call.b for call in calls] == [first.b, second.b]
        assert answer == calls[-1].result
        calls, _ = said(problem, Behavior.WRONG_ARGUMENT, rng)
        assert [call.tool for call in calls] == [first.tool, second.tool]
        assert calls != list(problem.steps)


def test_habits_occur_with_their_probabilities():
    assert sum(HABIT_SHARES.values()) == pytest.approx(1)
    lengths = [len(conversation) for conversation in islice(transcripts(4, habit=True), 4000)]
    assert lengths.count(4) / 4000 == pytest.approx(0.48, abs=0.03)  # user, call, result, answer
    assert lengths.count(2) / 4000 == pytest.approx(0.10, abs=0.02)
    assert {len(conversation) for conversation in islice(transcripts(4, habit=False), 200)} == {6}


def said(problem, script, rng):
    """Return the calls and the final answer of a scripted episode; each result must be what its call computes."""
    messages = build_transcript(problem, script, rng)
    assert messages[0] == {"role": "user", "content": problem.text}
    calls = []
    for call, result in zip(messages[1:-1:2], messages[2:-1:2], strict=True):
        function = call["tool_calls"][0]["function"]
        calls.append(Operation(function["name"], **function["arguments"]))
        assert result["role"] == "tool"
        assert result["content"] == str(calls[-1].result)
    return calls, int(re.fullmatch(r"Answer: (-?\d+)", messages[-1]["content"])[1])
