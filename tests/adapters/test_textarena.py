"""textarena's games as environments that answer."""

from functools import partial
from pathlib import Path

import anyio
import pytest

from envs.adapters import textarena_games
from stream.validity import RewardReason
from tests.adapters.rigged_game import Rigged
from tests.cases.sandboxes import needs_sandbox  # noqa: F401  (a fixture)
from workers.check.scripted import play
from workers.settings import RolloutSettings

textarena = pytest.importorskip("textarena", reason='needs pip install "penstock[textarena]"')
REF = "envs.adapters.textarena_games:TextArena"
LONG = RolloutSettings(max_turns=20, max_tokens=1_000_000)


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


@pytest.fixture
def rigged(monkeypatch):
    """Register the game here and, by its folder on the import path, in the children."""
    registry = textarena.envs.registration.ENV_REGISTRY
    monkeypatch.setitem(registry, "Rigged-v0", textarena.envs.registration.EnvSpec("Rigged-v0", Rigged, None))
    handler = "tests.adapters.rigged_game:RiggedReplayer"
    monkeypatch.setattr(textarena_games, "HANDLER", handler)
    folder = str(Path(__file__).parents[1])
    monkeypatch.setattr(textarena_games, "_word_lists", lambda: (folder,))
    return partial(play, REF, limits=LONG)


@pytest.mark.usefixtures("needs_sandbox")  # outside of one, somebody else may have killed it
@pytest.mark.parametrize(
    ("move", "reason"), [("raise", RewardReason.RAISED), ("hang", RewardReason.TIMEOUT), ("die", RewardReason.RAISED)]
)
def test_a_move_that_the_game_cannot_play_is_the_models_and_costs_no_other_game(rigged, move, reason):
    args = {"id": "Rigged-v0", "cpu_s": 1, "worst_reward": -2.0}
    played = rigged(["fine", move], args=args)
    assert played.failure is None
    assert (played.reward.value, played.reward.reason) == (-2.0, reason)
    assert "move 2" in played.reward.detail
    assert rigged(["fine", "end"], args=args | {"num_players": 2, "opponent": "builtins:str"}).reward_value == 1.0


def test_a_game_in_the_worker_whose_network_fails_is_not_the_models_doing(rigged):
    args = {"id": "Rigged-v0", "isolation": "none"}
    assert "does not answer" in rigged(["disconnect"], args=args).failure.detail
    assert rigged(["raise"], args=args).reward_value == -1.0


def test_a_reward_that_is_no_number_is_the_worst(rigged):
    assert rigged(["end"], args={"id": "Rigged-v0"}).reward_value == -1.0


def test_the_game_has_nothing_of_the_workers_environment(rigged, monkeypatch):
    monkeypatch.setenv("CANARY", "a secret of the worker")
    for isolation in ("sandbox", "process"):
        played = rigged(["look", "end"], args={"id": "Rigged-v0", "isolation": isolation})
        assert "nothing" in str(played.messages)
    played = rigged(["look", "end"], args={"id": "Rigged-v0", "isolation": "none"})
    assert "a secret of the worker" in str(played.messages)


def test_a_game_that_changes_when_it_is_played_again_says_so(rigged):
    played = rigged(["fine"], args={"id": "Rigged-v0", "num_players": 3, "opponent": "builtins:str"})
    assert 'isolation = "none"' in played.failure.detail


def test_a_move_of_the_opponent_that_the_game_cannot_play_is_not_the_models(rigged):
    played = rigged(["fine"], args={"id": "Rigged-v0", "opponent": f"{__file__}:raise_a_key_error"})
    assert "player 1" in played.failure.detail


def raise_a_key_error(observation):
    """Play a move at which the game raises."""
    return "raise"
