"""Reward functions: load them, call them, classify what they return. A failure never becomes a number."""

from envs.rewards.loading import CallOptions
from envs.rewards.parts import environment_reward, merge_parts
from envs.rewards.reward_batch import RewardBatch
from envs.rewards.reward_function import RewardFunction

__all__ = ("CallOptions", "RewardBatch", "RewardFunction", "environment_reward", "merge_parts")
