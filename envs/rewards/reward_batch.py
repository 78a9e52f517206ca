"""A group as its reward functions see it."""

from dataclasses import dataclass
from typing import Any

from envs.messages import messages_text
from stream.records import Completion, Group, Message, Prompt


@dataclass(frozen=True)
class RewardBatch:
    """What a reward function is called with: the same number of entries in each, one for each completion.

    Example, for one completion of a plain-text prompt::

        RewardBatch(prompts=["2 + 2?"], completions=["4"], completion_ids=[[19]], environments=None,
                    columns={"answer": ["4"]})
    """

    prompts: list[Any]
    """Strings, or lists of messages."""
    completions: list[Any]
    """Strings, or lists of messages; as the prompts."""
    completion_ids: list[list[int]]
    """Tokens after the prompt, sampled ones and tools' alike."""
    environments: list[Any] | None = None
    """What remains of each completion's environment; None where there is none, and then it is not passed at all."""
    columns: dict[str, list[Any]] | None = None
    """The prompt's fields, each repeated."""

    @property
    def size(self) -> int:
        """Number of completions."""
        return len(self.completions)

    def row(self, i: int) -> "RewardBatch":
        """The batch of completion i alone."""
        environments = None if self.environments is None else [self.environments[i]]
        columns = {name: [values[i]] for name, values in (self.columns or {}).items()}
        return RewardBatch([self.prompts[i]], [self.completions[i]], [self.completion_ids[i]], environments, columns)

    def to_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for TRL's signature; new lists, so that no function can shorten another one's."""
        own: dict[str, list[Any]] = {
            "prompts": self.prompts,
            "completions": self.completions,
            "completion_ids": self.completion_ids,
        }
        if self.environments is not None:
            own["environments"] = self.environments
        return {name: list(values) for name, values in ((self.columns or {}) | own).items()}


def batch_from_group(group: Group, environments: list[Any] | None) -> RewardBatch:
    """A group as its reward functions see it.

    Args:
        group: one prompt's completions.
        environments: what remains of each completion's environment, in their order; None where there is none.
    """
    completions, prompt = group.completions, group.prompt
    if prompt.is_plain_text:
        prompts: list[Any] = [messages_text(prompt.messages[-1:])] * len(completions)
        said: list[Any] = [messages_text([m for m in c.messages if m.get("role") == "assistant"]) for c in completions]
    else:
        prompts = [_prompt_messages(prompt, c) for c in completions]
        said = [list(c.messages) for c in completions]
    columns = {name: [value] * len(completions) for name, value in prompt.fields.items()}
    ids = [[token for row in c.rows for token in row.tokens] for c in completions]  # rows of a fork, one after another
    return RewardBatch(prompts, said, ids, environments, columns)


def _prompt_messages(prompt: Prompt, completion: Completion) -> list[Message]:
    """The prompt as this completion saw it, the environment's observation included."""
    return list(completion.prompt_messages or prompt.messages)
