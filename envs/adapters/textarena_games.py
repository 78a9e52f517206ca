"""Games of textarena: each turn of the model is a move, and the game's next observation is the answer.

::

    [environments.wordle]
    ref = "textarena"
    args = { id = "Wordle-v0" }

    [data]
    rows = 1000                     # games; no file is needed
"""

from collections.abc import Callable
from typing import Any

from envs.call import describe_error
from envs.extras import import_extra
from envs.references import resolve
from stream.errors import EnvironmentFailure

Opponent = Callable[[str], str]


class TextArena:
    """One game. The model is player 0.

    Args:
        id: id of a registered game, such as `Wordle-v0`.
        opponent: function, or reference to one, from an observation to a move, for the other players.
        num_players: number of players; default: 1, or 2 with an opponent.

    Attributes:
        moves: the model's moves.
        rewards: of the players, at the end of the game; empty before.
        info: what the game says about its end, for example the reason of an invalid move.
        done: the game is over.
    """

    def __init__(self, id: str, opponent: str | Opponent | None = None, num_players: int = 0) -> None:  # noqa: A002  (textarena's word)
        self.id = id
        self.moves: list[str] = []
        self.rewards: dict[int, float] = {}
        self.info: dict[str, Any] = {}
        self.done = False
        self._observation = self._seen = ""
        self._players = num_players or (1 if opponent is None else 2)
        self._opponent: Any = resolve(opponent, None).target if isinstance(opponent, str) else opponent
        self._game: Any = import_extra("textarena", "textarena").make(id)

    def __copy__(self) -> "TextArena":
        """Copy the data without the game, which a copy would share."""
        copied = object.__new__(type(self))
        handles = {"_game", "_opponent"}
        copied.__dict__.update({name: value for name, value in vars(self).items() if name not in handles})
        return copied

    def reset(self, seed: int) -> str:
        """Start a game; all completions of a group have the same one."""
        self.moves, self.rewards, self.info, self.done, self._seen = [], {}, {}, False, ""
        self._game.reset(num_players=self._players, seed=seed)
        self._play_others()
        return self._news()

    def respond(self, message: str) -> str | None:
        """Take the model's move, then let the other players move; None ends the episode.

        Raises:
            EnvironmentFailure: the game raised.
        """
        self.moves.append(message)
        self._step(message)
        self._play_others()
        return None if self.done else self._news()

    def get_reward(self) -> float | None:
        """Return the model's reward; a game that did not end is worth 0, the reward of a draw."""
        return float(self.rewards.get(0, 0.0))

    def _play_others(self) -> None:
        while not self.done:
            player, observation = self._game.get_observation()
            if player == 0:
                self._observation = str(observation)
                return
            if self._opponent is None:
                raise EnvironmentFailure(f"{self.id} has {self._players} players: set args.opponent, a function")
            self._step(str(self._opponent(str(observation))))

    def _step(self, move: str) -> None:
        try:
            self.done, _ = self._game.step(move)
            if self.done:
                self.rewards, self.info = self._game.close()
        except Exception as error:
            raise EnvironmentFailure(f"{self.id}: step({move[:100]!r}) raised {describe_error(error)}") from error

    def _news(self) -> str:
        """Return the part of the observation that the model has not read: many games repeat the whole history."""
        found, self._seen = self._observation.removeprefix(self._seen), self._observation
        return found.strip("\n")
