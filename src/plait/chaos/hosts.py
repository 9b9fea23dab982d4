"""Two machines on one: network namespaces with a cable between them. It takes root, and Linux."""

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
    """One of the two."""

    address: str
    namespace: str = ""
    """Empty: it is this machine itself."""
    cable: str = ""

    def enter(self) -> None:
        """Make this process, and those that it starts, run there."""
        if not self.namespace:
            return
        with open(f"/var/run/netns/{self.namespace}") as handle:
            if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), NEW_NETWORK):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.namespace}")

    def link(self, up: bool) -> None:
        """Pull the cable out, or put it in."""
        ran("ip", "-n", self.namespace, "link", "set", self.cable, "up" if up else "down")

    def slow(self, megabits: int, milliseconds: int) -> None:
        """Make the cable slow in the direction that leads away from here."""
        rate = ("tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", f"{max(50, milliseconds)}ms")
        ran("ip", "netns", "exec", self.namespace, "tc", "qdisc", "replace", "dev", self.cable, "root", *rate)

    def fast(self) -> None:
        ran("ip", "netns", "exec", self.namespace, "tc", "qdisc", "del", "dev", self.cable, "root")


Hosts = tuple[Host, Host]


def ran(*words: str) -> None:
    """Run a command of the system; OSError when it cannot be."""
    try:
        subprocess.run(words, check=True, capture_output=True, timeout=20)
    except subprocess.SubprocessError as error:
        raise OSError(f"{' '.join(words)}: {error}") from None


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """The two, which are removed at the end. OSError where the system does not allow them."""
    number = os.getpid()
    names = [f"chaos{number}{which}" for which in "ab"]
    cables = [f"p{number % 10**7}{which}" for which in "ab"]
    try:
        for name in names:
            ran("ip", "netns", "add", name)
        ran("ip", "link", "add", cables[0], "netns", names[0], "type", "veth", "peer", "name", cables[1], "netns", names[1])
        for name, cable, address in zip(names, cables, ("10.78.0.1/24", "10.78.0.2/24"), strict=True):
            ran("ip", "-n", name, "addr", "add", address, "dev", cable)
            for link in (cable, "lo"):
                ran("ip", "-n", name, "link", "set", link, "up")
        yield Host("10.78.0.1", names[0], cables[0]), Host("10.78.0.2", names[1], cables[1])
    finally:
        for name in names:
            if Path(f"/var/run/netns/{name}").exists():
                ran("ip", "netns", "del", name)


def own_mounts() -> bool:
    """Let what this process mounts from now on be seen by it and its children alone. False where that is not allowed."""
    system = ctypes.CDLL(None, use_errno=True)
    if os.getuid() != 0 or not hasattr(system, "unshare") or system.unshare(NEW_MOUNTS):
        return False
    return system.mount(b"none", b"/", None, PRIVATE, None) == 0


def mounted(path: Path, size: int) -> Callable[[], None]:
    """A small file system in memory, and what removes it."""
    path.mkdir(parents=True, exist_ok=True)
    ran("mount", "-t", "tmpfs", "-o", f"size={size}", "plait-chaos", str(path))
    return lambda: ran("umount", "-l", str(path))
