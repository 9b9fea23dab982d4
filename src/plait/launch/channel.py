"""Connections between processes of a run that survive the death of single peers: messages of a fixed-size header and a payload.

A gloo process group breaks for all members when one of them dies. So a server and its replica groups use one connection each. Both sides
authenticate with the run's key, as at the gate (`launch/gate.py`), because any user of the machine can connect to a loopback port. A header
has ten integers: the kind, eight fields whose meaning depends on the kind, and the payload size. Received bytes are never executed, and
payloads above the receiver's limit are rejected.

One thread serves all connections (`Hub.poll`) without blocking, so a slow reader delays no other peer.
"""

import contextlib
import hmac
import secrets
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from plait.launch.gate import AUTH_TIMEOUT, GREETING, NONCE, PROOF, AuthenticationError, compute_proof
from plait.launch.loopback import is_same_user

HEADER = struct.Struct("!10q")
HEADER_FIELDS = 8
CHUNK = 1 << 20
"""Bytes per read or write."""


@dataclass(frozen=True)
class Packet:
    """A message: its kind, up to eight integers, and a payload."""

    kind: int
    numbers: tuple[int, ...]
    payload: bytearray = field(default_factory=bytearray)


class Peer:
    """One end of a connection. The owner sets `name` when it has identified the peer."""

    def __init__(self, link: socket.socket, key: bytes, guest: bool, most: int):
        self.link, self.key, self.is_guest, self.max_bytes = link, key, guest, most
        self.name: tuple[int, int] | None = None
        self.is_authenticated, self.connected_at = False, time.monotonic()
        self.outbox = deque[memoryview]()
        self.own_nonce, self.peer_nonce = secrets.token_bytes(NONCE), b""
        self.header: tuple[int, ...] | None = None
        self.received = 0
        self.buffer = bytearray(len(GREETING) + NONCE if guest else NONCE + PROOF)
        if not guest:
            self.outbox.append(memoryview(GREETING + self.own_nonce))

    def send(self, kind: int, numbers: Iterable[int] = (), parts: Iterable[bytes] = ()) -> None:
        """Queue a message; `write` sends it."""
        row, rest = [*numbers], [memoryview(part) for part in parts if part]
        row += [0] * (HEADER_FIELDS - len(row))
        self.outbox.append(memoryview(HEADER.pack(kind, *row, sum(map(len, rest)))))
        self.outbox.extend(rest)

    def write(self) -> None:
        """Send as much as the socket accepts. Raises OSError if the peer has gone."""
        with contextlib.suppress(BlockingIOError):
            while self.outbox:
                sent = self.link.send(self.outbox[0][:CHUNK])
                self.outbox[0] = self.outbox[0][sent:]
                if not len(self.outbox[0]):
                    self.outbox.popleft()

    def read(self) -> list[Packet]:
        """Return the complete messages that have arrived.

        Raises OSError or EOFError if the peer has gone, `AuthenticationError` if it does not have the run's key.
        """
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                if self.received < len(self.buffer):
                    count = self.link.recv_into(memoryview(self.buffer)[self.received : self.received + CHUNK])
                    if not count and found:
                        break  # and the next time it is closed
                    if not count:
                        raise EOFError("the connection was closed")
                    self.received += count
                if self.received == len(self.buffer):
                    message = self._parse_buffer(self.buffer)
                    if message is not None:
                        found.append(message)
                        if len(found) >= 16:
                            break
        return found

    def _expect(self, size: int) -> None:
        self.buffer, self.received = bytearray(size), 0

    def _parse_buffer(self, data: bytearray) -> Packet | None:
        if not self.is_authenticated:
            self._authenticate(bytes(data))
            return None
        if self.header is None:
            self.header = HEADER.unpack(data)
            if not 0 <= self.header[-1] <= self.max_bytes:
                raise AuthenticationError(f"a message of {self.header[-1]} bytes, at most {self.max_bytes}")
            self._expect(self.header[-1])
            if self.header[-1]:
                return None
            data = self.buffer
        kind, *numbers, _ = self.header
        self.header = None
        self._expect(HEADER.size)
        return Packet(kind, tuple(numbers), data)

    def _authenticate(self, data: bytes) -> None:
        """Take the next step of mutual authentication."""
        if not self.is_guest:
            self.peer_nonce, proof = data[:NONCE], data[NONCE:]
            if not hmac.compare_digest(proof, compute_proof(self.key, b"guest", self.own_nonce + self.peer_nonce)):
                raise AuthenticationError("the peer does not have the key")
            self.outbox.append(memoryview(compute_proof(self.key, b"gate", self.own_nonce + self.peer_nonce)))
        elif not self.peer_nonce:
            if not data.startswith(GREETING):
                raise AuthenticationError("another program listens there")
            self.peer_nonce = data[len(GREETING) :]
            self.outbox.append(memoryview(self.own_nonce + compute_proof(self.key, b"guest", self.peer_nonce + self.own_nonce)))
            return self._expect(PROOF)
        elif not hmac.compare_digest(data, compute_proof(self.key, b"gate", self.peer_nonce + self.own_nonce)):
            raise AuthenticationError("the peer does not have the key")
        self.is_authenticated = True
        return self._expect(HEADER.size)


