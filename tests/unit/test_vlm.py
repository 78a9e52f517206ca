"""The reward `vlm`: the exact rules of its parts, and their weighted sum."""

from contextlib import AsyncExitStack
from functools import partial

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.builtin.vlm import PARTS, Vlm, generalized_iou, last_boxed, parse_box
from envs.rewards import RewardBatch, RewardFunction
from envs.rewards.loading import CallOptions
from stream.errors import ReferenceNotFoundError
from stream.records import Completion, Group, Prompt
from stream.validity import Measured, RewardReason
from workers.score.worker import score_group

BAD = RewardReason.BAD_REFERENCE
REF = "envs.builtin.vlm:Vlm"
SLOW_VLM = """
import time
from envs.builtin import vlm

def hang(gold, text):
    time.sleep(60 if text == "hang" else 0)
    return vlm.format_tags(gold, text)

vlm.PARTS["format"] = hang
Vlm = vlm.Vlm
"""
SQUARE = "[0, 0, 1, 1]"


def outcome(reward):
    return reward.value if isinstance(reward, Measured) else reward.reason


@pytest.mark.parametrize(
    ("part", "gold", "text", "expected"),
    [
        ("format", None, "<think>a</think> <answer>b</answer>", 1.0),
        ("format", None, "<think>a\nb</think>", 0.25),
        ("format", None, "<answer></answer>", 0.75),
        ("format", None, "</think><think> answer", 0.0),
        ("exact_alnum", "New York!", "<answer> new-york </answer>", 1.0),
        ("exact_alnum", "New York!", "<answer>york</answer>", 0.0),
        ("exact_alnum", "b", "b", 0.0),  # no tags, no answer
        ("exact_alnum", 7, "<answer>7.</answer>", 1.0),
        ("exact_alnum", "?!", "<answer>?!</answer>", BAD),
        ("exact_alnum", "?!", "nothing", BAD),
        ("exact_alnum", None, "<answer>None</answer>", BAD),
        ("math_expr", r"\frac12", "<answer>0.5</answer>", 1.0),
        ("math_expr", r"\frac12", "<answer>0.6</answer>", 0.0),
        ("math_expr", r"\frac12", "0.5", 0.0),
        ("math_expr", "?", "0.5", BAD),
        ("bbox_giou", SQUARE, f"<answer>{SQUARE}</answer>", 1.0),
        ("bbox_giou", SQUARE, "<answer>0, 0, 1, 2</answer>", 0.5),
        ("bbox_giou", SQUARE, "<answer>[2, 0, 3, 1]</answer>", -1 / 3),
        ("bbox_giou", SQUARE, "<answer>[nan,0,1,1]</answer>", 0.0),
        ("bbox_giou", SQUARE, "<answer>[0,0,inf,1]</answer>", 0.0),
        ("bbox_giou", SQUARE, "<answer>[1,1,0,0]</answer>", 0.0),  # reversed
        ("bbox_giou", SQUARE, "<answer>[0,0,0,1]</answer>", 0.0),  # no area
        ("bbox_giou", SQUARE, "<answer>[0,0,1]</answer>", 0.0),
        ("bbox_giou", SQUARE, "<answer>a box</answer>", 0.0),
        ("bbox_giou", SQUARE, SQUARE, 0.0),
        ("bbox_giou", [0, 0, 0.01, 0.01], "<answer>0,0,.01,.01</answer>", 1.0),  # small boxes count
        ("bbox_giou", "[nan,0,1,1]", f"<answer>{SQUARE}</answer>", BAD),
        ("bbox_giou", "[1,1,0,0]", "<answer>[1,1,0,0]</answer>", BAD),
        ("bbox_giou", None, "nothing", BAD),
        ("bbox_giou", "[0,0,1e200,1e200]", f"<answer>{SQUARE}</answer>", BAD),  # its area overflows
        ("bbox_giou", "[0,0,1e999,1]", f"<answer>{SQUARE}</answer>", BAD),
        ("bbox_giou", [0, 0, 10**400, 1], f"<answer>{SQUARE}</answer>", BAD),
        ("bbox_giou", "[0,0,1e-200,1e-200]", f"<answer>{SQUARE}</answer>", BAD),  # its area underflows
        ("bbox_giou", SQUARE, "<answer>[0,0,1e200,1e200]</answer>", -1.0),
        ("bbox_giou", SQUARE, "<answer>[-1e308,0,1e308,1]</answer>", -1.0),
        ("bbox_giou", SQUARE, "<answer>[0,0,1e999,1]</answer>", -1.0),
        ("bbox_giou", SQUARE, "<answer>[1e200,1e200,1e201,1e201]</answer>", -1.0),
        ("geo3k", "4", r"<think>a</think> \boxed{3} \boxed{4}", 1.0),
        ("geo3k", "4", r"\boxed{4}", 0.9),
        ("geo3k", "4", r"</think> \boxed{5}", 0.1),
        ("geo3k", "4", "4", 0.0),
        ("geo3k", "?", r"</think> \boxed{5}", BAD),
    ],
)
def test_each_part_scores_known_answers(part, gold, text, expected):
    result = outcome(PARTS[part](gold, text))
    assert result == (pytest.approx(expected) if isinstance(expected, float) else expected)


