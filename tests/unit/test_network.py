"""Closed forms of collectives, and what must hold for any links, sizes and groups."""

from math import log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.config import hardware
from plait.config.hardware import FITTED, HOPS, PROTOCOLS, Link, levels

NVLINK = Link("nvlink", 8, 100e9, HOPS["nvlink"][0])
NETWORK = Link("network", None, 10e9, HOPS["network"][0], "network")
NODES = (NVLINK, NETWORK)
LARGE = 1e10
"""Bytes of which the time is bandwidth, to a part in ten thousand."""
RATE, SLOW = 100e9, 10e9


def test_a_ring_in_one_node() -> None:
    group = levels(NODES, 8)
    assert hardware.all_reduce(LARGE, group) == pytest.approx(2 * 7 / 8 * LARGE / RATE, rel=2e-3)
    assert hardware.all_gather(LARGE, group) == pytest.approx(7 / 8 * LARGE / RATE, rel=2e-3)
    assert hardware.reduce_scatter(LARGE, group) == hardware.all_gather(LARGE, group)


def test_a_ring_over_nodes_shares_the_network() -> None:
    """Of a ring's bytes each of the 8 devices of a node sends an eighth over its share of the network."""
    n = 32
    assert hardware.all_reduce(LARGE, levels(NODES, n)) == pytest.approx(2 * (n - 1) / n * LARGE / 8 / SLOW, rel=2e-3)
    assert hardware.all_gather(LARGE, levels(NODES, n)) == pytest.approx((n - 1) / n * LARGE / 8 / SLOW, rel=2e-3)
    across = levels(NODES, 4, 8)
    assert hardware.all_reduce(LARGE, across) == pytest.approx(2 * 3 / 4 * LARGE / SLOW, rel=2e-3)


def test_two_nodes_use_a_tree() -> None:
    """Each of two nodes sends the bytes once: half of what a ring sends, where the node itself is not slower."""
    fast = (Link("nvlink", 8, 1e12, HOPS["nvlink"][0]), NETWORK)
    assert hardware.all_reduce(LARGE, levels(fast, 16)) == pytest.approx(LARGE / 8 / SLOW, rel=2e-3)


def test_small_messages_cost_hops() -> None:
    """Nothing to send: the call and 2 (n-1) hops of the fastest protocol; over many nodes a tree has fewer."""
    low = PROTOCOLS[2].call + FITTED["call"]
    assert hardware.all_reduce(0, levels(NODES, 8)) == pytest.approx(low + 14 * HOPS["nvlink"][2])
    many = low + 2 * (7 * HOPS["nvlink"][2] + log2(64) * HOPS["network"][2])
    assert hardware.all_reduce(0, levels(NODES, 512)) == pytest.approx(many)
    assert hardware.all_gather(0, levels(NODES, 512)) == pytest.approx(
        low + 448 * HOPS["nvlink"][2] + 63 * HOPS["network"][2]
    )
    assert hardware.all_reduce(1e9, ()) == hardware.send(1e9, ()) == hardware.all_to_all(1e9, ()) == 0


def test_all_to_all_and_send() -> None:
    """Of 16 parts 7 go to devices of the node and 8 over the network, at the same time."""
    assert hardware.all_to_all(LARGE, levels(NODES, 8)) == pytest.approx(7 / 8 * LARGE / RATE, rel=2e-3)
    assert hardware.all_to_all(LARGE, levels(NODES, 16)) == pytest.approx(8 / 16 * LARGE / SLOW, rel=2e-3)
    assert hardware.send(LARGE, levels(NODES, 2)) == pytest.approx(LARGE / RATE, rel=2e-3)
    assert hardware.send(LARGE, levels(NODES, 2, 8)) == pytest.approx(LARGE / SLOW, rel=2e-3)


def test_a_switch_that_adds_up() -> None:
    """A device sends (1 + 1/n) of the bytes instead of 2 (n-1)/n: for eight, not for two; over nodes the network decides."""
    adding = Link("switch", 8, 100e9, HOPS["nvlink"][0], adds=0.8)
    plain, added = (levels((link, NETWORK), 8) for link in (NVLINK, adding))
    assert hardware.all_reduce(LARGE, added) == pytest.approx(9 / 8 * LARGE / RATE / 0.8, rel=2e-3)
    assert hardware.all_reduce(LARGE, added) < hardware.all_reduce(LARGE, plain)
    assert hardware.all_gather(LARGE, added) == hardware.all_gather(LARGE, plain)
    two = levels((adding,), 2)
    assert hardware.all_reduce(LARGE, two) == pytest.approx(LARGE / RATE, rel=2e-3)
    assert hardware.all_reduce(LARGE, levels((adding, NETWORK), 32)) == pytest.approx(
        2 * 31 / 32 * LARGE / 8 / SLOW, rel=2e-3
    )


