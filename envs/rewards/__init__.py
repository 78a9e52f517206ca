"""Reward functions: load them, call them, classify what they return. A failure never becomes a number.

=======================  ===========================================================================
`loading.py`             resolve a reference to a reward function, and how it is called
`reward_function.py`     a reward function with TRL's signature; validates what it returns
`reward_processes.py`    reward functions in killable child processes
`reward_batch.py`        a group in the form that reward functions receive
`env_reward.py`          rewards from an environment's `get_reward`
`call_report.py`         what a function reports during a call
`call_results.py`        what a call returned, as rewards or the reason why there is none
`trainer_state.py`       the state of the trainer that a reward function gets
`merge.py`               merge the parts of a completion's reward into one
=======================  ===========================================================================
"""

from envs.rewards.loading import CallOptions
from envs.rewards.parts import environment_reward, merge_parts
from envs.rewards.reward_batch import RewardBatch
from envs.rewards.reward_function import RewardFunction

__all__ = ("CallOptions", "RewardBatch", "RewardFunction", "environment_reward", "merge_parts")
