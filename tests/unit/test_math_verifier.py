r"""The reward `math`: known answers; faults of the data, the model and the verifier have different reasons.

Answers are judged in the processes of a pool, as in a run.
"""

import threading
from contextlib import asynccontextmanager
from functools import partial

import anyio
import pytest

from envs.builtin.math_verifier import DEFAULT_VERIFIER, VERIFIERS, Math, math_verify
from envs.call import CallRunner
from envs.rewards import RewardBatch, RewardFunction
from envs.rewards.loading import CallOptions
from envs.rewards.parts import merge_parts
from stream.errors import ReferenceNotFoundError
from stream.records import RewardPart
from stream.validity import Measured, RewardReason, Unmeasured

REF = "envs.builtin.math_verifier:Math"
BAD = RewardReason.BAD_REFERENCE

# (gold, the model's answer, the right verdict)
PAIRS = [
    # numbers
    (r"\frac12", "The answer is 0.5", 1.0),
    ("0.1", "It is 10%", 1.0),
    ("10\\%", r"\boxed{0.1}", 1.0),
    ("1,000", r"\boxed{1000}", 1.0),
    ("1024", r"\boxed{2^{10}}", 1.0),
    ("-5", r"\boxed{-5}", 1.0),
    ("-5", r"\boxed{5}", 0.0),
    ("0", r"\boxed{0}", 1.0),
    ("0", r"\boxed{1}", 0.0),
    ("1/3", r"\boxed{0.333333}", 1.0),  # to six decimal places
    ("1/3", r"\boxed{0.3333}", 0.0),
    ("3.14159", r"\boxed{\pi}", 0.0),
    ("120", r"\boxed{5!}", 1.0),
    (r"\binom{5}{2}", r"\boxed{10}", 1.0),
    ("3+2i", r"\boxed{2i+3}", 1.0),
    (r"e^{i\pi}", r"\boxed{-1}", 0.0),  # a known false negative of math-verify 0.9.0
    (42, r"\boxed{42}", 1.0),
    (0.5, r"\boxed{\frac{1}{2}}", 1.0),
    # expressions
    ("x+1", r"$\boxed{1+x}$", 1.0),
    ("x+1", r"\boxed{x-1}", 0.0),
    ("x^2+2x+1", r"\boxed{(x+1)^2}", 1.0),
    (r"\sqrt{8}", r"\boxed{2\sqrt{2}}", 1.0),
    (r"2\pi", r"\boxed{\pi \cdot 2}", 1.0),
    (r"\sin^2 x + \cos^2 x", r"\boxed{1}", 1.0),
    (r"\log 2", r"\boxed{\log 3}", 0.0),
    ("x=3", r"\boxed{3}", 1.0),
    ("3", r"\boxed{x=3}", 1.0),
    ("y=2x+1", r"\boxed{y=1+2x}", 1.0),
    (r"90^\circ", r"\boxed{90}", 1.0),
    (r"12 \text{ cm}", r"\boxed{12}", 1.0),
    # sets, intervals, vectors
    (r"\{1,2\}", r"\boxed{\{2,1\}}", 1.0),
    (r"\{1,2\}", r"\boxed{\{1,2,3\}}", 0.0),
    ("1,2,3", r"\boxed{1, 2, 3}", 1.0),
    ("(1,2)", r"\boxed{(1,2)}", 1.0),
    ("(1,2)", r"\boxed{(2,1)}", 0.0),
    ("[1,2)", r"\boxed{[1,2]}", 0.0),
    (r"x \leq 3", r"\boxed{(-\infty,3]}", 1.0),
    (r"(-\infty,3]", r"\boxed{x \leq 3}", 0.0),  # another known false negative: only the reverse direction matches
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", 1.0),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}2\\1\end{pmatrix}}", 0.0),
    # notation
    ("$4$", "4", 1.0),
    (r"\boxed{4}", r"\boxed{4}", 1.0),
    ("4", "First 3, then 5. The final answer is $4$. I hope it is correct.", 1.0),
    ("A", r"\boxed{A}", 1.0),
    ("A", r"\boxed{B}", 0.0),
    # a solution, then the answer, as the data set GSM8K has them
    ("She sold 48/2 = <<48/2=24>>24 clips in May.\n48+24 = <<48+24=72>>72 altogether.\n#### 72", "So it is 72.", 1.0),
    ("First 3, then 5.\n#### 72", r"\boxed{5}", 0.0),
    ("A year has 12 months.\n#### 2,125", r"\boxed{2125}", 1.0),
    ("The temperature falls.\n#### -5 \n", r"\boxed{-5}", 1.0),
    ("72\n####", "72", BAD),
    ("72\n#### nan", "72", BAD),
    # traps
    ("4", r"\boxed{3} or rather \boxed{4}", 0.0),  # two answers count as none
    ("4", "I think 3, or 4", 1.0),  # a known false positive of math-verify 0.9.0: the last number counts
    ("4", "I think 4, or 3", 0.0),
    ("4", "I do not know", 0.0),  # an answer that does not parse is the model's fault
    ("4", "", 0.0),
    ("4", r"\boxed{\frac{1}{}", 0.0),
    ("4", "4" * 5000, 0.0),  # sympy raises on it
    ("100000", r"\boxed{1e5}", 0.0),  # read as 1*e*5
    # gold answers that cannot be compared
    ("", "4", BAD),
    ("$$", "4", BAD),
    ("?", "4", BAD),
    (r"\frac{1}{", r"\boxed{1}", BAD),
    (None, "4", BAD),
    (True, "1", BAD),
    (float("nan"), r"\boxed{nan}", BAD),  # a missing value in a data frame
    ("NaN", "4", BAD),
    (r"\text{nan}", "4", BAD),
    (float("inf"), r"\boxed{\infty}", 1.0),
    (["4"], "4", BAD),
]


