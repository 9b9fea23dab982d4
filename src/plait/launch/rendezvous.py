"""Where processes of several machines find each other: number 0 opens a store, the others come to it through a gate.

    number 0:  store on loopback  ←  gate on one interface     (`gate.py`)
    others:    rank  →  tunnel on loopback  →  the gate

Before a rank waits for anything, it is known which interface is used, and that the other side is there and knows the job's key.
Nobody has to choose a port: number 0 takes the first that is free of a row which follows from the job's number, and the others
knock along the same row, until somebody proves to be this job's gate.
"""

import asyncio
import contextlib
import errno
import hashlib
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from plait.config.errors import FAILED, PlaitError, Problem
from plait.launch import gate, loopback
from plait.launch.launchers import Membership
from plait.launch.loopback import Interface

if TYPE_CHECKING:
    from torch.distributed import Store

PORTS = 8
"""Length of the row of ports of a job."""
FIRST, LAST = 20_000, 32_000
"""They lie between those that services use and those that the system gives away."""
TOLD = 5.0
"""Seconds after which who waits for number 0 says so."""
ABSENT = 300.0
"""Seconds that number 0's machine may take to start; it answers, or its name will be known, but nobody listens yet."""
SILENT = 4.0
"""Seconds that a machine may take which gives no answer at all: a firewall swallows, or the address is wrong."""
SLOW = timedelta(seconds=300)
"""How long a rank may wait for what another puts into the store."""


@dataclass(frozen=True)
class Meeting:
    """The store of a job, as one of its machines sees it."""

    port: int
    """Where processes of this machine reach the store, on 127.0.0.1."""
    interface: Interface
    key: bytes = field(repr=False)
    """Of the job: who knows it belongs to the run."""
    prefix: str = ""
    """Of the names that are used in it."""

    def store(self) -> "Store":
        """A connection of its own to the store."""
        from torch.distributed import PrefixStore, TCPStore

        store = TCPStore("127.0.0.1", self.port, is_master=False, timeout=SLOW)
        return PrefixStore(self.prefix, store) if self.prefix else store


def meet(member: Membership, say: Callable[[str], None]) -> Meeting:
    """Open the store, or find the way to it. `say` gets a line when it takes long.

    L002 when no launcher says where number 0 is, L007 when it cannot be reached, L008 when it does not know the secret.
    """
    if member.master is None:
        raise _nowhere(member)
    key, ports = gate.key(member.job), _ports(member)
    if not loopback.guards():
        say("note  this system cannot keep other users out of loopback ports: every user of this machine can reach the run's store")
    if member.index == 0:
        return _open(member, key, ports)
    address = _resolved(member.master, say)
    interface = loopback.towards(address)
    loopback.use(interface)
    port = _knock(member, address, ports, key, interface, say)
    return Meeting(gate.tunnel(address, port, key), interface, key)


def _open(member: Membership, key: bytes, ports: list[int]) -> Meeting:
    """The store, and the gate before it on the interface that others come to."""
    interface = _listens_at(member)
    loopback.use(interface)
    return Meeting(gate.stand(_bound(interface, ports, member), key), interface, key)


def _listens_at(member: Membership) -> Interface:
    """Of number 0: the interface that its address means, or, where that is its own name for itself, the one that leads out."""
    assert member.master is not None
    mine = loopback.own(member.master)
    if mine is None:
        there = ", ".join(map(str, loopback.all_of_this_machine()))
        what = f"number 0 runs on this machine ({socket.gethostname()}), but its address is said to be {member.master}"
        fix = ("--master <an address of this machine>:29500    or PLAIT_MASTER, the same on all machines",)
        raise PlaitError(Problem("L007", what, why=f"this machine has {there}", fix=fix), FAILED)
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    alone = member.local_count == member.count if member.of == "ranks" else False
    if not mine.loops or (alone and not named) or member.master in ("localhost", "127.0.0.1"):
        return mine
    return loopback.towards("192.0.2.1")  # an address for documentation: what the default route leads through


def _bound(interface: Interface, ports: list[int], member: Membership) -> socket.socket:
    """A listening socket on the first port that is free."""
    for port in ports:
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((interface.address, port))
            listening.listen(256)
            return listening
        except OSError as error:
            listening.close()
            if error.errno != errno.EADDRINUSE:
                raise
    used = (
        f"port {ports[0]} of {interface} is in use"
        if len(ports) == 1
        else f"ports {ports} of {interface} are all in use"
    )
    fix = (
        f"--master {member.master}:{ports[0] + 1}    on all machines",
        f"ss -ltnp 'sport = :{ports[0]}'    says by whom",
    )
    raise PlaitError(Problem("L007", f"the machines cannot meet: {used}", fix=fix), FAILED)


