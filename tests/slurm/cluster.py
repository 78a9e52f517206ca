"""A Slurm cluster on one machine: a network namespace with its own address and host name for each node."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

TOOLS = ("slurmctld", "slurmd", "sbatch", "scontrol", "ip", "unshare", "nsenter")
DIE_WITH_TEST = ("setpriv", "--pdeathsig", "KILL")
NETWORK = "10.78.0"
CONFIGURATION = """
ClusterName=penstock
SlurmctldHost=n1
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=10
SlurmdTimeout=15
SchedulerParameters=sched_interval=2
MailProg=/bin/true
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Return why there can be no cluster on this machine; empty: there can."""
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: apt-get install slurm-wlm iproute2)"
    made = subprocess.run(["unshare", "-nmu", "true"], capture_output=True, check=False).returncode == 0
    return "" if os.geteuid() == 0 and made else "needs root and namespaces"


class Node:
    """A node: namespaces for network, host name and mounts, and the daemons in them."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._folder = folder
        self._init = subprocess.Popen(
            [*DIE_WITH_TEST, "unshare", "-nmu", "--propagation", "private", "sleep", "infinity"]
        )
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def pid(self) -> int:
        """The process that keeps the namespaces."""
        return self._init.pid

    def inside(self, *command: str) -> list[str]:
        return ["nsenter", "-t", str(self.pid), "-n", "-m", "-u", f"--wdns={self._folder}", "--", *command]

    def sh(self, text: str) -> None:
        subprocess.run(self.inside("sh", "-ec", text), check=True, timeout=30)

    def start(self, *command: str, environment: dict[str, str]) -> None:
        with (self._folder / f"{command[0]}-{self.name}.out").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    [*DIE_WITH_TEST, *self.inside(*command)],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )

    def power_off(self) -> None:
        """Kill every process in the node's network at once."""
        ours = Path(f"/proc/{self.pid}/ns/net").stat().st_ino
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if int(process.name) != self.pid and (process / "ns/net").stat().st_ino == ours:
                    os.kill(int(process.name), signal.SIGKILL)
            except OSError:  # it has just ended
                continue
        for daemon in self._daemons:
            daemon.wait()
        self._daemons.clear()

    def close(self) -> None:
        self.power_off()
        self._init.kill()
        self._init.wait()


class Cluster:
    """Nodes n1, n2, .. with a controller on n1."""

    def __init__(self, folder: Path, nodes: list[Node]) -> None:
        self.folder = folder
        self.nodes = nodes
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        (self.folder / "state").mkdir()
        cpus = os.cpu_count()
        lines = "\n".join(
            f"NodeName={node.name} NodeAddr={NETWORK}.{number} CPUs={cpus} RealMemory=1024 State=UNKNOWN"
            for number, node in enumerate(self.nodes, 1)
        )
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(folder=self.folder, nodes=lines))
        self.nodes[0].start("slurmctld", "-D", environment=self.environment)
        for node in self.nodes:
            self.start_node(node)
        deadline = time.monotonic() + 60
        while self.run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() != str(len(self.nodes)):
            assert time.monotonic() < deadline, self.run("sinfo", "-R") + (self.folder / "slurmctld.log").read_text()
            time.sleep(0.2)

    def start_node(self, node: Node) -> None:
        node.start("slurmd", "-D", "-N", node.name, environment=self.environment)

    def run(self, *command: str, check: bool = True, **variables: str) -> str:
        """Run a command on n1, as on a login node; returns what it prints."""
        result = subprocess.run(
            self.nodes[0].inside(*command),
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert result.returncode == 0 or not check, f"{command}: {result.stdout}{result.stderr}"
        return result.stdout

    def state(self, job: str) -> str:
        """Return a job's state, such as RUNNING or COMPLETED."""
        fields = self.run("scontrol", "show", "job", job, "-o")
        return fields.partition("JobState=")[2].split()[0]


@contextmanager
def slurm_cluster(folder: Path, count: int) -> Iterator[Cluster]:
    """Start a cluster whose nodes share the file system and one Ethernet."""
    with ExitStack() as stack:
        nodes = []
        for number in range(1, count + 1):
            nodes.append(Node(f"n{number}", folder))
            stack.callback(nodes[-1].close)
        time.sleep(0.5)  # until `unshare` has made the namespaces
        hosts = folder / "hosts"
        hosts.write_text(
            "127.0.0.1 localhost\n"
            + "".join(f"{NETWORK}.{number} {node.name}\n" for number, node in enumerate(nodes, 1))
        )
        first = nodes[0]
        first.sh("ip link add switch type bridge && ip link set switch up")
        for number, node in enumerate(nodes, 1):
            node.sh(f"hostname {node.name} && ip link set lo up && mount --bind {hosts} /etc/hosts")
            first.sh(f"ip link add port{number} type veth peer name cable netns {node.pid}")
            first.sh(f"ip link set port{number} master switch up")
            node.sh(f"ip addr add {NETWORK}.{number}/24 dev cable && ip link set cable up")
        cluster = Cluster(folder, nodes)
        cluster.start()
        yield cluster
