"""Connect processes on several nodes: node 0 opens a store, and the others reach it through a gate.

    node 0:  store on loopback  ←  gate on one interface     (`gate.py`)
    others:  rank  →  tunnel on loopback  →  the gate

Before a rank waits, the interface is known, and the other side has answered and proved the job's key. No port must be selected. Node 0 takes
the first free port of a list that is derived from the job's ID. The others try the ports of the same list until the job's gate answers.
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

PORT_COUNT = 8
"""Number of ports in a job's list."""
FIRST_PORT, LAST_PORT = 20_000, 32_000
"""Range of these ports, above the ports of services and below the system's ephemeral ports."""
NOTE_AFTER = 5.0
"""Seconds of waiting for node 0 after which a note is printed."""
START_TIMEOUT = 300.0
"""Seconds that node 0 may take to start. Meanwhile its host answers, or its name will be resolvable, but the port is closed."""
SILENT_TIMEOUT = 4.0
"""Seconds without any answer from a host: a firewall drops packets, or the address is wrong."""
STORE_TIMEOUT = timedelta(seconds=300)
"""Timeout of a rank that waits for another rank's key in the store."""


@dataclass(frozen=True)
class Rendezvous:
    """Access of one node to a job's store."""

    port: int
    """Port of the store for processes of this node, on 127.0.0.1."""
    interface: Interface
    key: bytes = field(repr=False)
    """Key of the job; its processes authenticate with it."""
    prefix: str = ""
    """Prefix of the keys in the store."""

    def connect_store(self) -> "Store":
        """Open a connection to the store."""
        from torch.distributed import PrefixStore, TCPStore

        store = TCPStore("127.0.0.1", self.port, is_master=False, timeout=STORE_TIMEOUT)
        return PrefixStore(self.prefix, store) if self.prefix else store


def join_rendezvous(member: Membership, say: Callable[[str], None]) -> Rendezvous:
    """Open the store, or connect to it. `say` gets a note if it takes long.

    Raises L002 if node 0's address is unknown, L007 if it is unreachable, L008 if the secrets differ.
    """
    if member.master is None:
        raise _missing_address_error(member)
    key, ports = gate.make_job_key(member.job), _list_ports(member)
    if not loopback.has_user_guards():
        say("note  this system cannot keep other users out of loopback ports: every user of this machine can reach the run's store")
    if member.index == 0:
        return _open_rendezvous(member, key, ports)
    address = _resolve_host(member.master, say)
    interface = loopback.find_route_interface(address)
    loopback.set_interface(interface)
    port = _find_gate_port(member, address, ports, key, interface, say)
    return Rendezvous(gate.start_tunnel(address, port, key), interface, key)


def _open_rendezvous(member: Membership, key: bytes, ports: list[int]) -> Rendezvous:
    """Open the store, and its gate on the interface of the other nodes."""
    interface = _pick_interface(member)
    loopback.set_interface(interface)
    return Rendezvous(gate.start_gate(_bind_first_free(interface, ports, member), key), interface, key)


def _pick_interface(member: Membership) -> Interface:
    """Return node 0's interface for its address, or, if the address is a loopback one, the interface of the default route."""
    assert member.master is not None
    mine = loopback.find_own_interface(member.master)
    if mine is None:
        there = ", ".join(map(str, loopback.list_interfaces()))
        what = f"number 0 runs on this machine ({socket.gethostname()}), but its address is given as {member.master}"
        fix = ("--master <an address of this machine>:29500    or PLAIT_MASTER, the same on all machines",)
        raise PlaitError(Problem("L007", what, why=f"this machine has {there}", fix=fix), FAILED)
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    alone = member.local_count == member.count if member.member_kind == "ranks" else False
    if not mine.is_loopback or (alone and not named) or member.master in ("localhost", "127.0.0.1"):
        return mine
    return loopback.find_route_interface("192.0.2.1")  # an address reserved for documentation, so the default route applies


def _bind_first_free(interface: Interface, ports: list[int], member: Membership) -> socket.socket:
    """Return a listening socket on the first free port."""
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
        f"ss -ltnp 'sport = :{ports[0]}'    shows by which process",
    )
    raise PlaitError(Problem("L007", f"the machines cannot meet: {used}", fix=fix), FAILED)


