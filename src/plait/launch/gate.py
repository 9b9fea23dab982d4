"""Authentication for a job's store. torch's store accepts every connection, so it is reachable only through the gate.

On node 0 the gate listens on one interface, and requires a proof that a peer has the job's key. Processes of the job on node 0 connect over
loopback, where the operating system identifies them: only this user's processes are admitted. On every other node a tunnel listens on
loopback, with the same check, and forwards connections through the gate. Gate and guest authenticate each other, so a program on the port
of another job's gate is detected. Gate and tunnel are separate processes, which end with the process that started them.

The proof is an HMAC-SHA256 over nonces of both sides, so recorded proofs cannot be replayed.

A process must have the job's key to join. The key is derived from a secret that all of a user's machines share, and from the job's ID, so
the key of one job does not admit to another.

The secret is PLAIT_SECRET, or else the user's file ~/.config/plait/secret, which the first run creates. Machines with a shared home folder
share that file.
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
from plait.config.files import read_plain_file
from plait.launch import limits
from plait.launch.child import fork_process, run_child
from plait.launch.loopback import GuardedStore, is_same_user

GREETING = b"plait-gate-1\n"
NONCE = PROOF = 32
REJECTED = bytes(PROOF)
"""Sent instead of a gate's proof if the guest's proof is wrong. A gate that is full closes the connection without a message."""
AUTH_TIMEOUT = 5.0
"""Seconds within which a peer must authenticate."""
ACK_TIMEOUT = 20.0
"""Seconds after which a connection without acknowledgments is closed, and for which a tunnel retries a gate."""
MAX_PENDING = 256
"""Maximum number of unauthenticated connections. A further one evicts the oldest, from the address with the most."""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Opener = Callable[[Streams], AbstractAsyncContextManager[Streams]]
"""Opens the other half of a connection, and closes it. Raises `AuthenticationError` if the connection is rejected."""


class AuthenticationError(Exception):
    """The peer does not have the job's key, is not a gate, or belongs to another user."""


@dataclass(frozen=True)
class _Route:
    """A listening socket, and the opener of the connections' other half."""

    listener: socket.socket
    opener: Opener


def start_gate(listening: socket.socket, key: bytes) -> int:
    """Start a store and its gate; return the store's port on this node. Closes `listening` here."""
    local = limits.open_loopback_socket()

    def make_routes() -> list[_Route]:
        store = GuardedStore()

        @contextlib.asynccontextmanager
        async def to_store() -> AsyncIterator[Streams]:
            with store.open_connection() as link:
                streams = await asyncio.open_connection(sock=link)
                try:
                    yield streams
                finally:
                    streams[1].transport.abort()  # before `link` is closed: the event loop must forget it, since the next socket has its number

        @contextlib.asynccontextmanager
        async def open_authenticated(streams: Streams) -> AsyncIterator[Streams]:
            await asyncio.wait_for(_authenticate_guest(streams, key), AUTH_TIMEOUT)
            async with to_store() as other:
                yield other

        @contextlib.asynccontextmanager
        async def open_same_user(streams: Streams) -> AsyncIterator[Streams]:
            _check_user(streams)
            async with to_store() as other:
                yield other

        return [_Route(listening, open_authenticated), _Route(local, open_same_user)]

    return _start_forwarder(make_routes, local, listening)


def start_tunnel(host: str, port: int, key: bytes) -> int:
    """Start a tunnel to a gate, and return its port for this node's processes."""
    local = limits.open_loopback_socket()

    @contextlib.asynccontextmanager
    async def open_gate(streams: Streams) -> AsyncIterator[Streams]:
        _check_user(streams)
        other = await _retry_connect(host, port, key)
        try:
            yield other
        finally:
            other[1].close()

    return _start_forwarder(lambda: [_Route(local, open_gate)], local)


async def connect_gate(host: str, port: int, key: bytes) -> Streams:
    """Connect to the store behind a gate. Raises `AuthenticationError`, or OSError or TimeoutError if no gate answers."""
    reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), AUTH_TIMEOUT)
    try:
        await asyncio.wait_for(_authenticate_to_gate((reader, writer), key), AUTH_TIMEOUT)
    except (AuthenticationError, OSError, asyncio.IncompleteReadError, TimeoutError) as error:
        writer.close()
        if isinstance(error, ConnectionError):
            raise
        raise AuthenticationError(f"{type(error).__name__}: {error}") from error
    return reader, writer


async def _retry_connect(host: str, port: int, key: bytes) -> Streams:
    """Connect to a gate, and retry while the gate is full."""
    end = asyncio.get_running_loop().time() + ACK_TIMEOUT
    while True:
        try:
            return await connect_gate(host, port, key)
        except ConnectionError:
            if asyncio.get_running_loop().time() > end:
                raise
        await asyncio.sleep(0.1)


async def _authenticate_guest(streams: Streams, key: bytes) -> None:
    reader, writer = streams
    mine = secrets.token_bytes(NONCE)
    writer.write(GREETING + mine)
    said = await reader.readexactly(NONCE + PROOF)
    theirs, proof = said[:NONCE], said[NONCE:]
    if not hmac.compare_digest(proof, compute_proof(key, b"guest", mine + theirs)):
        writer.write(REJECTED)
        await writer.drain()
        raise AuthenticationError("the peer does not have the key")
    writer.write(compute_proof(key, b"gate", mine + theirs))
    await writer.drain()


