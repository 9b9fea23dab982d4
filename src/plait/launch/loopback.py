"""Restrict connections on loopback to processes of this user; by default every user of the machine can reach every loopback port.

Processes with a common parent share a store in a file without a name. Others connect over TCP. There the operating system identifies the
user of a connection (Linux: netlink socket diagnostics). torch's store has no authentication, so a packet filter admits only connections of
one process to it. If the system has neither, every user of the machine is trusted, and `has_user_guards` is False.

This file also finds the network interface that leads to another node, and its address.
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
from plait.launch.scratch import ScratchFolder

if TYPE_CHECKING:
    from torch.distributed import FileStore, TCPStore

LINUX = sys.platform == "linux"
MAX_RECENT_PORTS = 1000
"""Maximum number of connections that the filter lists. Older ones have been accepted and no longer need it."""
MAX_TRIES = 10


@dataclass(frozen=True)
class _Connection:
    """State (linux/tcp_states.h) and user of one end of a connection."""

    state: int
    user: int


def _own_connection() -> _Connection:
    """Return the value of an established connection of this user."""
    return _Connection(1, os.getuid())


class LocalStore:
    """A store for this process and its forks. It is removed when the last of them has ended."""

    def __init__(self) -> None:
        self._resources = contextlib.ExitStack()
        if LINUX:
            file = os.memfd_create("plait-store")
            self._resources.callback(os.close, file)
            self._path = f"/proc/self/fd/{file}"
        else:
            self._path = f"{self._resources.enter_context(ScratchFolder('store')) / 'store'}"

    def open(self) -> "FileStore":
        """Connect this process to the store."""
        from torch.distributed import FileStore

        return FileStore(self._path, -1)

    def close(self) -> None:
        """Close it, in the process that created it."""
        self._resources.close()


@functools.cache
def has_user_guards() -> bool:
    """Whether the operating system can keep out other users of this machine."""
    return _can_identify_users() and _has_filters()


def is_same_user(link: socket.socket) -> bool:
    """Whether the peer of a connection within this machine is a process of this user."""
    return not _can_identify_users() or _query_other_end(link) == _own_connection()


@functools.cache
def _can_identify_users() -> bool:
    with contextlib.suppress(OSError), limits.open_loopback_socket() as door, socket.socket() as link:
        link.connect(door.getsockname())
        with door.accept()[0] as accepted:
            return _query_other_end(accepted) == _own_connection()
    return False


def _query_other_end(link: socket.socket) -> _Connection | None:
    """Query the other end of a connection within this machine: `sock_diag(7)` of Linux. Raises OSError if it is unknown."""
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
"""Constants of linux/sock_diag.h and linux/inet_diag.h; the last one is the offset of the user in an answer."""


class GuardedStore:
    """torch's store on loopback; only this process can connect to it."""

    def __init__(self) -> None:
        self._recent = deque[int](maxlen=MAX_RECENT_PORTS)
        for _ in range(MAX_TRIES):
            listening = limits.open_loopback_socket()
            self.address = listening.getsockname()
            self._listener = listening.dup()
            self.store = _open_tcp_store(listening)
            self._update_filter()
            if self._is_untouched():
                return
            self._listener.close()
        raise ConnectionAbortedError(f"another user connects to every new port of this machine, {MAX_TRIES} times")

    @contextlib.contextmanager
    def open_connection(self) -> Iterator[socket.socket]:
        """Connect to the store; the source port belongs to this process until the connection is closed."""
        with socket.socket() as link:
            link.bind((self.address[0], 0))
            port = link.getsockname()[1]
            self._recent.append(port)
            self._update_filter()
            try:
                link.settimeout(limits.CONNECT_TIMEOUT)
                link.connect(self.address)
                link.setblocking(False)
                yield link
            finally:
                with contextlib.suppress(ValueError):  # newer ports have replaced it
                    self._recent.remove(port)
                self._update_filter()

    def _is_untouched(self) -> bool:
        """Whether no process connected before the filter was installed: the store has one connection, its own, and no keys."""
        if not _has_filters():
            return True
        counted = [self.store.num_keys() for _ in range(2)]  # the second answer follows all requests that preceded the first
        return not any(counted) and _list_connections(self.address) == [_own_connection()]

    def _update_filter(self) -> None:
        """Install a filter that accepts only packets from ports of this process. A connection keeps the filter of its accept call."""
        if not _has_filters():
            return
        host = int.from_bytes(socket.inet_aton(self.address[0]), "big")
        steps = [(_LOAD_WORD, 0, 0, _SOURCE_ADDRESS), (_EQUAL, 1, 0, host), (_RETURN, 0, 0, 0), (_LOAD_HALF, 0, 0, _SOURCE_PORT)]
        for port in self._recent:
            steps += [(_EQUAL, 0, 1, port), (_RETURN, 0, 0, 0xFFFFFFFF)]
        _attach_filter(self._listener, [*steps, (_RETURN, 0, 0, 0)])


