"""Restarts by torchrun and Ray: the attempt of a process, and a store without entries of earlier attempts.

torchrun and Ray end all ranks when one is lost, and start the same command again: an *attempt*. The number of the attempt is in no
variable. TORCHELASTIC_RESTART_COUNT counts on one node only, and ranks are renumbered. torchrun's store still has the addresses of the
ended ranks, unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 was set before torchrun started.

The ranks of an attempt therefore agree on its number, the *epoch*. Each rank writes a random token. Rank 0 increments the epoch, and
publishes it with all tokens that it has read, until each rank has found its own token. Keys in the store then have the epoch as a prefix.

A message that all ranks of torchrun would print is printed by one of them.
"""

import contextlib
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from plait.config.errors import FAILED, RESUMABLE, PlaitError, Problem
from plait.launch import loopback
from plait.launch.launchers import Membership

if TYPE_CHECKING:
    from torch.distributed import Store

STORE_TIMEOUT = timedelta(seconds=1.5)
"""Timeout for torchrun's agent store."""


def should_report(text: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process prints an error. Among the ranks of torchrun, the first one with this text does."""
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    try:
        from torch.distributed import TCPStore

        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        store = TCPStore(host, port, is_master=False, timeout=STORE_TIMEOUT)
        name = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()
        attempt = f"{store.add('plait/epoch', 0)}.{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        return store.add(f"plait/said/{attempt}/{name}", 1) == 1
    except Exception:  # without a store every rank prints the message, which is better than none
        return True


START_VARIABLE = "PLAIT_START"
"""Variable with the ID of a start, for launchers that plait cannot identify again. It is the same in all attempts."""
SHARED_STORE_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"
UNSHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
JOIN_TIMEOUT_S = 300.0
"""Seconds within which all ranks of an attempt must arrive."""
POLL_S = 0.02
"""Seconds between two reads of the store."""


def find_start_ids(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the IDs of the start that this process belongs to. They are equal in all attempts of the start, and differ between starts.

    The agent of torchrun outlives its workers, so its process is an ID. A lost node loses its agent; the agents of the other nodes stay.
    """
    if environment.get(START_VARIABLE):
        return [f"{START_VARIABLE} {environment[START_VARIABLE]}"]
    run = environment.get("TORCHELASTIC_RUN_ID")
    if run is None:
        return []
    import psutil

    for process in psutil.Process().parents():
        with contextlib.suppress(psutil.AccessDenied):  # another user's process, so not a rank of torchrun
            if process.environ().get("TORCHELASTIC_RUN_ID") == run:
                continue
        return [f"torchrun {run} {socket.gethostname()} {process.pid} {process.create_time():.2f}"]
    return []


def set_start_id(name: str) -> None:
    """Set the ID of the start for this process and its children."""
    os.environ[START_VARIABLE] = name


def has_shared_store(member: Membership, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the ranks use a store that outlives them."""
    return member.has_agent_store and member.master is not None and environment.get(SHARED_STORE_VARIABLE) == "True"


def open_attempt_store(member: Membership, epoch: int) -> "Store":
    """Open torchrun's store with this attempt's prefix."""
    from torch.distributed import PrefixStore

    return PrefixStore(f"plait/{epoch}", _connect_store(member))


def join_epoch(member: Membership, stopping: Callable[[], bool]) -> int:
    """Return the number of this attempt, on which its ranks agree. Raises L020 if a rank does not arrive."""
    choose_interface(member)
    return agree_on_epoch(_connect_store(member), member.index, member.count, stopping)


def describe_restart_limits(member: Membership, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return a note for ranks on several nodes that torchrun restarts and that share one store (torch 2.13)."""
    again = environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if not (again and (member.nodes or 1) > 1 and has_shared_store(member, environment)):
        return []
    return [
        f"note  a lost machine cannot join again, since torchrun's store is shared; to allow it, export {UNSHARED_STORE} before torchrun starts"
    ]


def choose_interface(member: Membership) -> None:
    """Select the network interface that leads to the first node. By default gloo takes the interface of the host name."""
    if member.master is not None and (member.nodes or 1) > 1:
        loopback.set_interface(
            loopback.find_own_interface(member.master)
            or loopback.find_route_interface(loopback.resolve_addresses(member.master)[0])
        )


def agree_on_epoch(store: "Store", rank: int, world: int, stopping: Callable[[], bool], timeout: float = JOIN_TIMEOUT_S) -> int:
    """Agree on the epoch of an attempt of `world` ranks that use one store, whatever earlier attempts left in it."""
    end = time.monotonic() + timeout
    if rank:
        return _await_epoch(store, rank, stopping, end)
    epoch, others = store.add("plait/epoch", 1), range(1, world)
    came, heard = [f"plait/came/{r}" for r in others], [f"plait/heard/{epoch}/{r}" for r in others]
    answered: list[str] = []
    while others and not store.check(heard):
        if store.check(came) and (said := [text.decode() for text in store.multi_get(came)]) != answered:
            store.set("plait/answer", json.dumps({"epoch": epoch, "came": dict(zip(others, said))}))
            answered = said
        missing = lambda: [r for r, name in zip(others, heard) if not store.check([name])]  # noqa: E731
        _sleep_or_raise(end, stopping, missing)
    return epoch


def _await_epoch(store: "Store", rank: int, stopping: Callable[[], bool], end: float) -> int:
    mine = secrets.token_hex(8)
    store.set(f"plait/came/{rank}", mine)
    while True:
        if store.check(["plait/answer"]):
            answer = json.loads(store.get("plait/answer"))
            if answer["came"].get(str(rank)) == mine:
                store.set(f"plait/heard/{answer['epoch']}/{rank}", "1")
                return int(answer["epoch"])
        _sleep_or_raise(end, stopping, lambda: [0])


def _sleep_or_raise(end: float, stopping: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
    """Sleep briefly. Raises L020 after the timeout, or after a request to stop."""
    if stopping():
        raise PlaitError(Problem("L020", "the run received a request to stop before all ranks had arrived"), RESUMABLE)
    if time.monotonic() > end:
        late = missing()
        ranks = ", ".join(map(str, late[:8])) + (", …" if len(late) > 8 else "")
        what = f"some ranks that torchrun started are missing: rank {ranks} did not arrive"
        why = "torchrun's store outlives its workers, and entries of an earlier attempt are ignored"
        fix = (f"export {UNSHARED_STORE}    before torchrun starts, on every machine", "see the errors of the other ranks")
        raise PlaitError(Problem("L020", what, why=why, fix=fix), FAILED)
    time.sleep(POLL_S)


def _connect_store(member: Membership) -> "Store":
    from torch.distributed import TCPStore

    where = f"{member.master}:{member.port}"
    try:
        return TCPStore(member.master or "", member.port or 0, is_master=False, timeout=timedelta(seconds=JOIN_TIMEOUT_S))
    except RuntimeError as error:
        why = f"{error}".splitlines()[0]
        fix = (
            f"nc -vz {member.master} {member.port}    checks whether its agent is alive",
            f"export {UNSHARED_STORE}    before torchrun starts",
        )
        raise PlaitError(
            Problem("L020", f"torchrun's store at {where} cannot be reached", why=why, fix=fix), FAILED
        ) from error
