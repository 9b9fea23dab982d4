"""Two hosts on one machine: network namespaces with a virtual cable between them. Needs root and Linux."""

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NEW_NETWORK, NEW_MOUNTS = 0x40000000, 0x00020000
"""Linux's CLONE_NEWNET, CLONE_NEWNS."""
PRIVATE = 0x4000 | 0x40000
"""MS_REC | MS_PRIVATE."""


@dataclass(frozen=True)
class Host:
    """One of the two hosts."""

    address: str
    namespace: str = ""
    """Empty: the host is this machine itself."""
    interface: str = ""

    def enter(self) -> None:
        """Move this process, and the processes it starts, to the host."""
        if not self.namespace:
            return
        with open(f"/var/run/netns/{self.namespace}") as handle:
            if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), NEW_NETWORK):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.namespace}")

    def set_link(self, up: bool) -> None:
        """Set the link up or down."""
        run_command("ip", "-n", self.namespace, "link", "set", self.interface, "up" if up else "down")

    def slow_link(self, megabits: int, milliseconds: int) -> None:
        """Limit bandwidth and latency of packets that leave this host."""
        rate = ("tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", f"{max(50, milliseconds)}ms")
        run_command("ip", "netns", "exec", self.namespace, "tc", "qdisc", "replace", "dev", self.interface, "root", *rate)

    def restore_link(self) -> None:
        run_command("ip", "netns", "exec", self.namespace, "tc", "qdisc", "del", "dev", self.interface, "root")


Hosts = tuple[Host, Host]


def run_command(*words: str) -> None:
    """Run a system command; raises OSError if it fails."""
    try:
        subprocess.run(words, check=True, capture_output=True, timeout=20)
    except subprocess.SubprocessError as error:
        raise OSError(f"{' '.join(words)}: {error}") from None


@contextmanager
def make_two_hosts() -> Iterator[Hosts]:
    """Create two hosts and remove them at the end. Raises OSError if the system does not allow them."""
    number = os.getpid()
    names = [f"chaos{number}{which}" for which in "ab"]
    cables = [f"p{number % 10**7}{which}" for which in "ab"]
    try:
        for name in names:
            run_command("ip", "netns", "add", name)
        run_command("ip", "link", "add", cables[0], "netns", names[0], "type", "veth", "peer", "name", cables[1], "netns", names[1])
        for name, cable, address in zip(names, cables, ("10.78.0.1/24", "10.78.0.2/24"), strict=True):
            run_command("ip", "-n", name, "addr", "add", address, "dev", cable)
            for link in (cable, "lo"):
                run_command("ip", "-n", name, "link", "set", link, "up")
        yield Host("10.78.0.1", names[0], cables[0]), Host("10.78.0.2", names[1], cables[1])
    finally:
        for name in names:
            if Path(f"/var/run/netns/{name}").exists():
                run_command("ip", "netns", "del", name)


def isolate_mounts() -> bool:
    """Make later mounts of this process visible only to it and its children. Returns False if this is not allowed."""
    system = ctypes.CDLL(None, use_errno=True)
    if os.getuid() != 0 or not hasattr(system, "unshare") or system.unshare(NEW_MOUNTS):
        return False
    return system.mount(b"none", b"/", None, PRIVATE, None) == 0


def mount_tmpfs(path: Path, size: int) -> Callable[[], None]:
    """Mount a small file system in memory. Returns a function that removes it."""
    path.mkdir(parents=True, exist_ok=True)
    run_command("mount", "-t", "tmpfs", "-o", f"size={size}", "plait-chaos", str(path))
    return lambda: run_command("umount", "-l", str(path))
