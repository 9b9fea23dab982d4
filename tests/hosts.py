"""Two hosts on one machine: network namespaces with a cable between them, or two loopback addresses where the kernel allows none."""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

NEW_NETWORK = 0x40000000


@dataclass(frozen=True)
class Host:
    """One of the two."""

    address: str
    namespace: str | None = None

    def enter(self) -> None:
        """Make this process, and those that it starts, run there."""
        if self.namespace is not None:
            with open(f"/var/run/netns/{self.namespace}") as handle:
                if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), NEW_NETWORK):
                    raise OSError(ctypes.get_errno(), f"cannot enter {self.namespace}")


def two_hosts() -> Iterator[tuple[Host, Host]]:
    """For a fixture."""
    names = [f"plait{os.getpid()}{which}" for which in "ab"]
    cables = [f"v{os.getpid() % 10**6}{which}" for which in "ab"]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", cables[0], "netns", names[0], "type", "veth", "peer", "name", cables[1], "netns", names[1])
        for name, cable, address in zip(names, cables, ("10.77.0.1/24", "10.77.0.2/24"), strict=True):
            _ip("-n", name, "addr", "add", address, "dev", cable)
            for link in (cable, "lo"):
                _ip("-n", name, "link", "set", link, "up")
    except (OSError, subprocess.CalledProcessError):
        yield Host("127.0.0.1"), Host("127.0.0.1")
        return
    finally:
        if not all(Path(f"/var/run/netns/{name}").exists() for name in names):
            _remove(names)
    try:
        yield Host("10.77.0.1", names[0]), Host("10.77.0.2", names[1])
    finally:
        _remove(names)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _remove(names: list[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


hosts = pytest.fixture(two_hosts, name="hosts")
