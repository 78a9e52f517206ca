"""Checks of `[rollout]` and `[eval]`."""

from collections.abc import Iterator
from typing import Final

from workers.settings.settings import Settings

MIN_VLLM_TEMPERATURE: Final = 0.01
"""vLLM raises a smaller temperature above 0 to this value."""


def check_rollout(s: Settings) -> Iterator[str]:
    """`[rollout]`: completions of a group can differ."""
    if s.rollout.temperature == 0 and s.train.learning_rate > 0:
        yield (
            "rollout.temperature is 0, so all completions of a group are equal and nothing can be learned while "
            "train.learning_rate is above 0; raise the first or set the second to 0"
        )


def check_sampling(s: Settings) -> Iterator[str]:
    """`rollout.sampling` and temperatures: every value works with every engine."""
    sampling = s.rollout.sampling
    for key in ("max_tokens_per_turn", "max_tokens"):
        if sampling.min_tokens > (most := getattr(s.rollout, key)):
            yield (
                f"rollout.sampling.min_tokens ({sampling.min_tokens}) is more than rollout.{key} ({most}); "
                "lower the first or raise the second"
            )
    if "" in sampling.stop:
        yield "rollout.sampling.stop has an empty string, which would end every turn before it begins; leave it out"
    if any(token < 0 for token in sampling.logit_bias):
        yield (
            f"rollout.sampling.logit_bias has the key {min(sampling.logit_bias)}, which is not a token id; leave it out"
        )
    for key, temperature in (("rollout", s.rollout.temperature), ("eval", s.eval.temperature)):
        if 0 < temperature < MIN_VLLM_TEMPERATURE:
            yield (
                f"{key}.temperature is {temperature:g}, but vLLM raises values between 0 and {MIN_VLLM_TEMPERATURE:g} "
                f"to {MIN_VLLM_TEMPERATURE:g}; set it to 0 or to that"
            )


def check_evaluation(s: Settings) -> Iterator[str]:
    """`[eval]`: there are held-out prompts, and completions of one can differ."""
    if not s.eval.source:
        for key in s.eval.non_default():
            yield (
                f"eval.{key} is set, but eval.path is empty and eval.rows is 0, so nothing is evaluated; set one, "
                "or leave it out"
            )
        return
    if s.eval.path and s.eval.rows:
        yield "eval.path names a file, eval.rows counts problems that the environment makes; set one of the two"
    if s.eval.rows and not s.environments:
        yield "eval.rows counts problems that the environment makes, but [environments] is empty; set eval.path"
    if s.eval.temperature == 0 and s.eval.group_size > 1:
        yield (
            f"eval.temperature is 0, so all {s.eval.group_size} completions of a prompt (eval.group_size) are the "
            "same; raise the first or set the second to 1"
        )
