"""Who may use what this machine's processes tell each other on loopback: this user alone, though every user reaches every port there.

Processes that have a parent in common meet in a file without a name. Others come over TCP; there the system says whose a connection is
(Linux: its netlink interface for sockets), and torch's store, which asks nobody, stands behind a packet filter that only connections of
one process pass. Where the system has neither, every user of the machine is trusted, and `guards` says so.

Which network interface of this machine leads to another one, and has which address.
"""

import contextlib
import ctypes
import fcntl
import functools
import ipaddress
import os
import socket
import struct
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from plait.config.errors import FAILED, PlaitError, Problem
from plait.launch import limits
from plait.launch.scratch import Scratch

if TYPE_CHECKING:
    from torch.distributed import FileStore, TCPStore

LINUX = sys.platform == "linux"
RECENT = 1000
"""Connections that the filter knows. Older ones have been accepted, and need it no longer."""
TRIES = 10


@dataclass(frozen=True)
class _Connection:
    """What the system knows of one end: its state (linux/tcp_states.h) and the user whose it is."""

    state: int
    user: int


def _own() -> _Connection:
    """An established one of this user."""
    return _Connection(1, os.getuid())


class LocalStore:
    """A store for this process and those that it forks. Closed here, it goes with the last of them."""

    def __init__(self) -> None:
        self._opened = contextlib.ExitStack()
        if LINUX:
            file = os.memfd_create("plait-store")
            self._opened.callback(os.close, file)
            self._path = f"/proc/self/fd/{file}"
        else:
            self._path = f"{self._opened.enter_context(Scratch('store')) / 'store'}"

    def open(self) -> "FileStore":
        """A connection of this process to it."""
        from torch.distributed import FileStore

        return FileStore(self._path, -1)

    def close(self) -> None:
        """Of the process that made it."""
        self._opened.close()


@functools.cache
def guards() -> bool:
    """Whether the system keeps other users of this machine out."""
    return _knows_users() and _has_filters()


def same_user(link: socket.socket) -> bool:
    """Whether who has connected to this machine from this machine is a process of this user."""
    return not _knows_users() or _other_end(link) == _own()


@functools.cache
def _knows_users() -> bool:
    with contextlib.suppress(OSError), limits.listening() as door, socket.socket() as link:
        link.connect(door.getsockname())
        with door.accept()[0] as accepted:
            return _other_end(accepted) == _own()
    return False


def _other_end(link: socket.socket) -> _Connection | None:
    """The other end of a connection within this machine: `sock_diag(7)` of Linux. OSError when the system does not know it."""
    (here, port), (there, theirs) = link.getsockname(), link.getpeername()
    ends = struct.pack("!HH4s12x4s12x", theirs, port, socket.inet_aton(there), socket.inet_aton(here))
    request = struct.pack("=BBxxI", socket.AF_INET, socket.IPPROTO_TCP, 0xFFFFFFFF) + ends + struct.pack("=Iq", 0, -1)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as asked:
        asked.settimeout(1.0)
        asked.sendto(struct.pack("=IHHII", _HEADER + len(request), _BY_FAMILY, _REQUEST, 0, 0) + request, (0, 0))
        answer = asked.recv(4096)
    if struct.unpack_from("=IH", answer)[1] != _BY_FAMILY:
        return None
    return _Connection(*struct.unpack_from("=xB", answer, _HEADER), *struct.unpack_from("=I", answer, _HEADER + _USER))


_SOCK_DIAG, _BY_FAMILY, _REQUEST, _HEADER, _USER = 4, 20, 1, 16, 64
"""Numbers of linux/sock_diag.h and linux/inet_diag.h: the last is where the user stands in an answer."""


class GuardedStore:
    """torch's store on loopback, with which this process alone can connect."""

    def __init__(self) -> None:
        self._recent = deque[int](maxlen=RECENT)
        for _ in range(TRIES):
            listening = limits.listening()
            self.address = listening.getsockname()
            self._door = listening.dup()
            self.store = _store_at(listening)
            self._guard()
            if self._untouched():
                return
            self._door.close()
        raise ConnectionAbortedError(f"another user connects with every new port of this machine, {TRIES} times")

    @contextlib.contextmanager
    def connected(self) -> Iterator[socket.socket]:
        """A connection to the store; the port that it comes from is this process's until it is closed."""
        with socket.socket() as link:
            link.bind((self.address[0], 0))
            port = link.getsockname()[1]
            self._recent.append(port)
            self._guard()
            try:
                link.settimeout(limits.CONNECT)
                link.connect(self.address)
                link.setblocking(False)
                yield link
            finally:
                with contextlib.suppress(ValueError):  # so many came after it
                    self._recent.remove(port)
                self._guard()

    def _untouched(self) -> bool:
        """Whether nobody came in before the filter was there: the store has one connection, its own, and no keys."""
        if not _has_filters():
            return True
        counted = [self.store.num_keys() for _ in range(2)]  # the second answer comes after whatever had come before the first
        return not any(counted) and _connections_to(self.address) == [_own()]

    def _guard(self) -> None:
        """Let packets to the door through that come from the ports of this process; a connection keeps the filter it was accepted with."""
        if not _has_filters():
            return
        host = int.from_bytes(socket.inet_aton(self.address[0]), "big")
        steps = [(_LOAD_WORD, 0, 0, _SOURCE_ADDRESS), (_EQUAL, 1, 0, host), (_RETURN, 0, 0, 0), (_LOAD_HALF, 0, 0, _SOURCE_PORT)]
        for port in self._recent:
            steps += [(_EQUAL, 0, 1, port), (_RETURN, 0, 0, 0xFFFFFFFF)]
        _attach(self._door, [*steps, (_RETURN, 0, 0, 0)])


_LOAD_WORD, _LOAD_HALF, _EQUAL, _RETURN = 0x20, 0x28, 0x15, 0x06
_SOURCE_ADDRESS, _SOURCE_PORT = 0xFFF00000 + 12, 0
"""Where they stand: from the head of the address layer, and of the transport layer (linux/filter.h)."""
_ATTACH_FILTER = 26


@functools.cache
def _has_filters() -> bool:
    with contextlib.suppress(OSError), socket.socket() as one:
        _attach(one, [(_RETURN, 0, 0, 0)])
        return LINUX
    return False


def _attach(link: socket.socket, steps: list[tuple[int, int, int, int]]) -> None:
    """Have the system ask a program of the packet filter about each packet for this socket."""
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    link.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", len(steps), ctypes.addressof(program)))


def _store_at(listening: socket.socket) -> "TCPStore":
    from torch.distributed import TCPStore

    host, port = listening.getsockname()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def _connections_to(address: tuple[str, int]) -> list[_Connection]:
    """The other end of each connection to an address of this machine."""
    number = f"{int.from_bytes(socket.inet_aton(address[0]), sys.byteorder):08X}:{address[1]:04X}"
    tables = [table for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if table.exists()]
    rows = [line.split() for table in tables for line in table.read_text().splitlines() if number in line]
    return [_Connection(int(row[3], 16), int(row[7])) for row in rows if row[2].endswith(number)]


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