class Hub:
    """All connections of a process. `listening`: the socket that accepts peers. `most`: maximum payload in bytes."""

    def __init__(self, key: bytes, listening: socket.socket | None = None, most: int = 1 << 40):
        self.key, self.max_bytes, self.listener = key, most, listening
        self.selector = selectors.DefaultSelector()
        self.peers = set[Peer]()
        self.backlog: list[tuple[Peer, Packet | None]] = []
        """Messages that arrived while a connection was being made."""
        if listening is not None:
            listening.setblocking(False)
            self.selector.register(listening, selectors.EVENT_READ, None)

    def connect(self, port: int, alive: Callable[[], None]) -> Peer:
        """Connect to a server at a port of this machine; `alive` is called while waiting.

        Raises ConnectionError if no server listens there, or if it does not have the run's key.
        """
        early: list[tuple[Peer, Packet | None]] = []
        try:
            peer = self._add_peer(socket.create_connection(("127.0.0.1", port), AUTH_TIMEOUT), guest=True)
            while not peer.is_authenticated:
                alive()
                found = self.poll(1.0)
                if any(who is peer and message is None for who, message in found):
                    raise ConnectionError("the server closed the connection")
                early += found
        except OSError as error:
            raise ConnectionError(f"the server at port {port} is gone: {error}") from error
        self.backlog += early
        return peer

    def _add_peer(self, link: socket.socket, guest: bool) -> Peer:
        link.setblocking(False)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = Peer(link, self.key, guest, self.max_bytes)
        self.peers.add(peer)
        self.selector.register(link, selectors.EVENT_READ, peer)
        return peer

    def poll(self, timeout: float) -> list[tuple[Peer, Packet | None]]:
        """Return the messages that arrive within `timeout` seconds, with their peers. None stands for a peer that has gone."""
        for peer in [*self.peers]:
            if not peer.is_authenticated and not peer.is_guest and time.monotonic() - peer.connected_at > AUTH_TIMEOUT:
                self.close(peer)
        gone = [peer for peer in [*self.peers] if not self._flush_peer(peer)]
        found, self.backlog = [*self.backlog, *((peer, None) for peer in gone)], []
        for key, mask in self.selector.select(0.0 if found else timeout):
            peer = key.data
            if peer is None:
                self._accept()
                continue
            if mask & selectors.EVENT_WRITE and not self._flush_peer(peer):
                found.append((peer, None))
            elif mask & selectors.EVENT_READ:
                found += self._read(peer)
        return found

    def _accept(self) -> None:
        assert self.listener is not None
        with contextlib.suppress(OSError):
            link, _ = self.listener.accept()
            if is_same_user(link):
                self._add_peer(link, guest=False)
            else:
                link.close()

    def _read(self, peer: Peer) -> list[tuple[Peer, Packet | None]]:
        try:
            return [(peer, message) for message in peer.read()]
        except (OSError, EOFError, AuthenticationError):
            proven = peer.is_authenticated
            self.close(peer)
            return [(peer, None)] if proven or peer.is_guest else []

    def _flush_peer(self, peer: Peer) -> bool:
        """Send the bytes that the socket accepts; return whether the peer is still connected."""
        if peer not in self.peers:
            return True
        try:
            peer.write()
        except OSError:
            self.close(peer)
            return False
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outbox else 0)
        self.selector.modify(peer.link, events, peer)
        return True

    def close(self, peer: Peer) -> None:
        if peer in self.peers:
            self.peers.remove(peer)
            self.selector.unregister(peer.link)
            peer.link.close()

    def flush(self, peers: Iterable[Peer], seconds: float = 60.0) -> None:
        """Send all queued messages to these peers, for at most `seconds`."""
        end = time.monotonic() + seconds
        left = [peer for peer in peers if peer in self.peers]
        while time.monotonic() < end:
            left = [peer for peer in left if self._flush_peer(peer) and peer.outbox]
            if not left:
                break
            time.sleep(0.001)

    def close_all(self) -> None:
        for peer in [*self.peers]:
            self.close(peer)
        self.selector.close()
