"""The arguments of a reward function: one group, or one completion of it."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from envs.messages import messages_text
from envs.rewards.call_report import REPORT_PARAMETERS, TrainerState
from stream.records import Completion, Group, Message, Prompt


@dataclass(frozen=True)
class RewardBatch:
    """Arguments of one call: lists with one entry for each completion.

    Example, one completion of a plain-text prompt::

        RewardBatch(prompts=["2 + 2?"], completions=["4"], completion_ids=[[19]], environments=None,
                    columns={"answer": ["4"]})
    """

    prompts: list[Any]
    """Strings, or lists of messages."""
    completions: list[Any]
    """Strings or lists of messages, like the prompts."""
    completion_ids: list[list[int]]
    """All tokens after the prompt: sampled ones, tool results and observations."""
    environments: list[Any] | None = None
    """Thawed snapshots of the environments; None, and then not passed, if there are none."""
    columns: dict[str, list[Any]] | None = None
    """The prompt's fields, repeated for each completion."""
    trainer_state: TrainerState = TrainerState()  # noqa: RUF009  (frozen)
    """When the completions were sampled."""

    @classmethod
    def from_group(cls, group: Group, environments: list[Any] | None) -> "RewardBatch":
        """Build the arguments for one group.

        Args:
            group: the completions of one prompt.
            environments: thawed snapshots in the order of the completions; None if there are none.
        """
        completions, prompt = group.completions, group.prompt
        if prompt.is_plain_text:
            prompts: list[Any] = [messages_text(prompt.messages[-1:])] * len(completions)
            answers: list[Any] = [
                messages_text([m for m in c.messages if m.get("role") == "assistant"]) for c in completions
            ]
        else:
            prompts = [_prompt_messages(prompt, c) for c in completions]
            answers = [list(c.messages) for c in completions]
        columns = {name: [value] * len(completions) for name, value in prompt.fields.items()}
        ids = [[token for row in c.rows for token in row.tokens] for c in completions]  # all rows, in order
        return cls(prompts, answers, ids, environments, columns, TrainerState.of_group(group))

    @property
    def size(self) -> int:
        """Number of completions."""
        return len(self.completions)

    def row(self, i: int) -> "RewardBatch":
        """Return the batch of completion `i` alone."""
        environments = None if self.environments is None else [self.environments[i]]
        columns = {name: [values[i]] for name, values in (self.columns or {}).items()}
        rows = ([self.prompts[i]], [self.completions[i]], [self.completion_ids[i]])
        return RewardBatch(*rows, environments, columns, self.trainer_state)

    def to_kwargs(self) -> dict[str, Any]:
        """Return keyword arguments for TRL's signature. Their values are shared; `copy_arguments` copies them."""
        own: dict[str, list[Any]] = {
            "prompts": self.prompts,
            "completions": self.completions,
            "completion_ids": self.completion_ids,
        }
        if self.environments is not None:
            own["environments"] = self.environments
        return (self.columns or {}) | own


def copy_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments in which every completion has values of its own.

    A function that edits messages or columns in place changes neither what another function measures, nor a sibling,
    nor what the archive stores. Environments are thawed for each function and are passed as they are.
    """
    return {name: _copy_rows(name, values) for name, values in arguments.items()}


def _copy_rows(name: str, values: Any) -> Any:
    if name in REPORT_PARAMETERS:
        return values
    if name == "environments":
        return list(values)
    if name == "completion_ids":
        return [list(ids) for ids in values]
    return [value if isinstance(value, str) else copy.deepcopy(value) for value in values]


def _prompt_messages(prompt: Prompt, completion: Completion) -> list[Message]:
    """Return the prompt that this completion saw, including the environment's first observation."""
    return list(completion.prompt_messages or prompt.messages)
