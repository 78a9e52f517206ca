"""Which groups a step takes, and which it waits for, under `pacing.stale_policy = "wait"`."""

import random
import zlib

from hypothesis import given
from hypothesis import strategies as st

from workers.train.groups.step_plan import VersionSchedule, plan_step


def course(version, k, per_step=1, publish_every=1, steps_left=None):
    return VersionSchedule(
        version=version,
        steps_left=publish_every if steps_left is None else steps_left,
        groups_per_step=per_step,
        groups_per_version=per_step * publish_every,
        max_staleness=k,
    )


def test_a_group_that_the_next_version_makes_too_old_is_waited_for():
    chosen = plan_step({"old": 3, "young": 4}, {"young"}, (), course(4, k=1))
    assert chosen.stragglers == ["old"]
    assert plan_step({"old": 3, "young": 4}, {"young", "old"}, (), course(4, k=1)).prompt_ids == ["old"]


def test_a_group_that_can_be_trained_later_is_not_waited_for():
    chosen = plan_step({"slow": 4, "quick": 4}, {"quick"}, (), course(4, k=1))
    assert chosen == plan_step({"slow": 4, "quick": 4}, {"quick"}, (), course(4, k=1))
    assert (chosen.prompt_ids, chosen.stragglers) == (["quick"], [])


def test_groups_due_together_are_not_all_left_to_the_last_step():
    """At version 2 both would be due in one step of one group; so at version 1 the step waits for one of them."""
    begun = {"a": 0, "b": 0, "young": 1}
    assert plan_step(begun, {"young"}, (), course(1, k=2)).stragglers == ["a", "b"]
    assert plan_step(begun, {"young", "b"}, (), course(1, k=2)) == plan_step(begun, {"b"}, (), course(1, k=2))
    assert plan_step(begun, {"young", "b"}, (), course(1, k=2)).prompt_ids == ["b"]


def test_steps_before_the_next_publication_count_as_slots():
    begun = {"old": 0, "young": 0}
    assert plan_step(begun, {"young"}, (), course(0, k=0, publish_every=2)).stragglers == []
    assert plan_step({"old": 0}, (), (), course(0, k=0, publish_every=2, steps_left=1)).stragglers == ["old"]


def test_a_group_that_is_too_old_is_not_waited_for_and_precedes_younger_ones():
    begun = {"ancient": 0, "lost": 1, "young": 9}
    chosen = plan_step(begun, {"ancient", "young"}, (), course(9, k=1))
    assert (chosen.prompt_ids, chosen.stragglers) == (["ancient"], [])


def test_a_group_that_is_too_old_makes_no_other_group_late():
    begun = {"ancient": 0, "due": 8}
    assert plan_step(begun, {"ancient", "due"}, (), course(9, k=1)).prompt_ids == ["due"]


def test_an_abandoned_group_is_no_longer_waited_for():
    begun = {"hung": 3, "young": 4}
    assert plan_step(begun, {"young"}, {"hung"}, course(4, k=1)).stragglers == []


def test_a_step_never_requires_more_groups_than_it_takes():
    """After a resume more groups may be due than fit into a step: some are trained late, and no step waits forever."""
    begun = {f"p{i}": 0 for i in range(9)}
    chosen = plan_step(begun, set(begun), (), course(0, k=0, per_step=2))
    assert (len(chosen.prompt_ids), chosen.stragglers) == (2, [])


@given(
    k=st.integers(0, 5),
    per_step=st.integers(1, 5),
    publish_every=st.integers(1, 3),
    seed=st.integers(0, 10_000),
    quickness=st.floats(0.1, 0.9),
)
def test_no_group_is_trained_too_old_and_every_straggler_can_arrive(k, per_step, publish_every, seed, quickness):
    """Simulate a paced run: groups arrive in any order, some slowly; some are dropped, some are started again."""
    chance = random.Random(seed)
    capacity = (k + 1) * per_step * publish_every
    begun, in_hand, held, fresh = {}, set(), 0, iter(range(10**9))
    version = done = 0
    while version < 25:
        while len(begun) + held < capacity:
            begun[f"p{next(fresh)}"] = version
        for prompt in list(begun):
            fate = chance.random()
            if prompt not in in_hand and fate < 0.02:
                del begun[prompt]  # dropped, or given back
            elif prompt not in in_hand and fate < 0.03:
                begun[prompt] = version  # its worker died
            elif chance.random() < (0.02 if zlib.crc32(prompt.encode()) % 3 == 0 else quickness):
                in_hand.add(prompt)
        now = course(version, k, per_step, publish_every, publish_every - done)
        chosen = plan_step(begun, in_hand, (), now)
        if len(begun) + held == capacity:  # all permitted groups have started
            assert plan_step(begun, set(begun), (), now).stragglers == []
        assert not set(chosen.stragglers) & in_hand
        if chosen.stragglers or len(chosen.prompt_ids) < per_step:
            continue
        for prompt in chosen.prompt_ids:
            assert version - begun.pop(prompt) <= k
            in_hand.remove(prompt)
        held += per_step
        done += 1
        if done == publish_every:
            version, done, held = version + 1, 0, 0
