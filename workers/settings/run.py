"""Settings of the pipeline: names and places, process counts, queues, when to abort."""

import re
from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from workers.settings.hub import REVISION_FORM, REVISION_PATTERN, local_folder
from workers.settings.section import (
    Fraction,
    LeaseSeconds,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Seconds,
    Section,
)

_RUN_NAME: Final = "letters, digits, '.', '_' and '-', and a letter or a digit at the beginning"
"""What a run's name consists of."""
_STORAGE_URL: Final = "a URL with its scheme, such as s3://BUCKET/PREFIX, with %3F for ? and %23 for #; not memory"


def name_from(text: str) -> str:
    """Return the name of a run that is closest to a text."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-") or "run"


class RunSettings(Section, frozen=True):
    """`[run]`: name, folder and server of the run."""

    name: Annotated[str, Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?\Z", description=_RUN_NAME)] = ""
    """Name of the run; prefix of all its Redis keys, in braces. Empty: the name of `folder`; without a folder, every
    `penstock run` starts a new run, named after file and time. Roles that are started one by one need a name."""
    folder: str = ""
    """Folder for checkpoints, ledger and logs; empty: `runs/NAME`. Relative to the working directory.
    Only the trainer needs it."""
    redis: str = ""
    """URL of a Redis >= 7 or Valkey server (`redis://`, `rediss://`, `unix://`); empty: start a private server."""
    seed: int = 0
    """Seed for shuffling and for sampling."""
    threads: PositiveInt = 1
    """CPU threads of each trainer process, and of each started engine that has no GPU."""
    dashboard: Literal["on", "off"] | Annotated[int, Meta(ge=1, le=65535)] = "on"
    """`penstock run` serves the run's pages to this machine (`penstock dashboard`): `on` at a free port, a number at
    that port, `off` not at all."""
    address: str = "127.0.0.1"
    """`HOST` or `HOST:PORT` by which other machines reach this process. Engines download weights from the trainer
    (`weights.transport = "http"`, at this port, else at a free one). Environment servers request turns from a rollout
    worker."""
    metrics_address: Annotated[str, Meta(pattern=r"^(.+:[0-9]{1,5})?\Z", description="HOST:PORT")] = ""
    """`HOST:PORT` at which each process serves `/metrics` for Prometheus, `/health` and `/ready`, without a password;
    empty: it serves none. With `penstock run` the supervisor has this port, and feeder, rollout workers, scorers and
    trainer have the next ones. Port 0: any free port, named in each log."""

    def __post_init__(self) -> None:
        """Name the run after its folder, and refuse addresses that cannot be read."""
        if not self.name and self.folder:
            msgspec.structs.force_setattr(self, "name", name_from(Path(self.folder).name))
        for key in ("address", "metrics_address"):
            try:
                _ = urlsplit(f"//{getattr(self, key)}").port
            except ValueError:
                raise ValueError(
                    f"{key} = {getattr(self, key)!r} is no HOST or HOST:PORT; write an IPv6 address in brackets"
                ) from None

    @property
    def host(self) -> str:
        """The host of `address`."""
        return urlsplit(f"//{self.address}").hostname or self.address

    @property
    def port(self) -> int:
        """The port of `address`; 0 if it has none."""
        return urlsplit(f"//{self.address}").port or 0

    @property
    def metrics_port(self) -> int:
        """The port of `metrics_address`; 0 without one."""
        return urlsplit(f"//{self.metrics_address}").port or 0


class ModelSettings(Section, frozen=True):
    """`[model]`: the policy that the run starts from."""

    path: str
    """Folder in Hugging Face format: config, safetensors, tokenizer with a chat template; or the name of a model on the
    hub, `owner/name`, which is downloaded before anything starts. A folder of that name on the disk takes precedence.
    Rollout workers on machines without the files get what they need from the trainer."""
    revision: Annotated[str, Meta(pattern=REVISION_PATTERN, description=REVISION_FORM)] = ""
    """Branch, tag or commit of the hub's model; empty: `main`. A run keeps the commit of its first start."""
    tool_format: Literal["auto", "deepseek", "hermes", "llama3_json", "mistral", "pythonic"] = "auto"
    """Format of the model's tool calls; `auto`: detect it from the chat template."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the published weights; the optimizer always works in float32."""

    @property
    def folder(self) -> Path:
        """The model's folder on this machine; one that does not exist if the hub's model is not in the cache."""
        return local_folder(self.path, self.revision)


