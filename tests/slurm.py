"""A Slurm cluster of two nodes on this machine, from Debian's packages: network namespaces joined by a virtual cable, with a slurmd in
each.

All files are in one temporary folder. Each daemon has its own process namespace, so that its children end with it.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from engines import engine, libraries

from plait.chaos.hosts import Hosts, make_two_hosts
from plait.launch.child import die_with_parent

NODES = ("n1", "n2")
SOURCES = os.pathsep.join((str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")))
CONFIGURATION = """
ClusterName=plait
SlurmctldHost=n1({first})
SlurmUser=root
SlurmctldPort=6817
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
PluginDir={plugins}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=5
SchedulerParameters=sched_interval=2,bf_interval=2
NodeName=n1 NodeAddr={first} Port=6818 CPUs=4 State=UNKNOWN
NodeName=n2 NodeAddr={second} Port=6819 CPUs=4 State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES MaxTime=10 State=UP PreemptMode=OFF
PartitionName=low Nodes=ALL MaxTime=10 State=UP PriorityTier=1 GraceTime=40
PartitionName=high Nodes=ALL MaxTime=10 State=UP PriorityTier=2 PreemptMode=OFF
"""
THERE = ["unshare", "--mount", "--uts"]
SETTLED = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && '
"""A shell prefix of each command: sets the node's hostname, and the names of both nodes."""


class Cluster:
    """Starts Slurm; `run` executes a command on the first node, the login node of users."""

    def __init__(self, hosts: Hosts, folder: Path):
        self.hosts, self.folder, self.root = hosts, folder, engine("slurm")
        self.daemons: list[subprocess.Popen[bytes]] = []
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir()
        lines = [
            f"{host.address} {node}" + (" login" if node == "n1" else "")
            for host, node in zip(hosts, NODES, strict=True)
        ]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        (plugins,) = self.root.glob("usr/lib/*/slurm-wlm")
        settings = {"first": hosts[0].address, "second": hosts[1].address}
        (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, plugins=plugins, **settings))
        (folder / "plait").write_text(f'#!/bin/sh\nexec {sys.executable} -m plait "$@"\n')
        (folder / "plait").chmod(0o755)
        programs = [str(folder), *(str(self.root / where) for where in ("usr/bin", "usr/sbin")), os.environ["PATH"]]
        self.environment = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"), "LD_LIBRARY_PATH": libraries(self.root, "slurm-wlm"),
            "PATH": os.pathsep.join(programs), "PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1", "PLAIT_SECRET": secrets.token_hex(16),
        }  # fmt: skip

    def start(self) -> None:
        """Start the daemons, and return when both nodes are idle."""
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{name}={self.folder}/munge.{end}" for name, end in files.items()]
        self._daemon(0, "munged", "--foreground", "--force", *options)
        self.until((self.folder / "munge.socket").exists, "munged")
        self._daemon(0, "slurmctld-wlm", "-D", "-i")
        stepd = str(self.root / "usr/sbin/slurmstepd-wlm")
        for k, node in enumerate(NODES):
            self._daemon(k, "slurmd-wlm", "-D", "-N", node, "-d", stepd)
        self.until(lambda: self.output("sinfo", "-h", "-o", "%D %t") == "2 idle", "two idle machines")

    def _daemon(self, host: int, *words: str) -> None:
        wrapped = [*THERE, "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"]
        wrapped += [SETTLED + '{ "$@" & wait $!; }', str(self.folder / "hosts"), NODES[host], *words]
        with open(self.folder / f"{words[0]}-{host}.log", "wb") as log:
            self.daemons.append(
                subprocess.Popen(wrapped, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **self._on(host))
            )

    def _on(self, host: int) -> dict[str, Any]:
        def enter() -> None:
            die_with_parent()
            self.hosts[host].enter()

        return {"preexec_fn": enter, "env": self.environment, "cwd": self.folder}

    def begin(self, *words: str, folder: Path, **environment: str) -> subprocess.Popen[str]:
        """Start a command on the first node."""
        settings = self._on(0) | {"cwd": folder, "env": self.environment | environment}
        wrapped = [*THERE, "sh", "-c", SETTLED + 'exec "$@"', str(self.folder / "hosts"), "login", *words]
        return subprocess.Popen(wrapped, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **settings)

    def run(self, *words: str, folder: Path, timeout: float = 120, **environment: str) -> tuple[int, str]:
        """Return the exit code and the output of a command on the first node."""
        running = self.begin(*words, folder=folder, **environment)
        try:
            output, _ = running.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            running.kill()
            output, _ = running.communicate()
            raise AssertionError(f"{' '.join(words)} took longer than {timeout} s\n{output}\n{self.logs()}") from None
        return running.returncode, output

    def output(self, *words: str) -> str:
        return self.run(*words, folder=self.folder)[1].strip()

    def until(self, ready: Callable[[], bool], what: str, timeout: float = 60) -> None:
        end = time.monotonic() + timeout
        while not ready():
            assert time.monotonic() < end, f"{what}: not within {timeout:.0f} s\n{self.logs()}"
            time.sleep(0.1)

    def logs(self) -> str:
        """Return the last lines of the daemons' logs."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(
            f"== {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-12:]) for log in logs
        )

    def stop(self) -> None:
        """End the daemons. All processes in their namespaces end with them."""
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGKILL)
            daemon.wait()


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    """Yield a cluster for the tests of a file."""
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("a cluster on one machine wants namespaces, and these want root")
    engine("slurm")
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(make_two_hosts())
        except OSError:
            pytest.skip("this kernel gives no network namespaces")
        folder = Path(tempfile.mkdtemp(prefix="plait-slurm-", dir="/tmp"))  # the path of a socket must be short
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        cluster = Cluster(hosts, folder)
        stack.callback(cluster.stop)
        cluster.start()
        yield cluster