def test_links_reach_a_part_of_their_data_sheet() -> None:
    half = (Link("half", 8, 100e9, HOPS["nvlink"][0], reached=0.5),)
    assert hardware.all_gather(LARGE, levels(half, 8)) == pytest.approx(7 / 8 * LARGE / 50e9, rel=2e-3)


def test_levels_of_a_group() -> None:
    def seen(ranks: int, stride: int = 1) -> list[tuple[int, int, int]]:
        return [(x.ranks, x.inside, x.repeats) for x in levels(NODES, ranks, stride)]

    assert seen(1) == [] and seen(8) == [(8, 1, 1)] and seen(16, 8) == [(16, 1, 1)]
    assert seen(32) == [(8, 1, 4), (4, 8, 1)] and seen(8, 4) == [(2, 1, 4), (4, 2, 1)]
    assert seen(12) == [(6, 1, 2), (2, 6, 1)], "two nodes, evenly"
    with pytest.raises(LookupError):
        levels((NVLINK,), 9)
    with pytest.raises(LookupError):
        levels((), 2)


def test_three_levels() -> None:
    """Pairs on a bridge, four on a bus, nodes: the bus is what a ring in the node waits for."""
    links = (Link("bridge", 2, 50e9, 1e-6), Link("bus", 4, 10e9, 1e-6, "pcie"), NETWORK)
    assert [(x.ranks, x.inside, x.repeats) for x in levels(links, 8)] == [(2, 1, 4), (2, 2, 2), (2, 4, 1)]
    assert hardware.all_reduce(LARGE, levels(links, 4)) == pytest.approx(2 * 3 / 4 * LARGE / 2 / 10e9, rel=2e-3)


def test_a_mesh_has_fewer_links_for_fewer_devices() -> None:
    mesh = (Link("mesh", 4, 100e9, 1e-6, shares=(0.25, 0.5, 1.0)),)
    pair, three, four = (hardware.all_gather(LARGE, levels(mesh, n)) for n in (2, 3, 4))
    assert pair == pytest.approx(1 / 2 * LARGE / 25e9, rel=2e-3)
    assert three == pytest.approx(2 / 3 * LARGE / 50e9, rel=2e-3)
    assert four == pytest.approx(3 / 4 * LARGE / RATE, rel=2e-3)


COLLECTIVES = st.sampled_from([hardware.all_reduce, hardware.all_gather, hardware.all_to_all, hardware.send])
SIZES = st.floats(0, 1e12)
GROUPS = st.tuples(st.integers(1, 4096), st.sampled_from([1, 2, 4, 8, 16]))


@settings(max_examples=300, deadline=None)
@given(COLLECTIVES, SIZES, SIZES, GROUPS)
def test_more_bytes_take_longer(collective, one: float, other: float, group: tuple[int, int]) -> None:
    times = [collective(size, levels(NODES, *group)) for size in sorted((one, other))]
    assert 0 <= times[0] <= times[1]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([hardware.all_reduce, hardware.all_gather]), SIZES, st.integers(1, 9), st.sampled_from([1, 2, 4, 8])
)
def test_more_ranks_take_longer_over_the_network(collective, size: float, doublings: int, stride: int) -> None:
    """With the same number of a node's devices in it: only nodes are added."""
    few, many = (levels(NODES, 8 // stride * 2 ** (doublings + more), stride) for more in (0, 1))
    assert collective(size, few) <= collective(size, many)


@settings(max_examples=300, deadline=None)
@given(COLLECTIVES, SIZES, GROUPS, st.floats(1.1, 10))
def test_faster_links_are_never_slower(collective, size: float, group: tuple[int, int], factor: float) -> None:
    faster = (Link("a", 8, 100e9 * factor, 3.4e-6), Link("b", None, 10e9 * factor, 14e-6, "network"))
    assert collective(size, levels(faster, *group)) <= collective(size, levels(NODES, *group))


@settings(max_examples=200, deadline=None)
@given(SIZES, GROUPS)
def test_an_all_reduce_is_at_most_its_two_halves(size: float, group: tuple[int, int]) -> None:
    meeting = levels(NODES, *group)
    halves = hardware.reduce_scatter(size, meeting) + hardware.all_gather(size, meeting)
    assert hardware.all_reduce(size, meeting) <= halves * (1 + 1e-12)


@settings(max_examples=200, deadline=None)
@given(GROUPS)
def test_levels_multiply_to_the_group(group: tuple[int, int]) -> None:
    ranks, stride = group
    found = levels(NODES, ranks, stride)
    total = found[-1].inside * found[-1].ranks if found else 1
    assert ranks <= total < ranks + max(1, 8 // stride)
    hops = sum((x.ranks - 1) * x.repeats for x in found)
    assert hops == total - 1, "a lap of a ring passes every border once"
