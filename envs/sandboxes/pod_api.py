"""The requests to a cluster that sandboxes need: Pods made, watched, listed and removed, and scripts run in them.

A script and its input go by the standard input of `/bin/sh`, so no argument of a request holds them: a cluster's audit
log has the arguments. An exec may end early and report success (kubernetes#73056), so a script's output counts only
once it is followed by the line that ends it.
"""

import os
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import aiohttp
import anyio
import msgspec
from anyio import to_thread
from kubernetes_asyncio import config
from kubernetes_asyncio.client import ApiClient, Configuration, CoreV1Api, NetworkingV1Api
from kubernetes_asyncio.stream import WsApiClient
from msgspec import Struct

from envs.sandboxes.contract import FailureKind, SandboxFailure
from envs.sandboxes.pod_manifest import NETWORK_LABEL, Pod, PodList
from stream.waiting import Backoff

Sink = Callable[[bytes], Awaitable[None]]
_BACKOFF: Final = Backoff(0.1, 2.0)
_PAGE: Final = 200
_CHUNK: Final = 1 << 16
_STDIN, _STDOUT, _STDERR, _ERROR = range(4)
_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_MARK_BYTES: Final = 64
"""Longest line that ends a script's output."""
_FIRST: Final = 'eval "$(dd bs=1 count="$0" 2>/dev/null)"'
"""Runs the first $0 bytes of the standard input, and reads no byte beyond them."""


class ScriptResult(Struct):
    """How a script ended."""

    code: int | None
    """None: the connection ended first, or could not be made."""
    stderr: bytes = b""
    problem: str = ""
    """Of the connection."""


class _Watched(Struct):
    type: str
    object: msgspec.Raw = msgspec.Raw(b"{}")


class _Metadata(Struct):
    uid: str = ""


class _Named(Struct):
    metadata: _Metadata


class _Problem(Struct):
    reason: str = ""
    message: str = ""


