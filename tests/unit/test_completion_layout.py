"""Rows joined per completion and split again, against hand-written results and a loop over every token."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.train.algorithms.completion_layout import CompletionLayout, LeftPacking

# p prompt, a sampled, x sampled and rejected, t tool, . padding
ROWS = ["ppaata.", "pppppax", "paxtata", "pppxx..", "ppppaa."]
COMPLETIONS = [1, 0, 2, 1, 1]


def trajectories(rows=ROWS, owners=COMPLETIONS, completions=4, width=None):
    width = max((len(row) for row in rows), default=0) if width is None else width
    padded = [row.ljust(width, ".") for row in rows]

    def marks(letters):
        return torch.tensor([[letter in letters for letter in row] for row in padded], dtype=torch.bool)

    tokens, sampled = (marks(letters).view(len(rows), width) for letters in ("a", "ax"))
    return CompletionLayout(torch.tensor(owners, dtype=torch.int64), completions, tokens, sampled)


def numbered(rows=5, width=7):
    """Return 10 * row + position."""
    return torch.tensor([[10.0 * r + t for t in range(width)] for r in range(rows)]).view(rows, width)


def test_rows_are_concatenated_and_tool_tokens_keep_their_place():
    laid = trajectories()
    assert laid.to_dense(numbered(), fill=-1).tolist() == [
        [15, 16, -1, -1, -1, -1],
        [2, 3, 4, 5, 44, 45],
        [21, 22, 23, 24, 25, 26],
        [-1] * 6,
    ]
    assert laid.mask_CT.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 1, 1, 1],
        [1, 0, 0, 1, 0, 1],
        [0] * 6,
    ]


def test_a_row_without_counted_tokens_has_no_effect():
    rejected, never = trajectories(["paax", "pxx", "pa"], [0, 0, 0], 1), trajectories(["paax", "pa"], [0, 0], 1)
    assert torch.equal(rejected.mask_CT, never.mask_CT)


def test_values_are_put_back_into_rows():
    laid = trajectories()
    back = laid.to_rows(laid.to_dense(numbered()))
    assert back.tolist() == [
        [0, 0, 2, 3, 4, 5, 0],
        [0, 0, 0, 0, 0, 15, 16],
        [0, 21, 22, 23, 24, 25, 26],
        [0] * 7,
        [0, 0, 0, 0, 44, 45, 0],
    ]


def test_a_reward_is_placed_on_the_last_counted_token():
    placed = trajectories().on_last_token(torch.tensor([1.0, 2, 3, 4]))
    assert placed.tolist() == [[1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 2], [0, 0, 0, 0, 0, 3], [0] * 6]


@pytest.mark.parametrize("row", ["pata", "patatt", "patatx", "patatx.."])
def test_tool_tokens_and_rejected_tokens_at_the_end_get_no_reward(row):
    laid = trajectories([row], [0], 1)
    assert laid.on_last_token(torch.tensor([5.0]))[0, :3].tolist() == [0.0, 0.0, 5.0]
    assert laid.to_rows(laid.on_last_token(torch.tensor([5.0])))[0, :4].tolist() == [0, 0, 0, 5.0]


def test_prompts_and_padding_take_no_space():
    short = trajectories(["paa", "pata"], [0, 1], 2)
    long = trajectories(["pppppaa", "ppppppppata"], [0, 1], 2, width=20)
    assert torch.equal(short.mask_CT, long.mask_CT)


def test_types_are_kept():
    laid = trajectories()
    assert laid.to_dense(numbered().double()).dtype == torch.float64
    assert laid.to_dense(numbered().long()).dtype == torch.int64
    assert laid.mask_CT.dtype == torch.bool


def test_gradients_pass_through():
    laid, values = trajectories(), numbered().requires_grad_()
    laid.to_rows(laid.to_dense(values) * 2).sum().backward()
    assert values.grad.sum() == 2 * (4 + 2 + 6 + 2)


@pytest.mark.parametrize(
    ("rows", "owners", "completions"), [([], [], 0), ([], [], 3), (["ppp", "pxx"], [1, 0], 2), (["", ""], [0, 0], 2)]
)
def test_an_empty_batch_gives_an_empty_layout(rows, owners, completions):
    laid = trajectories(rows, owners, completions)
    width = max((len(row) for row in rows), default=0)
    assert laid.mask_CT.shape == (completions, 0)
    assert laid.on_last_token(torch.full((completions,), math.nan)).shape == (completions, 0)
    assert laid.to_rows(laid.to_dense(numbered(len(rows), width))).tolist() == [[0.0] * width] * len(rows)


written = st.lists(st.tuples(st.integers(0, 3), st.text("paxt.", max_size=6)), max_size=8)


@given(written)
def test_the_layout_equals_a_loop_over_the_rows(written):
    owners, rows = [owner for owner, _ in written], [row for _, row in written]
    laid = trajectories(rows, owners)
    width = max((len(row) for row in rows), default=0)
    lines = [[] for _ in range(4)]
    for r, (owner, row) in enumerate(written):
        sampled = [t for t, letter in enumerate(row) if letter in "ax"]
        if "a" in row:
            lines[owner] += [(r, t, row[t]) for t in range(sampled[0], sampled[-1] + 1)]
    longest = max(len(line) for line in lines)
    expected = [[10.0 * r + t for r, t, _ in line] + [-1.0] * (longest - len(line)) for line in lines]
    counting = [[letter == "a" for *_, letter in line] + [False] * (longest - len(line)) for line in lines]
    assert laid.to_dense(numbered(len(rows), width), fill=-1.0).tolist() == expected
    assert laid.mask_CT.tolist() == counting


def test_packing_moves_masked_tokens_to_the_left_and_unpacking_reverts_it():
    mask = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()
    values = torch.where(mask, numbered(3, 4), math.nan)
    packing = LeftPacking(mask)
    packed = packing.pack(values)
    assert packed.tolist() == [[1, 3, 0, 0], [0, 0, 0, 0], [20, 21, 22, 23]]
    assert packing.mask_CN.int().tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
    assert packing.unpack(packed).tolist() == [[0, 1, 0, 3], [0, 0, 0, 0], [20, 21, 22, 23]]


def test_packing_works_on_tensors_that_are_not_contiguous():
    mask = torch.tensor([[0, 1], [1, 1], [1, 0]]).bool()
    values = numbered(2, 3).t()
    assert LeftPacking(mask).pack(values).tolist() == [[10, 0], [1, 11], [2, 0]]
