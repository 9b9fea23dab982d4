"""Launchers that start lost ranks again: which start a process belongs to, and a store in which the dead left nothing.

torchrun and Ray end all ranks when one is lost, and start the same command again: an *attempt*. Nobody says which attempt it is:
TORCHELASTIC_RESTART_COUNT counts on one machine alone, ranks get other numbers, and torchrun's store, unless
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 was set before it started, still holds the addresses of the dead. So the ranks of an
attempt agree on its number, the *epoch*: each writes down what it drew, and rank 0 counts the epoch on and answers with all it
has read, until everybody has found his own in an answer. What they put into the store then has the epoch in its name.

What every rank of torchrun would say alike is said by one of them.
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

STORE = timedelta(seconds=1.5)
"""How long the store of torchrun's agent may take to answer."""


def says(text: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is to show an error: of the ranks that torchrun started, the first that has this text."""
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    try:
        from torch.distributed import TCPStore

        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        store = TCPStore(host, port, is_master=False, timeout=STORE)
        name = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()
        attempt = f"{store.add('plait/epoch', 0)}.{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        return store.add(f"plait/said/{attempt}/{name}", 1) == 1
    except Exception:  # no store, no agreement: said too often is better than not at all
        return True


NAME = "PLAIT_START"
"""The variable that names a start, for launchers that plait cannot recognise again: the same in all its attempts."""
SHARED = "TORCHELASTIC_USE_AGENT_STORE"
APART = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
SLOW = 300.0
"""Seconds that the ranks of an attempt may come apart."""
LOOK = 0.02
"""Seconds between two looks into the store."""


def starts(environment: Mapping[str, str] = os.environ) -> list[str]:
    """What tells the start that this process belongs to from others, and is the same in all its attempts: names of one or more.

    The agent of torchrun lives on while its workers are started again, so it is one. A machine that is lost takes its agent
    along; those of the others stay.
    """
    if environment.get(NAME):
        return [f"{NAME} {environment[NAME]}"]
    run = environment.get("TORCHELASTIC_RUN_ID")
    if run is None:
        return []
    import psutil

    for process in psutil.Process().parents():
        with contextlib.suppress(psutil.AccessDenied):  # somebody else's, so none of torchrun's ranks
            if process.environ().get("TORCHELASTIC_RUN_ID") == run:
                continue
        return [f"torchrun {run} {socket.gethostname()} {process.pid} {process.create_time():.2f}"]
    return []


def name_start(name: str) -> None:
    """Say which start this process, and those that it starts, belong to."""
    os.environ[NAME] = name


def shared(member: Membership, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the ranks meet in a store that outlives them."""
    return member.agent and member.master is not None and environment.get(SHARED) == "True"


def store_of(member: Membership, epoch: int) -> "Store":
    """torchrun's store, as this attempt is to see it."""
    from torch.distributed import PrefixStore

    return PrefixStore(f"plait/{epoch}", _opened(member))


def epoch_of(member: Membership, stopping: Callable[[], bool]) -> int:
    """The number of this attempt, on which its ranks agree. L020 when they do not all come."""
    choose_interface(member)
    return agree(_opened(member), member.index, member.count, stopping)


def told(member: Membership, environment: Mapping[str, str] = os.environ) -> list[str]:
    """A line for ranks on several machines that torchrun starts again: what its agents cannot do beside one store (torch 2.13)."""
    again = environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if not (again and (member.nodes or 1) > 1 and shared(member, environment)):
        return []
    return [
        f"note  a machine that is lost cannot join again: torchrun's store is shared · export {APART} before it starts lets it"
    ]


def choose_interface(member: Membership) -> None:
    """Have ranks on several machines talk over the interface that leads to the first: gloo would take that of the host's name."""
    if member.master is not None and (member.nodes or 1) > 1:
        loopback.use(loopback.own(member.master) or loopback.towards(loopback.addresses_of(member.master)[0]))


def agree(store: "Store", rank: int, world: int, stopping: Callable[[], bool], patience: float = SLOW) -> int:
    """The epoch of an attempt of `world` ranks that see one store, whatever was left in it."""
    end = time.monotonic() + patience
    if rank:
        return _come(store, rank, stopping, end)
    epoch, others = store.add("plait/epoch", 1), range(1, world)
    came, heard = [f"plait/came/{r}" for r in others], [f"plait/heard/{epoch}/{r}" for r in others]
    answered: list[str] = []
    while others and not store.check(heard):
        if store.check(came) and (said := [text.decode() for text in store.multi_get(came)]) != answered:
            store.set("plait/answer", json.dumps({"epoch": epoch, "came": dict(zip(others, said))}))
            answered = said
        missing = lambda: [r for r, name in zip(others, heard) if not store.check([name])]  # noqa: E731
        _patience(end, stopping, missing)
    return epoch


def _come(store: "Store", rank: int, stopping: Callable[[], bool], end: float) -> int:
    mine = secrets.token_hex(8)
    store.set(f"plait/came/{rank}", mine)
    while True:
        if store.check(["plait/answer"]):
            answer = json.loads(store.get("plait/answer"))
            if answer["came"].get(str(rank)) == mine:
                store.set(f"plait/heard/{answer['epoch']}/{rank}", "1")
                return int(answer["epoch"])
        _patience(end, stopping, lambda: [0])


def _patience(end: float, stopping: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
    """Wait a little. L020 when there was enough of it, or when somebody asked to stop."""
    if stopping():
        raise PlaitError(Problem("L020", "asked to stop before all ranks had come"), RESUMABLE)
    if time.monotonic() > end:
        late = missing()
        ranks = ", ".join(map(str, late[:8])) + (", …" if len(late) > 8 else "")
        what = f"the ranks that torchrun started did not all come: rank {ranks} said nothing"
        why = "torchrun's store outlives its workers, and what ranks of an earlier attempt left in it does not count"
        fix = (f"export {APART}    before torchrun starts, on every machine", "see what the other ranks say")
        raise PlaitError(Problem("L020", what, why=why, fix=fix), FAILED)
    time.sleep(LOOK)


def _opened(member: Membership) -> "Store":
    from torch.distributed import TCPStore

    where = f"{member.master}:{member.port}"
    try:
        return TCPStore(member.master or "", member.port or 0, is_master=False, timeout=timedelta(seconds=SLOW))
    except RuntimeError as error:
        why = f"{error}".splitlines()[0]
        fix = (
            f"nc -vz {member.master} {member.port}    is its agent alive?",
            f"export {APART}    before torchrun starts",
        )
        raise PlaitError(
            Problem("L020", f"torchrun's store at {where} cannot be reached", why=why, fix=fix), FAILED
        ) from error
