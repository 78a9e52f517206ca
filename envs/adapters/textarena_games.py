"""Games of textarena: each turn of the model is a move, and the game's next observation is the answer.

::

    [environments.wordle]
    ref = "textarena"
    args = { id = "Wordle-v0" }

    [data]
    rows = 1000                     # games; no file is needed
"""

from collections.abc import Awaitable, Callable
from typing import Any

from anyio import to_thread

from envs.call import describe_error, is_awaitable
from envs.extras import import_extra
from envs.references import resolve
from stream.errors import EnvironmentFailure
from stream.validity import Reward, RewardReason, worst_reward

Opponent = Callable[[str], str | Awaitable[str]]


class _GameError(EnvironmentFailure):
    """The game raised on a move."""


class TextArena:
    """One game. The model is player 0. A move of the model on which the game raises ends it, at the worst reward.

    Args:
        id: id of a registered game, such as `Wordle-v0`.
        opponent: function, sync or async, or reference to one, from an observation to a move, for the other players.
        num_players: number of players; default: 1, or 2 with an opponent.
        worst_reward: reward of a game that raises on the model's move, the worst that a game can give.

    Attributes:
        moves: the model's moves.
        rewards: of the players, at the end of the game; empty before.
        info: what the game says about its end, for example the reason of an invalid move.
        done: the game is over.
        fault: what the game raised on the model's move; empty if it did not.
    """

    def __init__(
        self,
        id: str,  # noqa: A002  (textarena's word)
        opponent: str | Opponent | None = None,
        num_players: int = 0,
        worst_reward: float = -1.0,
    ) -> None:
        self.id = id
        self.moves: list[str] = []
        self.rewards: dict[int, float] = {}
        self.info: dict[str, Any] = {}
        self.done = False
        self.fault = ""
        self._worst_reward = worst_reward
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

    def reset(self, seed: int) -> str | Awaitable[str | None] | None:
        """Start a game; all completions of a group have the same one."""
        self.moves, self.rewards, self.info, self.done, self._seen, self.fault = [], {}, {}, False, "", ""
        self._game.reset(num_players=self._players, seed=seed)
        return self._play_others()

    def respond(self, message: str) -> str | Awaitable[str | None] | None:
        """Take the model's move, then let the other players move; None ends the episode.

        Raises:
            EnvironmentFailure: the game raised on another player's move, or its files cannot be read.
        """
        self.moves.append(message)
        try:
            self._step(message)
        except _GameError as error:
            if isinstance(error.__cause__, ImportError | OSError | MemoryError):  # a failure of the machine
                raise
            self.done, self.fault = True, str(error)
            return None
        return self._play_others()

    def get_reward(self) -> float | Reward:
        """Return the model's reward; a game that did not end is worth 0, the reward of a draw."""
        if self.fault:
            return worst_reward(self._worst_reward, RewardReason.RAISED, self.fault)
        return float(self.rewards.get(0, 0.0))

    def _play_others(self) -> str | Awaitable[str | None] | None:
        """Let the other players move, and return what the model reads; None if the game is over."""
        found = self._play_until_awaited()
        return self._await_others(found) if is_awaitable(found) else found

    async def _await_others(self, found: Any) -> str | None:
        """Await moves on the event loop; the game itself goes on in a thread, because it may compute for long."""
        while is_awaitable(found):
            move = str(await found)
            found = await to_thread.run_sync(self._play_until_awaited, move, abandon_on_cancel=True)
        news: str | None = found
        return news

    def _play_until_awaited(self, move: str | None = None) -> Any:
        """Make another player's move, if one is given, and those that follow.

        Returns:
            What the model reads; None if the game is over; the next move, if it must be awaited.
        """
        if move is not None:
            self._step(move)
        while not self.done:
            player, observation = self._game.get_observation()
            if player == 0:
                self._observation = str(observation)
                return self._news()
            if self._opponent is None:
                raise EnvironmentFailure(f"{self.id} has {self._players} players: set args.opponent, a function")
            reply = self._opponent(str(observation))
            if is_awaitable(reply):
                return reply
            self._step(str(reply))
        return None

    def _step(self, move: str) -> None:
        try:
            self.done, _ = self._game.step(move)
            if self.done:
                self.rewards, self.info = self._game.close()
        except Exception as error:
            raise _GameError(f"{self.id}: step({move[:100]!r}) raised {describe_error(error)}") from error

    def _news(self) -> str:
        """Return the part of the observation that the model has not read: many games repeat the whole history."""
        found, self._seen = self._observation.removeprefix(self._seen), self._observation
        return found.strip("\n")