def batch_of_pairs(*pairs):
    completions = [completion for _, completion in pairs]
    golds = [gold for gold, _ in pairs]
    return RewardBatch(["?"] * len(pairs), completions, [[]] * len(pairs), columns={"answer": golds, "other": golds})


@asynccontextmanager
async def opened(**calling):
    function = await anyio.to_thread.run_sync(
        partial(RewardFunction.load, REF, name="math", call_options=CallOptions(**calling))
    )
    async with function.open():
        yield function


def outcome(reward):
    return reward.value if isinstance(reward, Measured) else reward.reason


async def test_known_answers_get_their_rewards():
    assert len(PAIRS) >= 50
    async with opened(processes=1) as function:
        rewards = await function(batch_of_pairs(*((gold, text) for gold, text, _ in PAIRS)), 30)
    results = [(gold, text, outcome(reward)) for (gold, text, _), reward in zip(PAIRS, rewards, strict=True)]
    assert results == PAIRS


@pytest.mark.parametrize(("gold", "text", "expected"), PAIRS)
def test_each_trap_is_a_known_answer(gold, text, expected):
    assert outcome(math_verify(gold, text)) == expected


HANGS = r"\boxed{9^{9^{9^9}}}"


UNMANAGEABLE = [HANGS, r"\boxed{10^{10^{10}}}", r"\boxed{2^{1000000000}}", r"\boxed{100000000!}"]


async def test_an_answer_that_hangs_the_verifier_is_measured_0_with_its_reason_and_costs_no_sibling_its_reward():
    async with opened(timeout_s=0.5, processes=2) as function:
        pairs = [*[("4", said) for said in UNMANAGEABLE], ("4", "4"), ("4", "5"), *[("4", r"\boxed{4}")] * 12]
        rewards = await function(batch_of_pairs(*pairs), 30)
    assert [outcome(reward) for reward in rewards] == [*[0.0] * len(UNMANAGEABLE), 1.0, 0.0, *[1.0] * 12]
    for reward in rewards[: len(UNMANAGEABLE)]:
        assert (reward.reason, reward.detail) == (
            RewardReason.TIMEOUT,
            "math-verify could not judge the answer: did not return within 0.5 s",
        )
    assert all(reward == Measured(reward.value) for reward in rewards[len(UNMANAGEABLE) :])