def _find_gate_port(
    member: Membership, address: str, ports: list[int], key: bytes, interface: Interface, say: Callable[[str], None]
) -> int:  # fmt: skip
    """Return the gate's port. Waits as long as the host answers; raises soon if it does not."""
    began, told, answered, stranger = time.monotonic(), False, False, ""
    where = f"{member.master}" + (f" ({address})" if member.master != address else "")
    while True:
        for port in ports:
            try:
                asyncio.run(_greet_gate(address, port, key))
                return port
            except gate.AuthenticationError as error:
                answered, stranger = True, f"{error}".partition(": ")[2]
            except ConnectionError:
                answered = True
            except (OSError, TimeoutError) as error:
                silent = f"{error.strerror if isinstance(error, OSError) and error.strerror else 'no answer'}"
                if time.monotonic() - began > SILENT_TIMEOUT or getattr(error, "errno", None) == errno.ENETUNREACH:
                    raise _unreachable_error(where, port, interface, silent) from error
        waited = time.monotonic() - began
        if stranger and waited > NOTE_AFTER:
            raise _rejected_error(where, ports, stranger)
        if waited > START_TIMEOUT:
            raise _unreachable_error(where, ports[0], interface, f"the port was closed for {waited:.0f} s")
        if waited > NOTE_AFTER and answered and not told:
            told = True
            say(
                f"note  {where} answers through {interface}, but number 0 does not listen at port {ports[0]} yet: waiting"
            )
        time.sleep(0.1)


async def _greet_gate(address: str, port: int, key: bytes) -> None:
    _, writer = await gate.connect_gate(address, port, key)
    writer.close()


def _resolve_host(host: str, say: Callable[[str], None]) -> str:
    """Resolve a host name. On Kubernetes a pod's name is unknown until the pod runs, and lookups cache that for 30 s."""
    end = time.monotonic() + (START_TIMEOUT if "KUBERNETES_SERVICE_HOST" in os.environ else NOTE_AFTER)
    told = False
    while True:
        try:
            return loopback.resolve_addresses(host)[0]
        except PlaitError:
            if time.monotonic() > end:
                raise
            if not told and "KUBERNETES_SERVICE_HOST" in os.environ:
                told = True
                say(f"note  {host} has no address yet: waiting for its pod")
        time.sleep(0.5)


def _list_ports(member: Membership) -> list[int]:
    """Return the given port, or the list derived from the job's ID."""
    if member.port is not None:
        return [member.port]
    row = hashlib.sha256(member.job.encode()).digest()
    numbers = (int.from_bytes(row[2 * k : 2 * k + 2], "big") for k in range(PORT_COUNT))
    return list(dict.fromkeys(FIRST_PORT + n % (LAST_PORT - FIRST_PORT) for n in numbers))


def _missing_address_error(member: Membership) -> PlaitError:
    why = f"{', '.join(member.variables)} set the index of this process among {member.count}, and no variable has the address of number 0"
    fix = ("export MASTER_ADDR=<host of number 0>    the same in every process",)
    if member.member_kind == "nodes":
        fix = ("--master <host of number 0>:29500    the same on all machines",)
    return PlaitError(Problem("L002", f"{member}, and the address of number 0 is unknown", why=why, fix=fix))


def _unreachable_error(where: str, port: int, interface: Interface, why: str) -> PlaitError:
    what = f"number 0 of this job cannot be reached at {where}, port {port}, through {interface}"
    fix = (
        "--master <host>:<port>    another address or port of number 0",
        "GLOO_SOCKET_IFNAME=<name>    another interface",
        f"nc -vz {where.partition(' ')[0]} {port}    while number 0 runs, to check for a firewall",
    )
    return PlaitError(Problem("L007", what, why=why, where=f"here: {socket.gethostname()}", fix=fix), FAILED)


def _rejected_error(where: str, ports: list[int], why: str) -> PlaitError:
    what = f"the program at {where}, port {ports[0]}, is not number 0 of this job, or has another secret"
    fix = (
        "export PLAIT_SECRET=<16 characters or more>    the same on all machines",
        f"this machine's secret is in {gate.describe_secret_source()}    copy it to the others",
        "--master <host>:<another port>    if another program uses this port",
    )
    return PlaitError(Problem("L008", what, why=why, where=f"here: {socket.gethostname()}", fix=fix), FAILED)


def print_note(text: str) -> None:
    """Print a note in a process without a console."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
