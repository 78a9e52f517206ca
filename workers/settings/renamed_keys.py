"""Keys of earlier settings files and their replacements, for error messages. Old keys are never accepted."""

from collections.abc import Mapping
from typing import Any, Final

RENAMED_KEYS: Final[dict[str, str]] = {
    "data.mix": "data.sets",
    "data.name": "data.sets with name",
    "data.environment": "data.sets with environment; otherwise the first of [environments]",
    "data.tool_schemas": "data.chat_template_kwargs = { tools = false }",
    "data.template_args": "data.chat_template_kwargs",
    "data.backlog": "data.max_queued_prompts",
    "rewards.where": "rewards.run_in",
    "rewards.each": "rewards.granularity",
    "rewards.concurrency": "rewards.max_concurrency",
    "rewards.per_second": "rewards.calls_per_second",
    "rollout.stop": "rollout.sampling = { stop = [...] }",
    "rollout.top_p": "rollout.sampling = { top_p = ... }",
    "rollout.top_k": "rollout.sampling = { top_k = ... }",
    "rollout.min_p": "rollout.sampling = { min_p = ... }",
    "rollout.min_tokens": "rollout.sampling = { min_tokens = ... }",
    "rollout.logit_bias": "rollout.sampling = { logit_bias = ... }",
    "rollout.restricted": "",
    "rollout.wall_clock_s": "rollout.episode_timeout_s",
    "rollout.reset_timeout_s": "rollout.call_timeout_s",
    "rollout.tool_timeout_s": "rollout.call_timeout_s",
    "rollout.reward_timeout_s": "rollout.call_timeout_s",
    "rollout.max_tool_errors": "half of rollout.max_tool_calls",
    "rollout.endpoint_host": "run.address",
    "rollout.partial": "rollout.save_partial_groups",
    "score.groups_in_flight": "rollout.groups_in_flight",
    "eval.share": "",
    "eval.hold_s": "half of abort.stall_timeout_s",
    "eval.publish_wait_s": "half of abort.stall_timeout_s",
    "engine.dns": 'engine.urls = ["dns+http://NAME:PORT"]',
    "engine.threads": "run.threads",
    "engine.min_concurrency": "",
    "engine.max_concurrency": "",
    "engine.attempts": "",
    "engine.max_attempts": "",
    "engine.max_batch": "engine.max_batch_size",
    "engine.max_length": "engine.max_model_len",
    "train.groups_per_step": "train.batch_size",
    "train.betas": "",
    "train.threads": "run.threads",
    "train.checkpoint_every": "train.save_every",
    "train.keep_last": "train.max_checkpoints",
    "lora.targets": "lora.target_modules",
    "lora.publish": "weights.transport",
    "weights.kv": "weights.kv_cache",
    "weights.host": "run.address",
    "weights.port": 'run.address = "HOST:PORT"',
    "weights.timeout_s": "",
    "algorithm.aggregation_constant": "rollout.max_tokens",
    "algorithm.kl_divergence": "algorithm.kl_estimator",
    "algorithm.correct_at": "algorithm.success_threshold",
    "algorithm.reward_bias": "a constant that the reward function adds",
    "algorithm.reward_scale": "rewards.weight",
    "algorithm.singleton": "algorithm.single_sample_policy",
    "filter.min_mean_reward": "filter.mean_reward_range",
    "filter.max_mean_reward": "filter.mean_reward_range",
    "filter.min_advantage": "filter.advantage_range",
    "filter.max_advantage": "filter.advantage_range",
    "shaping.bias": "a constant that the reward function adds",
    "shaping.scale": "rewards.weight",
    "shaping.clip": "algorithm.reward_clip",
    "shaping.overlong_tokens": "algorithm.overlong_penalty = [tokens, penalty]",
    "shaping.overlong_penalty": "algorithm.overlong_penalty = [tokens, penalty]",
    "reward_normalization": "algorithm.reward_normalization = [mean, std]",
    "advantage_normalization": "algorithm.advantage_normalization = [mean, std]",
    "correction.lower": "correction.weight_range",
    "correction.upper": "correction.weight_range",
    "correction.outside": "correction.out_of_range",
    "correction.normalize": 'correction.weights = "token-normalized" or "sequence-normalized"',
    "critic.width": "estimator.critic_width",
    "critic.learning_rate": "estimator.critic_learning_rate",
    "critic.value_clip": "estimator.critic_value_clip",
    "pacing.late": "pacing.stale_policy",
    "pacing.straggler_timeout_s": "half of abort.stall_timeout_s",
    "archive.annotations": "a quarter of archive.keep",
    "archive.megabytes": "archive.keep",
    "delivery.lease_s": "queue.lease_s",
    "delivery.infra_attempts": "queue.max_attempts",
    "delivery.data_attempts": "",
    "delivery.backoff_s": "",
    "delivery.reconnect_s": "queue.reconnect_timeout_s",
    "delivery.grace_s": "queue.shutdown_timeout_s",
    "delivery.lost_threads": "",
    "delivery.memory_mb": "queue.max_memory_mb",
    "delivery.restarts": "",
    "queue.max_restarts": "",
    "delivery.fsync": "queue.fsync",
    "queue.max_abandoned_threads": "",
    "guard.max_invalid_fraction": "abort.max_invalid_fraction",
    "guard.window_groups": "",
    "guard.stall_s": "abort.stall_timeout_s",
    "delivery": "queue",
    "guard": "abort",
    "shaping": "algorithm",
    "critic": "estimator",
}
"""Old key -> new key. An empty string: the key was removed."""


def explain_renamed(table: Mapping[str, Any]) -> list[str]:
    """Return a message for every old key of a settings file.

    A stored settings file has every key, so several may be old after an update of Penstock.

    Args:
        table: the whole file.
    """
    found = []
    for section, value in table.items():
        rows = value if isinstance(value, list) else [value]
        keys = {f"{section}.{key}": None for row in rows if isinstance(row, dict) for key in row}
        found += [key for key in keys if key in RENAMED_KEYS] or [section] * (section in RENAMED_KEYS)
    return [
        f"{key} is now {new}" if (new := RENAMED_KEYS[key]) else f"{key} was removed: leave it out" for key in found
    ]
