"""One run of Penstock on a Ray cluster: examples/ray/README.md.

    ray job submit --working-dir . -- python penstock_on_ray.py run.toml --samplers 4

This script and Redis are on one node. Every engine is a Ray actor, every other role a Ray task, with a process of its
own; if the actor or task dies, or its node does, Ray starts it again, on another node if need be.
"""

import argparse
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import tomllib
from contextlib import suppress
from pathlib import Path

import ray
from ray.util import get_node_ip_address

REDIS_PORT = 6390
LOOKUP_S = 10.0
"""Between two looks at the addresses of the engines, and the time for one."""
DIE_WITH_US = ("setpriv", "--pdeathsig", "KILL")
"""Linux kills the process when the Ray worker that started it is gone, so none runs beside its successor."""
DONE_OR_PERMANENT = (0, 2, 4)
"""Exit codes after which a role is not started again: it is done, or it would fail again."""


class RoleEndedError(Exception):
    """A role ended early; Ray starts it again."""


def plan(settings, samplers, gpus):
    """Return (role, Ray's options) for each task of a run; engines are actors.

    Args:
        settings: content of the settings file.
        samplers: how many engines there are, each with its rollout workers and scorers.
        gpus: GPUs of each engine; with any, the trainer has one for each of its ranks.
    """
    ranks = settings.get("train", {}).get("ranks", 1)
    tasks = [("train", {"num_gpus": ranks if gpus else 0}), ("feed", {})]
    for _ in range(samplers):
        tasks += [("rollout", {"scheduling_strategy": "SPREAD"})] * settings.get("rollout", {}).get("workers", 1)
        tasks += [("score", {"scheduling_strategy": "SPREAD"})] * settings.get("score", {}).get("workers", 1)
    return tasks


@ray.remote(max_retries=20, retry_exceptions=[RoleEndedError])
def run_role(role, file, redis, engines):
    """Run one role on this node until its work is done; return its exit code.

    The role reads its engines from a file, which gets the new address of an engine that Ray has started again.
    """
    here = get_node_ip_address()
    with tempfile.TemporaryDirectory() as folder:
        urls = Path(folder) / "engines.txt"
        command = [*DIE_WITH_US, "penstock", role, file, "--set", f'run.address="{here}"', "--engine", f"file:{urls}"]
        write_urls(urls, engines)
        process = subprocess.Popen(command, env={**os.environ, "PENSTOCK_REDIS": redis})
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(LOOKUP_S)
            write_urls(urls, engines)
    code = process.returncode
    if code in DONE_OR_PERMANENT:
        return code
    raise RoleEndedError(f"penstock {role} ended with code {code} on {here}")


def write_urls(file, engines):
    """Replace the file by one with the current addresses of the engines; keep it while one is being started again."""
    try:
        urls = ray.get([engine.get_url.remote() for engine in engines], timeout=LOOKUP_S)
    except ray.exceptions.RayError:
        return
    new = file.with_suffix(".new")
    new.write_text("\n".join(urls))
    new.replace(file)


@ray.remote(max_restarts=20, max_task_retries=20, max_concurrency=100)
class Engine:
    """One engine on this node. When its server ends, so does the actor, and Ray makes another."""

    def __init__(self, file):
        command = [*DIE_WITH_US, "penstock", "serve", file, "--host", get_node_ip_address(), "--port", "0"]
        self.server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.url = next((line.split()[2] for line in self.server.stdout if line.startswith("listening on ")), "")
        if not self.url:
            os._exit(1)

    def get_url(self):
        return self.url

    def run(self):
        """Wait for the end of the server."""
        for line in self.server.stdout:
            print(line, end="", flush=True)
        os._exit(1)


def start_redis(name):
    """Start Redis on this node; return its process and URL. Its data outlive it, and so does a file with the URL."""
    server = shutil.which("redis-server") or shutil.which("valkey-server")
    if server is None:
        sys.exit("neither redis-server nor valkey-server is installed on the node of this script")
    folder = (
        Path.home() / "penstock-redis" / name
    )  # not in the run's folder, which may be another on the trainer's node
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    password, here = secrets.token_hex(24), get_node_ip_address()
    lines = [f"requirepass {password}", f"bind {here}", f"port {REDIS_PORT}", f"dir {folder}", "logfile server.log"]
    lines += ["appendonly yes", 'save ""', "maxmemory-policy noeviction"]
    (folder / "redis.conf").write_text("\n".join(lines) + "\n")
    url = f"redis://:{password}@{here}:{REDIS_PORT}"
    (folder / "url").write_text(url)
    return subprocess.Popen([*DIE_WITH_US, server, str(folder / "redis.conf")]), url


def wait_for_trainer(tasks):
    """Return the exit code of the trainer, or of a role that failed for good before."""
    while True:
        (done,), _ = ray.wait(list(tasks))
        role, code = tasks.pop(done), ray.get(done)
        print(f"{role} ended with code {code}")
        if code or role == "train":
            return code


def main():
    parser = argparse.ArgumentParser(description="Run the roles of one run as tasks of a Ray cluster.")
    parser.add_argument("file", help="settings file")
    parser.add_argument("--samplers", type=int, default=1, help="engines, each with its rollout workers and scorers")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each engine; the trainer has one for each rank")
    options = parser.parse_args()
    settings = tomllib.loads(Path(options.file).read_text())
    run = settings.get("run", {})
    if not run.get("name") or not Path(run.get("folder", "")).is_absolute():
        sys.exit(f"{options.file}: set run.name, and run.folder to an absolute path: a task's own folder is temporary")
    subprocess.run(["penstock", "check", options.file], check=True)

    ray.init()
    redis, url = start_redis(run["name"])
    engine = Engine.options(num_cpus=1, num_gpus=options.gpus, scheduling_strategy="SPREAD")
    actors = [engine.remote(options.file) for _ in range(options.samplers)]
    timeout_s = settings.get("engine", {}).get("start_timeout_s", 900)
    ray.get([actor.get_url.remote() for actor in actors], timeout=timeout_s)
    tasks = {
        run_role.options(name=role, **how).remote(role, options.file, url, actors): role
        for role, how in plan(settings, options.samplers, options.gpus)
    }
    tasks |= {actor.run.remote(): "serve" for actor in actors}
    try:
        sys.exit(wait_for_trainer(tasks))
    finally:
        redis.terminate()
        redis.wait()


if __name__ == "__main__":
    main()
