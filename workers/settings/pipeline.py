"""The pipeline itself: where things are, how many, how long."""

from typing import Annotated, Literal

from msgspec import Meta

from workers.settings.section import Fraction, NonNegativeInt, PositiveInt, Seconds, Section


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


class Score(Section, frozen=True):
    """`[score]`: the scoring stage."""

    workers: NonNegativeInt = 1
    """Processes that `penstock run` starts."""
    groups_in_flight: PositiveInt = 8
    """Groups that one scorer works on at once."""


class Archive(Section, frozen=True):
    """`[archive]`: the groups that were trained or dropped, on disk in the run's folder."""

    keep: Literal["latest", "all", "none"] = "latest"
    """`all`: `penstock replay` needs every group of a run; `latest`: within `megabytes`; `none`: nothing is kept."""
    megabytes: PositiveInt = 1024
    """With `latest`: beyond so many the oldest groups are removed."""


class Delivery(Section, frozen=True):
    """`[delivery]`: leases and retries."""

    lease_s: Seconds = 15.0
    """A claimed entry whose owner has been silent for so long goes to somebody else."""
    infra_attempts: PositiveInt = 5
    """Workers an entry may outlive, failing engines included, before it is a dead letter."""
    data_attempts: PositiveInt = 2
    """Times its own content may fail before it is a dead letter."""
    backoff_s: Seconds = 0.5
    """First back-off; doubles, with jitter, up to 60 times itself."""
    reconnect_s: Seconds = 60.0
    """How long a worker tries to reach Redis, or any engine, before it gives up."""
    grace_s: Seconds = 20.0
    """Time to finish, or give back, what is held when asked to stop."""
    lost_threads: PositiveInt = 64
    """Threads of one worker that user code may keep beyond its deadline; at so many the worker drains, and restarts."""
    memory_mb: NonNegativeInt = 0
    """Resident memory, in MiB, at which a rollout worker or scorer drains, and restarts; 0: never."""
    restarts: NonNegativeInt = 5
    """Times `penstock run` restarts one role within ten minutes."""
    fsync: Literal["always", "everysec"] = "everysec"
    """The private server's `appendfsync`."""


class Guard(Section, frozen=True):
    """`[guard]`: when a run is too sick to go on."""

    max_invalid_fraction: Fraction = 0.2
    """Of one environment's completions, for one reason, over the window."""
    window_groups: PositiveInt = 64
    """Groups of one environment looked at together."""
    stall_s: Seconds = 600.0
    """No group trained or dropped for so long, while there is work: the run stops and says so."""
