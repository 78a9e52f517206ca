"""The pipeline's own settings: where things are, how many, how long."""

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from workers.settings.section import Count, Fraction, Least0, Positive, Seconds, Section


class Run(Section, frozen=True):
    """`[run]`: what it is called and where it lives."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """Every Redis key begins with it, in braces."""
    folder: str = ""
    """Checkpoints, ledger, logs; `runs/NAME` unless set. Relative paths start at the working directory."""
    redis: str = ""
    """URL of a Redis >= 7 or Valkey server (`redis://`, `rediss://`, `unix://`); empty: a private server."""
    seed: int = 0
    """Of shuffling and of the prompts' own seeds."""


class Model(Section, frozen=True):
    """`[model]`: the policy to begin with."""

    path: str
    """A folder in Hugging Face form: config, safetensors, tokenizer with a chat template."""
    tool_format: Literal["auto", "deepseek", "hermes", "llama3_json", "mistral", "pythonic"] = "auto"
    """How the model writes tool calls; `auto`: as its chat template does."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights that are published; the optimizer always works in float32."""


class DataSet(Section, frozen=True):
    """`[[data.mix]]`: one of several data sets. What it leaves out is as in `[data]`."""

    path: str
    """As `data.path`."""
    weight: Least0 = 0.0
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
    mix: tuple[DataSet, ...] = ()
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
    epochs: Positive = 1
    """Passes over the file. Of a mix with weights: until the last data set was passed; the others begin again."""
    shuffle: bool = True
    """A new order for each epoch, from the run's seed."""
    backlog: Positive = 256
    """Prompts fed but not yet claimed, at most."""


class Environment(Section, frozen=True):
    """`[environments.NAME]`: an environment whose factory takes arguments; one that takes none is `NAME = "REF"`."""

    ref: str
    """An entry point's name, `package.module:factory` or `path/to/file.py:factory`."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the factory."""


class RewardFunction(Section, frozen=True):
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
    processes: Count = 0
    """Processes that call it, if it is synchronous; one past its deadline is killed and replaced. 0: as the function
    itself says, a thread if it does not."""
    each: Literal["", "row", "group"] = ""
    """What one call is for. `group`: all completions of a prompt, and never fewer: for functions that compare them.
    `row`: one completion. Empty: as `group`, and where that raises, or is killed, once more for each completion."""
    timeout_s: Least0 = 0.0
    """For each call; 0: `rollout.reward_timeout_s`."""
    concurrency: Count = 0
    """Calls at once, of an asynchronous function, in each worker; 0: no bound."""
    per_second: Least0 = 0.0
    """Calls that begin in a second, in each worker; 0: no bound."""


class Rollout(Section, frozen=True):
    """`[rollout]`: groups, episodes, and their limits."""

    workers: Count = 1
    """Processes that `penstock run` starts."""
    groups_in_flight: Positive = 8
    """Groups that one worker works on at once."""
    group_size: Positive = 8
    """Completions to a prompt."""
    temperature: Least0 = 1.0
    """Of sampling; the trainer divides its logits by the same. Other than 1 it takes an engine whose log-probs are
    processed: the local one, or vLLM with `--logprobs-mode processed_logprobs`."""
    stop: tuple[str, ...] = ()
    """Strings that end a turn; the token that completes one of them is the last. The engine's own end of turn always
    does."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that have this mass together; 1: from all. Takes `restricted`."""
    top_k: Count = 0
    """Sample from so many of the likeliest tokens; 0: from all. Takes `restricted`."""
    min_p: Fraction = 0.0
    """Sample from tokens that are at least so likely, in units of the likeliest; 0: from all. Takes `restricted`."""
    min_tokens: Count = 0
    """Of a turn, before which no stop token can be sampled. Takes `restricted`."""
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] = field(default_factory=dict)
    """Added to the logits of these token ids, before the temperature. Takes `restricted`."""
    restricted: bool = False
    """Allow the five settings above, which change the distribution that is sampled from. The trainer's is of the whole
    vocabulary all the same, so on unchanged weights its ratio to the engine's is not 1: with `top_p`, `top_k` and
    `min_p` it is the mass of the tokens that were left, and nothing is ever learned of the others."""
    max_tokens_per_turn: Positive = 512
    """Sampled tokens of one turn."""
    max_tokens: Positive = 4096
    """Tokens of a completion, tool results included."""
    max_turns: Positive = 8
    """Turns of the model."""
    max_tool_calls: Positive = 32
    """Calls in one episode."""
    max_tool_errors: Positive = 16
    """Failed or malformed calls in one episode."""
    wall_clock_s: Seconds = 600.0
    """Of one episode, resets and tools included."""
    reset_timeout_s: Seconds = 30.0
    """For `reset`; past it the completion is invalid."""
    tool_timeout_s: Seconds = 30.0
    """For each tool call; past it the model reads that the tool timed out."""
    reward_timeout_s: Seconds = 30.0
    """For `get_reward`, and for each call of a reward function wherever it runs."""
    max_snapshot_bytes: Positive = 1_000_000
    """Of one frozen environment; the largest attributes are left out beyond it."""
    endpoint_host: str = "127.0.0.1"
    """This worker's address as environments that lead their episodes themselves (verifiers' servers) reach it: they ask
    there for every turn of the model."""
    partial: bool = False
    """Finished completions of an unfinished group are kept on the server, whatever became of them: where its worker
    dies, or is stopped, the next one plays only the others. For long episodes; costs memory of the server."""