def shorten_timeout(monkeypatch):
    Math().prepare()  # the first parse loads the grammar: more than a second on a busy machine
    monkeypatch.setattr("envs.builtin.math_verifier._TIMEOUT_S", 1)


def test_the_verifiers_own_timeout_on_an_answer_is_a_measured_0_with_its_reason(monkeypatch):
    shorten_timeout(monkeypatch)
    reward = math_verify("1", HANGS)  # in this main thread
    assert (outcome(reward), reward.reason) == (0.0, RewardReason.TIMEOUT)
    assert "compare" in reward.detail


def test_a_gold_answer_that_hangs_the_verifier_makes_no_answer_wrong(monkeypatch):
    shorten_timeout(monkeypatch)
    assert outcome(math_verify(r"10^{10^{10}}", "4")) is RewardReason.TIMEOUT
    assert math_verify(r"10^{10^{10}}", r"\boxed{10^{10^{10}}}") == Measured(1.0)


async def test_a_gold_answer_that_cannot_be_compared_measures_nothing_when_the_process_is_killed():
    async with opened(timeout_s=0.5, processes=1) as function:
        (reward,) = await function(batch_of_pairs((r"10^{10^{10}}", "4")), 30)
    assert outcome(reward) is RewardReason.TIMEOUT


@pytest.mark.parametrize("error", [MemoryError(), RecursionError("too deep"), ValueError("4300 digits")])
def test_an_answer_on_which_the_verifier_raises_is_a_measured_0_with_its_reason(monkeypatch, error):
    import math_verify as library

    real = library.verify

    def verify(gold, answer, **options):
        if "777" in map(str, answer):
            raise error
        return real(gold, answer, **options)

    monkeypatch.setattr(library, "verify", verify)
    reward = math_verify("4", "777")
    assert (outcome(reward), reward.reason) == (0.0, RewardReason.RAISED)
    assert type(error).__name__ in reward.detail


def test_a_verifier_that_compares_nothing_any_more_measures_nothing(monkeypatch):
    import math_verify as library

    def broken(*_, **__):
        raise AttributeError("another version of sympy")

    monkeypatch.setattr(library, "verify", broken)
    with pytest.raises(AttributeError, match="sympy"):
        math_verify("4", "4")


async def test_in_a_thread_the_reward_is_unmeasured_and_not_0():
    """This is why `math` uses processes: in a thread the verifier measures nothing."""
    outcome_there = await CallRunner(anyio.CapacityLimiter(1)).call(math_verify, {"gold": "4", "said": "4"}, 30)
    assert not isinstance(getattr(outcome_there, "value", None), Measured)


def test_omitting_the_verifier_equals_naming_the_default():
    assert threading.current_thread() is threading.main_thread()
    assert VERIFIERS[DEFAULT_VERIFIER] is math_verify
    for gold, text, _ in PAIRS[:12]:
        named = Math(verifier="math_verify")(completions=[text], answer=[gold])
        assert Math()(completions=[text], answer=[gold]) == named != []


def test_the_named_verifier_is_used(monkeypatch):
    monkeypatch.setitem(VERIFIERS, "generous", lambda gold, text, precision: Measured(0.75))
    assert Math(verifier="generous")(completions=["x"], answer=["4"]) == [Measured(0.75)]
    assert Math()(completions=["x"], answer=["4"]) == [Measured(0.0)]


def test_an_unknown_verifier_is_refused_at_the_start():
    with pytest.raises(ReferenceNotFoundError, match="no verifier 'mathruler'; known verifiers: math_verify"):
        RewardFunction.load(REF, args={"verifier": "mathruler"})


def test_a_missing_library_is_reported_with_the_extra(monkeypatch):
    monkeypatch.setattr("envs.builtin.math_verifier.find_spec", lambda name: None)
    with pytest.raises(ReferenceNotFoundError, match=r"penstock\[math\]"):
        RewardFunction.load(REF)