class ScoreSettings(Section, frozen=True):
    """`[score]`: the scoring stage."""

    workers: NonNegativeInt = 1
    """Scorer processes that `penstock run` starts."""


class ArchiveSettings(Section, frozen=True):
    """`[archive]`: trained and dropped groups, stored in the run's folder."""

    keep: Literal["all", "none"] | PositiveInt = 1024
    """Megabytes of groups to keep, and a quarter of it for their trained tokens (advantage, mask and log-prob
    difference of each sampled token); the oldest are removed first. `"all"`: keep everything, which `penstock replay`
    needs; `"none"`: store nothing."""

    @property
    def max_group_bytes(self) -> int | None:
        """Bytes of groups to keep; None: all."""
        return None if isinstance(self.keep, str) else self.keep * 1_000_000

    @property
    def max_trained_token_bytes(self) -> int | None:
        """Bytes of trained tokens to keep; None: all."""
        return None if self.max_group_bytes is None else self.max_group_bytes // 4


class StorageSettings(Section, frozen=True):
    """`[storage]`: a copy of checkpoints, ledger and archive, from which a run is restored whose folder was lost."""

    url: Annotated[str, Meta(pattern=r"^((?!memory:)[a-z0-9]+://[^?#]+)?\Z", description=_STORAGE_URL)] = ""
    """Object storage: `s3://BUCKET/PREFIX`, `gs://..`, `az://..`, or a folder `file:///PATH`. The trainer copies each
    checkpoint below `URL/NAME` while training continues. Credentials come from the environment. Empty: no copy."""


class QueueSettings(Section, frozen=True):
    """`[queue]`: leases, retries and restarts."""

    lease_s: LeaseSeconds = 15.0
    """Lease time: an entry whose worker has not renewed its lease for this long is given to another worker. The first
    retry of a failed entry or role waits 1/30 of it; the delay doubles, with jitter, up to 60 times."""
    max_attempts: PositiveInt = 5
    """Deliveries of one entry that fail, because of an engine for example, before it becomes a dead letter. An entry
    whose own content fails becomes one after two. If its worker dies, of whatever cause, the first two times in a row
    cost no attempt; then the entry is worked on alone, and each further death costs one."""
    reconnect_timeout_s: Seconds = 60.0
    """How long a worker tries to reach Redis or an engine before it gives up."""
    shutdown_timeout_s: Seconds = 20.0
    """Time for a stopping worker to finish or release what it holds."""
    max_memory_mb: NonNegativeInt = 0
    """Resident memory in MiB at which a rollout worker or scorer drains and is restarted; 0: no limit."""
    hang_timeout_s: NonNegativeFloat = 0.0
    """Longest time for which the event loop of a role may stand still, because user code blocks it or never releases
    Python's interpreter lock; then the role is killed. 0: a minute, or twice the longest deadline of a call if that is
    more."""
    fsync: Literal["always", "everysec"] = "everysec"
    """`appendfsync` of the private server."""

    @property
    def retry_delay_s(self) -> float:
        """Delay before the first retry; it doubles, with jitter, up to 60 times."""
        return self.lease_s / 30


class AbortSettings(Section, frozen=True):
    """`[abort]`: conditions that stop the run with an error."""

    max_invalid_fraction: Fraction = 0.2
    """Largest fraction of one environment's completions that may bear no loss for one reason (unmeasured, failed,
    excluded, too old, rejected, ...), over its last 4 x `train.batch_size` groups."""
    stall_timeout_s: Seconds = 600.0
    """Longest time without a trained or dropped group while there is work. Half of it is the longest time without
    progress for which the trainer waits for an evaluation, or with `pacing.stale_policy = "wait"` for stragglers: more
    than an episode takes."""

    @property
    def trainer_wait_s(self) -> float:
        """Longest wait of the trainer for an evaluation or for stragglers; it ends before the run is aborted."""
        return self.stall_timeout_s / 2
