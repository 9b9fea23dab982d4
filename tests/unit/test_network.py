"""Closed forms of collectives, and invariants for any links, sizes and groups."""

from math import log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.config import hardware
from plait.config.hardware import FITTED_CONSTANTS, HOP_SECONDS, PROTOCOLS, Link, build_levels

NVLINK = Link("nvlink", 8, 100e9, HOP_SECONDS["nvlink"][0])
NETWORK = Link("network", None, 10e9, HOP_SECONDS["network"][0], "network")
NODES = (NVLINK, NETWORK)
LARGE = 1e10
"""At this size the time is bandwidth, within one part in ten thousand."""
RATE, SLOW = 100e9, 10e9


def test_a_ring_in_one_node() -> None:
    group = build_levels(NODES, 8)
    assert hardware.all_reduce(LARGE, group) == pytest.approx(2 * 7 / 8 * LARGE / RATE, rel=2e-3)
    assert hardware.all_gather(LARGE, group) == pytest.approx(7 / 8 * LARGE / RATE, rel=2e-3)
    assert hardware.reduce_scatter(LARGE, group) == hardware.all_gather(LARGE, group)


def test_a_ring_over_nodes_shares_the_network() -> None:
    """Each of a node's 8 devices sends an eighth of a ring's bytes over its part of the network."""
    n = 32
    assert hardware.all_reduce(LARGE, build_levels(NODES, n)) == pytest.approx(2 * (n - 1) / n * LARGE / 8 / SLOW, rel=2e-3)
    assert hardware.all_gather(LARGE, build_levels(NODES, n)) == pytest.approx((n - 1) / n * LARGE / 8 / SLOW, rel=2e-3)
    across = build_levels(NODES, 4, 8)
    assert hardware.all_reduce(LARGE, across) == pytest.approx(2 * 3 / 4 * LARGE / SLOW, rel=2e-3)


def test_two_nodes_use_a_tree() -> None:
    """Each of two nodes sends the bytes once: half of a ring's bytes, unless the node itself is slower."""
    fast = (Link("nvlink", 8, 1e12, HOP_SECONDS["nvlink"][0]), NETWORK)
    assert hardware.all_reduce(LARGE, build_levels(fast, 16)) == pytest.approx(LARGE / 8 / SLOW, rel=2e-3)


def test_small_messages_cost_hops() -> None:
    """An empty message costs the call and 2 (n-1) hops of the fastest protocol. Over many nodes a tree has fewer hops."""
    low = PROTOCOLS[2].call + FITTED_CONSTANTS["call"]
    assert hardware.all_reduce(0, build_levels(NODES, 8)) == pytest.approx(low + 14 * HOP_SECONDS["nvlink"][2])
    many = low + 2 * (7 * HOP_SECONDS["nvlink"][2] + log2(64) * HOP_SECONDS["network"][2])
    assert hardware.all_reduce(0, build_levels(NODES, 512)) == pytest.approx(many)
    assert hardware.all_gather(0, build_levels(NODES, 512)) == pytest.approx(
        low + 448 * HOP_SECONDS["nvlink"][2] + 63 * HOP_SECONDS["network"][2]
    )
    assert hardware.all_reduce(1e9, ()) == hardware.send(1e9, ()) == hardware.all_to_all(1e9, ()) == 0


def test_all_to_all_and_send() -> None:
    """Of 16 parts, 7 are for devices of the node, and 8 cross the network at the same time."""
    assert hardware.all_to_all(LARGE, build_levels(NODES, 8)) == pytest.approx(7 / 8 * LARGE / RATE, rel=2e-3)
    assert hardware.all_to_all(LARGE, build_levels(NODES, 16)) == pytest.approx(8 / 16 * LARGE / SLOW, rel=2e-3)
    assert hardware.send(LARGE, build_levels(NODES, 2)) == pytest.approx(LARGE / RATE, rel=2e-3)
    assert hardware.send(LARGE, build_levels(NODES, 2, 8)) == pytest.approx(LARGE / SLOW, rel=2e-3)


def test_a_switch_that_adds_up() -> None:
    """A device sends (1 + 1/n) of the bytes instead of 2 (n-1)/n. This is faster for eight devices and not for two. Over nodes the network
    decides."""
    adding = Link("switch", 8, 100e9, HOP_SECONDS["nvlink"][0], adds=0.8)
    plain, added = (build_levels((link, NETWORK), 8) for link in (NVLINK, adding))
    assert hardware.all_reduce(LARGE, added) == pytest.approx(9 / 8 * LARGE / RATE / 0.8, rel=2e-3)
    assert hardware.all_reduce(LARGE, added) < hardware.all_reduce(LARGE, plain)
    assert hardware.all_gather(LARGE, added) == hardware.all_gather(LARGE, plain)
    two = build_levels((adding,), 2)
    assert hardware.all_reduce(LARGE, two) == pytest.approx(LARGE / RATE, rel=2e-3)
    assert hardware.all_reduce(LARGE, build_levels((adding, NETWORK), 32)) == pytest.approx(
        2 * 31 / 32 * LARGE / 8 / SLOW, rel=2e-3
    )


