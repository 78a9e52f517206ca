"""The contract of sandboxes: what an environment may ask of one, and what a provider has to do.

A *provider* makes sandboxes in a *place*: an engine, a cluster's namespace, a host. A `SandboxSpec` is plain data, a
`Sandbox` a living one. What the policy does to its own sandbox is a result (`ExecResult`, `SandboxEndedError`); what
happens to it from outside is a `SandboxFailure`, which leaves the completion unmeasured, with its kind.

==========================================================================  ===============================
what happens                                                                result
==========================================================================  ===============================
exit code other than 0, deadline passed, killed for memory, pids or disk    `ExecResult`
the sandbox ended by itself: out of memory, or what it runs ended it        `SandboxEndedError`, the model reads it
it is gone, its engine or node was lost, another worker has it              `SandboxFailure`: lost, unreachable, fenced
it cannot be created                                                        `SandboxFailure`: create, image, full
==========================================================================  ===============================
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Final, Literal, Self

from anyio import from_thread
from msgspec import Struct, field

from envs.contract import EnvironmentFailure, ToolError

RUN_LABEL: Final = "penstock.run"
"""Label of each sandbox and snapshot: the id of its run."""
BEGUN_LABEL: Final = "penstock.begun"
"""Label: Unix time in seconds at which its creation was noted."""
DEFAULT_MAX_BYTES: Final = 1 << 20


class Network(StrEnum):
    """What a sandbox reaches."""

    OFF = "off"
    ENDPOINT = "endpoint"
    """The agent endpoint of its worker alone."""
    ALLOWLIST = "allowlist"
    """The endpoint and `SandboxSpec.allowed_hosts`."""
    OPEN = "open"


class SandboxSpec(Struct, frozen=True, kw_only=True):
    """What a sandbox has, as plain data: two equal specs are interchangeable."""

    image: str = ""
    """Name, digest or snapshot; empty for a provider without images."""
    workdir: str = ""
    """Folder in which commands start; empty: the image's."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of every command. No secrets: all who may inspect the sandbox read them."""
    user: str = ""
    """Name or number of the user whose the commands are; empty: the image's."""
    cpus: float = 1.0
    memory_mb: int = 2048
    disk_mb: int = 10240
    pids: int = 256
    gpus: int = 0
    network: Network = Network.OFF
    allowed_hosts: tuple[str, ...] = ()
    joins_network_of: str = ""
    """Name of a sandbox in the same place whose network this one shares, and neither its processes nor its files."""
    max_life_s: float = 7200.0
    """Seconds after which the sandbox ends by itself, with no worker and no server alive."""


class ExecResult(Struct, kw_only=True):
    """How a command in a sandbox ended."""

    code: int
    """Exit code; 128 + N after signal N; 137 also for a command past its deadline."""
    ended: Literal["exited", "timeout"] = "exited"
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    """Whether a part of the output is left out, because it was longer than `max_bytes`."""
    seconds: float = 0.0


class ChangedFile(Struct, frozen=True):
    """A path at which a sandbox differs from its image."""

    path: str
    kind: Literal["added", "modified", "deleted"]


class ListedSandbox(Struct, frozen=True, kw_only=True):
    """A sandbox that a place has, as its label tells."""

    name: str
    run_id: str
    begun: float
    """Unix time in seconds; 0.0 if the label is missing."""
    state: Literal["created", "running", "ended"]
    snapshot: bool = False
    """It is a snapshot's image, and not a sandbox."""


class FailureKind(StrEnum):
    """What failed about a sandbox, other than the policy."""

    CREATE = "create"
    IMAGE = "image"
    LOST = "lost"
    UNREACHABLE = "unreachable"
    FULL = "full"
    FENCED = "fenced"
    """Another worker has adopted it."""


class SandboxFailure(EnvironmentFailure):
    """A sandbox failed, and not the policy: the completion is invalid.

    Args:
        kind: what failed.
        message: the thing, the place and the remedy.
    """

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class ImageBuildError(SandboxFailure):
    """An image cannot be built because of its own folder: kind `image`. The message has the build's last lines."""

    def __init__(self, message: str) -> None:
        super().__init__(FailureKind.IMAGE, message)


class SandboxEndedError(ToolError):
    """A sandbox ended by what ran in it. Its files can still be read and snapshotted. The model reads the message."""


