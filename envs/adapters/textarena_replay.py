"""Play a game of textarena in a child process: each job plays it anew, up to the last move, in a fork.

So no process belongs to a game: a child that is killed takes no game with it, and no move can reach another game. A
game that is not the same when it is played again is found by its digest. textarena draws from Python's global random
numbers, which are seeded here for each game.
"""

import hashlib
import random
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import Struct

from envs.call import describe_error, replace_surrogates
from envs.references import import_extra
from envs.sandboxes.pools.child_main import report_interim
from envs.sandboxes.pools.forked import run_forked

HANDLER: Final = f"{__name__}:Replayer"
_MOVE_ERRORS: Final = (
    ValueError,
    LookupError,
    TypeError,
    ArithmeticError,
    AttributeError,
    AssertionError,
    RecursionError,
)
_MAX_BYTES: Final = 1 << 30
"""Data memory for one game."""


class GameState(Struct, kw_only=True):
    """What the worker knows of a game."""

    player: int = 0
    """Whose move it is."""
    observation: str = ""
    done: bool = False
    rewards: dict[int, float] = {}
    """Rewards at the end, by player."""
    info: dict[str, Any] = {}
    """What the game says of its end."""
    error: str = ""
    """Why the last move could not be played."""
    is_about_the_move: bool = False
    """The error is of a kind that the text of a move causes, and no network or disk."""
    is_late: bool = False
    """It took all of its processor time, or ended the child with it."""
    digest: bytes = b""
    """Digest of everything that was seen so far."""
    differs: bool = False
    """The game was not the same when it was played again."""


class GameMoves(Struct, kw_only=True):
    """A job: a game and its moves."""

    id: str
    players: int
    seed: int
    cpu_s: int
    moves: list[str] = []
    """The moves of all players, in order."""
    digest: bytes = b""
    """The game's before its last move."""


class Game:
    """One game in this process.

    Args:
        game: what `textarena.make` returns.
        players: their number.
        seed: of the game.
    """

    def __init__(self, game: Any, players: int, seed: int) -> None:
        self._game = game
        _seed_random(seed)
        game.reset(num_players=players, seed=seed)
        self.state = GameState()
        self._observe()

    def play(self, move: str) -> None:
        """Play the next player's move; what the game raises is in `state.error`."""
        try:
            self.state.done, _ = self._game.step(action=move)
            if self.state.done:
                rewards, info = self._game.close()
                self.state.rewards = {int(player): float(reward) for player, reward in (rewards or {}).items()}
                self.state.info = _plain(info)
            self._observe()
        except Exception as error:  # noqa: BLE001  (the game's code on the model's text)
            self.state.error = describe_error(error)
            self.state.is_about_the_move = isinstance(error, _MOVE_ERRORS)

    def _observe(self) -> None:
        state = self.state
        if not state.done:
            player, observation = self._game.get_observation()
            state.player, state.observation = int(player), replace_surrogates(str(observation))
        seen = msgspec.msgpack.encode([state.digest, state.player, state.observation, state.done])
        state.digest = hashlib.blake2b(seen, digest_size=16).digest()


def make_game(id: str) -> Any:  # noqa: A002  (textarena's word)
    """Return a game that has not begun."""
    _seed_random(0)
    return import_extra("textarena", "textarena").make(id)


class Replayer:
    """The handler in a child process."""

    def __init__(self) -> None:
        import_extra("textarena", "textarena")
        self._games: dict[str, Any] = {}

    def __call__(self, job: bytes) -> bytes:
        """Play the moves of a job; return a `GameState`.

        Raises:
            TimeoutError: the machine is too busy to play.
            Exception: the game cannot be made, or not be begun.
        """
        moves = msgspec.msgpack.decode(job, type=GameMoves)
        if moves.id not in self._games:
            self._games[moves.id] = make_game(moves.id)
        if moves.moves:  # the game could be begun, so whatever happens is the last move's doing
            report_interim(msgspec.msgpack.encode(GameState(error="its process ended", is_late=True)))
        work = partial(_replay, self._games[moves.id], moves)
        forked = run_forked(work, cpu_s=moves.cpu_s, max_bytes=_MAX_BYTES)
        if forked.was_kept_waiting:
            raise TimeoutError(forked.why)
        if forked.value is None and not moves.moves:
            raise RuntimeError(forked.why)
        return forked.value or msgspec.msgpack.encode(GameState(error=forked.why, is_late=forked.used_its_time))


def _replay(made: Any, moves: GameMoves) -> bytes:
    """In a fork: play a game."""
    game = Game(made, moves.players, moves.seed)
    for move in moves.moves[:-1]:
        game.play(move)
    if moves.moves and game.state.digest != moves.digest:
        game.state.differs = True
    elif moves.moves:
        game.play(moves.moves[-1])
    return msgspec.msgpack.encode(game.state)


def _seed_random(seed: int) -> None:
    import numpy as np

    random.seed(seed)  # noqa: TID251  (textarena draws from it)
    np.random.seed(seed % 2**32)


def _plain(info: Any) -> dict[str, Any]:
    """Return what a game says of its end as plain data."""
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(info, enc_hook=str), strict=False)
    return {str(key): value for key, value in plain.items()} if isinstance(plain, dict) else {"info": plain}
