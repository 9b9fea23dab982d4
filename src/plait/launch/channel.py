"""Connections between processes of a run that may die one by one: messages with a header of fixed size, and bytes after it.

A process group of gloo breaks for all when one of its members dies, so a server and its groups have a connection each instead. Who
connects proves that it knows the run's key, and so does who listens, as at the gate (`launch/gate.py`): on a loopback port anyone on
the machine may knock. A header is ten whole numbers: kind, eight that the kind gives a meaning, and how many bytes follow. Nothing
that is received is code, and no length is believed beyond what the receiver says it expects.

One thread serves all connections (`Hub.poll`), and sends whatever a connection takes: a peer that reads slowly holds up nobody.
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

from plait.launch.gate import GREETING, KNOCKING, NONCE, PROOF, Stranger, proof_of
from plait.launch.loopback import same_user

HEADER = struct.Struct("!10q")
NUMBERS = 8
CHUNK = 1 << 20
"""Bytes that are read or written at once."""


@dataclass(frozen=True)
class Packet:
    """What one side tells the other."""

    kind: int
    numbers: tuple[int, ...]
    payload: bytearray = field(default_factory=bytearray)


class Peer:
    """One end of a connection. `name` is the owner's: whom it has found to be there."""

    def __init__(self, link: socket.socket, key: bytes, guest: bool, most: int):
        self.link, self.key, self.guest, self.most = link, key, guest, most
        self.name: tuple[int, int] | None = None
        self.proven, self.since = False, time.monotonic()
        self.out = deque[memoryview]()
        self.mine, self.theirs = secrets.token_bytes(NONCE), b""
        self.header: tuple[int, ...] | None = None
        self.got = 0
        self.room = bytearray(len(GREETING) + NONCE if guest else NONCE + PROOF)
        if not guest:
            self.out.append(memoryview(GREETING + self.mine))

    def send(self, kind: int, numbers: Iterable[int] = (), parts: Iterable[bytes] = ()) -> None:
        """Have a message sent, as soon as the other side takes it."""
        row, rest = [*numbers], [memoryview(part) for part in parts if part]
        row += [0] * (NUMBERS - len(row))
        self.out.append(memoryview(HEADER.pack(kind, *row, sum(map(len, rest)))))
        self.out.extend(rest)

    def write(self) -> None:
        """Send what can be sent now. OSError when the other side is gone."""
        with contextlib.suppress(BlockingIOError):
            while self.out:
                sent = self.link.send(self.out[0][:CHUNK])
                self.out[0] = self.out[0][sent:]
                if not len(self.out[0]):
                    self.out.popleft()

    def read(self) -> list[Packet]:
        """What has come, whole messages only. OSError, EOFError when the other side is gone; Stranger when it is none of the run's."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                if self.got < len(self.room):
                    count = self.link.recv_into(memoryview(self.room)[self.got : self.got + CHUNK])
                    if not count and found:
                        break  # and the next time it is closed
                    if not count:
                        raise EOFError("the connection was closed")
                    self.got += count
                if self.got == len(self.room):
                    message = self._filled(self.room)
                    if message is not None:
                        found.append(message)
                        if len(found) >= 16:
                            break
        return found

    def _expect(self, size: int) -> None:
        self.room, self.got = bytearray(size), 0

    def _filled(self, data: bytearray) -> Packet | None:
        if not self.proven:
            self._prove(bytes(data))
            return None
        if self.header is None:
            self.header = HEADER.unpack(data)
            if not 0 <= self.header[-1] <= self.most:
                raise Stranger(f"a message of {self.header[-1]} bytes, at most {self.most}")
            self._expect(self.header[-1])
            if self.header[-1]:
                return None
            data = self.room
        kind, *numbers, _ = self.header
        self.header = None
        self._expect(HEADER.size)
        return Packet(kind, tuple(numbers), data)

    def _prove(self, data: bytes) -> None:
        """The next step of showing each other that both know the key."""
        if not self.guest:
            self.theirs, proof = data[:NONCE], data[NONCE:]
            if not hmac.compare_digest(proof, proof_of(self.key, b"guest", self.mine + self.theirs)):
                raise Stranger("it does not know the key")
            self.out.append(memoryview(proof_of(self.key, b"gate", self.mine + self.theirs)))
        elif not self.theirs:
            if not data.startswith(GREETING):
                raise Stranger("something else listens there")
            self.theirs = data[len(GREETING) :]
            self.out.append(memoryview(self.mine + proof_of(self.key, b"guest", self.theirs + self.mine)))
            return self._expect(PROOF)
        elif not hmac.compare_digest(data, proof_of(self.key, b"gate", self.theirs + self.mine)):
            raise Stranger("it does not know the key")
        self.proven = True
        return self._expect(HEADER.size)


class Hub:
    """All connections of a process. `listening`: where others come to. `most`: bytes of the longest message."""

    def __init__(self, key: bytes, listening: socket.socket | None = None, most: int = 1 << 40):
        self.key, self.most, self.listening = key, most, listening
        self.selector = selectors.DefaultSelector()
        self.peers = set[Peer]()
        self.early: list[tuple[Peer, Packet | None]] = []
        """What others said while a connection was made."""
        if listening is not None:
            listening.setblocking(False)
            self.selector.register(listening, selectors.EVENT_READ, None)

    def connect(self, port: int, alive: Callable[[], None]) -> Peer:
        """A connection to who listens at a port of this machine, which may take its time; `alive` is called meanwhile.

        ConnectionError when nobody is there, or a stranger.
        """
        early: list[tuple[Peer, Packet | None]] = []
        try:
            peer = self._added(socket.create_connection(("127.0.0.1", port), KNOCKING), guest=True)
            while not peer.proven:
                alive()
                found = self.poll(1.0)
                if any(who is peer and message is None for who, message in found):
                    raise ConnectionError("the server closed the connection")
                early += found
        except OSError as error:
            raise ConnectionError(f"the server at port {port} is gone: {error}") from error
        self.early += early
        return peer

    def _added(self, link: socket.socket, guest: bool) -> Peer:
        link.setblocking(False)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = Peer(link, self.key, guest, self.most)
        self.peers.add(peer)
        self.selector.register(link, selectors.EVENT_READ, peer)
        return peer

    def poll(self, timeout: float) -> list[tuple[Peer, Packet | None]]:
        """What has come from whom, after at most so many seconds; None: that peer is gone."""
        for peer in [*self.peers]:
            if not peer.proven and not peer.guest and time.monotonic() - peer.since > KNOCKING:
                self.close(peer)
        gone = [peer for peer in [*self.peers] if not self._written(peer)]
        found, self.early = [*self.early, *((peer, None) for peer in gone)], []
        for key, mask in self.selector.select(0.0 if found else timeout):
            peer = key.data
            if peer is None:
                self._accept()
                continue
            if mask & selectors.EVENT_WRITE and not self._written(peer):
                found.append((peer, None))
            elif mask & selectors.EVENT_READ:
                found += self._read(peer)
        return found

    def _accept(self) -> None:
        assert self.listening is not None
        with contextlib.suppress(OSError):
            link, _ = self.listening.accept()
            if same_user(link):
                self._added(link, guest=False)
            else:
                link.close()

    def _read(self, peer: Peer) -> list[tuple[Peer, Packet | None]]:
        try:
            return [(peer, message) for message in peer.read()]
        except (OSError, EOFError, Stranger):
            proven = peer.proven
            self.close(peer)
            return [(peer, None)] if proven or peer.guest else []

    def _written(self, peer: Peer) -> bool:
        """Whether the peer is still there, after what can be sent was."""
        if peer not in self.peers:
            return True
        try:
            peer.write()
        except OSError:
            self.close(peer)
            return False
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.out else 0)
        self.selector.modify(peer.link, events, peer)
        return True

    def close(self, peer: Peer) -> None:
        if peer in self.peers:
            self.peers.remove(peer)
            self.selector.unregister(peer.link)
            peer.link.close()

    def flush(self, peers: Iterable[Peer], seconds: float = 60.0) -> None:
        """Send these all that is meant for them, for so long at most."""
        end = time.monotonic() + seconds
        left = [peer for peer in peers if peer in self.peers]
        while time.monotonic() < end:
            left = [peer for peer in left if self._written(peer) and peer.out]
            if not left:
                break
            time.sleep(0.001)

    def shut(self) -> None:
        for peer in [*self.peers]:
            self.close(peer)
        self.selector.close()