class Sandbox(ABC):
    """A living sandbox. Every method has a deadline, and raises `SandboxFailure`.

    Attributes:
        name: unique in its place, and never used twice.
        spec: what it was made of.
    """

    name: str
    spec: SandboxSpec

    @abstractmethod
    async def exec(
        self,
        command: Sequence[str],
        *,
        id: str = "",  # noqa: A002  (a call's id, as everywhere)
        timeout_s: float,
        cwd: str = "",
        env: Mapping[str, str] = MappingProxyType({}),
        user: str = "",
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> ExecResult:
        """Run a command to its end, or to its deadline, at which all processes of its session are killed.

        Args:
            command: program and arguments; no shell is put before it.
            id: of this call. A repeated id starts nothing: it waits for the first one's result. Empty: a new one.
            timeout_s: deadline, which is the policy's affair.
            cwd: folder; empty: the spec's `workdir`.
            env: variables in addition to the spec's. Secrets belong here.
            user: empty: the spec's.
            max_bytes: of stdout, and again of stderr. Of longer output beginning and end remain.

        Raises:
            SandboxEndedError: the sandbox ended by what ran in it.
        """

    @abstractmethod
    async def read(self, path: str, max_bytes: int) -> bytes:
        """Return the content of a regular file.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is no regular file, a link for example, or has more than `max_bytes`.
        """

    @abstractmethod
    async def write(self, files: Mapping[str, bytes | Path], *, user: str = "") -> None:
        """Write files by their absolute paths; folders are made. A `Path` is a file or a folder of this machine.

        Files of this machine keep their permission bits; others get 0644.
        """

    @abstractmethod
    async def changed_files(self) -> list[ChangedFile]:
        """Return where the files differ from the image's, sorted; without `/proc`, `/sys`, `/dev` and the runner's."""

    @abstractmethod
    async def snapshot(self) -> str:
        """Keep the files as they are, and return what a `SandboxSpec.image` of the same place can be.

        Processes are paused meanwhile. The snapshot has the sandbox's labels; `SandboxProvider.remove` takes its name.

        Raises:
            SandboxEndedError: the sandbox ended by what ran in it, and its files with it.
        """

    def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        cwd: str = "",
        env: Mapping[str, str] = MappingProxyType({}),
        user: str = "",
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> ExecResult:
        """Run a command as `exec` does, from a synchronous method of an environment."""

        async def call() -> ExecResult:
            return await self.exec(command, timeout_s=timeout_s, cwd=cwd, env=env, user=user, max_bytes=max_bytes)

        return from_thread.run(call)


class EpisodeSandboxes(ABC):
    """The sandboxes of one episode. An environment whose `reset` names a parameter `sandboxes` gets this.

    They are owned by the lease on the episode's prompt: whatever is killed, they are removed.
    """

    provider: "SandboxProvider"
    network: Network = Network.OFF
    """The most that a sandbox of this run may reach; `open` refuses a spec that asks for more."""

    @abstractmethod
    async def open(self, spec: SandboxSpec, *, purpose: Literal["agent", "verifier", "control"]) -> Sandbox:
        """Create a sandbox.

        Raises:
            SandboxFailure: it could not be made, or the lease is lost.
        """

    @abstractmethod
    async def close(self, sandbox: Sandbox) -> None:
        """Remove a sandbox and its snapshots. Those that are open at the episode's end are removed then."""


class ProviderOptions(Struct, frozen=True, kw_only=True):
    """How to reach a provider's place, and how long it may take."""

    address: str = ""
    """For example `unix:///run/docker.sock`; empty: where the provider's own tools look."""
    runtime: str = ""
    """For `docker`: runc, crun, runsc; for `kubernetes`: a RuntimeClass; empty: the place's default."""
    create_timeout_s: float = 120.0
    call_timeout_s: float = 30.0
    """Of every other request to the place, in addition to a command's own deadline."""
    image_cache_gb: float = 50.0
    """Built images beyond this size are removed before another is built, the longest unused first."""


class SandboxProvider(ABC):
    """Makes sandboxes in one place. An async context, entered once. Named by an entry point `penstock.sandboxes`.

    Class attributes say what it can do.
    """

    has_images: ClassVar[bool]
    """A spec may name an image, and `snapshot` gives one."""
    survives_worker: ClassVar[bool]
    """A sandbox goes on when the process that made it ends, and another can attach to it."""
    networks: ClassVar[frozenset[Network]]
    isolates: ClassVar[frozenset[str]]
    """What is bounded or kept apart: of `files`, `network`, `processes`, `memory`, `cpus`, `disk`, `pids`."""

    def __init__(self, options: ProviderOptions) -> None:
        self.options = options

    async def __aenter__(self) -> Self:
        """Connect.

        Raises:
            SandboxFailure: the place cannot be reached; the message says what to do.
        """
        return self

    async def __aexit__(self, *_: object) -> None:  # noqa: B027  (nothing to close is usual)
        """Disconnect. Sandboxes go on, unless the provider's end with the process."""

    @abstractmethod
    async def place(self) -> str:
        """Return what names the place for all workers alike: an engine's id, a cluster and namespace, a host."""

    @abstractmethod
    async def resolve(self, image: str) -> str:
        """Return the digest or id to which an image's name refers now.

        Raises:
            SandboxFailure: kind `image`: there is no such image.
        """

    async def build(self, folder: Path, timeout_s: float) -> str:  # noqa: ARG002  (for providers that build)
        """Return the id of the image that a folder's Dockerfile describes; the same content is built once in a place.

        Args:
            folder: the whole context of the build.
            timeout_s: deadline of the build.

        Raises:
            ImageBuildError: the folder's own fault, with the last lines of the build.
            SandboxFailure: kind `image`: this provider builds none.
        """
        message = f"{folder}: {type(self).__name__} builds no images; name one that the place has"
        raise SandboxFailure(FailureKind.IMAGE, message)

    @abstractmethod
    async def create(self, name: str, spec: SandboxSpec, labels: Mapping[str, str]) -> Sandbox:
        """Create and start a sandbox. Repeated with the same name, it returns the one that is there."""

    @abstractmethod
    async def attach(self, name: str, spec: SandboxSpec, fence: int) -> Sandbox:
        """Return a living sandbox that another worker made.

        Args:
            name: of the sandbox.
            spec: what it was made of.
            fence: larger than its former owner's, whose further calls are refused with kind `fenced`.
        """

    @abstractmethod
    async def remove(self, name: str) -> bool:
        """Remove a sandbox with its snapshots. Repeatable.

        Returns:
            Whether it was there; False: it is not there now, though a creation in progress may still make it.

        Raises:
            SandboxFailure: it is not known whether it is gone.
        """

    @abstractmethod
    async def list(self, run_id: str = "") -> list[ListedSandbox]:
        """Return the sandboxes and snapshots that the place has, by label; of all runs if none is named."""
