"""Device-specific code of plait, tested without a device."""

from typing import Any

import jobs
import pytest
import torch
import torch.distributed as dist
from torch import nn

from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.engine import build
from plait.engine.build import list_inexact_reasons
from plait.engine.engine import Engine
from plait.launch.place import Place
from plait.model.sketch import Sketch
from plait.tensors import collectives
from plait.tensors.collectives import digest_tensor, find_differing


def test_backward_on_a_device_stays_in_the_thread_of_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd's thread for a device would not see the context variables that the forward pass sets."""
    chosen: list[Any] = []
    monkeypatch.setattr(build, "resolve_kind", lambda wanted: wanted)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr("plait.launch.devices.list_cuda_devices", lambda: ["one"] * 4)
    try:
        assert build.pick_device("cuda", Place(local_rank=3)) == torch.device("cuda", 3) == chosen[0]
        assert not torch._C._is_multithreading_enabled()
    finally:
        torch.autograd.set_multithreading_enabled(True)


def test_tf32_is_allowed_as_long_as_the_engine_is_open() -> None:
    """No process setting is changed afterwards, and a plan in fp32 changes none."""
    settings = lambda: (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)  # noqa: E731
    before, found = settings(), dict[str, Any]()
    for precision in ("tf32", "fp32"):
        with Engine(jobs.mlp(), f"precision={precision}", device="cpu") as engine:
            engine.step(next(engine.batches()))
            found[precision] = settings()
        assert settings() == before
    assert found == {"tf32": ("high", True), "fp32": before}
    with Engine(jobs.mlp(), "precision=tf32", device="cpu", cast=torch.float64):
        assert settings() == before, "a proof in float64 multiplies in float64"


@pytest.mark.parametrize(
    "said, sees, visible",
    (
        ("CUDA error: invalid device ordinal\nCUDA kernel errors might be", 1, "1 are visible"),
        ("HIP error: invalid device ordinal", 1, "1 are visible"),
        ("No CUDA GPUs are available", None, "0 are visible"),
    ),
)
def test_a_device_that_is_listed_and_not_seen(
    said: str, sees: int | None, visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MIG, or a container: the driver lists more devices than the runtime has. Other errors are unchanged."""
    words = [said]

    def set_device(device: torch.device) -> None:
        raise RuntimeError(words[0])

    monkeypatch.setattr(build, "resolve_kind", lambda wanted: wanted)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: sees is not None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: sees)
    monkeypatch.setattr("plait.launch.devices.list_cuda_devices", lambda: ["one"] * 4)
    with pytest.raises(PlaitError, match="process 3 of this machine needs device 3") as caught:
        build.pick_device("cuda", Place(local_rank=3))
    assert caught.value.codes == ["H003"] and visible in str(caught.value) and "the driver lists 4" in str(caught.value)
    words[0] = "CUDA error: out of memory"
    with pytest.raises(RuntimeError, match="out of memory"):
        build.pick_device("cuda", Place(local_rank=3))


def test_digests_travel_on_the_device_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group created with NCCL alone accepts no host tensors."""
    seen: list[torch.Tensor] = []

    def gather_parts(everyone: torch.Tensor, mine: torch.Tensor, group: Any) -> None:
        seen.extend([everyone, mine])
        raise StopIteration

    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(collectives, "ALL_GATHER", gather_parts)
    with pytest.raises(StopIteration):
        find_differing([("weight", torch.ones(3))], None, torch.device("meta"))
    assert [t.numel() for t in seen] == [2, 1] and all(t.is_meta and t.dtype == torch.int64 for t in seen)


def test_a_digest_is_arithmetic_modulo_two_to_the_64() -> None:
    words = [3, 2**63 - 1, -5, 7 << 40]
    total = 0
    for place, word in enumerate(words, 1):
        mixed = (word ^ (word >> 29)) * (place * 2 + 1)
        total += mixed
    assert int(digest_tensor(torch.tensor(words))) % 2**64 == total % 2**64


def test_what_a_gpu_draws_inside_its_kernels_is_named() -> None:
    """Dropout of recurrent layers, which cuDNN draws, and of attention, for which tp slices draw equal numbers."""

    def named(device: str, plan: str = "dp=1", unkeyed: tuple[str, ...] = (), **lstm: Any) -> list[str]:
        model = nn.Sequential(nn.LSTM(4, 4, **lstm))
        return list_inexact_reasons(Plan.parse(plan), Sketch((), unkeyed=unkeyed), model, torch.device(device))

    assert named("cuda", num_layers=2, dropout=0.1) == ["dropout between the layers of 0 is drawn by cuDNN, which plait cannot key"]
    assert named("cuda", num_layers=2) == named("cpu", num_layers=2, dropout=0.1) == named("cuda") == []
    (plain,) = named("cuda", unkeyed=("block.attention",))
    assert "block.attention come from an operator plait cannot key" in plain
    assert named("cuda", "tp=2", ("block.attention",))[1] == "those of block.attention are the same on each of the 2 tp ranks"
