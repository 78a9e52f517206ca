"""Engine choice prefers a cached prefix, balances load, and moves few groups when engines are added or removed."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from workers.rollout.engine_client.router import (
    LATER_TURN_FACTOR,
    SLACK,
    Candidate,
    choose_engine,
    max_load,
    rank_engines,
)


def home(group: str, urls: list[str]) -> str:
    return rank_engines(group, tuple(urls))[0]


urls = st.integers(2, 12).map(lambda n: [f"http://engine-{i}:8000" for i in range(n)])
groups = st.text(min_size=1, max_size=20)
MANY = [f"d:0:{i}" for i in range(400)]


@st.composite
def seats(draw):
    return [Candidate(url, draw(st.integers(0, 40)), draw(st.integers(0, 40))) for url in draw(urls)]


@given(seats(), st.text(max_size=20), st.text(max_size=20))
def test_the_chosen_engine_is_below_its_limit(candidates, group, last):
    chosen = choose_engine(group, last, candidates)
    free = {seat.url for seat in candidates if seat.load < seat.limit}
    assert chosen in free if free else chosen is None


@given(urls, st.lists(st.tuples(st.integers(0, 30), st.integers(0, 7), st.booleans()), max_size=200))
def test_no_engine_is_ever_much_busier_than_the_mean(names, requests):
    loads = Counter(dict.fromkeys(names, 0))
    lasts: dict[tuple[int, int], str] = {}
    for group, completion, ends in requests:
        key = (group, completion)
        at = choose_engine(f"g{group}", lasts.get(key, ""), [Candidate(url, loads[url], 10_000) for url in names])
        loads[at] += 1
        lasts[key] = at
        assert loads[at] <= max(
            min(loads.values()) + 1, LATER_TURN_FACTOR * sum(loads.values()) / len(names) + SLACK + 1
        )
        if ends:
            busiest = max(names, key=lambda url: loads[url])
            loads[busiest] -= 1


@given(urls)
def test_groups_spread_over_idle_engines(names):
    homes = Counter(home(group, names) for group in MANY)
    assert set(homes) == set(names)
    assert max(homes.values()) < 2 * len(MANY) / len(names)


@given(urls, groups)
def test_removing_an_engine_moves_only_its_own_groups(names, group):
    at = home(group, names)
    for gone in names:
        left = [url for url in names if url != gone]
        assert home(group, left) == at if gone != at else home(group, left) != gone


@given(urls, st.randoms(use_true_random=False))
def test_adding_an_engine_moves_groups_only_to_it(names, random):
    new = "http://new:8000"
    grown = [*names, new]
    random.shuffle(grown)
    moved = [group for group in MANY if home(group, grown) != home(group, names)]
    assert all(home(group, grown) == new for group in moved)
    assert len(moved) < 2.5 * len(MANY) / len(grown)


@given(seats(), groups)
def test_a_completion_stays_at_its_last_engine_unless_that_is_much_busier(candidates, group):
    for seat in candidates:
        if seat.load < min(seat.limit, max_load(LATER_TURN_FACTOR, candidates)):
            assert choose_engine(group, seat.url, candidates) == seat.url


@given(urls, groups)
def test_all_completions_of_a_group_start_at_one_engine_below_its_limit(names, group):
    loads = Counter(dict.fromkeys(names, 0))
    for _ in range(SLACK):
        loads[choose_engine(group, "", [Candidate(url, loads[url], 100) for url in names])] += 1
    assert max(loads.values()) == SLACK


@given(seats(), groups)
def test_an_ejected_engine_is_never_chosen_even_if_it_sampled_the_last_turn(candidates, group):
    gone, *left = candidates
    assert choose_engine(group, gone.url, left) != gone.url


@given(seats())
def test_a_request_without_a_group_goes_to_the_least_loaded_engine(candidates):
    chosen = choose_engine("", "", candidates)
    free = {seat.url: seat.load for seat in candidates if seat.load < seat.limit}
    assert chosen is None or free[chosen] == min(free.values())