def _knock(
    member: Membership, address: str, ports: list[int], key: bytes, interface: Interface, say: Callable[[str], None]
) -> int:  # fmt: skip
    """The port of the gate. It is waited for as long as the machine answers; a machine that does not is told at once."""
    began, told, answered, stranger = time.monotonic(), False, False, ""
    where = f"{member.master}" + (f" ({address})" if member.master != address else "")
    while True:
        for port in ports:
            try:
                asyncio.run(_greet(address, port, key))
                return port
            except gate.Stranger as error:
                answered, stranger = True, f"{error}".partition(": ")[2]
            except ConnectionError:
                answered = True
            except (OSError, TimeoutError) as error:
                silent = f"{error.strerror if isinstance(error, OSError) and error.strerror else 'no answer'}"
                if time.monotonic() - began > SILENT or getattr(error, "errno", None) == errno.ENETUNREACH:
                    raise _unreachable(where, port, interface, silent) from error
        waited = time.monotonic() - began
        if stranger and waited > TOLD:
            raise _refused(where, ports, stranger)
        if waited > ABSENT:
            raise _unreachable(where, ports[0], interface, f"nobody listened there for {waited:.0f} s")
        if waited > TOLD and answered and not told:
            told = True
            say(
                f"note  {where} answers through {interface}, but number 0 does not listen at port {ports[0]} yet: waiting"
            )
        time.sleep(0.1)


async def _greet(address: str, port: int, key: bytes) -> None:
    _, writer = await gate.through(address, port, key)
    writer.close()


def _resolved(host: str, say: Callable[[str], None]) -> str:
    """The address of a name. On Kubernetes a pod's name is known when the pod runs, and that it is not yet is remembered for 30 s."""
    end = time.monotonic() + (ABSENT if "KUBERNETES_SERVICE_HOST" in os.environ else TOLD)
    told = False
    while True:
        try:
            return loopback.addresses_of(host)[0]
        except PlaitError:
            if time.monotonic() > end:
                raise
            if not told and "KUBERNETES_SERVICE_HOST" in os.environ:
                told = True
                say(f"note  {host} has no address yet: waiting for its pod")
        time.sleep(0.5)


def _ports(member: Membership) -> list[int]:
    """The port that was said, or the row that follows from the job's number."""
    if member.port is not None:
        return [member.port]
    row = hashlib.sha256(member.job.encode()).digest()
    numbers = (int.from_bytes(row[2 * k : 2 * k + 2], "big") for k in range(PORTS))
    return list(dict.fromkeys(FIRST + n % (LAST - FIRST) for n in numbers))


def _nowhere(member: Membership) -> PlaitError:
    why = f"{', '.join(member.variables)} say which of {member.count} this is, and none says where number 0 is"
    fix = ("export MASTER_ADDR=<host of number 0>    the same in every process",)
    if member.of == "nodes":
        fix = ("--master <host of number 0>:29500    the same on all machines",)
    return PlaitError(Problem("L002", f"{member}, and plait does not know where the others are", why=why, fix=fix))


def _unreachable(where: str, port: int, interface: Interface, why: str) -> PlaitError:
    what = f"number 0 of this job cannot be reached at {where}, port {port}, through {interface}"
    fix = (
        "--master <host>:<port>    another address or port of number 0",
        "GLOO_SOCKET_IFNAME=<name>    another interface",
        f"nc -vz {where.partition(' ')[0]} {port}    while number 0 runs: is there a firewall?",
    )
    return PlaitError(Problem("L007", what, why=why, where=f"here: {socket.gethostname()}", fix=fix), FAILED)


def _refused(where: str, ports: list[int], why: str) -> PlaitError:
    what = f"what listens at {where}, port {ports[0]}, is not number 0 of this job, or has another secret"
    fix = (
        "export PLAIT_SECRET=<16 characters or more>    the same on all machines",
        f"this machine's secret is in {gate.whence()}    copy it to the others",
        "--master <host>:<another port>    where another program has this one",
    )
    return PlaitError(Problem("L008", what, why=why, where=f"here: {socket.gethostname()}", fix=fix), FAILED)


def say_on_terminal(text: str) -> None:
    """For processes that have no console yet."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