def test_the_column_with_the_gold_answers_and_the_precision_are_arguments():
    assert Math(answer="gold")(completions=["4"], gold=["4"], answer=["5"]) == [Measured(1.0)]
    assert Math(precision=2)(completions=["0.333"], answer=["1/3"]) == [Measured(1.0)]
    with pytest.raises(KeyError, match="no column 'gold'"):
        Math(answer="gold")(completions=["4"], answer=["4"])


def test_the_models_last_message_counts():
    messages = [
        {"role": "assistant", "content": r"\boxed{3}"},
        {"role": "tool", "content": r"\boxed{5}"},
        {"role": "assistant", "content": [{"type": "text", "text": r"\boxed{4}"}]},
        {"role": "user", "content": r"\boxed{6}"},
    ]
    assert Math()(completions=[messages, [], [{"role": "assistant", "content": None}]], answer=["4"] * 3) == [
        Measured(1.0),
        Measured(0.0),
        Measured(0.0),
    ]


async def test_a_policy_that_makes_the_verifier_hang_earns_the_worst_reward_and_is_in_the_baseline():
    async with opened(timeout_s=0.3, processes=1) as function:
        entries = await function(batch_of_pairs(*[("4", "4")] * 3, ("4", HANGS)), 30)
    merged = [merge_parts([RewardPart(name="math", reward=entry)]) for entry in entries]
    assert [outcome(reward) for reward in merged] == [1.0, 1.0, 1.0, 0.0]
    assert (merged[3].reason, merged[3].detail) == (entries[3].reason, f"math: {entries[3].detail}")


THOUGHTS = [
    (r"<think>\boxed{4}</think> I do not know.", 0.0, 1.0),
    (r"<think>\boxed{3}</think> \boxed{4}", 1.0, 0.0),  # the whole text has two answers
    (r"<think>\boxed{4}", 0.0, 1.0),  # cut off while it was thinking
    (r"\boxed{4}</think>", 0.0, 1.0),  # the prompt opened the block
    (r"<think>a</think> \boxed{4} </think>", 0.0, 1.0),
    (r"[THINK]\boxed{4}[/THINK] I do not know.", 0.0, 1.0),
    (r"It is \boxed{4}. <think>", 1.0, 1.0),  # no block of reasoning
    (r"\boxed{4}", 1.0, 1.0),
]


@pytest.mark.parametrize(("text", "after", "whole"), THOUGHTS)
def test_the_answer_after_the_reasoning_is_graded_unless_the_whole_message_is_asked_for(text, after, whole):
    assert Math()(completions=[text], answer=["4"]) == [Measured(after)]
    assert Math(reasoning_delimiters=[])(completions=[text], answer=["4"]) == [Measured(whole)]


def test_the_delimiters_of_the_reasoning_may_be_named():
    text = r"<reason>\boxed{3}</reason>\boxed{4}"
    assert Math(reasoning_delimiters=["</reason>"])(completions=[text], answer=["4"]) == [Measured(1.0)]
    with pytest.raises(ReferenceNotFoundError, match="a list of texts"):
        RewardFunction.load(REF, args={"reasoning_delimiters": "</think>"})


def test_a_gold_answer_is_judged_before_the_prediction():
    assert math_verify("?", "no idea") == Unmeasured(BAD, "the gold answer '?' is not an expression")


@pytest.mark.parametrize("error", [OSError("no file can be opened"), ModuleNotFoundError("no antlr4")])
def test_a_system_error_while_parsing_a_prediction_is_not_a_wrong_answer(monkeypatch, error):
    import math_verify as library

    def parse(text, configs, **limits):
        if text == r"\boxed{4}":
            return real(text, configs, **limits)
        raise error

    real = library.parse
    monkeypatch.setattr(library, "parse", parse)
    with pytest.raises(type(error)):
        math_verify("4", "It is 4.")
