"""A cluster of one node for tests: the routes of Kubernetes' API that sandboxes use, and Pods that are real processes.

A Pod is a bubblewrap sandbox with a writable copy of its image, which is a folder here. It has namespaces of its own,
no network, and ends at its deadline, or when it has more memory or files than its limits; an exec is a process in its
namespaces, and outlives its connection. As a cluster it is faithful as far as its author knows Kubernetes.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest
import yaml
from aiohttp import WSMsgType, web

from tests.cases.docker_engine import busybox

TOKEN = "a-token-of-the-cluster"
NAMESPACE = "sandboxes"
BUSYBOX = "busybox:test"
DASH = "dash:test"
"""An image whose shell runs programs of its folders alone; busybox' shell has its tools in itself."""
ROLE = {
    ("get", "namespaces"),
    ("list", "networkpolicies"),
    ("get", "pods/exec"),
    *((verb, "pods") for verb in ("create", "get", "list", "watch", "delete")),
}
"""(verb, resource) of what the provider may ask for."""
_LOOK_S = 0.1


@pytest.fixture
async def cluster(tmp_path, monkeypatch):
    """A cluster with an image of busybox, which kubectl's own settings name."""
    program = await asyncio.to_thread(busybox)
    if program is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("busybox-static is not installed")
    image = await asyncio.to_thread(
        make_busybox, program, Path(tempfile.gettempdir()) / f"penstock-busybox-{os.geteuid()}"
    )
    dash = await asyncio.to_thread(make_dash, image, tmp_path / "dash")
    async with FakeCluster(tmp_path / "cluster", {BUSYBOX: image, DASH: dash}) as result:
        monkeypatch.setenv("KUBECONFIG", str(result.config))
        yield result