async def _authenticate_to_gate(streams: Streams, key: bytes) -> None:
    reader, writer = streams
    try:
        greeting = await reader.readexactly(len(GREETING))
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        raise ConnectionResetError("the peer closed the connection before its greeting") from None
    if greeting != GREETING:
        raise AuthenticationError("another program listens there")
    theirs, mine = await reader.readexactly(NONCE), secrets.token_bytes(NONCE)
    writer.write(mine + compute_proof(key, b"guest", theirs + mine))
    try:
        proof = await reader.readexactly(PROOF)
    except asyncio.IncompleteReadError:
        raise ConnectionResetError("the peer closed the connection before its proof") from None
    if proof == REJECTED:
        raise AuthenticationError("the peer rejects this machine's key")
    if not hmac.compare_digest(proof, compute_proof(key, b"gate", theirs + mine)):
        raise AuthenticationError("the peer does not have the key")


def compute_proof(key: bytes, who: bytes, nonces: bytes) -> bytes:
    """Compute the proof of the key for these nonces. `who`: the side that sends it."""
    return hmac.new(key, who + nonces, hashlib.sha256).digest()


def _check_user(streams: Streams) -> None:
    if not is_same_user(streams[1].get_extra_info("socket")):
        raise AuthenticationError("the peer belongs to another user")


def _start_forwarder(doors: Callable[[], list[_Route]], local: socket.socket, *others: socket.socket) -> int:
    """Start a process that forwards connections, and makes its routes. Returns the port of `local`; closes all sockets here."""
    parent, port = os.getpid(), int(local.getsockname()[1])

    def work() -> int:
        asyncio.run(_serve_routes(doors()))
        return 0

    with limits.catch_fork_failure("the process that forwards connections"):
        child = fork_process()
    if child == 0:
        run_child(work, parent)
    for one in (local, *others):
        one.close()
    return port


async def _serve_routes(doors: list[_Route]) -> None:
    servers = [await asyncio.start_server(_make_handler(door.opener), sock=door.listener, backlog=1024) for door in doors]
    await asyncio.gather(*(server.serve_forever() for server in servers))


def _make_handler(way: Opener) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
    """Return the handler of a route's connections."""
    waiting = dict[asyncio.Task[None], str]()

    async def forward_both(streams: Streams) -> None:
        task = asyncio.current_task()
        try:
            async with way(streams) as other:
                waiting.pop(task, None)  # pyrefly: ignore
                for _, writer in (streams, other):
                    _set_ack_timeout(writer)
                await _run_until_first(_forward_bytes(streams[0], other[1]), _forward_bytes(other[0], streams[1]))
        except (AuthenticationError, OSError, asyncio.IncompleteReadError, TimeoutError):
            pass
        finally:
            waiting.pop(task, None)  # pyrefly: ignore
            streams[1].close()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while len(waiting) >= MAX_PENDING:
            crowded = Counter(waiting.values()).most_common(1)[0][0]
            oldest = next(task for task, address in waiting.items() if address == crowded)
            del waiting[oldest]
            oldest.cancel()
        peer = writer.get_extra_info("peername")
        waiting[asyncio.ensure_future(forward_both((reader, writer)))] = peer[0] if peer else ""

    return connected


async def _run_until_first(*ways: Coroutine[Any, Any, None]) -> None:
    """Run until one of the coroutines ends; then cancel the others."""
    tasks = [asyncio.ensure_future(way) for way in ways]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _set_ack_timeout(writer: asyncio.StreamWriter) -> None:
    """Close the connection if sent data is not acknowledged. An unplugged cable closes nothing, and a request to the store would never return."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * ACK_TIMEOUT))


async def _forward_bytes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


MIN_SECRET, MAX_SECRET = 16, 4096
"""Minimum and maximum number of characters of a secret."""


def make_job_key(job: str) -> bytes:
    """Derive the 32-byte key of a job. Raises L008 if the secret is too short, or if other users can read its file."""
    said = os.environ.get("PLAIT_SECRET")
    secret = said if said is not None else _read_or_make_secret(_find_secret_file())
    if len(secret) < MIN_SECRET:
        where = "PLAIT_SECRET" if said is not None else str(_find_secret_file())
        what = f"the secret in {where} has {len(secret)} characters; the minimum is {MIN_SECRET}"
        raise PlaitError(
            Problem("L008", what, fix=("export PLAIT_SECRET=$(openssl rand -hex 16)    the same on all machines",))
        )
    return hmac.new(secret.encode("utf-8", "surrogateescape"), f"plait {job}".encode(), hashlib.sha256).digest()


def describe_secret_source() -> str:
    """Describe the source of this machine's secret."""
    return "PLAIT_SECRET" if "PLAIT_SECRET" in os.environ else str(_find_secret_file())


def _find_secret_file() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "plait" / "secret"


def _read_or_make_secret(path: Path) -> str:
    """Read the secret file, or create it atomically, so that exactly one of several processes creates it."""
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
        text = read_plain_file(path, MAX_SECRET).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        what = f"the secret that authenticates a job's processes cannot be stored in {path}"
        raise PlaitError(
            Problem("L008", what, why=str(error), fix=("export PLAIT_SECRET=<the same on all machines>",))
        ) from error
    if facts.st_uid != os.getuid() or facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        what = f"other users can read {path}, the secret that authenticates a job's processes"
        raise PlaitError(
            Problem("L008", what, why=f"its mode is {stat.filemode(facts.st_mode)}", fix=(f"chmod 600 {path}",))
        )
    return text
