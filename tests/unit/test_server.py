"""The parts of outer_sync=async one by one: authenticated connections, serialized tensors, delayed Nesterov, the required bound."""

import socket
import threading

import pytest
import torch
from torch import nn

from plait.config.errors import PlaitError
from plait.engine.server.group import Layout, assign_to_servers, sum_weighted
from plait.engine.server.state import DelayedNesterov
from plait.launch import limits
from plait.launch.channel import HEADER, Hub, Packet, Peer
from plait.launch.gate import GREETING

KEY = b"k" * 32


def heard(hub: Hub, count: int = 1) -> list[tuple[Peer, Packet | None]]:
    found: list[tuple[Peer, Packet | None]] = []
    for _ in range(400):
        found += hub.poll(0.05)
        if len(found) >= count:
            break
    return found


def connected(server: Hub, guest: Hub, port: int) -> Peer:
    made: list[Peer] = []
    thread = threading.Thread(target=lambda: made.append(guest.connect(port, lambda: None)))
    thread.start()
    while thread.is_alive():
        server.backlog += server.poll(0.01)
    thread.join()
    return made[0]


def test_packets_arrive_whole_and_in_order() -> None:
    listening = limits.open_loopback_socket()
    server, guest = Hub(KEY, listening), Hub(KEY)
    peer = connected(server, guest, listening.getsockname()[1])
    large = bytes(range(256)) * 20_000
    peer.send(7, (1, -2, 3))
    peer.send(8, (4,), [large, b"", b"end"])
    peer.send(9)
    guest.poll(0.0)
    found: list[Packet | None] = []
    while len(found) < 3:
        guest.poll(0.0)
        found += [packet for _, packet in server.poll(0.01)]
    assert [p.kind for p in found if p] == [7, 8, 9]
    assert found[0] is not None and found[0].numbers == (1, -2, 3, 0, 0, 0, 0, 0)
    assert found[1] is not None and bytes(found[1].payload) == large + b"end"
    guest.close_all()
    assert [packet for _, packet in heard(server)] == [None]
    server.close_all()
    listening.close()


def test_who_does_not_know_the_key_is_not_heard() -> None:
    listening = limits.open_loopback_socket()
    server, port = Hub(KEY, listening), listening.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.settimeout(5)
        server.poll(0.2)
        server.poll(0.2)
        assert stranger.recv(100).startswith(GREETING)
        stranger.sendall(b"x" * 64 + HEADER.pack(1, 0, 0, 0, 0, 0, 0, 0, 0, 0))
        assert server.poll(0.2) == [] and not server.peers
    guest = Hub(b"another" + KEY[7:])
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            server.poll(0.02)

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(ConnectionError):
        guest.connect(port, lambda: None)
    ended.set()
    thread.join()
    guest.close_all()
    server.close_all()
    listening.close()


def test_who_listens_must_know_the_key_too() -> None:
    with limits.open_loopback_socket() as listening:

        def impostor() -> None:
            link, _ = listening.accept()
            link.sendall(GREETING + b"n" * 32)
            link.recv(64)
            link.sendall(b"p" * 32)
            link.close()

        thread = threading.Thread(target=impostor)
        thread.start()
        guest = Hub(KEY)
        with pytest.raises(ConnectionError):
            guest.connect(listening.getsockname()[1], lambda: None)
        thread.join()
        guest.close_all()


def test_a_packet_longer_than_expected_breaks_the_connection() -> None:
    listening = limits.open_loopback_socket()
    server, guest = Hub(KEY, listening, most=100), Hub(KEY)
    peer = connected(server, guest, listening.getsockname()[1])
    peer.send(1, (), [b"x" * 101])
    guest.poll(0.0)
    assert [packet for _, packet in heard(server)] == [None] and not server.peers
    server.close_all()
    guest.close_all()
    listening.close()


def test_tensors_are_the_same_after_a_journey() -> None:
    named = {
        "a": torch.randn(3, 4),
        "b": torch.tensor(5),
        "c": torch.empty(0, 2),
        "d": torch.randn(4).to(torch.bfloat16),
        "e": torch.ones(2),
    }
    layout = Layout(named)
    sent = {name: t for name, t in named.items() if name != "e"}
    found = layout.unpack(b"".join(layout.pack(sent)))
    assert found.keys() == sent.keys() and all(
        torch.equal(found[n], sent[n]) and found[n].dtype == sent[n].dtype for n in sent
    )
    data = b"".join(layout.pack(named))
    assert len(data) == layout.bytes
    for wrong in (data[:-1], data + b"x", b"\x02" + data[1:], b""):
        with pytest.raises(ValueError):
            layout.unpack(wrong)


def test_servers_hold_about_as_much_each() -> None:
    sizes = {f"p{i}": size for i, size in enumerate((100, 1, 40, 60, 1, 50, 3))}
    held = assign_to_servers(sizes, 3)
    assert sorted(name for names in held for name in names) == sorted(sizes)
    assert max(sum(sizes[n] for n in names) for names in held) <= 100
    assert assign_to_servers({"only": 8}, 2) == [["only"], []]


def test_a_sum_is_over_those_that_have_it() -> None:
    total = sum_weighted([(0.25, {"a": torch.ones(2)}), (0.75, {"a": 2 * torch.ones(2), "b": torch.ones(1)})])
    assert total["a"].tolist() == [1.75, 1.75] and total["b"].tolist() == [0.75]


def test_n_pushes_at_the_same_weights_are_a_step_of_nesterov_on_their_mean() -> None:
    ours, theirs = (nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64)) for _ in range(2))
    made = DelayedNesterov.from_optimizer(torch.optim.SGD([ours], lr=0.1, momentum=0.9), 4)
    plain = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, nesterov=True)
    made.share = 0.25
    for step in range(5):
        pushes = [
            torch.randn(2, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + k))
            for k in range(4)
        ]
        for gradient in pushes:
            ours.grad = gradient
            made.step()
        theirs.grad = torch.stack(pushes).mean(0)
        plain.step()
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-15)


def test_delayed_nesterov_is_for_sgd() -> None:
    with pytest.raises(PlaitError) as caught:
        DelayedNesterov.from_optimizer(torch.optim.AdamW([nn.Parameter(torch.ones(1))]), 2)
    assert caught.value.codes == ["P061"]
