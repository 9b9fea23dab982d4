"""`plait bench` measures in real processes and writes a machine file that is read again. How a machine is identified."""

import json
import subprocess
import sys
from collections.abc import Iterator
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from device import nccl

from plait.cli import bench, measure_machine
from plait.cli.main import main
from plait.config.errors import PlaitError
from plait.config.machine import Machine
from plait.launch import detect, devices, fork
from plait.launch.detect import read_machine
from plait.launch.place import count_cores

JOB = str(Path(__file__).parents[1] / "training.py")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Tiny sizes, and a separate current directory."""
    monkeypatch.setattr(measure_machine, "COLLECTIVE_SIZES", {"cpu": (4096, 65536)})
    monkeypatch.setattr(measure_machine, "MATMUL_SIDES", {"cpu": (16, 64)})
    monkeypatch.setattr(measure_machine, "COPY_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(measure_machine, "BUDGET_S", 0.01)
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "machine.toml"


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_what_is_measured_is_what_here_is(small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "all", JOB, "--nproc", "2", "--device", "cpu"]) == 0
    said = capfd.readouterr().out
    assert (
        "matmul fp32" in said
        and "all_reduce" in said
        and "samples/s per rank" in said
        and "wrote    machine.toml" in said
    )
    machine = read_machine("here")
    assert machine == Machine.load(small) and machine.devices_per_node == 2 and machine.is_measured
    assert {c.collective for c in machine.collectives} == set(measure_machine.COLLECTIVES)
    assert all(c.ranks == 2 and [x for x, _ in c.points] == [4096, 65536] for c in machine.collectives)
    assert all(0 < seconds < 5 for c in machine.collectives for _, seconds in c.points)
    assert [c.precision for c in machine.matmuls] == ["fp32", "bf16", "fp16"]
    assert all(0 < part <= 1 for c in machine.matmuls for _, part in c.points)
    assert machine.device.peak.fp32 and 1e6 < machine.device.peak.fp32 < 1e15
    assert machine.operator and 1e-7 < machine.operator < 1e-2 and machine.is_on_cores
    assert machine.device.memory_bandwidth and 1e8 < machine.device.memory_bandwidth < 1e13
    assert [each.job for each in machine.loaders] == [JOB] and machine.loaders[0].samples_per_s > 10
    assert machine.all_reduce(4096, 2) == machine.collectives[0].points[0][1] and machine.send(4096) > 0


def test_one_part_leaves_the_others_as_they_were(small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "compute", "--nproc", "1", "--device", "cpu"]) == 0
    before = Machine.load(small)
    assert before.matmuls and not before.collectives
    assert main(["bench", "data", JOB, "--nproc", "1", "--device", "cpu", "--json"]) == 0
    after = Machine.load(small)
    assert after.matmuls == before.matmuls and len(after.loaders) == 1
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["loaders"][JOB] == after.loaders[0].samples_per_s


@pytest.mark.parametrize(
    ("words", "code"), [(["data"], "U001"), (["comm", "--nproc", "0"], "U002"), (["all", "none.py"], "J001")]
)
def test_what_is_refused(words: list[str], code: str, small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert f"error[{code}]" in capfd.readouterr().err and not small.exists()


def test_one_process_has_nobody_to_talk_to(small: Path) -> None:
    """A measurement of two processes is not reused for one."""
    small.write_text(Machine.from_name("h100x2x1").with_network(1e9).to_toml(), encoding="utf-8")
    assert main(["bench", "comm", "--nproc", "1", "--device", "cpu"]) == 0
    machine = Machine.load(small)
    assert machine.devices == 1 and not machine.collectives and not machine.links


def test_devices_are_measured_by_the_collectives_of_training(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No lists of parts: torch's list collectives make copies that training on devices avoids."""

    def of_lists(*args: object, **given: object) -> None:
        raise AssertionError("a collective of a list of parts")

    for name in ("all_gather", "reduce_scatter"):
        monkeypatch.setattr(dist, name, of_lists)
    with nccl.instead_of_gloo():
        found = fork.run_ranks(lambda place: measure_machine.measure_collectives(place, "cpu"), 2)
    (group,) = found[0]["groups"]
    assert group["ranks"] == 2 and group["points"].keys() == measure_machine.COLLECTIVES.keys()
    assert all([size for size, _ in points] == [4096, 65536] for points in group["points"].values())


