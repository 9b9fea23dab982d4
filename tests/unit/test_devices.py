"""Devices are counted by what CUDA sees, and more ranks than devices are refused before a start."""

import subprocess
import sys
from typing import Any

import pytest
import torch
import training

from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.launch import detect, devices
from plait.launch.place import Place
from plait.proof import verify
from plait.tensors import torch_private


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A torch with CUDA on a machine whose files list four devices; `driver(n)`: the driver shows n of them."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(devices, "_listed", lambda: [f"NVIDIA {n}" for n in "abcd"])
    return lambda count: monkeypatch.setattr(torch_private, "devices_by_driver", lambda: count)


@pytest.mark.parametrize(
    "count, names", ((2, ["NVIDIA a", "NVIDIA b"]), (0, []), (None, [f"NVIDIA {n}" for n in "abcd"]))
)
def test_what_the_driver_shows_counts(count: int | None, names: list[str], driver: Any) -> None:
    driver(count)
    assert devices.cuda_names() == names
    assert devices.kind_of("auto") == ("cuda" if names else "cpu")


def test_more_than_are_listed(driver: Any) -> None:
    driver(5)
    assert devices.cuda_names()[3:] == ["NVIDIA d", "a device"]


def test_hip_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch_private, "devices_by_driver", lambda: 8)
    assert len(devices.cuda_names()) == 8 and devices.kind_of("auto") == "cuda"


def test_more_ranks_than_devices_are_refused_before_the_fork(driver: Any) -> None:
    driver(2)
    devices.check("cuda", 2)
    devices.check("cpu", 64)
    for refused in (lambda: devices.check("cuda", 3), lambda: verify.verify(training.job(), Plan(dp=3), device="cuda")):
        with pytest.raises(PlaitError, match="2 are visible") as caught:
            refused()
        assert caught.value.codes == ["H003"] and "--nproc 2" in str(caught.value)


def test_the_device_of_a_rank(driver: Any) -> None:
    driver(2)
    assert [devices.of_rank(Place(r, 4, r)) for r in range(2)] == [0, 1]
    with pytest.raises(PlaitError, match="wants device 2; 2 are visible"):
        devices.of_rank(Place(2, 4, 2))
    for place, why in ((Place(0, 4, unsaid=True), "LOCAL_RANK is not"), (Place(0, 4, only=True), "1 would be idle")):
        with pytest.raises(PlaitError, match=why) as caught:
            devices.of_rank(place)
        assert caught.value.codes == ["L004"]
    driver(1)
    assert devices.of_rank(Place(0, 4, unsaid=True)) == devices.of_rank(Place(0, 4, only=True)) == 0


def test_a_device_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: object) -> Any:
        raise subprocess.CalledProcessError(
            1, command, stderr="Traceback …\nRuntimeError: no CUDA-capable device is detected\n"
        )

    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(devices, "cuda_names", lambda: ["NVIDIA L4"])
    with pytest.raises(PlaitError, match="no CUDA-capable device") as caught:
        detect.found()
    assert caught.value.codes == ["H009"]