async def test_an_answer_that_hangs_the_verifier_costs_its_own_parts_only():
    function = await anyio.to_thread.run_sync(
        partial(
            RewardFunction.load,
            "envs.builtin.vlm:Vlm",
            args={"parts": {"format": 2, "math_expr": 1, "geo3k": 1}},
            call_options=CallOptions(timeout_s=0.5),
        )
    )
    said = r"<think>a</think> \boxed{2^{1000000000}} <answer>2^{1000000000}</answer>"
    async with function.open():
        (found,) = await function(RewardBatch(["?"], [said], [[]], columns={"answer": ["4"]}), 30)
    assert {name: reward.value for name, reward in found.by_name.items()} == {
        "format": 0.5,
        "math_expr": 0.0,
        "geo3k": pytest.approx(0.025),
    }
    assert [reward.reason for reward in found.by_name.values()] == [None, RewardReason.TIMEOUT, RewardReason.TIMEOUT]


LONG = {
    "closings and an open box": "</think>" * 27_100 + r"\boxed{4",
    "openings": "<think>" * 50_000,
    "closings and openings of boxes": r"</think>\boxed{" * 25_000,
    "openings of answers": "<answer>" * 40_000,
    "one character": "a" * 300_000,
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
async def test_every_part_reads_a_very_long_answer_within_the_calls_deadline(text):
    args = {"parts": dict.fromkeys(PARTS, 1), "answer": "gold"}
    golds = {"exact_alnum": "b", "math_expr": "4", "bbox_giou": SQUARE, "geo3k": "4", "format": None}
    async with AsyncExitStack() as stack:
        for part, gold in golds.items():
            load = partial(RewardFunction.load, REF, args=args | {"parts": {part: 1}})
            function = await anyio.to_thread.run_sync(load)
            await stack.enter_async_context(function.open())
            (found,) = await function(RewardBatch(["?"], [text], [[]], columns={"gold": [gold]}), 5)
            assert isinstance(found.by_name[part], Measured), found.by_name[part]
            assert found.by_name[part].reason is None


async def test_a_part_that_does_not_end_is_measured_at_the_worst_value_of_every_part(tmp_path, monkeypatch):
    """A part that hangs before the verifier is asked is the answer's fault too, once the gold answers are read."""
    (tmp_path / "slow_vlm.py").write_text(SLOW_VLM)
    monkeypatch.syspath_prepend(tmp_path)
    parts = {"format": 1, "bbox_giou": 1}
    function = await anyio.to_thread.run_sync(
        partial(RewardFunction.load, "slow_vlm:Vlm", args={"parts": parts}, call_options=CallOptions(timeout_s=1))
    )
    async with function.open():
        columns = {"answer": [SQUARE, "no box"]}
        found, bad = await function(RewardBatch(["?"] * 2, ["hang"] * 2, [[]] * 2, columns=columns), 30)
    assert {name: (r.value, r.reason) for name, r in found.by_name.items()} == {
        "format": (0.0, RewardReason.TIMEOUT),
        "bbox_giou": (-0.5, RewardReason.TIMEOUT),
    }
    assert outcome(bad.by_name["bbox_giou"]) is BAD


def test_parts_are_weighted_by_their_share_and_returned_separately():
    (parts,) = Vlm({"format": 1, "exact_alnum": 3})(completions=["<answer>b</answer>"], answer=["b"])
    assert {name: outcome(reward) for name, reward in parts.items()} == {"format": 0.75 / 4, "exact_alnum": 0.75}


def test_a_bad_gold_answer_invalidates_only_parts_that_need_it():
    (parts,) = Vlm({"format": 1, "bbox_giou": 1})(completions=["<answer>b</answer>"], answer=["b"])
    assert outcome(parts["format"]) == 0.375
    assert outcome(parts["bbox_giou"]) is BAD


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"colour": 1}, "no part 'colour'; known parts: format, exact_alnum"),
        ({}, "one of them above 0"),
        ({"format": 0}, "one of them above 0"),
        ({"format": 2, "geo3k": -1}, "at least 0"),
        ({"format": float("nan")}, "at least 0"),
    ],
)
def test_invalid_parts_are_refused_at_the_start(parts, words):
    with pytest.raises(ReferenceNotFoundError, match=words):
        RewardFunction.load("envs.builtin.vlm:Vlm", args={"parts": parts})


