"""Games of textarena: each turn of the model is a move, and the game's next observation is the answer.

::

    [environments.tictactoe]
    ref = "textarena"
    args = { id = "TicTacToe-v0", opponent = "rivals.py:move" }

    [data]
    rows = 1000                     # games; no file is needed

Games are played in child processes, in a sandbox where this machine makes them. The opponent's function runs in the
worker.
"""

import math
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from anyio import to_thread

from envs.adapters.textarena_replay import HANDLER, Game, GameMoves, GameState, make_game
from envs.call import Failed, describe_failure, is_awaitable
from envs.references import import_extra, resolve
from envs.sandboxes.bubblewrap import warn_without_sandbox
from envs.sandboxes.pools.child_main import JobError
from envs.sandboxes.pools.isolation import Isolation, IsolationKind, strongest_isolation
from envs.sandboxes.pools.shared_pools import finished, pool_timeout_s, run_in_pool
from stream.errors import EnvironmentFailure, ReferenceNotFoundError
from stream.validity import Measured, Reward, RewardReason, worst_reward

Opponent = Callable[[str], str | Awaitable[str]]


class TextArena:
    """One game. The model is player 0.

    Args:
        id: id of a registered game, such as `Wordle-v0`.
        opponent: function, sync or async, or reference to one, from an observation to a move, for the other players.
        num_players: number of players; default: 1, or 2 with an opponent.
        isolation: `sandbox`, the default: the game sees nothing of this machine; where no sandbox can be made it is
            played as with `process`: in a child process without the worker's environment. `none`: in the worker, for a
            game that is not the same when it is played again, or needs the worker's environment.
        cpu_s: seconds of processor time for a move, with those before it.
        worst_reward: reward of a game that raises on the model's move or takes too long, the worst that it can give.

    Attributes:
        moves: the model's moves.
        rewards: of the players, at the end of the game; empty before.
        info: what the game says about its end, for example the reason of an invalid move.
        done: the game is over.
        fault: why the model's last move could not be played; empty if it could.
    """

    without_sandbox: ClassVar[str] = "games are played in child processes that can read files and use the network"

    def __init__(
        self,
        id: str,  # noqa: A002  (textarena's word)
        opponent: str | Opponent | None = None,
        num_players: int = 0,
        *,
        isolation: IsolationKind = "sandbox",
        cpu_s: int = 2,
        worst_reward: float = -1.0,
    ) -> None:
        self.id = id
        self.moves: list[str] = []
        self.rewards: dict[int, float] = {}
        self.info: dict[str, Any] = {}
        self.done = False
        self._seen = ""
        self.fault = ""
        self._worst_reward, self._cpu_s = worst_reward, cpu_s
        self._players = num_players or (1 if opponent is None else 2)
        self._opponent: Any = resolve(opponent, None).target if isinstance(opponent, str) else opponent
        if id not in import_extra("textarena.envs.registration", "textarena").ENV_REGISTRY:
            raise ReferenceNotFoundError(
                f"textarena has no game {id!r}: textarena.pprint_registry_detailed() lists them"
            )
        if isolation not in ("sandbox", "process", "none"):
            raise ReferenceNotFoundError(f"textarena: isolation is 'sandbox', 'process' or 'none', not {isolation!r}")
        if isolation == "sandbox":
            isolation = strongest_isolation()
            warn_without_sandbox("textarena", self.without_sandbox)
        folders = _word_lists() if isolation == "sandbox" else ()
        self._isolation = Isolation(isolation, folders, (("NLTK_DATA", os.pathsep.join(folders)),) if folders else ())
        self._game: Game | None = None
        self._record = GameMoves(id=id, players=self._players, seed=0, cpu_s=cpu_s)
        self._state = GameState()

    def __copy__(self) -> "TextArena":
        """Copy the data without the game."""
        copied = object.__new__(type(self))
        names = ("id", "moves", "rewards", "info", "done", "fault")
        copied.__dict__.update({name: vars(self)[name] for name in names})
        return copied

    def reset(self, seed: int) -> str | Awaitable[str | None] | None:
        """Start a game; all completions of a group have the same one.

        Raises:
            EnvironmentFailure: the game cannot be begun.
        """
        self.moves, self.rewards, self.info, self.done, self._seen, self.fault = [], {}, {}, False, "", ""
        self._record = GameMoves(id=self.id, players=self._players, seed=seed, cpu_s=self._cpu_s)
        if self._isolation.kind == "none":
            self._game = Game(make_game(self.id), self._players, seed)
            self._state = self._game.state
        else:
            self._replay()
        return self._play_others()

    def respond(self, message: str) -> str | Awaitable[str | None] | None:
        """Take the model's move, then let the other players move; None ends the episode.

        Raises:
            EnvironmentFailure: another player's move could not be played, or the machine failed, or the game was not
                the same when it was played again.
        """
        self.moves.append(message)
        self._step(message)
        self._check_error(0)
        if self._state.error:
            self.done, self.fault = True, f"{self.id} could not play move {len(self.moves)}: {self._state.error}"
            return None
        return self._play_others()

    def get_reward(self) -> Reward:
        """Return the model's reward; a game that did not end is worth 0, the reward of a draw."""
        if self.fault:
            reason = RewardReason.TIMEOUT if self._state.is_late else RewardReason.RAISED
            return worst_reward(self._worst_reward, reason, self.fault)
        reward = self.rewards.get(0, 0.0)
        if not math.isfinite(reward):
            return worst_reward(self._worst_reward, RewardReason.RAISED, f"{self.id} returned the reward {reward}")
        return Measured(reward)

    def _play_others(self) -> str | Awaitable[str | None] | None:
        """Let the other players move, and return what the model reads; None if the game is over."""
        found = self._play_until_awaited()
        return self._await_others(found) if is_awaitable(found) else found

    async def _await_others(self, found: Any) -> str | None:
        """Await moves on the event loop; the game itself goes on in a thread, which waits for a child process."""
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
        while True:
            if move is not None:
                player = self._state.player
                self._step(move)
                self._check_error(player)
            if self.done:
                return None
            if self._state.player == 0:
                return self._new_observation()
            if self._opponent is None:
                raise EnvironmentFailure(f"{self.id} has {self._players} players: set args.opponent, a function")
            reply = self._opponent(self._state.observation)
            if is_awaitable(reply):
                return reply
            move = str(reply)

    def _check_error(self, player: int) -> None:
        """Check that a move was played, or that it is the model's move which could not be played.

        In a sandbox there is nothing else that could fail.

        Raises:
            EnvironmentFailure: something else failed.
        """
        state = self._state
        is_the_models = player == 0 and (state.is_about_the_move or state.is_late or self._isolation.kind == "sandbox")
        if state.error and not is_the_models:
            raise EnvironmentFailure(f"{self.id}: a move of player {player} could not be played: {state.error}")

    def _step(self, move: str) -> None:
        if self._game is not None:
            self._game.play(move)
        else:
            self._record.moves.append(move.encode(errors="replace").decode())
            self._record.digest = self._state.digest
            self._replay()
        if self._state.done:
            self.done, self.rewards, self.info = True, self._state.rewards, self._state.info

    def _replay(self) -> None:
        """Play the game up to its last move, in a child process."""
        job = msgspec.msgpack.encode(self._record)
        (outcome,) = run_in_pool(HANDLER, {}, self._isolation, [job], pool_timeout_s(self._cpu_s))
        encoded = finished(outcome)
        if encoded is None:
            error = outcome.error if isinstance(outcome, Failed) else None
            hint = ""
            is_faulty = isinstance(error, JobError) and str(error).startswith(("SyntaxError", "ImportError"))
            if not self._record.moves and self._isolation.kind == "sandbox" and not is_faulty:
                hint = ". A sandbox has no network and no environment variable: see args.isolation"
            raise EnvironmentFailure(f"{self.id}: {describe_failure(outcome)}{hint}") from error
        state = msgspec.msgpack.decode(encoded, type=GameState)
        if state.differs:
            raise EnvironmentFailure(
                f"{self.id} is not the same when it is played again with the same seed and moves: "
                'set args.isolation = "none", which plays it in the worker'
            )
        self._state = state

    def _new_observation(self) -> str:
        """Return the part of the observation that the model has not read: many games repeat the whole history."""
        seen, self._seen = self._seen, self._state.observation
        return self._seen.removeprefix(seen).strip("\n")


def _word_lists() -> tuple[str, ...]:
    """Return the folders of NLTK's word lists on this machine, which many games of words read."""
    named = os.environ.get("NLTK_DATA", "").split(os.pathsep)
    folders = [
        *filter(None, named),
        str(Path.home() / "nltk_data"),
        "/usr/share/nltk_data",
        "/usr/local/share/nltk_data",
    ]
    return tuple(folder for folder in dict.fromkeys(folders) if Path(folder).is_dir())