class PodApi:
    """Pods of one namespace. An async context.

    Args:
        namespace: of the Pods.
        clients: for requests and for execs.
        call_timeout_s: of a request with its retries.
    """

    def __init__(self, namespace: str, clients: tuple[ApiClient, WsApiClient], call_timeout_s: float) -> None:
        self.namespace = namespace
        self._clients = clients
        # Its types are those of decoded answers; here answers are decoded as far as they are needed.
        self._core: Any = CoreV1Api(clients[0])
        self._networking: Any = NetworkingV1Api(clients[0])
        self._exec: Any = CoreV1Api(clients[1])
        self._call_timeout_s = call_timeout_s

    @classmethod
    async def connect(cls, address: str, call_timeout_s: float) -> Self:
        """Return the API that kubectl would use, or a Pod's own.

        Args:
            address: `NAMESPACE` or `CONTEXT/NAMESPACE`; empty: the current context's, in a cluster the Pod's own.
            call_timeout_s: of a request with its retries.

        Raises:
            SandboxFailure: nothing says where the cluster is.
        """
        configuration = Configuration()
        configuration.connection_pool_maxsize = 0  # an exec holds a connection; sandboxes bound their number
        context, _, namespace = address.rpartition("/")
        try:
            if "KUBECONFIG" not in os.environ and not context and "KUBERNETES_SERVICE_HOST" in os.environ:
                found = await to_thread.run_sync(_configure_in_cluster, configuration)
            else:
                found = await _configure_as_kubectl(configuration, context)
        except (config.ConfigException, OSError, ValueError) as error:
            message = f"no cluster: {error}; set KUBECONFIG, or give the worker's Pod its service account's token"
            raise SandboxFailure(FailureKind.UNREACHABLE, message) from error
        heartbeat = WsApiClient(configuration, heartbeat=max(call_timeout_s / 2, 1.0))
        clients = (ApiClient(configuration), heartbeat)
        return cls(namespace or found or "default", clients, call_timeout_s)

    async def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            await client.close()

    async def namespace_id(self) -> str:
        """Return the id of the namespace, which no other namespace of any cluster has."""
        status, body = await self._answer(
            lambda: self._core.read_namespace(self.namespace, _preload_content=False), "get namespaces"
        )
        if status != 200:
            raise self._refusal(status, body, "get namespaces")
        return msgspec.json.decode(body, type=_Named).metadata.uid

    async def denies_all(self, network: str) -> bool:
        """Return whether a NetworkPolicy denies everything to the Pods of this `NETWORK_LABEL`."""
        call = lambda: self._networking.list_namespaced_network_policy(self.namespace, _preload_content=False)  # noqa: E731
        status, body = await self._answer(call, "list networkpolicies")
        if status != 200:
            raise self._refusal(status, body, "list networkpolicies")
        policies = msgspec.json.decode(body)["items"]
        return any(denies_everything(policy.get("spec", {}), network) for policy in policies)

    async def create(self, name: str, body: dict[str, Any]) -> Pod:
        """Create a Pod, or return the one that has this name."""
        call = lambda: self._core.create_namespaced_pod(self.namespace, body, _preload_content=False)  # noqa: E731
        status, answer = await self._answer(call, "create pods")
        if status in (200, 201, 202):
            return msgspec.json.decode(answer, type=Pod)
        if status == 409 and (there := await self.get(name)) is not None:
            return there
        raise self._refusal(status, answer, f"create Pod {name}")

    async def get(self, name: str) -> Pod | None:
        """Return a Pod; None if there is none of this name."""
        call = lambda: self._core.read_namespaced_pod(name, self.namespace, _preload_content=False)  # noqa: E731
        status, body = await self._answer(call, "get pods")
        if status == 404:
            return None
        if status != 200:
            raise self._refusal(status, body, f"get Pod {name}")
        return msgspec.json.decode(body, type=Pod)

    async def delete(self, name: str) -> bool:
        """Begin to delete a Pod; returns whether there was one."""
        call = lambda: self._core.delete_namespaced_pod(  # noqa: E731
            name, self.namespace, grace_period_seconds=1, _preload_content=False
        )
        status, body = await self._answer(call, "delete pods")
        if status == 404:
            return False
        if status not in (200, 202, 409):  # 409: it is being deleted
            raise self._refusal(status, body, f"delete Pod {name}")
        return True

    async def list(self, selector: str) -> list[Pod]:
        """Return the Pods that a label selector selects."""
        found: list[Pod] = []
        following = ""
        for _ in range(10_000):
            goes_on = {"_continue": following} if following else {}
            call = partial(
                self._core.list_namespaced_pod,
                self.namespace,
                label_selector=selector,
                limit=_PAGE,
                _preload_content=False,
                **goes_on,
            )
            status, body = await self._answer(call, "list pods")
            if status == 410:  # the list has grown too old to go on: from its beginning
                found, following = [], ""
                continue
            if status != 200:
                raise self._refusal(status, body, "list pods")
            page = msgspec.json.decode(body, type=PodList)
            found += page.items
            if not (following := page.metadata.next):
                return found
        raise SandboxFailure(FailureKind.UNREACHABLE, f"{self._where}: the list of Pods does not end")

    async def wait(self, name: str, is_reached: Callable[[Pod | None], bool]) -> Pod | None:
        """Return a Pod once it is in a state; None if it is gone and this is the state. The caller has a deadline."""
        attempt = 0
        while not is_reached(pod := await self.get(name)):
            if pod is not None and await self._changed(name, pod.metadata.resource_version, is_reached):
                attempt = 0
            else:  # a watch that ends at once: its version is too old, or the server is busy
                attempt += 1
                await anyio.sleep(_BACKOFF.delay_s(attempt))
        return pod

    async def _changed(self, name: str, version: str, is_reached: Callable[[Pod | None], bool]) -> bool:
        """Watch a Pod until it may be in a state, or the watch ends; returns whether the Pod has changed."""
        has_changed = False
        try:
            answer = await self._core.list_namespaced_pod(
                self.namespace,
                field_selector=f"metadata.name={name}",
                resource_version=version,
                watch=True,
                _preload_content=False,
            )
            async with answer:
                if answer.status != 200:
                    return False
                async for line in answer.content:
                    event = msgspec.json.decode(line, type=_Watched)
                    if event.type == "ERROR":  # 410: the version is too old
                        return has_changed
                    has_changed = True
                    gone = event.type == "DELETED"
                    if is_reached(None if gone else msgspec.json.decode(event.object, type=Pod)):
                        return True
        except (aiohttp.ClientError, OSError, ValueError):
            return has_changed
        return has_changed

    async def run(self, name: str, script: str, stdin: bytes | Path, sink: Sink) -> ScriptResult:
        """Run a script of `/bin/sh` in a Pod.

        Args:
            name: of the Pod.
            script: what to run. It knows how much of `stdin` there is: nothing says where it ends.
            stdin: bytes, or a file.
            sink: is called with what the script prints, as it comes.

        Raises:
            SandboxFailure: the worker may not.
        """
        mark = secrets.token_hex(8)
        text = f"(\n{script}\n)\nprintf '\\n{mark} %s\\n' \"$?\"".encode()
        output, problem = _Output(mark), "it ended early"
        try:
            connection = await self._exec.connect_get_namespaced_pod_exec(
                name,
                self.namespace,
                command=["/bin/sh", "-c", _FIRST, str(len(text))],
                stdin=True,
                stdout=True,
                stderr=True,
                _preload_content=False,
            )
            async with connection as socket:
                await _send(socket, text)
                await _send(socket, stdin)
                async for message in socket:
                    if message.type is aiohttp.WSMsgType.BINARY and message.data:
                        await sink(output.take(message.data[0], message.data[1:]))
                    if output.is_whole:
                        break
        except aiohttp.WSServerHandshakeError as error:
            if error.status in (401, 403):
                raise self._refusal(error.status, b"", f"exec in Pod {name}") from error
            problem = f"status {error.status}"
        except (aiohttp.ClientError, OSError) as error:
            problem = str(error) or type(error).__name__  # what came before may be whole
        rest, code = output.end()
        await sink(rest)
        return ScriptResult(code, bytes(output.stderr), output.status or problem)

    async def _answer(self, call: Callable[[], Awaitable[Any]], what: str) -> tuple[int, bytes]:
        """Return status and content of a request that may be repeated, and is while the server does not answer."""
        problem = "no answer"
        with anyio.move_on_after(self._call_timeout_s):
            for attempt in range(1, 1000):
                try:
                    answer = await call()
                    async with answer:
                        body = await answer.read()
                    if answer.status < 500 and answer.status != 429:
                        return answer.status, body
                    problem = f"status {answer.status}: {_message(body)}"
                except (aiohttp.ClientError, OSError) as error:
                    problem = str(error) or type(error).__name__
                await anyio.sleep(_BACKOFF.delay_s(attempt))
        message = f"{self._where}: {what}: {problem}, for {self._call_timeout_s:g} s (sandboxes.call_timeout_s)"
        raise SandboxFailure(FailureKind.UNREACHABLE, message)

    @property
    def _where(self) -> str:
        return f"cluster {self._clients[0].configuration.host}, namespace {self.namespace}"

    def _refusal(self, status: int, body: bytes, what: str) -> SandboxFailure:
        message = _message(body)
        kind = FailureKind.CREATE if what.startswith("create") else FailureKind.UNREACHABLE
        if status == 403 and "exceeded quota" in message:
            kind = FailureKind.FULL
        elif status in (401, 403):
            message += "; the worker's service account needs the Role of docs/sandboxes.md"
        return SandboxFailure(kind, f"{self._where}: {what}: status {status}: {message}")