def make_busybox(program: Path, folder: Path) -> Path:
    """Return a folder that is an image of busybox; made once."""
    if not folder.exists():
        new = folder.with_name(f"{folder.name}.{os.getpid()}")
        for name in ("bin", "dev", "etc", "proc", "root", "run/penstock", "sys", "tmp", "usr/bin", "srv/data"):
            (new / name).mkdir(parents=True)
        (new / "tmp").chmod(0o1777)
        (new / "run/penstock").chmod(0o777)
        shutil.copy(program, new / "bin/busybox")
        for applet in subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout.split():
            if applet != "busybox":
                (new / "bin" / applet).symlink_to("busybox")
        (new / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nworker:x:1234:1234::/home/worker:/bin/sh\n")
        (new / "etc/group").write_text("root:x:0:\nworker:x:1234:\n")
        (new / "etc/motd").write_text("of the image\n")
        (new / "srv/data/one").write_text("1\n")
        (new / "srv/data/two").write_text("2\n")
        with suppress(OSError):  # another test process was first
            new.rename(folder)
    return folder


def make_dash(image: Path, folder: Path) -> Path:
    """Return a folder that is an image with this machine's shell."""
    shutil.copytree(image, folder, symlinks=True)
    shell = Path("/bin/sh").resolve()
    libraries = subprocess.run(["ldd", str(shell)], capture_output=True, text=True, check=True).stdout.split()
    (folder / "bin/sh").unlink()
    shutil.copy(shell, folder / "bin/sh")
    for library in (word for word in libraries if word.startswith("/")):
        (folder / library[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, folder / library[1:])
    return folder


class FakePod:
    """A Pod and its processes."""

    def __init__(self, body: dict[str, Any], folder: Path) -> None:
        self.body, self.folder = body, folder
        self.name = body["metadata"]["name"]
        self.process: asyncio.subprocess.Process | None = None
        self.pid = 0
        self.ended = asyncio.Event()

    @property
    def container(self) -> dict[str, Any]:
        return self.body["spec"]["containers"][0]

    @property
    def variables(self) -> dict[str, str]:
        own = {each["name"]: each["value"] for each in self.container.get("env", [])}
        return {"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"} | own

    async def start(self, image: Path) -> None:
        """Start the container's first process."""
        await asyncio.to_thread(shutil.copytree, image, self.folder, symlinks=True)
        reading, writing = os.pipe()
        words = ["bwrap", "--bind", str(self.folder), "/", "--proc", "/proc", "--dev", "/dev", "--unshare-pid"]
        words += ["--unshare-net", "--unshare-ipc", "--unshare-uts", "--as-pid-1", "--die-with-parent", "--new-session"]
        words += ["--chdir", self.container.get("workingDir", "/"), "--info-fd", str(writing)]
        if os.geteuid() != 0:
            words += ["--unshare-user", "--uid", "0", "--gid", "0"]
        self.process = await asyncio.create_subprocess_exec(
            *words, "--", *self.container["command"], env=self.variables, pass_fds=(writing,), stdin=subprocess.DEVNULL
        )
        os.close(writing)
        with os.fdopen(reading) as info:
            self.pid = json.loads(await asyncio.to_thread(info.read))["child-pid"]

    def entering(self) -> list[str]:
        """Return the words before a command that runs in the namespaces."""
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        return ["nsenter", "--target", str(self.pid), *user, "--mount", "--pid", "--net", "--ipc", "--uts"]

    def kill(self) -> None:
        """End every process."""
        if self.pid and not self.ended.is_set():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def memory(self) -> int:
        """Return the bytes of memory that its processes have. Blocks."""
        pages = 0
        with suppress(OSError):
            mine = Path(f"/proc/{self.pid}/ns/pid").readlink()
            for path in Path("/proc").glob("[0-9]*"):
                with suppress(OSError, IndexError):
                    if (path / "ns/pid").readlink() == mine:
                        pages += int((path / "statm").read_text().split()[1])
        return pages * 4096

    def disk(self) -> int:
        """Return the bytes of its files beyond the image's largest one, as du counts. Blocks."""
        found = subprocess.run(["du", "-sk", str(self.folder)], capture_output=True, text=True, check=False)
        return int(found.stdout.split()[0]) * 1024 if found.stdout else 0


class FakeCluster:
    """The API server and its node. An async context.

    Args:
        folder: of its own.
        images: name -> folder.
    """

    def __init__(self, folder: Path, images: dict[str, Path]) -> None:
        self.folder, self.images = folder, images
        self.pods: dict[str, FakePod] = {}
        self.policies = [policy()]
        self.requests: list[tuple[str, str]] = []
        """Verb and resource of each request, as RBAC names them."""
        self.answers: dict[tuple[str, str], list[tuple[int, str]]] = {}
        """(verb, resource) -> answers that requests get instead, in this order: status and message; 0: no answer."""
        self.lost_replies: list[tuple[str, str]] = []
        """Verbs and resources whose next request is carried out, and whose connection is cut instead of answered."""
        self.cuts: list[int] = []
        """After so many bytes of output the next execs end, as if all was well."""
        self.create_delay_s = 0.0
        """A created Pod appears after this time, also if the client is gone."""
        self.start_delay_s = 0.0
        self.watch_is_too_old = False
        self.seen_urls: list[str] = []
        self._version = 100
        self._events: list[tuple[int, str, dict[str, Any]]] = []
        self._oldest = 0
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._lists = 0

    async def __aenter__(self) -> Self:
        app = web.Application(middlewares=[self._gate], client_max_size=1 << 24)
        pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
        app.router.add_get(f"/api/v1/namespaces/{NAMESPACE}", self._namespace)
        app.router.add_get(f"/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies", self._list_policies)
        app.router.add_post(pods, self._create)
        app.router.add_get(pods, self._list)
        app.router.add_get(f"{pods}/{{name}}", self._get)
        app.router.add_delete(f"{pods}/{{name}}", self._delete)
        app.router.add_get(f"{pods}/{{name}}/exec", self._exec)
        self._runner = web.AppRunner(app, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        self.folder.mkdir()
        self.config = self.folder / "kubeconfig"
        self.config.write_text(yaml.safe_dump(kubeconfig(f"http://127.0.0.1:{self.port}", TOKEN)))
        return self

    async def __aexit__(self, *_: object) -> None:
        for pod in self.pods.values():
            pod.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pod in self.pods.values():
            if pod.process is not None:
                pod.kill()
                await pod.process.wait()
        await self._runner.cleanup()
        await asyncio.to_thread(shutil.rmtree, self.folder, True)

    # What a test does to the cluster.

    async def evict(self, name: str, reason: str = "TerminationByKubelet") -> None:
        """End a Pod because its node is short of memory."""
        pod = self.pods[name]
        condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "the node is low"}
        pod.body["status"]["conditions"] = [condition]
        await self._end(pod, "Failed", "Evicted", "The node was low on resource: memory.")

    async def lose_node(self, name: str) -> None:
        """Remove a Pod as the garbage collector does once its node is gone."""
        pod = self.pods[name]
        pod.kill()
        await self._gone(pod)

    async def silence_node(self, name: str) -> None:
        """The node of a Pod stops reporting."""
        self.pods[name].body["status"]["phase"] = "Unknown"
        await self._note("MODIFIED", self.pods[name])

    async def note_change(self, name: str) -> None:
        """Tell those who watch that a test has changed a Pod."""
        await self._note("MODIFIED", self.pods[name])

    def add_listed(self, name: str, labels: dict[str, str]) -> None:
        """Add a Pod without processes, for lists."""
        self.pods[name] = FakePod(
            {"metadata": {"name": name, "labels": labels}, "status": {"phase": "Running"}}, Path()
        )

    def forget_events(self) -> None:
        """Compact the history: watches from before now are too old."""
        self._oldest = self._version

    # The API server.

    @web.middleware
    async def _gate(self, request: web.Request, handler: Any) -> web.StreamResponse:
        verb, resource = rbac(request)
        self.requests.append((verb, resource))
        self.seen_urls.append(request.path_qs)
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return problem(401, "Unauthorized", "no token")
        if answers := self.answers.get((verb, resource)):
            status, message = answers.pop(0)
            if status == 0:
                request.transport.abort()
                return web.Response()
            return problem(status, "Forbidden" if status == 403 else "Problem", message)
        answer = await handler(request)
        if (verb, resource) in self.lost_replies:
            self.lost_replies.remove((verb, resource))
            request.transport.abort()
        return answer

    async def _namespace(self, request: web.Request) -> web.Response:
        return web.json_response({"metadata": {"name": NAMESPACE, "uid": "6c9f0b7e-0000-4000-8000-000000000001"}})

    async def _list_policies(self, request: web.Request) -> web.Response:
        return web.json_response({"items": self.policies})

    async def _create(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = body["metadata"]["name"]
        if self.create_delay_s:
            self._start_task(self._create_later(body))
            await asyncio.sleep(self.create_delay_s + 0.05)
            return web.json_response(self.pods[name].body, status=201)
        if name in self.pods:
            return problem(409, "AlreadyExists", f'pods "{name}" already exists')
        return web.json_response(await self._add(body), status=201)

    async def _create_later(self, body: dict[str, Any]) -> None:
        await asyncio.sleep(self.create_delay_s)
        await self._add(body)

    async def _add(self, body: dict[str, Any]) -> dict[str, Any]:
        pod = FakePod(body, self.folder / f"pod-{self._version}")
        body["metadata"] |= {"namespace": NAMESPACE, "creationTimestamp": now()}
        body["status"] = {"phase": "Pending"}
        self.pods[pod.name] = pod
        await self._note("ADDED", pod)
        self._start_task(self._live(pod))
        return body

    async def _get(self, request: web.Request) -> web.Response:
        pod = self.pods.get(request.match_info["name"])
        return web.json_response(pod.body) if pod else problem(404, "NotFound", "no such pod")

    async def _delete(self, request: web.Request) -> web.Response:
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return problem(404, "NotFound", "no such pod")
        pod.body["metadata"].setdefault("deletionTimestamp", now())
        await self._note("MODIFIED", pod)
        self._start_task(self._terminate(pod, float(request.query.get("gracePeriodSeconds", "30"))))
        return web.json_response(pod.body)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("watch"):
            return await self._watch(request)
        key, _, value = request.query.get("labelSelector", "").partition("=")
        found = [
            pod.body
            for _, pod in sorted(self.pods.items())
            if key in pod.body["metadata"]["labels"] and value in ("", pod.body["metadata"]["labels"][key])
        ]
        start, limit = int(request.query.get("continue", "0")), int(request.query.get("limit", "0")) or len(found)
        following = str(start + limit) if start + limit < len(found) else ""
        return web.json_response({"metadata": {"continue": following}, "items": found[start : start + limit]})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        name = request.query["fieldSelector"].removeprefix("metadata.name=")
        version = int(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)
        if version < self._oldest or self.watch_is_too_old:
            await response.write(b'{"type": "ERROR", "object": {"code": 410, "reason": "Expired"}}\n')
            return response
        with suppress(ConnectionError):
            while True:
                async with self._changed:
                    events = [event for event in self._events if event[0] > version]
                    if not events:
                        await self._changed.wait()
                        continue
                for version, kind, body in events:  # noqa: B007
                    if body["metadata"]["name"] == name:
                        await response.write(json.dumps({"type": kind, "object": body}).encode() + b"\n")
                if version < self._oldest:
                    await response.write(b'{"type": "ERROR", "object": {"code": 410, "reason": "Expired"}}\n')
                    return response
        return response

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return problem(404, "NotFound", "no such pod")
        if pod.body["status"]["phase"] != "Running":
            return problem(400, "BadRequest", "container sandbox is not running")
        socket = web.WebSocketResponse(protocols=["v4.channel.k8s.io"])
        await socket.prepare(request)
        process = await asyncio.create_subprocess_exec(
            *pod.entering(),
            *request.query.getall("command"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=pod.variables,
        )
        cut = self.cuts.pop(0) if self.cuts else None
        feeding = asyncio.create_task(feed(socket, process))
        errors = asyncio.create_task(pump(socket, 2, process.stderr, None))
        self._start_task(go_on(process))
        try:
            if await pump(socket, 1, process.stdout, cut):
                await socket.close()
                return socket
            await errors
            status = (
                {"status": "Success"} if await process.wait() == 0 else {"status": "Failure", "message": "exit code"}
            )
            with suppress(ConnectionError):
                await socket.send_bytes(b"\x03" + json.dumps(status).encode())
                await socket.close()
        finally:
            feeding.cancel()
            errors.cancel()
            self._start_task(reap(process))
        return socket

    # The node.

    async def _live(self, pod: FakePod) -> None:
        """Start a Pod and watch over its limits, as a kubelet does."""
        await asyncio.sleep(self.start_delay_s)
        image = self.images.get(pod.container["image"])
        if image is None:
            waiting = {"reason": "ErrImagePull", "message": f"{pod.container['image']}: not found"}
            pod.body["status"]["containerStatuses"] = [{"name": "sandbox", "state": {"waiting": waiting}}]
            await self._note("MODIFIED", pod)
            return
        await pod.start(image)
        empty_kb = await asyncio.to_thread(pod.disk)
        pod.body["status"] |= {"phase": "Running", "containerStatuses": [{"name": "sandbox", "state": {"running": {}}}]}
        await self._note("MODIFIED", pod)
        limits = pod.container["resources"]["limits"]
        deadline = time.monotonic() + pod.body["spec"]["activeDeadlineSeconds"]
        while pod.process.returncode is None and not pod.ended.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(pod.process.wait()), _LOOK_S)
            if await asyncio.to_thread(pod.memory) > mebibytes(limits["memory"]):
                pod.kill()
                await pod.process.wait()
                await self._end(pod, "Failed", "", "", {"exitCode": 137, "reason": "OOMKilled"})
            elif await asyncio.to_thread(pod.disk) - empty_kb > mebibytes(limits["ephemeral-storage"]):
                message = (
                    f"Pod ephemeral local storage usage exceeds the total limit of containers {limits['memory']}. "
                )
                await self._end(pod, "Failed", "Evicted", message)
            elif time.monotonic() > deadline:
                message = "Pod was active on the node longer than the specified deadline"
                await self._end(pod, "Failed", "DeadlineExceeded", message)
        if not pod.ended.is_set() and (code := pod.process.returncode) is not None:
            reason = "Completed" if code == 0 else "Error"
            phase = "Failed" if code else "Succeeded"
            await self._end(pod, phase, "", "", {"exitCode": code if code >= 0 else 128 - code, "reason": reason})

    async def _end(
        self, pod: FakePod, phase: str, reason: str, message: str, terminated: dict[str, Any] | None = None
    ) -> None:
        pod.kill()
        pod.ended.set()
        state = {"terminated": terminated or {"exitCode": 137, "reason": "Error"}}
        pod.body["status"] |= {"phase": phase, "containerStatuses": [{"name": "sandbox", "state": state}]}
        pod.body["status"] |= {"reason": reason, "message": message} if reason else {}
        await self._note("MODIFIED", pod)

    async def _terminate(self, pod: FakePod, grace_s: float) -> None:
        """End a deleted Pod: SIGTERM, SIGKILL after the grace period, and then the object goes."""
        if pod.process is not None and pod.process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(pod.pid, signal.SIGTERM)
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(pod.process.wait()), min(grace_s, 0.2))
            pod.kill()
            await pod.process.wait()
        await self._gone(pod)

    async def _gone(self, pod: FakePod) -> None:
        if self.pods.get(pod.name) is pod:
            pod.ended.set()
            del self.pods[pod.name]
            await self._note("DELETED", pod)
        if pod.process is not None:
            await asyncio.to_thread(shutil.rmtree, pod.folder, True)

    async def _note(self, kind: str, pod: FakePod) -> None:
        async with self._changed:
            self._version += 1
            pod.body["metadata"]["resourceVersion"] = str(self._version)
            self._events.append((self._version, kind, json.loads(json.dumps(pod.body))))
            self._changed.notify_all()

    def _start_task(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def feed(socket: web.WebSocketResponse, process: asyncio.subprocess.Process) -> None:
    """Pass what comes by the connection to a process; its input stays open, as in a cluster."""
    with suppress(ConnectionError):
        async for message in socket:
            if message.type is WSMsgType.BINARY and message.data[:1] == b"\x00":
                process.stdin.write(message.data[1:])
                await process.stdin.drain()


async def pump(socket: web.WebSocketResponse, channel: int, pipe: asyncio.StreamReader, cut: int | None) -> bool:
    """Pass what a process prints to the connection; returns whether it was cut off after so many bytes."""
    while data := await pipe.read(1 << 15):
        part = data if cut is None else data[:cut]
        with suppress(ConnectionError):
            await socket.send_bytes(bytes((channel,)) + part)
        if cut is not None and len(data) >= cut:
            return True
        cut = None if cut is None else cut - len(data)
    return cut is not None


async def go_on(process: asyncio.subprocess.Process) -> None:
    """Continue `nsenter` until it ends: it stops with what it has started."""
    while process.returncode is None:
        process.send_signal(signal.SIGCONT)
        await asyncio.sleep(_LOOK_S)


async def reap(process: asyncio.subprocess.Process) -> None:
    """Wait for the end of an exec whose connection is gone."""
    try:
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
        process._transport.close()


def rbac(request: web.Request) -> tuple[str, str]:
    """Return verb and resource of a request, as roles name them."""
    parts = request.path.split("/namespaces/")[1].split("/")
    if len(parts) == 1:
        return "get", "namespaces"
    if len(parts) == 4:
        return "get", f"{parts[1]}/{parts[3]}"
    named = {"GET": "get" if len(parts) == 3 else "watch" if request.query.get("watch") else "list"}
    return {**named, "POST": "create", "DELETE": "delete"}[request.method], parts[1]


def problem(status: int, reason: str, message: str) -> web.Response:
    body = {"kind": "Status", "status": "Failure", "reason": reason, "message": message, "code": status}
    return web.json_response(body, status=status)


def policy(network: str = "off") -> dict[str, Any]:
    """Return a NetworkPolicy that denies everything."""
    selector = {"matchLabels": {"penstock.network": network}}
    return {"metadata": {"name": "x"}, "spec": {"podSelector": selector, "policyTypes": ["Ingress", "Egress"]}}


def kubeconfig(server: str, token: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": server}}],
        "users": [{"name": "test", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": NAMESPACE}}],
    }


def mebibytes(amount: str) -> int:
    return int(amount.removesuffix("Mi")) << 20


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
