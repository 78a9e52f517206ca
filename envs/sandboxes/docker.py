"""The provider `docker`: a container of a Docker or Podman engine for each sandbox.

A container has no network, no mount of the host and no swap, and its first process only sleeps. Commands go through
`runner.sh`, whose reply alone says how they ended; the engine's own exec can neither be killed nor asked again.
"""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self
from weakref import WeakValueDictionary

import anyio
import structlog
from aiodocker.exceptions import DockerError
from anyio import to_thread

from envs.sandboxes.contract import (
    BEGUN_LABEL,
    RUN_LABEL,
    FailureKind,
    ListedSandbox,
    Network,
    ProviderOptions,
    Sandbox,
    SandboxEndedError,
    SandboxFailure,
    SandboxProvider,
    SandboxSpec,
)
from envs.sandboxes.docker_sandbox import SNAPSHOT_LABEL, DockerSandbox
from envs.sandboxes.engine import Engine, find_address
from envs.sandboxes.images import Images
from envs.sandboxes.runner import STATE_FOLDER, first_process

log = structlog.get_logger()

_DISK_WATCH_S: Final = 30.0
_BETWEEN_ASKING_S: Final = 0.2
_State = Literal["created", "running", "ended"]
_STATES: Final[dict[str, _State]] = {"created": "created", "running": "running", "paused": "running"}


class DockerProvider(SandboxProvider):
    """Sandboxes on a Docker or Podman engine, reached by its socket."""

    has_images: ClassVar[bool] = True
    survives_worker: ClassVar[bool] = True
    networks: ClassVar[frozenset[Network]] = frozenset({Network.OFF, Network.OPEN})
    isolates: ClassVar[frozenset[str]] = frozenset({"files", "network", "processes", "memory", "cpus", "pids"})
    """The disk is bounded by a quota only where the storage driver has one; else it is measured now and then."""

    def __init__(self, options: ProviderOptions) -> None:
        super().__init__(options)
        self._has_quotas = True  # until the engine says otherwise
        self._is_podman = False
        self._watched: WeakValueDictionary[str, DockerSandbox] = WeakValueDictionary()

    async def __aenter__(self) -> Self:
        address = self.options.address or await to_thread.run_sync(find_address)
        self._engine = Engine(address, self.options.call_timeout_s, self.options.create_timeout_s)
        self._images = Images(self._engine, self.options.create_timeout_s, self.options.image_cache_gb)
        try:
            with self._engine.request("the engine's version"):
                version = await self._engine.client.version()
        except BaseException:
            await self._engine.close()
            raise
        self._is_podman = any("podman" in part["Name"].lower() for part in version.get("Components") or ())
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._watch_disks)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._tasks.cancel_scope.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            with anyio.CancelScope(shield=True):
                await self._engine.close()

    async def place(self) -> str:
        """Return the engine's host and id. A host that is a clone of another has the other's id."""
        with self._engine.request("the engine's id"):
            info = await self._engine.client.system.info()
        # Podman's id is another one each time.
        own = info.get("DockerRootDir", "") if self._is_podman else info["ID"]
        return f"{info['Name']}/{own}"

    async def resolve(self, image: str) -> str:
        """Return the digest of an image, or its id if no registry gave it one. A missing one is pulled."""
        return await self._images.resolve(image)

    async def build(self, folder: Path, timeout_s: float) -> str:
        """Return the image that a folder's `Dockerfile` makes, built once for each content of the folder."""
        return await self._images.build(folder, timeout_s)

    async def create(self, name: str, spec: SandboxSpec, labels: Mapping[str, str]) -> Sandbox:
        """Create and start a container; one that is there is returned as it is."""
        if spec.network not in self.networks:
            raise SandboxFailure(FailureKind.CREATE, f"provider docker has no network {spec.network!r}")
        begun = time.monotonic()
        image = await self._images.details(spec.image)
        network = await self._network(spec)
        folder = spec.workdir or image["Config"].get("WorkingDir") or "/"
        sandbox = DockerSandbox(self._engine, name, spec, folder, verifies_fence=not self._is_podman)
        config = container_config(spec, labels, network, self.options.runtime)
        left_s = self.options.create_timeout_s - (time.monotonic() - begun)
        with self._engine.request(f"creation of {name}", FailureKind.CREATE, left_s):
            try:
                await self._create_container(name, config, spec.disk_mb)
            except DockerError as error:
                if error.status == 404:
                    self._images.forget(spec.image)
                    raise SandboxFailure(FailureKind.IMAGE, f"image {spec.image!r} is gone: {error.message}") from error
                if error.status != 409:
                    raise
                if (await self._engine.inspect(name))["State"]["Status"] != "created":
                    return sandbox  # never started again: its processes are gone
            await self._start(name, spec)
        if not self._has_quotas:
            self._watched[name] = sandbox
        return sandbox

    async def _create_container(self, name: str, config: dict[str, Any], disk_mb: int) -> None:
        """Create a container, with a quota of its disk where the storage driver has them."""
        if self._has_quotas:
            limited = config | {"HostConfig": config["HostConfig"] | {"StorageOpt": {"size": f"{disk_mb}m"}}}
            try:
                await self._engine.call("containers/create", "POST", body=limited, name=name)
            except DockerError as error:
                if not any(words in error.message.lower() for words in ("storage-opt", "storage opt", "quota")):
                    raise
                self._has_quotas = False
                log.info("sandbox.disk_measured", why=error.message, every_s=_DISK_WATCH_S)
            else:
                return
        await self._engine.call("containers/create", "POST", body=config, name=name)

    async def _start(self, name: str, spec: SandboxSpec) -> None:
        try:
            await self._engine.call(f"containers/{name}/start", "POST")
        except DockerError as error:
            if "executable file not found" in error.message and '"sh"' in error.message:
                why = "a sandbox's image needs sh and setsid, as Debian, Alpine and busybox have them"
                raise SandboxFailure(FailureKind.IMAGE, f"image {spec.image!r} has no sh: {why}") from error
            raise

    async def _network(self, spec: SandboxSpec) -> str:
        """Return the engine's word for a sandbox's network."""
        if not spec.joins_network_of:
            return "bridge" if spec.network == Network.OPEN else "none"
        joined = DockerSandbox(self._engine, spec.joins_network_of, spec, "/", verifies_fence=False)
        try:
            await joined.check_alive()
        except SandboxEndedError:
            return "none"  # what it ran has ended it, and its services with it
        return f"container:{spec.joins_network_of}"

    async def attach(self, name: str, spec: SandboxSpec, fence: int) -> Sandbox:
        """Return a running container of another worker, whose further commands are refused."""
        with self._engine.request(f"sandbox {name}", FailureKind.LOST):
            details = await self._engine.inspect(name)
        folder = spec.workdir or details["Config"].get("WorkingDir") or "/"
        sandbox = DockerSandbox(self._engine, name, spec, folder, fence=fence, verifies_fence=not self._is_podman)
        await sandbox.adopt()
        if "StorageOpt" not in details["HostConfig"]:
            self._watched[name] = sandbox
        return sandbox

    async def remove(self, name: str) -> bool:
        """Remove a container, its anonymous volumes, and its snapshots; wait until it is gone."""
        found = False
        with self._engine.request(f"removal of {name}"):
            while True:
                try:
                    await self._engine.call(f"containers/{name}", "DELETE", force=True, v=True)
                    found = True
                except DockerError as error:
                    if error.status == 404:
                        break
                    if error.status != 409:  # 409: another removal is in progress
                        raise
                    found = True
                    await anyio.sleep(_BETWEEN_ASKING_S)
            for image in await self._engine.client.images.list(filters={"label": [f"{SNAPSHOT_LABEL}={name}"]}):
                found = True
                try:
                    await self._engine.client.images.delete(image["Id"], force=True)
                except DockerError as error:
                    if error.status != 404:
                        raise
        self._watched.pop(name, None)
        return found

    async def list(self, run_id: str = "") -> list[ListedSandbox]:
        """Return the containers and snapshots that have a run's label."""
        label = f"{RUN_LABEL}={run_id}" if run_id else RUN_LABEL
        with self._engine.request("the list of sandboxes"):
            containers = await self._engine.client.containers.list(all=1, filters=json.dumps({"label": [label]}))
            images = await self._engine.client.images.list(filters={"label": [label, SNAPSHOT_LABEL]})
        found = [
            _listed(one["Names"][0].lstrip("/"), one["Labels"], _STATES.get(one["State"], "ended"))
            for one in containers
        ]
        found += [_listed(one["Labels"][SNAPSHOT_LABEL], one["Labels"], "ended", snapshot=True) for one in images]
        return found

    async def _watch_disks(self) -> None:
        """End sandboxes that use more disk than they may, where the storage driver has no quotas."""
        while True:
            await anyio.sleep(_DISK_WATCH_S)
            for sandbox in list(self._watched.values()):
                with suppress(SandboxFailure, SandboxEndedError):
                    await sandbox.end_if_over_disk()


