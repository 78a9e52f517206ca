"""Completions whose worker dies at any moment: what the next one restores, samples again, and never does twice."""

import itertools
import random
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.contract import EnvironmentFailure
from stream.errors import EngineUnavailableError, ReferenceNotFoundError
from stream.validity import RolloutReason
from tests.cases.progress import SavedGroup
from tests.unit.test_episode import Box, Scripted, call, factory_of, group_of, make_prompt

TURNS = 4


class Replayable(Box):
    """Does the same after the same calls."""

    replayable = True

    def respond(self, text):
        self.seen.append(text)
        return f"go on, {len(self.seen)}" if len(self.seen) < TURNS else None


def script_of(plan, asked=None):
    """Return a sampler that calls a tool in the turns where the plan says so."""

    def script(turn, text):
        return (call("put", f'{{"thing": "{turn}"}}') if plan[turn] else f"turn {turn}") if turn < TURNS else "Done."

    sampler = Scripted(script)
    if asked is not None:
        sampler.asked = asked
    return sampler


async def killed_after(plan, parts, env=Replayable, **options):
    """Return what a worker saves that dies after so many parts, and what its group would have become."""
    saved, states = SavedGroup(), []
    saved.on_put = lambda: states.append(saved.copy())
    group = await group_of(script_of(plan), env=env, journal=await saved.journal(), **options)
    states.insert(0, SavedGroup())
    return states[min(parts, len(states) - 1)], group


def facts(group):
    """Return what does not depend on time."""
    return [
        (
            c.rows,
            c.prompt_messages,
            c.messages,
            c.failure,
            c.truncated,
            c.turns,
            c.tool_calls,
            [p.reward for p in c.parts],
        )
        for c in group.completions
    ]


@given(
    plan=st.lists(st.booleans(), min_size=TURNS, max_size=TURNS),
    size=st.integers(1, 3),
    kills=st.lists(st.integers(0, 15), min_size=1, max_size=3),
)
async def test_a_replay_makes_the_same_rows_and_samples_no_saved_turn(plan, size, kills):
    prompt = make_prompt(group_size=size)
    whole = await group_of(script_of(plan), env=Replayable, prompt=prompt)
    saved = SavedGroup()
    for kill in kills:  # each worker dies after so many parts
        states = [saved]
        attempt = saved.copy()
        attempt.on_put = lambda attempt=attempt, states=states: states.append(attempt.copy())
        asked = []
        group = await group_of(script_of(plan, asked), env=Replayable, prompt=prompt, journal=await attempt.journal())
        turns = sum(c.turns for c in group.completions)
        finished = (await saved.journal()).completions
        assert facts(group) == facts(whole)
        assert len(asked) == turns - len(saved.turns) - sum(c.turns for c in finished)
        assert attempt.again == 0
        saved = states[min(kill, len(states) - 1)]


@pytest.mark.parametrize("parts", [1, 2, 3])
async def test_an_environment_that_differs_begins_anew(parts):
    numbers = itertools.count()

    class Differing(Box):
        replayable = True

        def put(self, thing: str = "it") -> str:
            return f"number {next(numbers)}"

    saved, _ = await killed_after([True] * TURNS, parts, env=Differing)
    asked = []
    group = await group_of(script_of([True] * TURNS, asked), env=Differing, journal=await saved.journal())
    (completion,) = group.completions
    assert completion.failure is None
    results = [message["content"] for message in completion.messages if message["role"] == "tool"]
    assert results == [f"number {int(results[0].split()[1]) + n}" for n in range(TURNS)], "of one episode"
    # With one saved turn nothing that was read can be compared: its results are new, and so is all that follows.
    assert (saved.resumed, saved.again) == ((["replay"], 0) if parts == 1 else (["anew"], parts))
    assert len(asked) == TURNS + 1 - (parts == 1)


async def test_a_reset_that_differs_begins_anew():
    class Differing(Box):
        replayable = True

        def reset(self, greeting=None, **row):
            super().reset(**row)
            return str(random.random())

    saved, _ = await killed_after([True] * TURNS, 2, env=Differing)
    group = await group_of(script_of([True] * TURNS), env=Differing, journal=await saved.journal())
    assert group.completions[0].failure is None
    assert (saved.resumed, saved.again) == (["anew"], 2)


