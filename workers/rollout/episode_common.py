"""Both ends of an episode, whoever leads it: what it begins with, and what is taken when it is over."""

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from stream.records import Completion, Failure, Prompt
from workers.rollout.environment_slot import MAX_SNAPSHOT_BYTES, EnvironmentSlot
from workers.settings import Rollout


def new_completion(prompt: Prompt, index: int) -> Completion:
    """A completion to be."""
    seconds = dict.fromkeys(("reset", "engine", "tools", "reward", "total"), 0.0)
    return Completion(index=index, prompt_messages=prompt.messages, seconds=seconds)


@contextmanager
def timed(completion: Completion, activity: str) -> Iterator[None]:
    """Count the time within as this activity's."""
    started = time.perf_counter()
    try:
        yield
    finally:
        completion.seconds[activity] += time.perf_counter() - started


def reset_fields(prompt: Prompt) -> dict[str, Any]:
    """What `reset` may ask for: the row's fields and its prompt. Copies: a class may change what it is given."""
    shown: Any = prompt.messages[-1].get("content") if prompt.is_plain_text else prompt.messages
    fields = {"prompt": shown, **prompt.fields}
    return {name: value if isinstance(value, str) else copy.deepcopy(value) for name, value in fields.items()}


async def measure(completion: Completion, slot: EnvironmentSlot, limits: Rollout) -> None:
    """Take reward and snapshot, before the slot can be reset for somebody else; of a failed completion, neither."""
    if completion.failure is not None:
        return
    if slot.has_reward:
        with timed(completion, "reward"):
            completion.parts = await slot.reward(limits.call_timeout_s, completion.messages)
    frozen = await slot.freeze(MAX_SNAPSHOT_BYTES, limits.call_timeout_s)
    if isinstance(frozen, Failure):
        completion.failure = frozen
    else:
        completion.snapshot = frozen