def container_config(spec: SandboxSpec, labels: Mapping[str, str], network: str, runtime: str) -> dict[str, Any]:
    """Return what the engine makes a sandbox's container of."""
    limits = {
        "NanoCpus": int(spec.cpus * 1e9),
        "Memory": spec.memory_mb << 20,
        "MemorySwap": spec.memory_mb << 20,  # in all, so that there is no swap
        "PidsLimit": spec.pids,
    }
    host = {
        **limits,
        "NetworkMode": network,
        "CapDrop": ["NET_RAW", "MKNOD"],
        "SecurityOpt": ["no-new-privileges"],
        "LogConfig": {"Type": "none"},
        "Tmpfs": {STATE_FOLDER: f"rw,nosuid,nodev,noexec,mode=0777,size={max(spec.memory_mb // 2, 1)}m"},
    }
    if runtime:
        host["Runtime"] = runtime
    if spec.gpus:
        host["DeviceRequests"] = [{"Count": spec.gpus, "Capabilities": [["gpu"]]}]
    config = {
        "Image": spec.image,
        "Entrypoint": first_process(spec.max_life_s),
        "Cmd": [],
        "Env": [f"{key}={value}" for key, value in spec.env.items()],
        "Labels": dict(labels),
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": host,
    }
    if spec.user:
        config["User"] = spec.user
    if spec.workdir:
        config["WorkingDir"] = spec.workdir
    if not spec.joins_network_of:
        config["Hostname"] = "sandbox"
    return config


def _listed(name: str, labels: Mapping[str, str], state: _State, *, snapshot: bool = False) -> ListedSandbox:
    try:
        begun = float(labels.get(BEGUN_LABEL, 0.0))
    except ValueError:
        begun = 0.0
    return ListedSandbox(name=name, run_id=labels[RUN_LABEL], begun=begun, state=state, snapshot=snapshot)