numbers = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(numbers, min_size=4, max_size=4), st.lists(numbers, min_size=4, max_size=4))
def test_the_reward_is_within_bounds_for_any_boxes(gold, text):
    reward = PARTS["bbox_giou"](gold, f"<answer>{text}</answer>")
    assert outcome(reward) is BAD if parse_box(gold) is None else -1 <= reward.value <= 1


def test_boxes_that_overlap_have_a_known_giou():
    assert generalized_iou((0, 0, 2, 2), (1, 1, 3, 3)) == pytest.approx(1 / 7 - 2 / 9)
    assert generalized_iou((0, 1, 5, 7), (2, 4, 9, 6)) == pytest.approx(6 / 38 - 16 / 54)


@pytest.mark.parametrize(
    ("text", "expected"),
    [(r"\boxed{a} \boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\boxed{a", None), ("a", None), (r"\boxed{}", "")],
)
def test_the_last_box_is_read_to_its_matching_brace(text, expected):
    assert last_boxed(text) == expected


async def test_scoring_stores_each_part_in_the_record():
    function = await anyio.to_thread.run_sync(
        partial(
            RewardFunction.load, "envs.builtin.vlm:Vlm", 2.0, name="vlm", args={"parts": {"format": 1, "math_expr": 1}}
        )
    )
    turns = ["<think></think><answer>4</answer>", "5"]
    group = Group(
        prompt=Prompt(id="p", messages=[], is_plain_text=True, fields={"answer": "4"}),
        completions=[Completion(index=i, messages=[{"role": "assistant", "content": s}]) for i, s in enumerate(turns)],
    )
    async with function.open():
        await score_group(group, [function], {}, 30)
    right, wrong = group.completions
    assert [(part.name, part.weight, part.reward) for part in right.parts] == [
        ("vlm.format", 2.0, Measured(0.5)),
        ("vlm.math_expr", 2.0, Measured(0.5)),
    ]
    assert right.reward == Measured(2.0)
    assert wrong.reward == Measured(0.0)
