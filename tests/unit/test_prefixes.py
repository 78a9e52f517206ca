"""Which finished sequences the engine still holds."""

from array import array

from workers.engine.prefixes import Prefixes


def tokens(*ids: int) -> bytes:
    return array("i", ids).tobytes()


def test_the_longest_beginning_is_found():
    prefixes = Prefixes(range(10, 13))
    short, long = prefixes.keep(tokens(1, 2)), prefixes.keep(tokens(1, 2, 3, 4))
    assert prefixes.find(tokens(1, 2, 3, 4, 5)) == (long, 4)
    assert prefixes.find(tokens(1, 2, 3)) == (short, 2)
    assert prefixes.find(tokens(1)) is None
    assert prefixes.find(tokens(9, 1, 2)) is None


def test_the_one_unused_longest_makes_room():
    prefixes = Prefixes(range(2))
    first, second = prefixes.keep(tokens(1)), prefixes.keep(tokens(2))
    assert prefixes.find(tokens(1, 5)) == (first, 1)
    assert prefixes.keep(tokens(3)) == second
    assert prefixes.find(tokens(2, 5)) is None
    assert prefixes.find(tokens(1, 5)) == (first, 1)


def test_what_is_held_already_takes_no_second_slot():
    prefixes = Prefixes(range(2))
    prefixes.keep(tokens(1))
    assert prefixes.keep(tokens(1)) is None


def test_nothing_is_found_after_clearing():
    prefixes = Prefixes(range(1))
    slot = prefixes.keep(tokens(1))
    prefixes.clear()
    assert prefixes.find(tokens(1, 2)) is None
    assert prefixes.keep(tokens(4)) == slot
