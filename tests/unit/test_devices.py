"""Devices are counted as CUDA sees them. A start with more ranks than devices is rejected."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import training
from torch import nn

from plait import Engine
from plait.cli.train import _list_notes as notes_of
from plait.cli.train import format_headline
from plait.cli.train_request import TrainRequest
from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.launch import detect, devices
from plait.launch.place import Place
from plait.model.build_model import make_model
from plait.proof import verify
from plait.tensors import torch_private


@pytest.fixture
def amd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A torch for ROCm, on a machine whose kernel lists a CPU and three devices."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch_private, "devices_by_driver", lambda: None)
    for name in devices.VISIBLE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for node, minor, name in (
        (0, 0, ""),
        (1, 128, "AMD Instinct MI300X\n"),
        (2, 136, ""),
        (10, 144, "AMD Instinct MI250X\n"),
    ):
        at = tmp_path / f"class/kfd/kfd/topology/nodes/{node}"
        at.mkdir(parents=True)
        (at / "properties").write_text(
            f"cpu_cores_count {64 * (node == 0)}\nsimd_count {304 * (node > 0)}\ndrm_render_minor {minor}\n"
        )
        if name:
            board = tmp_path / f"class/drm/renderD{minor}/device"
            board.mkdir(parents=True)
            (board / "product_name").write_text(name)
    amd = devices._list_amd_names
    monkeypatch.setattr(devices, "_list_amd_names", lambda: amd(tmp_path))
    monkeypatch.setattr(devices.shutil, "which", lambda name: pytest.fail(f"{name} is asked on ROCm"))
    return tmp_path


THREE = ["AMD Instinct MI300X", "AMD device", "AMD Instinct MI250X"]


@pytest.mark.parametrize(
    "variables, names",
    (
        ({}, THREE), ({"HIP_VISIBLE_DEVICES": "2,0"}, [THREE[2], THREE[0]]), ({"CUDA_VISIBLE_DEVICES": "2"}, [THREE[2]]),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "2"}, [THREE[0]]), ({"HIP_VISIBLE_DEVICES": ""}, []),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, [THREE[2]]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-7f"}, ["AMD device"]),
    ),
)  # fmt: skip
def test_devices_of_rocm_are_listed_without_its_tools(
    variables: dict[str, str], names: list[str], amd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert devices.list_cuda_devices() == names
    assert devices.describe_kind("cuda") == ("ROCm", "rccl") and devices.describe_kind("cpu") == ("CPU", "gloo")
    if len(names) == 1:
        with pytest.raises(PlaitError, match="VISIBLE_DEVICES") as caught:
            devices.check_devices("cuda", 2)
        assert caught.value.codes == ["H003"]


def test_the_headline_names_rocm(amd: Path) -> None:
    request = TrainRequest("net.py", training.job(), Plan(dp=2), device="cuda")
    assert "dp=2 on 2 ROCm processes (rccl)" in format_headline(request)
    assert "on 2 CPU processes (gloo)" in format_headline(replace(request, device="cpu"))


@pytest.mark.parametrize("wanted", ("xpu", "mps", "tpu"))
def test_other_kinds_of_devices_are_named(wanted: str) -> None:
    with pytest.raises(PlaitError, match=wanted) as caught:
        Engine(training.job(), device=wanted)
    assert caught.value.codes == ["H012"] and "--device cuda" in str(caught.value)


def test_a_kind_that_torch_has_and_plait_has_not_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.list_unused_kinds() == []
    monkeypatch.setattr(torch.version, "xpu", "20250")
    request = TrainRequest("net.py", training.job(), Plan())
    assert notes_of(request) == ["note  xpu is not supported yet; running on CPU"]
    assert notes_of(replace(request, device="cpu")) == []
    with pytest.raises(PlaitError, match="it has xpu, which plait does not use yet"):
        devices.resolve_kind("cuda")


@pytest.mark.parametrize(
    "mapped, spread",
    (({"": 0}, False), ({"a": "cpu", "b": "cpu"}, False), ({"a": 0, "b": 1, "c": 1, "d": "cpu"}, True)),
)
def test_a_model_that_is_spread_over_devices(mapped: dict[str, Any], spread: bool) -> None:
    def model() -> nn.Module:
        made = nn.Linear(2, 2)
        made.hf_device_map = mapped  # as accelerate leaves it
        return made

    job = replace(training.job(), model=model)
    if not spread:
        assert isinstance(make_model(job), nn.Linear)
        return
    with pytest.raises(PlaitError, match="spread over 3 devices, and a rank drives one") as caught:
        make_model(job)
    assert caught.value.codes == ["J043"] and "a on 0; c on 1; d on cpu" in str(caught.value)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A torch with CUDA on a machine whose files list four devices. `driver(n)`: the driver shows n of them."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "_list_nvidia_names", lambda: [f"NVIDIA {n}" for n in "abcd"])
    return lambda count: monkeypatch.setattr(torch_private, "devices_by_driver", lambda: count)


@pytest.mark.parametrize(
    "count, names", ((2, ["NVIDIA a", "NVIDIA b"]), (0, []), (None, [f"NVIDIA {n}" for n in "abcd"]))
)
def test_what_the_driver_shows_counts(count: int | None, names: list[str], driver: Any) -> None:
    driver(count)
    assert devices.list_cuda_devices() == names
    assert devices.resolve_kind("auto") == ("cuda" if names else "cpu")


def test_more_than_are_listed(driver: Any) -> None:
    driver(5)
    assert devices.list_cuda_devices()[3:] == ["NVIDIA d", "a device"]


def test_hip_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch_private, "devices_by_driver", lambda: 8)
    assert len(devices.list_cuda_devices()) == 8 and devices.resolve_kind("auto") == "cuda"


def test_more_ranks_than_devices_are_refused_before_the_fork(driver: Any) -> None:
    driver(2)
    devices.check_devices("cuda", 2)
    devices.check_devices("cpu", 64)
    for refused in (lambda: devices.check_devices("cuda", 3), lambda: verify.verify(training.job(), Plan(dp=3), device="cuda")):
        with pytest.raises(PlaitError, match="2 are visible") as caught:
            refused()
        assert caught.value.codes == ["H003"] and "--nproc 2" in str(caught.value)


def test_the_device_of_a_rank(driver: Any) -> None:
    driver(2)
    assert [devices.find_rank_device(Place(r, 4, r)) for r in range(2)] == [0, 1]
    with pytest.raises(PlaitError, match="needs device 2; 2 are visible"):
        devices.find_rank_device(Place(2, 4, 2))
    for place, why in ((Place(0, 4, unsaid=True), "LOCAL_RANK is not"), (Place(0, 4, is_one_per_node=True), "1 would be idle")):
        with pytest.raises(PlaitError, match=why) as caught:
            devices.find_rank_device(place)
        assert caught.value.codes == ["L004"]
    driver(1)
    assert devices.find_rank_device(Place(0, 4, unsaid=True)) == devices.find_rank_device(Place(0, 4, is_one_per_node=True)) == 0


def test_a_device_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: object) -> Any:
        raise subprocess.CalledProcessError(
            1, command, stderr="Traceback …\nRuntimeError: no CUDA-capable device is detected\n"
        )

    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(devices, "list_cuda_devices", lambda: ["NVIDIA L4"])
    with pytest.raises(PlaitError, match="no CUDA-capable device") as caught:
        detect.detect_machine()
    assert caught.value.codes == ["H009"]
