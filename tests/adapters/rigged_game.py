"""A game in textarena's form, for the worker and for its children."""

import os
import random
import signal
import time

from envs.adapters.textarena_replay import Replayer


class Rigged:
    """A game with a move for everything that a game may do."""

    def __init__(self):
        self.secret = random.random()

    def reset(self, num_players, seed):
        self.number, self.players, self.turn = random.randint(0, 10**9), num_players, 0

    def get_observation(self):
        noise = time.monotonic() if self.players == 3 else ""
        return self.turn % min(self.players, 2), f"{self.number} {noise}"

    def step(self, action):
        if action == "raise":
            raise KeyError("no such field")
        if action == "disconnect":
            raise ConnectionError("the game master does not answer")
        if action == "hang":
            while True:
                pass
        if action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "look":
            self.number = os.environ.get("CANARY", "nothing")
        self.turn += 1
        return action == "end", {}

    def close(self):
        return {0: float("nan") if self.players == 1 else 1}, {"secret": self.secret}


class RiggedReplayer(Replayer):
    """A child's handler that knows the game."""

    def __init__(self):
        super().__init__()
        self._games["Rigged-v0"] = Rigged()
