"""Where prompts come from, where they are played, and what judges completions."""

from typing import Any, Literal

from msgspec import field

from workers.settings.section import NonNegativeFloat, NonNegativeInt, PositiveInt, Section


class DatasetSettings(Section, frozen=True):
    """`[[data.mix]]`: one of several data sets. What it leaves out is as in `[data]`."""

    path: str
    """As `data.path`."""
    weight: NonNegativeFloat = 0.0
    """Its share of the prompts, relative to the others'; 0: its number of rows."""
    name: str = ""
    """As `data.name`."""
    prompt: str = ""
    """As `data.prompt`."""
    columns: dict[str, str] = field(default_factory=dict)
    """As `data.columns`, besides those."""
    system: str = ""
    """As `data.system`."""
    environment: str = ""
    """As `data.environment`."""


class Data(Section, frozen=True):
    """`[data]`: where prompts come from, and which column means what."""

    path: str = ""
    """A `.jsonl` or `.parquet` file, or the folder of a Hugging Face data set saved to disk."""
    mix: tuple[DatasetSettings, ...] = ()
    """Several data sets instead: tables `[[data.mix]]` with `path`, `weight` (its share of the prompts; the number of
    its rows unless set), and, where the rest of `[data]` does not fit it, `name`, `prompt`, `columns`, `system`,
    `environment`."""
    name: str = ""
    """Of the data set, in the ids of its prompts; the file's stem or the folder's name unless set."""
    prompt: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages. Empty: rows have none, and what the environment's
    `reset` returns is the prompt."""
    environment: str = ""
    """The environment of rows that name none in a column `environment`; the first of `[environments]` unless set."""
    columns: dict[str, str] = field(default_factory=dict)
    """Renames: `name for reset and rewards = column in the file`. All other columns pass under their own names."""
    system: str = ""
    """A system message put before every prompt."""
    template_args: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the chat template, `enable_thinking = false` for one."""
    tool_schemas: bool = True
    """Show the tools' JSON schemas to the chat template."""
    epochs: PositiveInt = 1
    """Passes over the file. Of a mix with weights: until the last data set was passed; the others begin again."""
    shuffle: bool = True
    """A new order for each epoch, from the run's seed."""
    backlog: PositiveInt = 256
    """Prompts fed but not yet claimed, at most."""


class EnvironmentSettings(Section, frozen=True):
    """`[environments.NAME]`: an environment whose factory takes arguments; one that takes none is `NAME = "REF"`."""

    ref: str
    """An entry point's name, `package.module:factory` or `path/to/file.py:factory`."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the factory."""


class RewardSettings(Section, frozen=True):
    """`[[rewards]]`: one reward function."""

    ref: str
    """An entry point's name, `package.module:function` or `path/to/file.py:function`."""
    name: str = ""
    """What its part is called, each by a name of its own; the reference's own name unless set."""
    args: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments for the function; where `ref` names a class, those that make an instance of it."""
    weight: float = 1.0
    """The completion's reward is the weighted sum of its parts."""
    where: Literal["score", "rollout"] = "score"
    """`rollout`: run it in the rollout worker, on the live environment's snapshot before the slot is reset."""
    processes: NonNegativeInt = 0
    """Processes that call it, if it is synchronous; one past its deadline is killed and replaced. 0: as the function
    itself says, a thread if it does not."""
    each: Literal["", "row", "group"] = ""
    """What one call is for. `group`: all completions of a prompt, and never fewer: for functions that compare them.
    `row`: one completion. Empty: as `group`, and where that raises, or is killed, once more for each completion."""
    timeout_s: NonNegativeFloat = 0.0
    """For each call; 0: `rollout.reward_timeout_s`."""
    concurrency: NonNegativeInt = 0
    """Calls at once, of an asynchronous function, in each worker; 0: no bound."""
    per_second: NonNegativeFloat = 0.0
    """Calls that begin in a second, in each worker; 0: no bound."""
