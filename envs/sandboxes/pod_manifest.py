"""Pods as plain data: the manifest that a spec becomes, and what the status of a Pod says of its sandbox.

What the policy did to its Pod ends the episode and is measured: the container exited or was killed for memory, or the
Pod was evicted for more files than its own limit. Everything else is infrastructure: a node lost, drained or short of
memory, a Pod deleted by others.
"""

import math
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from msgspec import Struct, field

from envs.sandboxes.contract import (
    BEGUN_LABEL,
    RUN_LABEL,
    FailureKind,
    ListedSandbox,
    Network,
    SandboxEndedError,
    SandboxFailure,
    SandboxSpec,
)
from envs.sandboxes.runner import LIFE_OVER_CODE, NO_SETSID_CODE, STATE_FOLDER

CONTAINER: Final = "sandbox"
IMAGE_ANNOTATION: Final = "penstock.image"
"""Annotation: the image, without the files of a snapshot."""
NETWORK_LABEL: Final = "penstock.network"
"""Label: what the sandbox reaches. A NetworkPolicy selects by it."""
_NOT_STARTED: Final = frozenset(("StartError", "ContainerCannotRun"))
_IMAGE_REASONS: Final = frozenset(
    ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
)
_CREATE_REASONS: Final = frozenset(("CreateContainerConfigError", "CreateContainerError", "RunContainerError"))
_OWN_ENDS: Final = frozenset(("OOMKilled", "Error", "Completed"))
"""Reasons of a terminated container that come from what ran in it."""
_LABEL_VALUE: Final = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")


class Metadata(Struct, rename="camel"):
    """What identifies an object."""

    name: str = ""
    uid: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(name="annotations", default_factory=dict)
    resource_version: str = ""
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None


class Condition(Struct, rename="camel"):
    """One of a Pod's conditions."""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class Waiting(Struct, rename="camel"):
    """Why a container has not started."""

    reason: str = ""
    message: str = ""


class Terminated(Struct, rename="camel"):
    """How a container ended."""

    exit_code: int = 0
    reason: str = ""
    message: str = ""


class ContainerState(Struct, rename="camel"):
    """A container is in at most one of these; in none of them it waits."""

    waiting: Waiting | None = None
    running: dict[str, Any] | None = None
    terminated: Terminated | None = None


class ContainerStatus(Struct, rename="camel"):
    """The state of a container."""

    state: ContainerState = field(default_factory=ContainerState)


class Status(Struct, rename="camel"):
    """The state of a Pod."""

    phase: str = ""
    reason: str = ""
    message: str = ""
    conditions: list[Condition] = field(default_factory=list)
    container_statuses: list[ContainerStatus] = field(default_factory=list)


class Pod(Struct, rename="camel"):
    """A Pod, as far as it is read here."""

    metadata: Metadata = field(default_factory=Metadata)
    status: Status = field(default_factory=Status)

    @property
    def container(self) -> ContainerState:
        """The state of its one container."""
        statuses = self.status.container_statuses
        return statuses[0].state if statuses else ContainerState()

    @property
    def is_running(self) -> bool:
        """Whether commands can be run in it."""
        running = self.status.phase == "Running" and self.container.running is not None
        return running and self.metadata.deletion_timestamp is None


class PodList(Struct, rename="camel"):
    """A page of Pods; `metadata.continue` names the next one."""

    class Page(Struct):
        """Where the list goes on; empty at its end."""

        next: str = field(name="continue", default="")

    metadata: Page = field(default_factory=Page)
    items: list[Pod] = field(default_factory=list)


def manifest(
    name: str, spec: SandboxSpec, image: str, labels: Mapping[str, str], command: list[str], runtime_class: str
) -> dict[str, Any]:
    """Return the manifest of a sandbox's Pod.

    Args:
        name: of the Pod.
        spec: of the sandbox.
        image: of the container.
        labels: of the sandbox. They are annotations as well, since a label's value may not have every character.
        command: of the container: what waits until the sandbox's life is over.
        runtime_class: name of a RuntimeClass, gVisor's for example; empty: the cluster's default.
    """
    limits = {
        "cpu": f"{math.ceil(spec.cpus * 1000)}m",
        "memory": f"{spec.memory_mb}Mi",
        "ephemeral-storage": f"{spec.disk_mb}Mi",
        **({"nvidia.com/gpu": str(spec.gpus)} if spec.gpus else {}),
    }
    container = {
        "name": CONTAINER,
        "image": image,
        "command": command,
        "env": [{"name": key, "value": value} for key, value in spec.env.items()],
        "volumeMounts": [{"name": "state", "mountPath": STATE_FOLDER}],
        "resources": {"limits": limits, "requests": limits},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["NET_RAW", "MKNOD"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **({"workingDir": spec.workdir} if spec.workdir else {}),
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": max(math.ceil(spec.max_life_s), 1),
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # else the addresses of all Services are in the environment
        "volumes": [{"name": "state", "emptyDir": {}}],
        "containers": [container],
    }
    if spec.network is Network.OFF:
        pod |= {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["127.0.0.1"]}}  # no resolver of the cluster
    if runtime_class:
        pod["runtimeClassName"] = runtime_class
    shown = {key: value for key, value in labels.items() if _LABEL_VALUE.fullmatch(value)}
    metadata = {"name": name, "labels": {**shown, NETWORK_LABEL: spec.network.value}, "annotations": dict(labels)}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}