_LOAD_WORD, _LOAD_HALF, _EQUAL, _RETURN = 0x20, 0x28, 0x15, 0x06
_SOURCE_ADDRESS, _SOURCE_PORT = 0xFFF00000 + 12, 0
"""Offsets from the start of the network header and of the transport header (linux/filter.h)."""
_ATTACH_FILTER = 26


@functools.cache
def _has_filters() -> bool:
    with contextlib.suppress(OSError), socket.socket() as one:
        _attach_filter(one, [(_RETURN, 0, 0, 0)])
        return LINUX
    return False


def _attach_filter(link: socket.socket, steps: list[tuple[int, int, int, int]]) -> None:
    """Attach a packet filter program to a socket."""
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    link.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", len(steps), ctypes.addressof(program)))


def _open_tcp_store(listening: socket.socket) -> "TCPStore":
    from torch.distributed import TCPStore

    host, port = listening.getsockname()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def _list_connections(address: tuple[str, int]) -> list[_Connection]:
    """List the other ends of all connections to an address of this machine."""
    number = f"{int.from_bytes(socket.inet_aton(address[0]), sys.byteorder):08X}:{address[1]:04X}"
    tables = [table for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if table.exists()]
    rows = [line.split() for table in tables for line in table.read_text().splitlines() if number in line]
    return [_Connection(int(row[3], 16), int(row[7])) for row in rows if row[2].endswith(number)]


LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_ADDRESS_OF = 0x8915  # SIOCGIFADDR of Linux


@dataclass(frozen=True)
class Interface:
    """A network interface of this machine, with its IPv4 address."""

    name: str
    address: str

    @property
    def is_loopback(self) -> bool:
        """It reaches this machine only."""
        return ipaddress.ip_address(self.address).is_loopback

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


def list_interfaces() -> list[Interface]:
    """List the interfaces that have an IPv4 address."""
    found = list[Interface]()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asking.fileno(), _ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
                found.append(Interface(name, socket.inet_ntoa(answer[20:24])))
    return found


def resolve_addresses(host: str) -> list[str]:
    """Resolve a host name or address to IPv4 addresses. Raises L007 if it has none."""
    try:
        rows = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        what = f"the host of rank 0 is {host}, and this machine ({socket.gethostname()}) cannot resolve that name"
        fix = ("--master <its address>:29500    or PLAIT_MASTER", f"getent hosts {host}    repeats plait's lookup")
        raise PlaitError(Problem("L007", what, why=str(error), fix=fix), FAILED) from error
    return list(dict.fromkeys(str(row[4][0]) for row in rows))


def find_own_interface(host: str) -> Interface | None:
    """Return this machine's interface with one of the host's addresses; None if the host is another machine."""
    addresses = resolve_addresses(host)
    mine = [one for one in list_interfaces() if one.address in addresses]
    if mine:
        return min(mine, key=lambda one: one.is_loopback)
    if any(ipaddress.ip_address(address).is_loopback for address in addresses):
        return Interface(LOOPBACK, "127.0.0.1")  # 127.0.1.1 of Debian, for a machine's own name
    return None


def find_route_interface(address: str) -> Interface:
    """Return the interface that routes to an address, or the one in GLOO_SOCKET_IFNAME. Raises L007 if it is missing."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    known = list_interfaces()
    if chosen:
        named = next((one for one in known if one.name == chosen), None)
        if named is None:
            there = ", ".join(map(str, known)) or "none"
            what = f"GLOO_SOCKET_IFNAME={chosen}: this machine has no such interface with an address"
            raise PlaitError(Problem("L007", what, why=f"it has {there}", fix=("unset GLOO_SOCKET_IFNAME",)))
        return named
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.connect((address, 9))  # sends nothing; the routing table selects the source address
            source = str(asking.getsockname()[0])
    except OSError as error:
        there = ", ".join(map(str, known)) or "none"
        what = f"no interface of this machine ({socket.gethostname()}) leads to {address}"
        raise PlaitError(
            Problem("L007", what, why=f"{error.strerror}; it has {there}", fix=("ip route",)), FAILED
        ) from error
    return next((one for one in known if one.address == source), Interface(LOOPBACK, source))


def set_interface(interface: Interface) -> None:
    """Make gloo use one interface, and NCCL if there are several. Values that the user set are kept."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface.name)
    others = [one for one in list_interfaces() if not one.is_loopback]
    if len(others) > 1 and not interface.is_loopback:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface.name}")