def test_links_reach_a_part_of_their_data_sheet() -> None:
    half = (Link("half", 8, 100e9, HOP_SECONDS["nvlink"][0], reached=0.5),)
    assert hardware.all_gather(LARGE, build_levels(half, 8)) == pytest.approx(7 / 8 * LARGE / 50e9, rel=2e-3)


def test_levels_of_a_group() -> None:
    def seen(ranks: int, stride: int = 1) -> list[tuple[int, int, int]]:
        return [(x.ranks, x.inside, x.repeats) for x in build_levels(NODES, ranks, stride)]

    assert seen(1) == [] and seen(8) == [(8, 1, 1)] and seen(16, 8) == [(16, 1, 1)]
    assert seen(32) == [(8, 1, 4), (4, 8, 1)] and seen(8, 4) == [(2, 1, 4), (4, 2, 1)]
    assert seen(12) == [(6, 1, 2), (2, 6, 1)], "two nodes, evenly"
    with pytest.raises(LookupError):
        build_levels((NVLINK,), 9)
    with pytest.raises(LookupError):
        build_levels((), 2)


def test_three_levels() -> None:
    """Pairs on a bridge, four devices on a bus, nodes: a ring inside a node is limited by the bus."""
    links = (Link("bridge", 2, 50e9, 1e-6), Link("bus", 4, 10e9, 1e-6, "pcie"), NETWORK)
    assert [(x.ranks, x.inside, x.repeats) for x in build_levels(links, 8)] == [(2, 1, 4), (2, 2, 2), (2, 4, 1)]
    assert hardware.all_reduce(LARGE, build_levels(links, 4)) == pytest.approx(2 * 3 / 4 * LARGE / 2 / 10e9, rel=2e-3)


def test_a_mesh_has_fewer_links_for_fewer_devices() -> None:
    mesh = (Link("mesh", 4, 100e9, 1e-6, shares=(0.25, 0.5, 1.0)),)
    pair, three, four = (hardware.all_gather(LARGE, build_levels(mesh, n)) for n in (2, 3, 4))
    assert pair == pytest.approx(1 / 2 * LARGE / 25e9, rel=2e-3)
    assert three == pytest.approx(2 / 3 * LARGE / 50e9, rel=2e-3)
    assert four == pytest.approx(3 / 4 * LARGE / RATE, rel=2e-3)


COLLECTIVES = st.sampled_from([hardware.all_reduce, hardware.all_gather, hardware.all_to_all, hardware.send])
SIZES = st.floats(0, 1e12)
GROUPS = st.tuples(st.integers(1, 4096), st.sampled_from([1, 2, 4, 8, 16]))


@settings(max_examples=300, deadline=None)
@given(COLLECTIVES, SIZES, SIZES, GROUPS)
def test_more_bytes_take_longer(collective, one: float, other: float, group: tuple[int, int]) -> None:
    times = [collective(size, build_levels(NODES, *group)) for size in sorted((one, other))]
    assert 0 <= times[0] <= times[1]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([hardware.all_reduce, hardware.all_gather]), SIZES, st.integers(1, 9), st.sampled_from([1, 2, 4, 8])
)
def test_more_ranks_take_longer_over_the_network(collective, size: float, doublings: int, stride: int) -> None:
    """The number of a node's devices in the group is constant. Only nodes are added."""
    few, many = (build_levels(NODES, 8 // stride * 2 ** (doublings + more), stride) for more in (0, 1))
    assert collective(size, few) <= collective(size, many)


@settings(max_examples=300, deadline=None)
@given(COLLECTIVES, SIZES, GROUPS, st.floats(1.1, 10))
def test_faster_links_are_never_slower(collective, size: float, group: tuple[int, int], factor: float) -> None:
    faster = (Link("a", 8, 100e9 * factor, 3.4e-6), Link("b", None, 10e9 * factor, 14e-6, "network"))
    assert collective(size, build_levels(faster, *group)) <= collective(size, build_levels(NODES, *group))


@settings(max_examples=200, deadline=None)
@given(SIZES, GROUPS)
def test_an_all_reduce_is_at_most_its_two_halves(size: float, group: tuple[int, int]) -> None:
    meeting = build_levels(NODES, *group)
    halves = hardware.reduce_scatter(size, meeting) + hardware.all_gather(size, meeting)
    assert hardware.all_reduce(size, meeting) <= halves * (1 + 1e-12)


@settings(max_examples=200, deadline=None)
@given(GROUPS)
def test_levels_multiply_to_the_group(group: tuple[int, int]) -> None:
    ranks, stride = group
    found = build_levels(NODES, ranks, stride)
    total = found[-1].inside * found[-1].ranks if found else 1
    assert ranks <= total < ranks + max(1, 8 // stride)
    hops = sum((x.ranks - 1) * x.repeats for x in found)
    assert hops == total - 1, "a lap of a ring passes every border once"
