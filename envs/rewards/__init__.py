"""Rewards: how a function that measures them is found and called, and what came of it. No failure becomes a number.

==================  =========================================================================
`calling.py`        a reference as a function, and how it wants to be called
`function.py`       a reward function: called with TRL's signature, its results classified
`process.py`        one that runs in processes that can be killed
`batch.py`          a group as reward functions see it
`environment.py`    what an environment measures itself
`results.py`        what a call returned, as rewards, or why there is none
`merge.py`          a completion's parts as one reward
==================  =========================================================================
"""

from envs.rewards.env_reward import environment_reward
from envs.rewards.loading import CallOptions
from envs.rewards.merge import merge_parts
from envs.rewards.reward_batch import RewardBatch, batch_from_group
from envs.rewards.reward_function import RewardFunction

__all__ = ("CallOptions", "RewardBatch", "RewardFunction", "batch_from_group", "environment_reward", "merge_parts")
