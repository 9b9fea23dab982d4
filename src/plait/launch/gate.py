"""The gate before a job's store: torch's store lets in anyone who connects, so nobody connects to it but this.

On the machine of number 0 the gate listens on one interface, and asks whoever comes for a proof that it knows the job's key. On loopback,
where the processes of the job come to the store, it asks the system who they are: only this user's are let in. On every other machine a
tunnel listens on loopback, with the same question, and passes what comes through the gate. Gate and guest both prove it: who has taken the
port of another job's gate is found out too. Gate and tunnel are processes of their own, which end with the one that made them.

The proof is HMAC-SHA256 over numbers that both sides drew: nothing that was listened to can be used again.

The key of a job: who does not know it does not join. Every process makes it from a secret that all of a user's machines share.

The secret is PLAIT_SECRET, or else the user's own file, which the first run makes: ~/.config/plait/secret. Machines that share
home folders share that too. A job's key is made of the secret and the job's number, so that one job does not open another.
"""

import asyncio
import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import stat
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.config.errors import PlaitError, Problem
from plait.config.files import read_plain
from plait.launch import limits
from plait.launch.child import live
from plait.launch.loopback import GuardedStore, same_user

GREETING = b"plait-gate-1\n"
NONCE = PROOF = 32
NO = bytes(PROOF)
"""In place of a gate's proof: the guest's is wrong. A gate that has no room closes the connection without a word."""
KNOCKING = 5.0
"""Seconds in which who has connected must have proved that it knows the key."""
UNHEARD = 20.0
"""Seconds after which a connection is broken on which nothing that is sent is acknowledged; and for which a tunnel tries a gate."""
WAITING = 256
"""Connections that have not yet proved it. For a further one the oldest goes, of the address that has most."""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Way = Callable[[Streams], AbstractAsyncContextManager[Streams]]
"""Opens the other half of a connection, and closes it. Raises `Stranger` when the connection is refused."""


class Stranger(Exception):
    """The other side does not know the job's key, is no gate, or is another user."""


@dataclass(frozen=True)
class _Door:
    """Where connections come from, and where they lead."""

    listening: socket.socket
    way: Way


def stand(listening: socket.socket, key: bytes) -> int:
    """Start a store, and the gate that leads to it; returns the store's port on this machine. Closes `listening` here."""
    local = limits.listening()

    def doors() -> list[_Door]:
        store = GuardedStore()

        @contextlib.asynccontextmanager
        async def to_store() -> AsyncIterator[Streams]:
            with store.connected() as link:
                yield await asyncio.open_connection(sock=link)

        @contextlib.asynccontextmanager
        async def proven(streams: Streams) -> AsyncIterator[Streams]:
            await asyncio.wait_for(_admit(streams, key), KNOCKING)
            async with to_store() as other:
                yield other

        @contextlib.asynccontextmanager
        async def own(streams: Streams) -> AsyncIterator[Streams]:
            _check_user(streams)
            async with to_store() as other:
                yield other

        return [_Door(listening, proven), _Door(local, own)]

    return _start(doors, local, listening)


def tunnel(host: str, port: int, key: bytes) -> int:
    """Start a tunnel to a gate, and return the port on which this machine's processes find it."""
    local = limits.listening()

    @contextlib.asynccontextmanager
    async def outwards(streams: Streams) -> AsyncIterator[Streams]:
        _check_user(streams)
        other = await _patiently(host, port, key)
        try:
            yield other
        finally:
            other[1].close()

    return _start(lambda: [_Door(local, outwards)], local)


async def through(host: str, port: int, key: bytes) -> Streams:
    """A connection to the store behind a gate. Raises `Stranger`, and OSError or TimeoutError when nobody is there."""
    reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), KNOCKING)
    try:
        await asyncio.wait_for(_prove((reader, writer), key), KNOCKING)
    except (Stranger, OSError, asyncio.IncompleteReadError, TimeoutError) as error:
        writer.close()
        if isinstance(error, ConnectionError):
            raise
        raise Stranger(f"{type(error).__name__}: {error}") from error
    return reader, writer


async def _patiently(host: str, port: int, key: bytes) -> Streams:
    """The same, again and again where the gate has no room."""
    end = asyncio.get_running_loop().time() + UNHEARD
    while True:
        try:
            return await through(host, port, key)
        except ConnectionError:
            if asyncio.get_running_loop().time() > end:
                raise
        await asyncio.sleep(0.1)


async def _admit(streams: Streams, key: bytes) -> None:
    reader, writer = streams
    mine = secrets.token_bytes(NONCE)
    writer.write(GREETING + mine)
    said = await reader.readexactly(NONCE + PROOF)
    theirs, proof = said[:NONCE], said[NONCE:]
    if not hmac.compare_digest(proof, proof_of(key, b"guest", mine + theirs)):
        writer.write(NO)
        await writer.drain()
        raise Stranger("it does not know the key")
    writer.write(proof_of(key, b"gate", mine + theirs))
    await writer.drain()