def test_large_messages_are_measured_where_devices_have_room() -> None:
    assert measure_machine.select_sizes(inf, "cpu") == tuple(4096 * 4**i for i in range(8))
    assert measure_machine.select_sizes(80e9, "cuda")[-2:] == (1 << 28, 1 << 30)
    assert measure_machine.select_sizes(3.9 * 2**30, "cuda")[-1] == 1 << 28
    assert measure_machine.select_sizes(0, "cuda") == ()


def test_groups_that_are_measured() -> None:
    assert [measure_machine.list_group_sizes(n) for n in (1, 2, 3, 6, 8)] == [[], [2], [3], [2, 6], [2, 4, 8]]


def test_a_smaller_message_never_takes_longer() -> None:
    assert bench.make_monotonic([[1, 5.0], [2, 3.0], [4, 4.0], [8, 9.0]]) == ((1, 3.0), (2, 3.0), (4, 4.0), (8, 9.0))


def test_without_a_device_cores_are_the_devices(small: Path) -> None:
    machine = detect.load_local_machine()
    assert machine == detect.detect_machine() or devices.list_cuda_devices()
    machine = detect.detect_machine("cpu")
    assert machine.devices == machine.cores == count_cores() and machine.device.name and machine.links == ()
    assert machine.host_memory and machine.device.memory == machine.host_memory // count_cores()
    if count_cores() > 1:
        with pytest.raises(PlaitError, match="M013"):
            machine.all_reduce(1e6, 2)


class FakeNvml(SimpleNamespace):
    """The answers of nvidia-ml-py, as far as plait calls it."""

    class NVMLError(Exception):
        pass

    links: int = 0

    def nvmlInit(self) -> None:
        self.open = True

    def nvmlShutdown(self) -> None:
        self.open = False

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, device: int) -> SimpleNamespace:
        assert self.open
        return SimpleNamespace(total=81559 * 2**20)

    def nvmlDeviceGetNvLinkState(self, device: int, link: int) -> int:
        if link >= self.links:
            raise FakeNvml.NVMLError
        return 1


@pytest.mark.parametrize(
    ("name", "links", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 18, ["NVLink4 + NVSwitch", "network"]),
        ("NVIDIA H100 80GB HBM3", 0, ["PCIe", "network"]),
        ("NVIDIA L4", 0, ["PCIe"]),
        ("NVIDIA Q9", 4, []),
    ],
)
def test_devices_are_found_by_what_the_driver_calls_them(
    name: str, links: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeNvml(links=links)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(devices, "list_cuda_devices", lambda: [name, name])
    machine = detect.detect_machine()
    assert machine.devices == 2 and [link.name for link in machine.links] == expected
    assert machine.device.memory == 81559 * 2**20 and machine.cores == count_cores() and not fake.open
    assert machine.device.name == {"NVIDIA H100 80GB HBM3": "H100-SXM-80GB", "NVIDIA L4": "L4"}.get(name, name)
    assert (machine.device.peak.bf16 is None) == (name == "NVIDIA Q9")


def test_without_nvml_a_process_of_its_own_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the separate process starts CUDA, so this process may still fork."""
    asked = []

    def run(command: list[str], **options: object) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(stdout="85017755648\n")

    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(devices, "list_cuda_devices", lambda: ["NVIDIA L4"])
    machine = detect.detect_machine()
    assert machine.device.memory == 85017755648 and asked[0][0] == sys.executable and "PCIe4 x16" in str(machine.links)
