"""An OpenEnv server with a Wordle, on the public base classes of `openenv-core`.

`python -m uvicorn wordle_server:app --port PORT`, where `openenv-core` is installed. The secret word is `crane`. Its
wire format is that of OpenEnv's TextArena server, so that clients of the latter can play here without word lists: the
only message of an observation holds the whole transcript, and a guess that is not five letters in brackets is
recognised by its text. For tests, some guesses cause trouble: `[nan]` has a NaN as its reward, `[slow]` takes until the
client has gone, `[raise]` makes the environment raise, `[0.25]` has that reward.
"""

import asyncio
import re
import uuid

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import BaseModel

SECRET = "crane"
INTRODUCTION = "You are playing Wordle. Guess a word of five letters in brackets, for example '[apple]'.\n"
SLOW_S = 1.0


class Guess(Action):
    message: str


class Message(BaseModel):
    sender_id: int
    content: str
    category: str


class Board(Observation):
    prompt: str
    messages: list[Message]


class Wordle(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._begin()

    def _begin(self):
        self.said = INTRODUCTION
        self.turns = 0
        self._state = State(episode_id=str(uuid.uuid4()), step_count=0)

    def _observe(self, reward, done):
        message = Message(sender_id=-1, content=self.said, category="PROMPT")
        return Board(prompt=INTRODUCTION, messages=[message], reward=reward, done=done)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._begin()
        return self._observe(0.0, False)

    def step(self, action, timeout_s=None, **kwargs):
        raise NotImplementedError

    async def step_async(self, action: Guess, timeout_s=None, **kwargs):
        result = re.search(r"\[([a-z0-9.]+)\]", action.message)
        guess = result.group(1) if result else ""
        if guess == "raise":
            raise RuntimeError("the word list is gone")
        if guess == "slow":
            await asyncio.sleep(SLOW_S)
            return self._observe(0.111, False)
        if guess == "nan":
            return self._observe(float("nan"), False)
        if guess.startswith("0."):
            return self._observe(float(guess), False)
        if not re.fullmatch(r"[a-z]{5}", guess):
            self.said += "\nYou attempted an invalid move."
            return self._observe(0.0, False)
        self.turns += 1
        marks = "".join("G" if a == b else "Y" if a in SECRET else "X" for a, b in zip(guess, SECRET, strict=True))
        self.said += f"\nFeedback: {guess} {marks}"
        won = guess == SECRET
        return self._observe(float(won) if won else marks.count("G") / 10, won or self.turns >= 6)

    @property
    def state(self):
        return self._state


app = create_app(Wordle, Guess, Board, env_name="wordle", max_concurrent_envs=64)