class _Output:
    """What a script prints, by channel. What may be the line that ends it is held back."""

    def __init__(self, mark: str) -> None:
        self._mark = f"\n{mark} ".encode()
        self._tail = b""
        self.stderr = bytearray()
        self.status = ""

    def take(self, channel: int, data: bytes) -> bytes:
        """Return what of the script's output is certain."""
        if channel == _STDERR:
            self.stderr += data
        if channel == _ERROR:
            self.status = _message(data)
        if channel != _STDOUT:
            return b""
        self._tail += data
        certain, self._tail = self._tail[:-_MARK_BYTES], self._tail[-_MARK_BYTES:]
        return certain

    @property
    def is_whole(self) -> bool:
        """Whether nothing comes any more: the output has ended, and what has run it says so."""
        return bool(self.status) and self.end()[1] is not None

    def end(self) -> tuple[bytes, int | None]:
        """Return the rest of the output, and the exit code; None if the output is not whole."""
        output, mark, code = self._tail.rpartition(self._mark)
        return (output, int(code)) if mark and code.endswith(b"\n") else (b"", None)


async def _send(socket: Any, content: bytes | Path) -> None:
    if isinstance(content, bytes):
        for start in range(0, len(content), _CHUNK):
            await socket.send_bytes(bytes((_STDIN,)) + content[start : start + _CHUNK])
        return
    async with await anyio.open_file(content, "rb") as file:
        while data := await file.read(_CHUNK):
            await socket.send_bytes(bytes((_STDIN,)) + data)


def _configure_in_cluster(configuration: Configuration) -> str:
    """Fill in where the cluster is, and return the Pod's namespace. Blocks."""
    config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    return _NAMESPACE_FILE.read_text().strip() if _NAMESPACE_FILE.exists() else ""


async def _configure_as_kubectl(configuration: Configuration, context: str) -> str:
    """Fill in where the cluster of kubectl's settings is, and return the namespace of the context."""
    load = partial(
        config.load_kube_config,
        config_file=os.environ.get("KUBECONFIG") or None,
        context=context or None,
        client_configuration=configuration,
        persist_config=False,
    )
    loader: Any = await to_thread.run_sync(anyio.run, load)  # on a loop of its own, since it reads and writes files
    return str(loader.current_context["context"].get("namespace", ""))


def denies_everything(policy: dict[str, Any], network: str) -> bool:
    """Return whether the spec of a NetworkPolicy denies everything to the Pods of a `NETWORK_LABEL`."""
    selector = policy.get("podSelector", {})
    labels = selector.get("matchLabels", {})
    selected = not selector.get("matchExpressions") and labels in ({}, {NETWORK_LABEL: network})
    types = {"Ingress", "Egress"} <= set(policy.get("policyTypes", ()))
    return selected and types and not policy.get("ingress") and not policy.get("egress")


def _message(body: bytes) -> str:
    try:
        problem = msgspec.json.decode(body, type=_Problem)
    except ValueError:
        return body[:500].decode(errors="replace")
    return ": ".join(part for part in (problem.reason, problem.message) if part)
