"""Machines: the catalog, names, files, errors, and times that depend on placement and size."""

import subprocess
import sys
import tomllib
from dataclasses import fields, replace
from math import log10
from pathlib import Path

import pytest

from plait.config.errors import PlaitError
from plait.config.hardware import (
    CORES_NOTE,
    FITTED_CONSTANTS,
    LINK_EFFICIENCY,
    Collectives,
    Device,
    Loader,
    Matmuls,
    Rates,
    extrapolate_seconds,
    interpolate,
)
from plait.config.machine import Machine
from plait.config.machine_file import CATALOG_FOLDER, MACHINE_KEYS, read_catalog
from plait.launch.detect import read_machine

FILES = sorted(CATALOG_FOLDER.glob("*.toml"))
UNITS = ("_gib", "_gb_per_s", "gb_per_s", "_tflops", "gbit_per_s_per_node", "_us")
MINE = """
name = "mine"
devices_per_node = 4
nodes = 2
price_per_hour = 1.5
[device]
name = "some device"
memory_gib = 10.5
memory_gb_per_s = 100
[device.peak_tflops]
bf16 = 200
[device.matmul_tflops]
bf16 = 150
[host]
gb_per_s = 20
[[links]]
name = "bridge"
kind = "nvlink"
devices = 2
gb_per_s = 50
[[links]]
name = "bus"
kind = "pcie"
gb_per_s = 10
[[links]]
name = "cards"
kind = "network"
gbit_per_s_per_node = 320
latency_us = 20
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_machine_of_the_catalogue_loads(path: Path) -> None:
    machine = Machine.load(path)
    assert machine.name == path.stem and machine.source
    assert 2**33 <= machine.device.memory <= 2**40
    for rate in ("fp32", "tf32", "fp16", "bf16", "fp8"):
        share = machine.device.achievable.for_precision(rate)
        assert share is None or 0.4 < share < 1, f"{rate}: {share} of the peak"
    assert [x.bandwidth for x in machine.links] == sorted((x.bandwidth for x in machine.links), reverse=True)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_number_of_the_catalogue_has_a_unit_and_a_source(path: Path) -> None:
    """A source for the file or the table. A unit in the name of the key or of its table, unless the value is a count."""
    said = tomllib.loads(path.read_text(encoding="utf-8"))
    assert len(said["source"]) > 5
    tables = [
        ("", said),
        ("device", said["device"]),
        ("host", said.get("host", {})),
        *(("links", x) for x in said.get("links", ())),
    ]
    tables += [(name, said["device"].get(name, {})) for name in ("peak_tflops", "matmul_tflops")]
    for table, rows in tables:
        for key, value in rows.items():
            if isinstance(value, (int, float)):
                counts = ("devices", "devices_per_node", "nodes", "reached", "adds", "multiprocessors")
                assert key in counts or key.endswith(UNITS) or table.endswith(UNITS), f"{path.name}: {table} {key}"


def test_names_are_of_one_machine_each() -> None:
    said = [tomllib.loads(path.read_text(encoding="utf-8")) for path in FILES]
    names = [name for one in said for name in (one["name"], *one.get("aliases", ()))]
    assert len(names) == len(set(names)) and set(names) == set(read_catalog())
    reported = [name for one in said for name in one.get("reported", ())]
    assert len(reported) == len(set(reported))


@pytest.mark.parametrize(
    ("name", "per_node", "nodes", "device"),
    [
        ("h100", 1, 1, "H100-SXM-80GB"), ("h100x8", 8, 1, "H100-SXM-80GB"), ("H100x8x16", 8, 16, "H100-SXM-80GB"),
        ("h100x16", 8, 2, "H100-SXM-80GB"), ("h100x4x3", 4, 3, "H100-SXM-80GB"), ("a100-40gbx8x4", 8, 4, "A100-SXM-40GB"),
        ("A100-SXM-80GB", 1, 1, "A100-SXM-80GB"), ("rtx 3090x2", 2, 1, "RTX 3090"), ("rtx3090x4", 4, 1, "RTX 3090"),
        ("l4x8x2", 8, 2, "L4"), ("gb200x72", 72, 1, "GB200"),
    ],
)  # fmt: skip
def test_a_name_says_device_devices_and_nodes(name: str, per_node: int, nodes: int, device: str) -> None:
    machine = Machine.from_name(name)
    assert (machine.devices_per_node, machine.nodes, machine.device.name) == (per_node, nodes, device)
    assert machine.devices == per_node * nodes


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("h10x8", "did you mean  h100 ?"),
        ("zzz", "known: "),
        ("h100x12", "1.50 nodes"),
        ("", "known: "),
        ("h100x0", "h100"),
    ],
)
def test_an_unknown_name_is_refused(name: str, says: str) -> None:
    with pytest.raises(PlaitError) as caught:
        Machine.from_name(name)
    assert caught.value.codes == ["M010"] and says in str(caught.value)


def test_a_network_card_is_shared_by_the_devices_of_a_node() -> None:
    """8 × 400 Gbit/s: 50 GB/s for each of 8 devices, and for 4 of them, which have their own cards. 25 for each of 16."""
    rates = [Machine.from_name(name).links[-1].bandwidth for name in ("h100x8", "h100x4", "h100x16x1")]
    assert rates == [50e9, 50e9, 25e9]


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    machine = Machine.load(write(tmp_path, MINE))
    assert machine == read_machine(str(tmp_path / "mine.toml"))
    assert machine.device.memory == 10.5 * 2**30 and machine.device.memory_bandwidth == 1e11
    assert machine.device.peak == Rates(bf16=2e14) and machine.device.achievable == Rates(bf16=0.75)
    assert [(x.devices, x.bandwidth) for x in machine.links] == [(2, 5e10), (4, 1e10), (None, 1e10)]
    assert [x.reached for x in machine.links] == [LINK_EFFICIENCY, LINK_EFFICIENCY, FITTED_CONSTANTS["network"]]
    assert machine.links[-1].latency == pytest.approx(20e-6) and machine.host == 2e10 and machine.devices == 8
    assert machine.price_per_hour == 1.5 and str(machine) == "2 nodes of 4 × some device, bridge"
    assert not machine.is_measured and machine.resize(20).nodes == 5


def test_fewer_processes_have_more_threads() -> None:
    rates = Rates(fp32=1e11, bf16=2e11)
    cores = Machine("here", Device("some CPU", 2**33, 2e10, rates), devices_per_node=8, cores=8, notes=CORES_NOTE)
    four, one = cores.resize(2), cores.resize(1)
    assert (cores.threads, four.threads, one.threads, cores.resize(3).threads, cores.resize(16).threads) == (1, 4, 8, 2, 1)
    assert four.device.peak == Rates(fp32=pytest.approx(1e11 * 4**0.8), bf16=pytest.approx(2e11 * 4**0.8))
    assert four.device.memory_bandwidth == pytest.approx(2e10 * 4**0.8) and four.device.memory == 4 * 2**33
    assert one.device.peak.fp32 == pytest.approx(four.resize(1).device.peak.fp32) and four.resize(8).device.peak.fp32 == pytest.approx(1e11)
    assert cores.resize(16).device.peak == rates
    unknown = Machine("here", Device("some CPU", 2**33), devices_per_node=8, cores=8, notes=CORES_NOTE).resize(2)
    assert unknown.device.peak == Rates() and unknown.device.memory_bandwidth is None
    assert Machine.from_name("h100x8").resize(2).device == Machine.from_name("h100x8").device


@pytest.mark.parametrize("name", ["v100x8x2", "rtx-4090x2", "tpu-v5e", "h100x8x16"])
def test_to_toml_reads_back(name: str, tmp_path: Path) -> None:
    machine = Machine.from_name(name)
    curve, sums = ((1e9, 0.2), (1e12, 0.7)), ((4096.0, 3e-5), (2.0**26, 0.01))
    full = replace(
        machine, cores=64, host_memory=2**40, price_per_hour=2.0, loaders=(Loader("job.py", 812.5),), matmuls=(Matmuls("bf16", curve),),
        collectives=(Collectives("all_reduce", 2, sums),),
    )  # fmt: skip
    for one in (machine, full):
        assert_same(Machine.load(write(tmp_path, one.to_toml())), one)
    assert full.is_measured


def assert_same(one: Machine, other: Machine) -> None:
    """Equal, with numbers equal to fifteen digits: a unit conversion may change the last one."""
    for field in fields(Machine):
        a, b = getattr(one, field.name), getattr(other, field.name)
        assert rounded(a) == rounded(b), field.name


def rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.14g}")
    if isinstance(value, tuple):
        return tuple(map(rounded, value))
    return (
        {f.name: rounded(getattr(value, f.name)) for f in fields(value)}
        if hasattr(value, "__dataclass_fields__")
        else value
    )


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ("nodess = 2\n", "M011", "did you mean  nodes ?"),
        ("nodes = 0\n", "M012", "nodes = 0        expected a whole number"),
        ('cores = "2"\n', "M012", 'cores = "2"        expected a whole number'),
        ("price_per_hour = -1\n", "M012", "expected a number above 0"),
        ("price_per_hour = inf\n", "M012", "expected a number above 0"),
        ("device = 3\n", "M012", "[device] is not a table of keys"),
        ("links = [3]\n", "M012", "[links] is not a table of keys"),
        ("nodes = \n", "M012", "is not TOML"),
    ],
)
def test_what_is_wrong_with_a_file(change: str, code: str, says: str, tmp_path: Path) -> None:
    rest = MINE.replace("nodes = 2\n", "", 1).replace("price_per_hour = 1.5\n", "", 1)
    if change.startswith(("device", "links")):
        rest = 'name = "mine"\n'
    with pytest.raises(PlaitError) as caught:
        Machine.load(write(tmp_path, change + rest))
    assert code in caught.value.codes and says in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("memory_gib = 10.5", "", "no [device] memory_gib"),
        ("bf16 = 200", "bf17 = 200", "[device.peak_tflops] bf17        did you mean  bf16 ?"),
        ("gb_per_s = 50", "gb_per_s = 50\ngbit_per_s_per_node = 5", "[links] give one of"),
        ('kind = "pcie"', 'kind = "pci"', "did you mean  pcie ?"),
        ('kind = "pcie"', "", "[links] kind is missing"),
        ("latency_us = 20", '[[collectives]]\ncollective = "send"\nbytes = [2, 1]\nseconds = [1, 2]', "bytes rising"),
        ("latency_us = 20", '[[matmuls]]\nprecision = "bf16"\nflops = [1, 2]', "fraction_of_peak is missing"),
    ],
)
def test_what_is_wrong_with_a_table(old: str, new: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(PlaitError, match=r"M01[12]") as caught:
        Machine.load(write(tmp_path, MINE.replace(old, new, 1)))
    assert says in str(caught.value)


def test_all_faults_are_shown_together(tmp_path: Path) -> None:
    with pytest.raises(PlaitError) as caught:
        Machine.load(write(tmp_path, MINE.replace("bf16 = 200", "bf17 = 200").replace("nodes = 2", "nodes = 0")))
    assert caught.value.codes == ["M012", "M011"]
    with pytest.raises(PlaitError, match="M012"):
        Machine.load(tmp_path / "none.toml")


def test_a_link_that_no_source_gives_is_not_guessed() -> None:
    machine = Machine.from_name("a800x8x2")
    assert machine.all_reduce(1e9, 8) > 0
    with pytest.raises(PlaitError, match="M013") as caught:
        machine.all_reduce(1e9, 16)
    assert "NVLink3 (cut) (8 devices)" in str(caught.value)
    with pytest.raises(PlaitError, match="M013"):
        Machine.from_name("gh200x4").all_reduce(1.0, 4)


def test_times_follow_place() -> None:
    """A gigabyte among 8 devices of a node uses NVLink. Among one device of each of 16 nodes it uses the network."""
    machine = Machine.from_name("h100x8x16")
    inside, across, all_of_it = (machine.all_reduce(1e9, *g) for g in ((8, 1), (16, 8), (128, 1)))
    assert inside < all_of_it < across
    assert across == pytest.approx(2 * 15 / 16 * 1e9 / 50e9 / FITTED_CONSTANTS["network"], rel=0.03)
    assert machine.all_gather(1e9, 8) == machine.reduce_scatter(1e9, 8) < inside
    assert machine.send(1e9) < machine.send(1e9, 8)
    assert machine.all_reduce(1e9, 1) == machine.all_reduce(0, 8) == 0


def test_published_bandwidths_that_nothing_was_fitted_to() -> None:
    """H100, 8 on a node: all-reduce 476 to 480 GB/s of bus bandwidth if the switch reduces, 420 among 5, 370 in a ring
    (github.com/NVIDIA/nccl/issues/1455). Three nodes of 8 A100 with 4 × 200 Gbit/s: at most 96 GB/s (nccl-tests/119).
    """
    h100, large = Machine.from_name("h100x8"), 8 * 2**30

    def bus(ranks: int) -> float:
        return 2 * (ranks - 1) / ranks * large / h100.all_reduce(large, ranks) / 1e9

    assert [bus(n) for n in (2, 4, 5, 8)] == pytest.approx([370, 370, 420, 478], rel=0.03)
    assert 7 / 8 * large / h100.all_gather(large, 8) / 1e9 == pytest.approx(370, rel=0.03)
    a100 = Machine.from_name("a100-40gbx8x3").with_network(4 * 200e9)
    assert a100.links[-1].bandwidth == 12.5e9 and len(a100.links) == 2
    assert 2 * 23 / 24 * 2**27 / a100.all_reduce(2**27, 24) / 1e9 == pytest.approx(96, rel=0.1)


def test_what_was_measured_is_preferred() -> None:
    """At the measured points, between them and beyond them. For other numbers of ranks, in the same ratio to the formula."""
    points = ((1e6, 1e-3), (3e6, 2e-3))
    plain = Machine.from_name("h100x8x2")
    machine = replace(plain, collectives=(Collectives("all_reduce", 4, points),))
    assert machine.all_reduce(1e6, 4) == 1e-3 and machine.all_reduce(2e6, 4) == pytest.approx(1.5e-3)
    assert machine.all_reduce(7e6, 4) == pytest.approx(4e-3) and machine.all_reduce(10, 4) == 1e-3
    ratio = plain.all_reduce(1e6, 8) / plain.all_reduce(1e6, 4)
    assert machine.all_reduce(1e6, 8) == pytest.approx(1e-3 * ratio)
    assert machine.all_reduce(1e6, 16) == plain.all_reduce(1e6, 16), "other nodes were not measured"
    assert machine.all_gather(1e6, 4) == plain.all_gather(1e6, 4)


def test_fractions_of_the_peak() -> None:
    machine = Machine.from_name("h100")
    assert machine.matmul_fraction("bf16", 1e12) == pytest.approx(794.5 / 989)
    assert machine.matmul_fraction("fp32", 1e12) is None
    curve = Matmuls("bf16", ((1e8, 0.1), (1e10, 0.5)))
    measured = replace(machine, matmuls=(curve,))
    found = [measured.matmul_fraction("bf16", 10**x) for x in (7, 8, 9, 10, 13)]
    assert found == pytest.approx([0.1, 0.1, 0.3, 0.5, 0.5]) and log10(1e9) == 9


def test_lines_between_points() -> None:
    points = ((1.0, 10.0), (3.0, 20.0))
    assert [interpolate(points, x) for x in (0, 1, 2, 3, 9)] == [10, 10, 15, 20, 20]
    assert [extrapolate_seconds(points, x) for x in (0, 2, 5)] == [10, 15, 30] and extrapolate_seconds(points[:1], 7) == 10


def test_a_machine_needs_no_torch() -> None:
    code = "import sys, plait.config.machine; plait.config.machine.Machine.from_name('h100x8'); assert 'torch.distributed' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_keys_say_their_unit() -> None:
    counts = {
        "devices_per_node",
        "nodes",
        "cores",
        "devices",
        "ranks",
        "shares",
        "reached",
        "adds",
        "fraction_of_peak",
        "multiprocessors",
        "flops",
        "bytes",
    }
    numbers = {
        key
        for keys in MACHINE_KEYS.values()
        for key, check in keys.items()
        if check.__name__ in ("_is_numbers", "_is_positive", "_is_count")
    }
    others = numbers - counts - {f.name for f in fields(Rates)}
    assert {k for k in others if not k.endswith((*UNITS, "per_hour", "per_s", "seconds"))} == set()


def test_links_inside_a_node_join_no_more_devices_than_it_has() -> None:
    together, apart = Machine.from_name("h100x8"), Machine.from_name("h100x1x8")
    assert apart.all_reduce(1e9, 8) > 2 * together.all_reduce(1e9, 8)
    halves = Machine.from_name("h100x4x2")
    assert halves.all_reduce(1e9, 4) == together.all_reduce(1e9, 4) and halves.all_reduce(1e9, 8) > together.all_reduce(
        1e9, 8
    )
