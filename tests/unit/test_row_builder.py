"""Rows under construction: their ids grow with their JSON, and a copy grows on its own."""

import json

from hypothesis import given
from hypothesis import strategies as st

from stream.records import Span
from workers.rollout.engine_client.sampling import SampledTurn
from workers.rollout.rows import RowBuilder
from workers.rollout.token_ids import TokenIds

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5)


@given(start=IDS, pieces=st.lists(IDS, max_size=5))
def test_ids_and_their_json_grow_together(start, pieces):
    ids, whole = TokenIds(start), list(start)
    for piece in pieces:
        ids.extend(piece)
        whole += piece
    assert (list(ids), json.loads(ids.json), ids.tolist(), len(ids)) == (whole, whole, whole, len(whole))
    assert ids[-3:] == whole[-3:]
    assert ids.is_prefix_of(TokenIds([*whole, 7]))
    assert not TokenIds([*whole, 7]).is_prefix_of(ids)
    ids.extend(TokenIds(start))
    assert (ids.tolist(), json.loads(ids.json)) == ([*whole, *start], [*whole, *start])


def test_a_copy_of_a_row_grows_on_its_own():
    row = RowBuilder([1, 2])
    row.append_sample(SampledTurn([3], [-1.0], "stop", [Span(0, 0, 1)]))
    copied = row.copy()
    copied.append_context([4])
    copied.append_sample(SampledTurn([5], [-2.0], "stop", [Span(1, 0, 1)]))
    assert (row.context().tolist(), row.context().json, len(row)) == ([1, 2, 3], b"[1,2,3]", 1)
    assert (copied.context().tolist(), len(copied)) == ([1, 2, 3, 4, 5], 3)
    assert list(row.row().sampled_logprobs) == [-1.0]
    assert (copied.row().sampled_ranges, list(copied.row().sampled_logprobs)) == ([(0, 1), (2, 3)], [-1.0, -2.0])
    assert row.versions() == {0}
