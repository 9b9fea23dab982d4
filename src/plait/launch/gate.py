"""The gate before a job's store: torch's store lets in anyone who connects, so it listens on loopback only, and this stands before it.

On the machine of number 0 the gate listens on one interface, asks whoever comes for a proof that it knows the job's key, and
then passes bytes on to the store. On every other machine a tunnel listens on loopback, and passes what comes through the gate.
Both sides prove it: who has taken the port of another job's gate is found out too. Each is a process of its own, which ends
with the one that made it.

The proof is HMAC-SHA256 over numbers that both sides drew: nothing that was listened to can be used again.
"""

import asyncio
import contextlib
import hashlib
import hmac
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from plait.launch import limits
from plait.launch.child import live

if TYPE_CHECKING:
    from torch.distributed import TCPStore

GREETING = b"plait-gate-1\n"
NONCE = PROOF = 32
KNOCKING = 5.0
"""Seconds in which who has connected must have proved that it knows the key."""
UNHEARD = 20.0
"""Seconds after which a connection is broken on which nothing that is sent is acknowledged."""
WAITING = 256
"""Connections that have not yet proved it; a further one is closed at once."""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Way = Callable[[Streams], Awaitable[Streams | None]]
"""Opens the other half of a connection; None: it is refused."""


class Stranger(Exception):
    """The other side does not know the job's key, or is no gate."""


def store_at(listening: socket.socket) -> "TCPStore":
    """torch's store, on a loopback socket that listens already."""
    from torch.distributed import TCPStore

    port = listening.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def stand(listening: socket.socket, key: bytes) -> int:
    """Start a store, and the gate that leads to it; returns the store's port on this machine. Closes `listening` here."""
    inner = limits.listening()
    port = int(inner.getsockname()[1])

    async def inwards(streams: Streams) -> Streams | None:
        await asyncio.wait_for(_admit(streams, key), KNOCKING)
        return await asyncio.open_connection("127.0.0.1", port)

    _start(listening, inwards, lambda: store_at(inner))
    inner.close()
    return port


def tunnel(host: str, port: int, key: bytes) -> int:
    """Start a tunnel to a gate, and return the port on which this machine's processes find it."""
    listening = limits.listening()
    here = int(listening.getsockname()[1])
    _start(listening, lambda streams: through(host, port, key))
    return here


async def through(host: str, port: int, key: bytes) -> Streams:
    """A connection to the store behind a gate. Raises `Stranger`, and OSError or TimeoutError when nobody is there."""
    reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), KNOCKING)
    try:
        await asyncio.wait_for(_prove((reader, writer), key), KNOCKING)
    except (Stranger, OSError, asyncio.IncompleteReadError, TimeoutError) as error:
        writer.close()
        raise Stranger(f"{type(error).__name__}: {error}") from error
    return reader, writer


async def _admit(streams: Streams, key: bytes) -> None:
    reader, writer = streams
    mine = secrets.token_bytes(NONCE)
    writer.write(GREETING + mine)
    said = await reader.readexactly(NONCE + PROOF)
    theirs, proof = said[:NONCE], said[NONCE:]
    if not hmac.compare_digest(proof, proof_of(key, b"guest", mine + theirs)):
        raise Stranger("it does not know the key")
    writer.write(proof_of(key, b"gate", mine + theirs))
    await writer.drain()


async def _prove(streams: Streams, key: bytes) -> None:
    reader, writer = streams
    greeting = await reader.readexactly(len(GREETING))
    if greeting != GREETING:
        raise Stranger("something else listens there")
    theirs, mine = await reader.readexactly(NONCE), secrets.token_bytes(NONCE)
    writer.write(mine + proof_of(key, b"guest", theirs + mine))
    try:
        proof = await reader.readexactly(PROOF)
    except asyncio.IncompleteReadError:
        raise Stranger("it does not accept this machine's key") from None
    if not hmac.compare_digest(proof, proof_of(key, b"gate", theirs + mine)):
        raise Stranger("it does not know the key")


def proof_of(key: bytes, who: bytes, nonces: bytes) -> bytes:
    """What shows that one knows the key, to who drew the numbers."""
    return hmac.new(key, who + nonces, hashlib.sha256).digest()


def _start(listening: socket.socket, way: Way, serve: Callable[[], object] = lambda: None) -> None:
    """Pass connections on in a process of its own, in which what `serve` makes lives too."""
    parent = os.getpid()

    def work() -> int:
        served = serve()
        asyncio.run(_serve(listening, way))
        del served
        return 0

    if os.fork() == 0:
        live(work, parent)
    listening.close()


async def _serve(listening: socket.socket, way: Way) -> None:
    unproven = 0

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal unproven
        if unproven >= WAITING:
            writer.close()
            return
        unproven += 1
        other: Streams | None = None
        try:
            other = await way((reader, writer))
        except (Stranger, OSError, asyncio.IncompleteReadError, TimeoutError):
            writer.close()
        finally:
            unproven -= 1
        if other is not None:
            _patient(writer)
            _patient(other[1])
            await asyncio.gather(_pass(reader, other[1]), _pass(other[0], writer))

    server = await asyncio.start_server(connected, sock=listening)
    await server.serve_forever()


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
    with contextlib.suppress(OSError):
        writer.close()
