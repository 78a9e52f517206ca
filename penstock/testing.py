"""Test an environment without a model: the test itself says what the model would say, turn by turn.

>>> from penstock.testing import call, play
>>> played = play("counter.py:Counter", [call("add", amount=3), "done"], fields={"target": 3})
>>> played.reward_value
1.0
"""

from workers.check.scripted import Call, EpisodeResult, call, play

__all__ = ["Call", "EpisodeResult", "call", "play"]
