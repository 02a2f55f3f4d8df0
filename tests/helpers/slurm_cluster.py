"""A real Slurm on this machine: munge, slurmctld and several slurmd on loopback, all in one folder, as root.

Needs the programs that ``tests/helpers/slurm/install.sh`` installs. ``/etc/hosts`` gets a line for each node, for jobs
look their nodes up by name; the lines go when the cluster does.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from smlp.launch.local import free_port

HOSTS = Path("/etc/hosts")
MARK = "# a node of smlp's tests"
DAEMONS = ("munged", "slurmctld", "slurmd")
NUM_GPUS = 8  # of each node, in name only
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
SEARCH_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
# Partition `main`, whose jobs those in `urgent` take the nodes away from: SIGTERM, then up to 30 s to save.
CONFIGURATION = """
ClusterName=loop
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SwitchType=switch/none
GresTypes=gpu
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
InactiveLimit=0
KillWait=10
{nodes}
PartitionName=main Nodes={names} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
PartitionName=urgent Nodes={names} PriorityTier=2 PreemptMode=OFF
"""


class Cluster:
    """Runs from :meth:`start` to :meth:`stop`; ``environment`` is what Slurm's commands and jobs need."""

    def __init__(self, folder: Path, num_nodes: int, cpus: int, environment: dict[str, str]) -> None:
        self.folder = folder
        self.cpus = cpus
        # names that no other cluster on this machine has at the same time
        self.nodes = [f"smlp{os.getpid()}n{number}" for number in range(1, num_nodes + 1)]
        self.configuration = folder / "slurm.conf"
        self.environment = {**environment, "SLURM_CONF": str(self.configuration)}
        self.daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Returns when all nodes are idle; raises RuntimeError with what the logs say if that does not come."""
        self.write_configuration()
        add_hosts(self.nodes)
        folder = self.folder
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        self.launch(
            *("munged", "--foreground", "--force", f"--key-file={folder}/munge.key"),
            *(f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid", "--num-threads=2"),
            *(f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed"),
        )
        self.wait(lambda: (folder / "munge.socket").exists(), "munged", 10)
        self.launch("slurmctld", "-D", "-f", str(self.configuration))
        for node in self.nodes:
            self.launch("slurmd", "-D", "-f", str(self.configuration), "-N", node)
        self.wait(lambda: self.command("sinfo", "-h", "-t", "idle", "-o", "%D") == str(len(self.nodes)), "nodes", 60)

    def write_configuration(self) -> None:
        for name in ("state", *(f"spool/{node}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True)
        # files that exist are GPUs enough for Slurm
        for number in range(NUM_GPUS):
            (self.folder / f"gpu{number}").touch()
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-{NUM_GPUS - 1}]\n")
        host = socket.gethostname().partition(".")[0]
        controller, *ports = free_ports(1 + len(self.nodes))
        same = f"NodeHostname={host} NodeAddr=127.0.0.1 CPUs={self.cpus} Gres=gpu:{NUM_GPUS} State=UNKNOWN"
        nodes = [f"NodeName={node} Port={port} {same}" for node, port in zip(self.nodes, ports, strict=True)]
        self.configuration.write_text(
            CONFIGURATION.format(
                host=host, port=controller, folder=self.folder, nodes="\n".join(nodes), names=",".join(self.nodes)
            )
        )

    def launch(self, *command: str) -> None:
        program = shutil.which(command[0], path=SEARCH_PATH)
        with (self.folder / "daemons.log").open("ab") as log:
            self.daemons.append(
                subprocess.Popen(
                    [program, *command[1:]],
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    preexec_fn=end_with_parent(),
                )
            )

    def command(self, *words: str) -> str:
        """The output of one of Slurm's commands, empty if it fails."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=30)
        return done.stdout.strip() if done.returncode == 0 else ""

    def wait(self, condition: Callable[[], bool], what: str, seconds: float) -> None:
        limit = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > limit:
                logs = "\n".join(path.read_text(errors="replace")[-1500:] for path in self.folder.glob("*.log"))
                raise RuntimeError(f"no {what} within {seconds:.0f} s:\n{logs}")
            time.sleep(0.1)

    def stop(self) -> None:
        """Ends jobs and daemons, whatever state they are in."""
        try:
            with suppress(subprocess.TimeoutExpired):
                self.command("scancel", "--user=root")
                self.command("scancel", "--user=root", "--signal=KILL", "--full")
            for daemon in reversed(self.daemons):
                daemon.terminate()
            for daemon in self.daemons:
                with suppress(subprocess.TimeoutExpired):
                    daemon.wait(timeout=10)
                daemon.kill()
                daemon.wait()
            for pid in self.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        finally:
            remove_hosts(self.nodes)

    def processes(self) -> Iterator[int]:
        """Those that belong to this cluster: they know its configuration by its path."""
        mark = f"SLURM_CONF={self.configuration}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                with suppress(OSError):
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        yield int(entry.name)


@contextmanager
def running_cluster(folder: Path, num_nodes: int, cpus: int, environment: dict[str, str]) -> Iterator[Cluster]:
    """A cluster that is gone afterwards, whatever happens."""
    cluster = Cluster(folder, num_nodes, cpus, environment)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def missing() -> str:
    """Why there can be no cluster here; empty if there can."""
    if os.geteuid() != 0:
        return "slurmd needs root"
    absent = [name for name in (*DAEMONS, "sbatch", "srun") if shutil.which(name, path=SEARCH_PATH) is None]
    return f"not installed: {', '.join(absent)} (bash tests/helpers/slurm/install.sh)" if absent else ""


def add_hosts(names: Sequence[str]) -> None:
    """For :func:`remove_hosts` to take out again; takes out those of test runs that were killed before they could."""
    ours = re.findall(rf"^127\.0\.0\.1 (smlp(\d+)n\d+) {MARK}$", HOSTS.read_text(), re.M)
    remove_hosts([name for name, pid in ours if not Path(f"/proc/{pid}").exists()])
    with HOSTS.open("a") as hosts:
        hosts.write("".join(f"127.0.0.1 {name} {MARK}\n" for name in names))


def remove_hosts(names: Sequence[str]) -> None:
    """In place: in a container the file may be a mount point, which nothing can be renamed over."""
    ours = {f"127.0.0.1 {name} {MARK}" for name in names}
    lines = HOSTS.read_text().splitlines()
    HOSTS.write_text("".join(f"{line}\n" for line in lines if line not in ours))


def free_ports(count: int) -> list[int]:
    """Different TCP ports that nobody listens on just now."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


def end_with_parent() -> Callable[[], None]:
    """Something to run in a child before its program: the kernel kills it when this process ends, even by SIGKILL."""
    prctl = ctypes.CDLL(None).prctl

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return prepare
