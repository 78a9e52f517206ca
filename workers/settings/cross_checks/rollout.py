"""How completions are sampled, how many, and when."""

from collections.abc import Iterator
from typing import Final

from workers.settings.settings import Settings

TRUNCATED_SAMPLING_KEYS: Final = ("top_p", "top_k", "min_p", "min_tokens", "logit_bias")
"""Settings of `[rollout]` that change the distribution that is sampled from."""
MIN_VLLM_TEMPERATURE: Final = 0.01
"""Temperature."""


def check_rollout(s: Settings) -> Iterator[str]:
    """`[rollout]`: lengths, and completions that differ."""
    if s.rollout.max_tokens_per_turn > s.rollout.max_tokens:
        yield (
            f"rollout.max_tokens_per_turn ({s.rollout.max_tokens_per_turn}) is more than rollout.max_tokens "
            f"({s.rollout.max_tokens}); lower the first or raise the second"
        )
    if s.rollout.temperature == 0 and s.train.learning_rate > 0:
        yield (
            "rollout.temperature is 0, so all completions of a group are equal and nothing can be learned while "
            "train.learning_rate is above 0; raise the first or set the second to 0"
        )


def check_sampling(s: Settings) -> Iterator[str]:
    """`[rollout]`: what is sampled from, and whether the trainer's distribution is the same."""
    changed = s.rollout.non_default(*TRUNCATED_SAMPLING_KEYS)
    if changed and not s.rollout.restricted:
        yield (
            f"rollout.{changed[0]} changes the distribution that is sampled from, and the trainer's stays that of the "
            "whole vocabulary, so their ratio would not be 1 on unchanged weights; leave it out, or accept that with "
            "rollout.restricted = true"
        )
    if s.rollout.restricted and not changed:
        yield (
            f"rollout.restricted is true, but none of {', '.join(TRUNCATED_SAMPLING_KEYS)} is set, so nothing is restricted; leave "
            "it out"
        )
    if s.rollout.min_tokens > s.rollout.max_tokens_per_turn:
        yield (
            f"rollout.min_tokens ({s.rollout.min_tokens}) is more than rollout.max_tokens_per_turn "
            f"({s.rollout.max_tokens_per_turn}); lower the first or raise the second"
        )
    if "" in s.rollout.stop:
        yield "rollout.stop holds an empty string, with which every turn would end before it begins; leave it out"
    if any(token < 0 for token in s.rollout.logit_bias):
        yield f"rollout.logit_bias has the key {min(s.rollout.logit_bias)}, which is no token id; leave it out"
    for key, temperature in (("rollout", s.rollout.temperature), ("eval", s.eval.temperature)):
        if 0 < temperature < MIN_VLLM_TEMPERATURE:
            yield (
                f"{key}.temperature is {temperature:g}, but vLLM samples at {MIN_VLLM_TEMPERATURE:g} where it is asked for less, "
                "other than 0; set it to 0 or to that"
            )


def check_pacing(s: Settings) -> Iterator[str]:
    """`[pacing]`: who waits for whom."""
    if s.pacing.non_default("straggler_timeout_s") and s.pacing.late != "wait":
        yield (
            f"pacing.straggler_timeout_s is set, but with pacing.late = {s.pacing.late!r} nobody waits for stragglers; "
            "set the second to 'wait' or leave the first out"
        )


def check_evaluation(s: Settings) -> Iterator[str]:
    """`[eval]`: that there is one, and that it can end."""
    if not s.eval.path:
        for key in s.eval.non_default():
            yield f"eval.{key} is set, but eval.path is empty, so nothing is evaluated; set it too, or leave it out"
        return
    if s.eval.temperature == 0 and s.eval.group_size > 1:
        yield (
            f"eval.temperature is 0, so all {s.eval.group_size} completions of a prompt (eval.group_size) are the "
            "same; raise the first or set the second to 1"
        )
    if s.eval.hold_s >= s.guard.stall_s:
        yield (
            f"eval.hold_s ({s.eval.hold_s:g}) is not less than guard.stall_s ({s.guard.stall_s:g}), so an evaluation "
            "that stands still would end the run; lower the first or raise the second"
        )
