"""A server beside the first: it keeps gradients that come, and does with them what the lead says."""

from typing import Any

from plait.data.batch import Position
from plait.engine.server import group as say
from plait.engine.server.setting import Doors, ServerSetting
from plait.engine.server.state import Server
from plait.launch.channel import Packet, Peer
from plait.launch.place import Place


class Follower:
    """Server `number`, from 1 on."""

    def __init__(self, setting: ServerSetting, place: Place, doors: Doors):
        self.server = Server(setting, place, doors)
        self.server.resume()
        self.groups: dict[tuple[int, int], Peer] = {}
        self.forgotten: set[int] = set()
        self.lead = self.server.hub.connect(doors.ports[0], lambda: self.server.alive("build"))
        self.lead.send(say.HELLO, (say.FOLLOWER - self.server.number, 0))

    def run(self) -> dict[str, Any]:
        """Until the lead says that the run has ended."""
        server = self.server
        while True:
            for peer, message in server.hub.poll(1.0):
                if peer is self.lead:
                    if message is None:
                        raise ConnectionError("Connection closed by peer: server 0 is gone")
                    if message.kind == say.END:
                        server.hub.shut()
                        return {"applied": server.applied}
                    self.told(message)
                elif message is not None:
                    self.heard(peer, message)
            server.alive("reduce")

    def heard(self, peer: Peer, message: Packet) -> None:
        """A group says something."""
        if message.kind == say.HELLO:
            peer.name = (message.numbers[0], message.numbers[1])
            self.groups[peer.name] = peer
            peer.send(say.WELCOME)
        elif message.kind == say.PART:
            if message.numbers[0] not in self.forgotten:
                self.server.parts[message.numbers[0]] = self.server.layout.unpack(message.payload)
            peer.send(say.HAVE, message.numbers[:1])

    def told(self, message: Packet) -> None:
        """The lead says what to do."""
        server, numbers = self.server, message.numbers
        if message.kind == say.SEND:
            peer = self.groups.get((numbers[0], numbers[1]))
            if peer is not None and peer in server.hub.peers:
                server.send(peer, numbers[2])
        elif message.kind == say.APPLY:
            server.apply(say.ServerUpdate.unpack(message.payload), numbers[1])
        elif message.kind == say.FORGET:
            self.forgotten.add(numbers[0])
            server.parts.pop(numbers[0], None)
        elif message.kind == say.SNAP:
            server.snaps[numbers[0]] = server.packed()
        elif message.kind == say.DROP:
            server.snaps.pop(numbers[0], None)
        elif message.kind == say.SAVE:
            step, epoch, start, samples, wait = numbers[:5]
            server.save(Position(step, epoch, start, samples), {}, bool(wait))


def run(setting: ServerSetting, place: Place, doors: Doors) -> dict[str, Any]:
    """A server beside the first, from its build to the end of the run."""
    return Follower(setting, place, doors).run()
