"""Sandboxes as Pods of a Kubernetes cluster, in a namespace of their own: `sandboxes.provider = "kubernetes"`.

A Pod has no snapshots. `PodSandbox.snapshot` takes the files that changed since its start into an archive of this
worker, and `create` fills a fresh Pod with them: files, links, folders and deletions, not processes. The archive ends
with this process. What it does not hold is not in the fresh Pod, so a policy that hides its changes undoes them.
"""

import re
from collections.abc import Mapping
from typing import ClassVar, Final, Self

import anyio
from anyio import to_thread

from envs.sandboxes.contract import (
    RUN_LABEL,
    FailureKind,
    ListedSandbox,
    Network,
    ProviderOptions,
    SandboxEndedError,
    SandboxFailure,
    SandboxProvider,
    SandboxSpec,
)
from envs.sandboxes.pod_api import PodApi
from envs.sandboxes.pod_manifest import IMAGE_ANNOTATION, Pod, end_of, late_start, listed, manifest, start_failure
from envs.sandboxes.pod_sandbox import PodSandbox
from envs.sandboxes.pod_snapshots import Baselines, Snapshots
from envs.sandboxes.runner import first_process

POLICY_NAME: Final = "penstock-sandboxes"
"""Name of the NetworkPolicy that messages and pages give."""
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


class KubernetesProvider(SandboxProvider):
    """Makes Pods in one namespace.

    `sandboxes.address` is `NAMESPACE` or `CONTEXT/NAMESPACE`, `sandboxes.runtime` a RuntimeClass.
    """

    has_images: ClassVar[bool] = True
    survives_worker: ClassVar[bool] = True
    networks: ClassVar[frozenset[Network]] = frozenset((Network.OFF, Network.OPEN))
    isolates: ClassVar[frozenset[str]] = frozenset(("files", "network", "processes", "memory", "cpus", "disk"))

    def __init__(self, options: ProviderOptions) -> None:
        super().__init__(options)
        self._api: PodApi | None = None
        self._place = ""
        self._baselines = Baselines()
        self._snapshots = Snapshots()

    async def __aenter__(self) -> Self:
        self._api = await PodApi.connect(self.options.address, self.options.call_timeout_s)
        try:
            self._place = f"kubernetes:{self._api.namespace}:{await self._api.namespace_id()}"
            await self._demand_policy(self._api)
        except BaseException:
            await self._api.close()
            raise
        return self

    async def _demand_policy(self, api: PodApi) -> None:
        if not await api.denies_all(Network.OFF.value):
            message = f"no NetworkPolicy of namespace {api.namespace} denies everything to its sandboxes: "
            message += f"install the chart with sandboxes.enabled, or {POLICY_NAME} of docs/sandboxes.md"
            raise SandboxFailure(FailureKind.CREATE, message)

    async def __aexit__(self, *_: object) -> None:
        with anyio.CancelScope(shield=True):
            await self._connected.close()
            await to_thread.run_sync(self._snapshots.close)

    @property
    def _connected(self) -> PodApi:
        if self._api is None:
            raise RuntimeError("the provider is not entered")
        return self._api

    async def place(self) -> str:
        """Return the namespace with its id, which differs between clusters."""
        return self._place

    async def resolve(self, image: str) -> str:
        """Return the name as it is: nodes resolve it, and nothing in the API does. Name an image by its digest."""
        return image

    async def create(self, name: str, spec: SandboxSpec, labels: Mapping[str, str]) -> PodSandbox:
        """Create a Pod, wait until it runs, and fill it if `spec.image` is a snapshot.

        `spec.joins_network_of` has no effect: a Pod has a network of its own.

        Raises:
            SandboxEndedError: the snapshot's files are more than the Pod may have.
        """
        snapshot = self._snapshots.find(spec.image)
        image = snapshot.image if snapshot else spec.image
        _check(name, spec, image)
        labels = {**labels, IMAGE_ANNOTATION: image}
        body = manifest(name, spec, image, labels, first_process(spec.max_life_s), self.options.runtime)
        seen: list[Pod | None] = []

        def has_started(pod: Pod | None) -> bool:
            seen[:] = [pod]
            return pod is None or pod.is_running or start_failure(pod) is not None

        with anyio.move_on_after(self.options.create_timeout_s):
            seen.append(await self._connected.create(name, body))
            pod = await self._connected.wait(name, has_started)
            if pod is None or not pod.is_running:
                raise (pod and start_failure(pod)) or late_start(pod, name, self.options.create_timeout_s)
            sandbox = self._sandbox(name, spec, image, fence=0)
            await self._begin(sandbox)
            if snapshot is not None:
                await sandbox.fill(snapshot)
            return sandbox
        raise late_start(seen[-1] if seen else Pod(), name, self.options.create_timeout_s)

    async def attach(self, name: str, spec: SandboxSpec, fence: int) -> PodSandbox:
        """Return the sandbox of a running Pod, and refuse its former owner's calls from now on."""
        pod = await self._connected.get(name)
        ended = end_of(pod, name)
        if pod is None or ended is not None:
            raise ended or SandboxFailure(FailureKind.LOST, f"Pod {name} is gone")
        image = pod.metadata.notes.get(IMAGE_ANNOTATION, spec.image)
        sandbox = self._sandbox(name, spec, image, fence)
        await sandbox.begin()
        return sandbox

    async def _begin(self, sandbox: PodSandbox) -> None:
        try:
            await sandbox.begin()
        except SandboxEndedError as error:  # nothing of the policy has run: the image cannot be used
            pod = await self._connected.get(sandbox.name)
            failure = start_failure(pod) if pod is not None else None
            raise failure or SandboxFailure(FailureKind.CREATE, f"Pod {sandbox.name}: {error}") from error

    def _sandbox(self, name: str, spec: SandboxSpec, image: str, fence: int) -> PodSandbox:
        return PodSandbox(
            self._connected, name, spec, image, fence, self.options, kept=(self._baselines, self._snapshots)
        )

    async def remove(self, name: str) -> bool:
        """Delete a Pod, and wait until its node has ended it."""
        await to_thread.run_sync(self._snapshots.drop, name)
        if not await self._connected.delete(name):
            return False
        with anyio.move_on_after(self.options.call_timeout_s):
            await self._connected.wait(name, lambda pod: pod is None)
            return True
        message = f"Pod {name} is still there {self.options.call_timeout_s:g} s after it was deleted: is its node lost?"
        raise SandboxFailure(FailureKind.UNREACHABLE, message)

    async def list(self, run_id: str = "") -> list[ListedSandbox]:
        """Return the Pods by label. Snapshots are this worker's and end with it, so none is listed."""
        pods = await self._connected.list(f"{RUN_LABEL}={run_id}" if run_id else RUN_LABEL)
        return [listed(pod) for pod in pods]


def _check(name: str, spec: SandboxSpec, image: str) -> None:
    """Refuse what no Pod can be."""
    if not _NAME.fullmatch(name):
        raise SandboxFailure(FailureKind.CREATE, f"{name!r} is no name of a Pod")
    if not image:
        raise SandboxFailure(FailureKind.IMAGE, "a Pod needs an image: name one, or build it and push it to a registry")
    if spec.network not in KubernetesProvider.networks:
        message = f"a Pod's network is off or open, not {spec.network.value}: use the provider docker"
        raise SandboxFailure(FailureKind.CREATE, message)