class Score(Section, frozen=True):
    """`[score]`: the scoring stage."""

    workers: Count = 1
    """Processes that `penstock run` starts."""
    groups_in_flight: Positive = 8
    """Groups that one scorer works on at once."""


class Eval(Section, frozen=True):
    """`[eval]`: held-out prompts, sampled every so often by the run's own workers, never trained on."""

    path: str = ""
    """A prompt file with the columns of `[data]`; empty: nothing is evaluated."""
    every: Positive = 10
    """Policy versions from one evaluation to the next; the first version and the last are evaluated besides."""
    group_size: Positive = 4
    """Completions to a prompt; pass@k is told for powers of two up to it."""
    temperature: Least0 = 1.0
    """Of sampling; 0 is greedy, with `group_size = 1`."""
    share: Annotated[float, Meta(gt=0, lt=1)] = 0.25
    """Of each worker's `groups_in_flight`, while an evaluation is under way; one group at least."""
    hold_s: Seconds = 300.0
    """The next version is published only when an evaluation has been sampled, or when nothing of it has come for so
    long. Longer than an episode, and less than `guard.stall_s`."""


class Archive(Section, frozen=True):
    """`[archive]`: the groups that were trained or dropped, on disk in the run's folder."""

    keep: Literal["latest", "all", "none"] = "latest"
    """`all`: `penstock replay` needs every group of a run; `latest`: within `megabytes`; `none`: nothing is kept."""
    megabytes: Positive = 1024
    """With `latest`: beyond so many the oldest groups are removed."""


class Pacing(Section, frozen=True):
    """`[pacing]`: how far rollouts may run ahead of the trainer."""

    max_staleness: Count = 1
    """Outstanding groups are bounded by (max_staleness + 1) x groups per policy version."""
    late: Literal["train", "wait", "cancel"] = "train"
    """What becomes of groups that take longer than `max_staleness` versions. `train`: nothing, any age is trained.
    `wait`: the trainer waits for them. `cancel`: they are aborted at the engine and begun anew, at most twice; then as
    `train`."""
    straggler_timeout_s: Seconds = 60.0
    """`late = "wait"`: the trainer goes on without them when none has come for so long."""
    max_token_age: Count = 0
    """Tokens sampled more versions ago are masked and counted; 0: any age is trained."""


class Delivery(Section, frozen=True):
    """`[delivery]`: leases and retries."""

    lease_s: Seconds = 15.0
    """A claimed entry whose owner has been silent for so long goes to somebody else."""
    infra_attempts: Positive = 5
    """Workers an entry may outlive, failing engines included, before it is a dead letter."""
    data_attempts: Positive = 2
    """Times its own content may fail before it is a dead letter."""
    backoff_s: Seconds = 0.5
    """First back-off; doubles, with jitter, up to 60 times itself."""
    reconnect_s: Seconds = 60.0
    """How long a worker tries to reach Redis, or any engine, before it gives up."""
    grace_s: Seconds = 20.0
    """Time to finish, or give back, what is held when asked to stop."""
    lost_threads: Positive = 64
    """Threads of one worker that user code may keep beyond its deadline; at so many the worker drains, and restarts."""
    memory_mb: Count = 0
    """Resident memory, in MiB, at which a rollout worker or scorer drains, and restarts; 0: never."""
    restarts: Count = 5
    """Times `penstock run` restarts one role within ten minutes."""
    fsync: Literal["always", "everysec"] = "everysec"
    """The private server's `appendfsync`."""


class Guard(Section, frozen=True):
    """`[guard]`: when a run is too sick to go on."""

    max_invalid_fraction: Fraction = 0.2
    """Of one environment's completions, for one reason, over the window."""
    window_groups: Positive = 64
    """Groups of one environment looked at together."""
    stall_s: Seconds = 600.0
    """No group trained or dropped for so long, while there is work: the run stops and says so."""
