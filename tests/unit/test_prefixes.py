"""Which finished sequences the engine still caches."""

from array import array

from workers.local_engine.kv_cache import PrefixCache


def tokens(*ids: int) -> bytes:
    return array("i", ids).tobytes()


def test_the_longest_prefix_is_found():
    prefixes = PrefixCache(range(10, 13))
    short, long = prefixes.reserve(tokens(1, 2)), prefixes.reserve(tokens(1, 2, 3, 4))
    assert prefixes.longest_match(tokens(1, 2, 3, 4, 5)) == (long, 4)
    assert prefixes.longest_match(tokens(1, 2, 3)) == (short, 2)
    assert prefixes.longest_match(tokens(1)) is None
    assert prefixes.longest_match(tokens(9, 1, 2)) is None


def test_the_least_recently_used_prefix_is_evicted():
    prefixes = PrefixCache(range(2))
    first, second = prefixes.reserve(tokens(1)), prefixes.reserve(tokens(2))
    assert prefixes.longest_match(tokens(1, 5)) == (first, 1)
    assert prefixes.reserve(tokens(3)) == second
    assert prefixes.longest_match(tokens(2, 5)) is None
    assert prefixes.longest_match(tokens(1, 5)) == (first, 1)


def test_a_known_prefix_takes_no_second_slot():
    prefixes = PrefixCache(range(2))
    prefixes.reserve(tokens(1))
    assert prefixes.reserve(tokens(1)) is None


def test_nothing_is_found_after_clearing():
    prefixes = PrefixCache(range(1))
    slot = prefixes.reserve(tokens(1))
    prefixes.clear()
    assert prefixes.longest_match(tokens(1, 2)) is None
    assert prefixes.reserve(tokens(4)) == slot
