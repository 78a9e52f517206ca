"""Settings of prompts, environments and reward functions."""

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, field

from workers.settings.hub import REVISION_FORM, REVISION_PATTERN
from workers.settings.section import NonNegativeFloat, NonNegativeInt, PositiveInt, Section

GENERATED: Final = "rows:"
"""Start of the source of a data set without a file."""
ENVIRONMENT_ROWS: Final = "environment:"
"""Start of the path of rows that an environment's `rows()` returned; the file is in the run's folder."""


def with_split(path: str, split: str) -> str:
    """Return a path as it names one split of a data set: `PATH#SPLIT`."""
    return f"{path}#{split}" if split else path


class DatasetSettings(Section, frozen=True):
    """`[[data.sets]]`: one of several data sets. Keys that are left out have the value from `[data]`."""

    path: str = ""
    """As `data.path`. Without `path` and `rows`: what `rows()` of its `environment` returns."""
    rows: NonNegativeInt = 0
    """As `data.rows`."""
    config: str = ""
    """As `data.config`, of this set."""
    split: str = ""
    """As `data.split`, of this set."""
    revision: Annotated[str, Meta(pattern=REVISION_PATTERN, description=REVISION_FORM)] = ""
    """As `data.revision`, of this set."""
    weight: NonNegativeFloat = 0.0
    """Share of the prompts, relative to the other sets; 0: the number of rows."""
    name: str = ""
    """Name of the set, part of its prompts' ids; empty: the file's stem or the folder's name, with `#split`."""
    prompt: str = ""
    """As `data.prompt`."""
    columns: dict[str, str] = field(default_factory=dict)
    """As `data.columns`, added to those."""
    system: str = ""
    """As `data.system`."""
    environment: str = ""
    """Environment of its rows without an `environment` column; empty: the first of `[environments]`."""

    @property
    def source(self) -> str:
        """Its path with `#split`, or `rows:N` for problems that the environment makes."""
        return f"{GENERATED}{self.rows}" if self.rows else with_split(self.path, self.split)


class DataSettings(Section, frozen=True):
    """`[data]`: prompts and the meaning of their columns."""

    path: str = ""
    """A `.jsonl` or `.parquet` file, the folder of a Hugging Face data set, or the name of a data set on the hub,
    `owner/name`, which is downloaded before anything starts. What is on the disk takes precedence. Without `path`,
    `rows` and `sets`: what `rows()` of each environment returns."""
    config: str = ""
    """Configuration (subset) of a data set that has several, such as `main` of `openai/gsm8k`."""
    split: str = ""
    """Split of a data set, such as `train`, or a part of one, such as `train[:1000]`. Empty: the only one."""
    revision: Annotated[str, Meta(pattern=REVISION_PATTERN, description=REVISION_FORM)] = ""
    """Branch, tag or commit of the hub's data set; empty: `main`. A run keeps the commit of its first start."""
    rows: NonNegativeInt = 0
    """Number of problems, instead of `path`, where the environment makes them itself from the `seed` that `reset` gets.
    What `reset` returns is then the prompt."""
    sets: tuple[DatasetSettings, ...] = ()
    """Several data sets instead of `path`: tables `[[data.sets]]` with `path`, `weight` (share of the prompts; default:
    number of rows), `name`, and where they differ from `[data]`: `prompt`, `columns`, `system`, `environment`."""
    prompt: str = "prompt"
    """Column with the prompt: a string or a list of chat messages. Empty: the environment's `reset` returns the
    prompt."""
    columns: dict[str, str] = field(default_factory=dict)
    """Renamed columns: `name for reset and rewards = column in the file`. Other columns keep their names."""
    system: str = ""
    """System message in front of every prompt."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the chat template, for example `enable_thinking = false`. `tools = false` renders prompts
    without the tools' JSON schemas."""
    epochs: PositiveInt = 1
    """Passes over the data. With weighted sets: until every set was used this often; shorter sets start again."""
    shuffle: bool = True
    """Shuffle each epoch, with the run's seed."""
    max_queued_prompts: PositiveInt = 256
    """Largest number of prompts that wait for a rollout worker."""


class EnvironmentSettings(Section, frozen=True):
    """`[environments.NAME]`: an environment whose factory takes arguments. Without arguments write `NAME = "REF"`."""

    ref: str
    """Entry point name, `package.module:factory` or `path/to/file.py:factory`."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""


class RewardSettings(Section, frozen=True):
    """`[[rewards]]`: one reward function."""

    ref: str
    """Entry point name, `package.module:function` or `path/to/file.py:function`."""
    name: str = ""
    """Unique name of its reward part; empty: the name in `ref`."""
    args: dict[str, Any] = field(default_factory=dict)
    """Extra keyword arguments; of the constructor, where `ref` names a class."""
    weight: float = 1.0
    """The reward of a completion is the weighted sum of its parts."""
    run_in: Literal["score", "rollout"] = "score"
    """`rollout`: call it in the rollout worker, right after the episode."""
    processes: NonNegativeInt = 0
    """Child processes for a synchronous function; one that passes its deadline is killed and replaced. 0: what the
    function itself asks for, else a thread."""
    granularity: Literal["", "row", "group"] = ""
    """Completions per call. `group`: all completions of a prompt, which may be compared; `row`: one, so that a
    completion on which the call fails is invalid alone. Empty: what the function itself asks for, else `group`."""
    timeout_s: NonNegativeFloat = 0.0
    """Deadline of one call; 0: `rollout.call_timeout_s`."""
    max_concurrency: NonNegativeInt = 0
    """Concurrent calls of an asynchronous function in each worker; 0: no limit."""
    calls_per_second: NonNegativeFloat = 0.0
    """Rate limit in each worker; 0: none."""
    environments: tuple[str, ...] = ()
    """Names in `[environments]` whose completions it measures; empty: all. Elsewhere it has no part in the reward."""
    none: Literal["", "invalid", "not_applicable"] = ""
    """Meaning of a returned None. `invalid`: the reward is unknown; `not_applicable`: the function has no part in this
    completion's reward. Empty: what the function itself asks for, else `invalid`."""
