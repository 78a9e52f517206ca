"""textarena's games as environments that answer."""

import anyio
import pytest

from stream.validity import RewardReason
from workers.settings import Rollout
from workers.testing import play

pytest.importorskip("textarena", reason='needs pip install "penstock[textarena]"')
REF = "envs.adapters.textarena_games:TextArena"
LONG = Rollout(max_turns=20, max_tokens=1_000_000)


def first_empty_cell(observation):
    """Play tic-tac-toe in the first cell that is offered."""
    return "[" + observation.rpartition("Available Moves:")[2].partition("[")[2].partition("]")[0] + "]"


def test_a_game_is_played_until_it_ends():
    moves = [f"[{number}]" for number in range(1, 21)]
    played = play(REF, moves, args={"id": "GuessTheNumber-v0"}, seed=3, limits=LONG)
    assert played.failure is None
    assert "between 1 and 20" in played.messages[0]["content"]
    replies = [m["content"] for m in played.messages[1:] if m["role"] == "user"]
    assert replies[0].endswith(("higher.", "lower."))
    assert "between 1 and 20" not in replies[0]  # not the whole history again
    assert played.environment.done
    assert played.reward_value == played.environment.rewards[0]
    again = play(REF, moves, args={"id": "GuessTheNumber-v0"}, seed=3, limits=LONG)
    assert [m["content"] for m in again.messages] == [m["content"] for m in played.messages]


TALKS = {"id": "CharacterConclave-v0", "num_players": 3}
"""A real game of textarena 0.7.4 whose `step` raises on what a player says."""


def test_a_move_on_which_the_game_raises_loses_and_is_measured():
    for args, worst in (({}, -1.0), ({"worst_reward": 0.0}, 0.0)):
        played = play(REF, ["zzz", "never played"], args=TALKS | {"opponent": str.upper} | args)
        assert played.failure is None, played.failure
        assert (played.reward_value, played.environment.moves) == (worst, ["zzz"])
        assert "TypeError" in played.environment.fault
        (part,) = played.completion.parts
        assert part.reward.reason is RewardReason.RAISED


def test_an_opponent_that_raises_is_not_the_models_fault():
    def resign(observation):
        raise RuntimeError("I resign")

    played = play(REF, ["[4]"], args={"id": "TicTacToe-v0", "opponent": resign})
    assert "I resign" in played.failure.detail


async def ask_somebody(observation):
    """Play like `first_empty_cell`, after waiting on the worker's event loop."""
    await anyio.sleep(0.01)
    return first_empty_cell(observation)


def test_an_asynchronous_opponent_is_awaited():
    moves = ["[4]", "[0]", "[8]", "[2]", "[6]"]
    games = [
        play(REF, moves, args={"id": "TicTacToe-v0", "opponent": opponent}, seed=1)
        for opponent in (first_empty_cell, ask_somebody)
    ]
    assert games[1].failure is None, games[1].failure
    assert games[1].messages == games[0].messages
    assert len(games[1].messages) > 2


def test_the_other_player_is_a_function():
    played = play(REF, ["[4]", "[0]", "[8]", "[2]", "[6]"], args={"id": "TicTacToe-v0", "opponent": first_empty_cell})
    assert played.failure is None, played.failure
    assert set(played.environment.rewards or {0: 0}) <= {0, 1}
    lonely = play(REF, ["[4]"], args={"id": "TicTacToe-v0", "num_players": 2})
    assert "set args.opponent" in lonely.failure.detail