def listed(pod: Pod) -> ListedSandbox:
    """Return a Pod as a sandbox of a list."""
    given = {**pod.metadata.labels, **pod.metadata.notes}
    phase = pod.status.phase
    try:
        begun = float(given.get(BEGUN_LABEL, "0"))
    except ValueError:
        begun = 0.0
    return ListedSandbox(
        name=pod.metadata.name,
        run_id=given.get(RUN_LABEL, ""),
        begun=begun,
        state="ended" if phase in ("Succeeded", "Failed") else "running" if phase == "Running" else "created",
    )


def start_failure(pod: Pod) -> SandboxFailure | None:
    """Return why a Pod will not start; None while it may."""
    name, state, status = pod.metadata.name, pod.container, pod.status
    if pod.metadata.deletion_timestamp is not None:
        return SandboxFailure(FailureKind.CREATE, f"Pod {name} is being deleted")
    if state.waiting is not None and state.waiting.reason in _IMAGE_REASONS:
        return SandboxFailure(FailureKind.IMAGE, f"Pod {name}: {_text(state.waiting.reason, state.waiting.message)}")
    if state.waiting is not None and state.waiting.reason in _CREATE_REASONS:
        return SandboxFailure(FailureKind.CREATE, f"Pod {name}: {_text(state.waiting.reason, state.waiting.message)}")
    if state.terminated is not None and state.terminated.reason in _NOT_STARTED:
        why = _text(state.terminated.reason, state.terminated.message)
        return SandboxFailure(FailureKind.IMAGE, f"Pod {name}: {why}: a sandbox's image needs /bin/sh")
    if state.terminated is not None and state.terminated.exit_code == NO_SETSID_CODE:
        return SandboxFailure(FailureKind.IMAGE, f"the image of Pod {name} has no setsid, which a sandbox needs")
    if status.phase in ("Failed", "Succeeded"):
        kind = FailureKind.FULL if status.reason.startswith("OutOf") else FailureKind.CREATE
        return SandboxFailure(kind, f"Pod {name} ended before it was used: {_text(status.reason, status.message)}")
    return None


def late_start(pod: Pod | None, name: str, seconds: float) -> SandboxFailure:
    """Return why a Pod did not start in time."""
    if pod is None:
        return SandboxFailure(FailureKind.CREATE, f"Pod {name} was deleted while it started")
    for condition in pod.status.conditions:
        if condition.type == "PodScheduled" and condition.status == "False":
            why = _text(condition.reason, condition.message)
            return SandboxFailure(FailureKind.FULL, f"no node took Pod {name} within {seconds:g} s: {why}")
    waiting = pod.container.waiting or Waiting("its node does not report")
    why = _text(waiting.reason, waiting.message)
    return SandboxFailure(
        FailureKind.CREATE, f"Pod {name} did not start within sandboxes.create_timeout_s ({seconds:g} s): {why}"
    )


def end_of(pod: Pod | None, name: str) -> SandboxFailure | SandboxEndedError | None:
    """Return what to raise for a Pod in which a command could not be run; None if commands can be run in it."""
    if pod is not None and (ended := _own_end(pod)) is not None:
        return ended
    why = _loss(pod)
    if not why:
        return None
    is_silent = pod is not None and pod.status.phase == "Unknown"
    return SandboxFailure(FailureKind.UNREACHABLE if is_silent else FailureKind.LOST, f"Pod {name} {why}")


def _own_end(pod: Pod) -> SandboxEndedError | None:
    """Return how a Pod was ended by what ran in it; None if it was not."""
    status, terminated = pod.status, pod.container.terminated
    if _disruption(pod) is not None or pod.metadata.deletion_timestamp is not None:
        return None
    if status.reason == "Evicted" and re.search(r"ephemeral.*exceed|exceed.*ephemeral", status.message):
        return SandboxEndedError(f"the sandbox was ended: {status.message}")
    if status.reason or terminated is None or terminated.reason not in _OWN_ENDS:
        return None
    if terminated.exit_code == LIFE_OVER_CODE:
        return None
    why = "its memory was used up" if terminated.reason == "OOMKilled" else "what ran in it ended it"
    return SandboxEndedError(f"the sandbox has ended: {why} (exit code {terminated.exit_code})")


def _loss(pod: Pod | None) -> str:
    """Return why a Pod that did not end by itself takes no commands; empty if it does."""
    if pod is None:
        return "is gone"
    if (disruption := _disruption(pod)) is not None:
        return f"was taken from its node: {_text(disruption.reason, disruption.message)}"
    if pod.metadata.deletion_timestamp is not None:
        return "is being deleted"
    if pod.is_running:
        return ""
    status, terminated = pod.status, pod.container.terminated
    if status.reason == "DeadlineExceeded" or (terminated and terminated.exit_code == LIFE_OVER_CODE):
        return "has had its longest life (max_life_s)"
    return f"does not run: {_text(status.reason or status.phase, status.message)}"


def _disruption(pod: Pod) -> Condition | None:
    """Return why the cluster ended a Pod; None if it did not."""
    return next((one for one in pod.status.conditions if one.type == "DisruptionTarget" and one.status == "True"), None)


def _text(reason: str, message: str) -> str:
    return ": ".join(part for part in (reason, message.strip()[-500:]) if part) or "no reason is given"