async def _prove(streams: Streams, key: bytes) -> None:
    reader, writer = streams
    try:
        greeting = await reader.readexactly(len(GREETING))
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        raise ConnectionResetError("it closed the connection before it greeted") from None
    if greeting != GREETING:
        raise Stranger("something else listens there")
    theirs, mine = await reader.readexactly(NONCE), secrets.token_bytes(NONCE)
    writer.write(mine + proof_of(key, b"guest", theirs + mine))
    try:
        proof = await reader.readexactly(PROOF)
    except asyncio.IncompleteReadError:
        raise ConnectionResetError("it closed the connection before it answered") from None
    if proof == NO:
        raise Stranger("it does not accept this machine's key")
    if not hmac.compare_digest(proof, proof_of(key, b"gate", theirs + mine)):
        raise Stranger("it does not know the key")


def proof_of(key: bytes, who: bytes, nonces: bytes) -> bytes:
    """What shows that one knows the key, to who drew the numbers."""
    return hmac.new(key, who + nonces, hashlib.sha256).digest()


def _check_user(streams: Streams) -> None:
    if not same_user(streams[1].get_extra_info("socket")):
        raise Stranger("it is another user's")


def _start(doors: Callable[[], list[_Door]], local: socket.socket, *others: socket.socket) -> int:
    """Pass connections on in a process of its own, in which the doors are made. Returns the port of `local`; closes all here."""
    parent, port = os.getpid(), int(local.getsockname()[1])

    def work() -> int:
        asyncio.run(_serve(doors()))
        return 0

    with limits.forking("the process that passes connections on"):
        child = os.fork()
    if child == 0:
        live(work, parent)
    for one in (local, *others):
        one.close()
    return port


async def _serve(doors: list[_Door]) -> None:
    servers = [await asyncio.start_server(_passing(door.way), sock=door.listening, backlog=1024) for door in doors]
    await asyncio.gather(*(server.serve_forever() for server in servers))


def _passing(way: Way) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
    """What is done with each connection of a door."""
    waiting = dict[asyncio.Task[None], str]()

    async def pass_on(streams: Streams) -> None:
        task = asyncio.current_task()
        try:
            async with way(streams) as other:
                waiting.pop(task, None)  # pyrefly: ignore
                for _, writer in (streams, other):
                    _patient(writer)
                await _either(_pass(streams[0], other[1]), _pass(other[0], streams[1]))
        except (Stranger, OSError, asyncio.IncompleteReadError, TimeoutError):
            pass
        finally:
            waiting.pop(task, None)  # pyrefly: ignore
            streams[1].close()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while len(waiting) >= WAITING:
            crowded = Counter(waiting.values()).most_common(1)[0][0]
            oldest = next(task for task, address in waiting.items() if address == crowded)
            del waiting[oldest]
            oldest.cancel()
        peer = writer.get_extra_info("peername")
        waiting[asyncio.ensure_future(pass_on((reader, writer)))] = peer[0] if peer else ""

    return connected


async def _either(*ways: Coroutine[Any, Any, None]) -> None:
    """Until one of them ends; then the others end too."""
    tasks = [asyncio.ensure_future(way) for way in ways]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _patient(writer: asyncio.StreamWriter) -> None:
    """Have the connection broken when nobody acknowledges what is sent: a cable that is pulled out closes nothing, and who
    asks the store would wait for an answer without end."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNHEARD))


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


SHORTEST, LONGEST = 16, 4096
"""Characters of a secret."""


def key(job: str) -> bytes:
    """32 bytes. L008 when the secret is too short, or others can read the file it is in."""
    said = os.environ.get("PLAIT_SECRET")
    secret = said if said is not None else _kept(_file())
    if len(secret) < SHORTEST:
        where = "PLAIT_SECRET" if said is not None else str(_file())
        what = f"the secret in {where} has {len(secret)} characters: at least {SHORTEST} make one that is not guessed"
        raise PlaitError(
            Problem("L008", what, fix=("export PLAIT_SECRET=$(openssl rand -hex 16)    the same on all machines",))
        )
    return hmac.new(secret.encode("utf-8", "surrogateescape"), f"plait {job}".encode(), hashlib.sha256).digest()


def whence() -> str:
    """Where this machine has its secret from, in words."""
    return "PLAIT_SECRET" if "PLAIT_SECRET" in os.environ else str(_file())


def _file() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "plait" / "secret"


def _kept(path: Path) -> str:
    """What the file says. It is made where there is none: whole at once, so that of several processes one makes it."""
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            draft = path.with_name(f".secret-{secrets.token_hex(8)}")
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w") as out:
                out.write(secrets.token_hex(32))
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
            draft.unlink()
        facts = path.stat()
        text = read_plain(path, LONGEST).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        what = f"the secret that keeps strangers out of a job cannot be kept in {path}"
        raise PlaitError(
            Problem("L008", what, why=str(error), fix=("export PLAIT_SECRET=<the same on all machines>",))
        ) from error
    if facts.st_uid != os.getuid() or facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        what = f"others can read {path}, in which the secret is that keeps strangers out of a job"
        raise PlaitError(
            Problem("L008", what, why=f"its mode is {stat.filemode(facts.st_mode)}", fix=(f"chmod 600 {path}",))
        )
    return text
