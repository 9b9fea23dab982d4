"""Which network interface of this machine leads to another one, and has which address."""

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
import sys
from dataclasses import dataclass

from plait.config.errors import FAILED, PlaitError, Problem

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_ADDRESS_OF = 0x8915  # SIOCGIFADDR of Linux


@dataclass(frozen=True)
class Interface:
    """One of this machine's, with its IPv4 address."""

    name: str
    address: str

    @property
    def loops(self) -> bool:
        """It reaches this machine only."""
        return ipaddress.ip_address(self.address).is_loopback

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


def all_of_this_machine() -> list[Interface]:
    """Those that have an IPv4 address."""
    found = list[Interface]()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asking.fileno(), _ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
                found.append(Interface(name, socket.inet_ntoa(answer[20:24])))
    return found


def addresses_of(host: str) -> list[str]:
    """The IPv4 addresses of a name, or of itself. L007 when it has none."""
    try:
        rows = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        what = f"the machine of rank 0 is called {host}, and this one ({socket.gethostname()}) knows no address of that name"
        fix = ("--master <its address>:29500    or PLAIT_MASTER", f"getent hosts {host}    asks as plait did")
        raise PlaitError(Problem("L007", what, why=str(error), fix=fix), FAILED) from error
    return list(dict.fromkeys(str(row[4][0]) for row in rows))


def own(host: str) -> Interface | None:
    """The interface of this machine that a name means; None when it means another machine."""
    addresses = addresses_of(host)
    mine = [one for one in all_of_this_machine() if one.address in addresses]
    if mine:
        return min(mine, key=lambda one: one.loops)
    if any(ipaddress.ip_address(address).is_loopback for address in addresses):
        return Interface(LOOPBACK, "127.0.0.1")  # 127.0.1.1 of Debian, for a machine's own name
    return None


def towards(address: str) -> Interface:
    """The one through which this machine sends to an address, or the one that GLOO_SOCKET_IFNAME names. L007 when there is none."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    known = all_of_this_machine()
    if chosen:
        named = next((one for one in known if one.name == chosen), None)
        if named is None:
            there = ", ".join(map(str, known)) or "none"
            what = f"GLOO_SOCKET_IFNAME={chosen}: this machine has no such interface with an address"
            raise PlaitError(Problem("L007", what, why=f"it has {there}", fix=("unset GLOO_SOCKET_IFNAME",)))
        return named
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.connect((address, 9))  # sends nothing: the routing table answers
            source = str(asking.getsockname()[0])
    except OSError as error:
        there = ", ".join(map(str, known)) or "none"
        what = f"no interface of this machine ({socket.gethostname()}) leads to {address}"
        raise PlaitError(
            Problem("L007", what, why=f"{error.strerror}; it has {there}", fix=("ip route",)), FAILED
        ) from error
    return next((one for one in known if one.address == source), Interface(LOOPBACK, source))


def use(interface: Interface) -> None:
    """Have gloo, and NCCL where there is a choice, use one interface. What the user set stays."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface.name)
    others = [one for one in all_of_this_machine() if not one.loops]
    if len(others) > 1 and not interface.loops:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface.name}")