@pytest.mark.parametrize("what", ["ends", "fails"])
async def test_a_replayed_episode_that_ends_before_its_turns_begins_anew(what):
    resets = itertools.count()

    class Ending(Box):
        replayable = True

        def reset(self, **row):
            self.number = next(resets)
            return super().reset(**row)

        def put(self, thing: str = "it") -> str:
            if self.number == 1 and what == "fails":
                raise EnvironmentFailure("out of order")
            self.done = self.number == 1
            return "has it"

    saved, _ = await killed_after([True] * TURNS, 2, env=Ending)
    group = await group_of(script_of([True] * TURNS), env=Ending, journal=await saved.journal())
    assert group.completions[0].failure is None
    assert group.completions[0].turns == TURNS + 1
    assert (saved.resumed, saved.again) == (["anew"], 2)


async def test_an_environment_that_is_not_replayable_begins_anew_and_its_turns_take_no_memory():
    saved, _ = await killed_after([True] * TURNS, 3, env=Box)
    assert all(len(record) < 32 for record in saved.turns.values())
    asked = []
    group = await group_of(script_of([True] * TURNS, asked), env=Box, journal=await saved.journal())
    assert len(asked) == TURNS + 1
    assert group.completions[0].failure is None
    assert (saved.resumed, saved.again) == (["anew"], 3)


@given(plan=st.lists(st.booleans(), min_size=TURNS, max_size=TURNS), parts=st.integers(1, 9), replayable=st.booleans())
async def test_a_call_with_effects_is_never_made_twice(plan, parts, replayable):
    made = []

    class Paying(Replayable):
        effects = "external"

        def put(self, thing: str = "it") -> str:
            made.append(("put", thing))
            return "paid"

        def respond(self, text):
            made.append(("respond", text))
            return "go on" if text != "Done." else None

    Paying.replayable = replayable
    saved = SavedGroup()
    left = iter(range(parts - 1))

    def die():
        if next(left, None) is None:
            raise EngineUnavailableError("the worker dies")

    saved.on_put = die
    with suppress(EngineUnavailableError):
        await group_of(script_of(plan), env=Paying, journal=await saved.journal())
    before, saved.on_put = list(made), lambda: None
    (completion,) = (await group_of(script_of(plan), env=Paying, journal=await saved.journal())).completions
    assert len(made) == len(set(made)), "each effect once"
    if saved.resumed:
        assert saved.resumed == ["never"]
        assert completion.failure.reason is RolloutReason.EFFECTS
        assert made == before


async def test_a_call_with_effects_is_not_made_if_nobody_would_know_of_it():
    made = []

    class Paying(Box):
        effects = "external"

        def put(self, thing: str = "it") -> str:
            made.append(thing)
            return "paid"

    saved = SavedGroup()
    saved.is_short = True
    group = await group_of([call("put"), "Done."], env=Paying, journal=await saved.journal())
    assert group.completions[0].failure.reason is RolloutReason.EFFECTS
    assert made == []


async def test_a_turn_after_a_missing_one_is_not_used():
    saved, whole = await killed_after([True] * TURNS, 3)
    del saved.turns["0/1"]
    asked = []
    group = await group_of(script_of([True] * TURNS, asked), env=Replayable, journal=await saved.journal())
    assert facts(group) == facts(whole)
    assert len(asked) == TURNS
    assert (saved.resumed, saved.again) == (["replay"], 1)


@pytest.mark.parametrize(
    ("members", "replayable", "effects"),
    [
        ({}, False, False),
        ({"replayable": True}, True, False),
        ({"replayable": False, "effects": "none"}, False, False),
        ({"effects": "external"}, False, True),
        ({"replayable": lambda self: "a tool", "effects": property(lambda self: "state")}, False, False),
    ],
)
def test_a_class_declares_what_may_be_repeated(members, replayable, effects):
    factory = factory_of(type("Declared", (Box,), members))
    assert (factory.is_replayable, factory.has_effects) == (replayable, effects)


@pytest.mark.parametrize(
    "members", [{"replayable": "yes"}, {"effects": "outside"}, {"effects": True}, {"effects": [1]}]
)
def test_a_declaration_that_means_nothing_is_refused(members):
    with pytest.raises(ReferenceNotFoundError, match="it has to be"):
        factory_of(type("Declared", (Box,), members))
