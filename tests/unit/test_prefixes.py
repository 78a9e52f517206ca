"""Which finished sequences the engine still caches, and what sequences that begin alike compute once."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from workers.local_engine.kv_cache import PrefixCache
from workers.local_engine.shared_prefill import LEAST_SAVED, common_length, longest_shared, plan_shared_passes


def tokens(*ids: int) -> bytes:
    return array("i", ids).tobytes()


def test_the_longest_prefix_is_found():
    prefixes = PrefixCache(range(10, 13))
    short, long = prefixes.reserve(tokens(1, 2)), prefixes.reserve(tokens(1, 2, 3, 4))
    assert prefixes.longest_match(tokens(1, 2, 3, 4, 5)) == (long, 4)
    assert prefixes.longest_match(tokens(1, 2, 3)) == (long, 3)
    assert prefixes.longest_match(tokens(1, 2, 9, 4)) in {(short, 2), (long, 2)}
    assert prefixes.longest_match(tokens(1, 2, 3, 9))[1] == 3, "the beginning of a sequence will do"
    assert prefixes.longest_match(tokens(9, 1, 2)) == (0, 0)


def test_the_least_recently_used_prefix_is_evicted():
    prefixes = PrefixCache(range(2))
    first, second = prefixes.reserve(tokens(1)), prefixes.reserve(tokens(2))
    assert prefixes.longest_match(tokens(1, 5)) == (first, 1)
    assert prefixes.reserve(tokens(3)) == second
    assert prefixes.longest_match(tokens(2, 5)) == (0, 0)
    assert prefixes.longest_match(tokens(1, 5)) == (first, 1)


def test_a_known_prefix_takes_no_second_slot():
    prefixes = PrefixCache(range(2))
    prefixes.reserve(tokens(1))
    assert prefixes.reserve(tokens(1)) is None


def test_nothing_is_found_after_clearing():
    prefixes = PrefixCache(range(1))
    slot = prefixes.reserve(tokens(1))
    prefixes.clear()
    assert prefixes.longest_match(tokens(1, 2)) == (0, 0)
    assert prefixes.reserve(tokens(4)) == slot


def test_evicted_sequences_are_not_found_again():
    prefixes = PrefixCache(range(5, 7))
    for first in range(6):
        prefixes.reserve(tokens(first, 1))
    assert [prefixes.longest_match(tokens(first, 1, 1))[1] for first in range(6)] == [0, 0, 0, 0, 2, 2]
    prefixes.shrink(2)
    assert [prefixes.longest_match(tokens(first, 1, 1))[1] for first in (4, 5)] == [0, 2]


SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=9)


@given(SEQUENCES, st.lists(st.integers(0, 2), min_size=1, max_size=7))
def test_the_longest_shared_beginning_is_that_of_a_neighbour(sequences, other):
    ordered = sorted((tokens(*each), slot) for slot, each in enumerate(sequences))
    slot, length = longest_shared(ordered, tokens(*other))
    assert length == max(common_length(tokens(*each), tokens(*other)) for each in sequences)
    assert sequences[slot][:length] == other[:length]


@given(SEQUENCES, st.integers(1, 60), st.data())
def test_passes_over_shared_beginnings_compute_every_token_in_its_place(sequences, width, data):
    sequences = [[token for token in each for _ in range(width)] for each in sequences]
    known = [data.draw(st.integers(0, len(each) - 1)) for each in sequences]
    slots = [each[:have] for each, have in zip(sequences, known, strict=True)]
    computed, last = 0, 0
    for shared in plan_shared_passes([tokens(*each) for each in sequences], known):
        assert shared.level >= last
        last = shared.level
        computed += max(0, shared.end - len(slots[shared.row]))
        slots[shared.row] += sequences[shared.row][len(slots[shared.row]) : shared.end]
        saved = 0
        for copy in shared.copies:
            assert shared.end < len(sequences[copy]), "the last token must be computed for its logits"
            saved += shared.end - len(slots[copy])
            slots[copy] = slots[shared.row][: shared.end]
        assert saved >= LEAST_SAVED
    for slot, whole in zip(slots, sequences, strict=True):
        assert whole[: len(slot)] == slot
        assert len(slot) < len(whole)
        computed += len(whole) - len(slot)
    assert computed <= sum(map(len, sequences)) - sum(known)


def test_a_long_beginning_and_the_prompt_of_each_group_are_computed_once():
    prompts = [[1] * 100 + [10 + group] * 20 for group in range(3)]
    sequences = [prompt + [50 + member] * 2 for prompt in prompts for member in range(4)]
    passes = plan_shared_passes([tokens(*each) for each in sequences], [0] * 12)
    assert [(each.level, each.end, len(each.copies)) for each in passes] == [(0, 100, 11), *[(1, 120, 3)] * 3]
