"""Steps on pretended devices, over NCCL's rules: no tensor is left on the host, no stream reads what another still writes, the numbers are
those of the CPU, and what makes the host wait in a step is counted and bounded."""

import hashlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rarely import rarely

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATIENCE = 100.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def library() -> Path:
    """shadow.cpp, compiled once for each source and torch."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA of its own, and devices can be pretended in one without it alone")
    source, home = HERE / "shadow.cpp", Path(torch.__file__).parent
    key = hashlib.sha256(source.read_bytes() + source.with_name("clocks.h").read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    made = ROOT / "build" / f"shadow-{key}.so"
    if not made.exists():
        made.parent.mkdir(exist_ok=True)
        part = made.with_suffix(f".{os.getpid()}")
        where = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}", f"-L{home / 'lib'}"]
        flags = ["-shared", "-fPIC", "-std=c++20", "-O1", "-w", *where, "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{home / 'lib'}"]
        subprocess.run([compiler, str(source), "-o", str(part), *flags], check=True, timeout=250)
        part.rename(made)
    return made


class Devices:
    """A process that has pretended devices, and runs one case after another."""

    def __init__(self, made: Path):
        paths = [str(ROOT / "src"), str(HERE.parent)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "device.shadow_runs", str(made)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, cwd=HERE.parent,
        )  # fmt: skip

    def ask(self, **case: Any) -> dict[str, Any]:
        """What came of a case, within `PATIENCE` seconds."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(case).encode() + b"\n")
        self.process.stdin.flush()
        told, ends = b"", time.monotonic() + PATIENCE
        while not told.endswith(b"\n"):
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, ends - time.monotonic()))
            assert ready, f"{case} has not ended in {PATIENCE:g} s"
            more = os.read(self.process.stdout.fileno(), 1 << 16)
            assert more, f"the process of the devices has ended in {case}"
            told += more
        return json.loads(told)

    def end(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        self.process.stdout.close()

    @cache  # noqa: B019  (there is one)
    def on_cpu(self, name: str, plan: str = "dp=1", cast: str | None = "float64") -> list[float]:
        return self.ask(name=name, plan=plan, device="cpu", steps=2, cast=cast)["ranks"][0]["numbers"]


@pytest.fixture(scope="module")
def devices() -> Iterator[Devices]:
    found = Devices(library())
    yield found
    found.end()


BUDGET = {
    ("mlp", "dp=1"): 5, ("mlp", "dp=2"): 5, ("deep", "fsdp=2"): 13, ("words", "tp=2"): 13, ("deep", "pp=2 microbatches=4"): 23,
    ("attention", "cp=2"): 12, ("attention", "cp=2 context=ulysses"): 12, ("experts", "ep=2"): 37, ("batch_norm", "dp=2"): 8,
    ("deep", "dp=2 microbatches=3"): 25, ("deep", "dp=2 offload=optimizer"): 57, ("deep", "fsdp=2 tp=2"): 16,
    ("words", "pp=2 tp=2 microbatches=2 schedule=zb"): 19, ("experts", "fsdp=2 ep=2"): 37,
}  # fmt: skip
"""What may make the host of a rank wait in one step. These are measurements, to be lowered."""
MASKS = "randomness/distributions.py"


@pytest.mark.parametrize("name, plan", BUDGET)
def test_a_step_on_devices(name: str, plan: str, devices: Devices) -> None:
    found = devices.ask(name=name, plan=plan, device="cuda", steps=2)
    assert "error" not in found, found["error"]
    most = max((rank["waits"] for rank in found["ranks"]), key=lambda waits: sum(waits.values()))
    masks = sum(n for line, n in most.items() if line.startswith(MASKS))
    print(f"{name} under {plan}: {sum(most.values())} host synchronisations in a step, {masks} of them for masks")
    for line, n in sorted(most.items()):
        print(f"    {n:3} × {line}")
    for rank in found["ranks"]:
        assert rank["numbers"] == pytest.approx(devices.on_cpu(name), rel=1e-9)
    assert sum(most.values()) <= BUDGET[name, plan], most


@pytest.mark.parametrize(
    "name, plan",
    (
        ("attention", "cp=2 precision=bf16"), ("mlp", "dp=2 precision=fp16"), ("deep", "fsdp=2 precision=bf16"),
        *rarely(("words", "tp=2 precision=bf16"), ("deep", "pp=2 microbatches=2 precision=bf16"), ("attention", "cp=2")),
    ),
)  # fmt: skip
def test_steps_in_the_formats_of_training(name: str, plan: str, devices: Devices) -> None:
    found = devices.ask(name=name, plan=plan, device="cuda", steps=2, cast=None)
    assert "error" not in found, found["error"]
    for rank in found["ranks"]:
        assert rank["numbers"] == pytest.approx(devices.on_cpu(name, cast=None), rel=5e-2)


def test_checkpoints_and_evaluation(devices: Devices, tmp_path: Path) -> None:
    """Saved on devices under one plan, read on the CPU under another."""
    case = {"name": "deep", "folder": str(tmp_path), "steps": 2}
    one = devices.ask(name="deep", plan="dp=1", device="cpu", steps=4)["ranks"][0]
    found = devices.ask(**case, plan="fsdp=2", device="cuda")
    assert "error" not in found, found["error"]
    for plan, device in (("pp=2 microbatches=2", "cuda"), ("dp=1", "cpu")):
        then = devices.ask(**case, plan=plan, device=device, resume=True)
        assert "error" not in then, then["error"]
        if device == "cuda":
            assert found["ranks"][0]["numbers"] + then["ranks"][0]["numbers"] == pytest.approx(one["numbers"], rel=1e-9)
            assert all(rank["measured"] == pytest.approx(one["measured"], rel=1e-9) for rank in then["ranks"])


@pytest.mark.parametrize("name, plan", (("words", "fsdp=2"), *rarely(("words", "pp=2 tp=2 microbatches=2"), ("experts", "ep=2"))))
def test_a_proof_on_devices(name: str, plan: str, devices: Devices) -> None:
    found = devices.ask(prove=name, plan=plan)
    assert "error" not in found, found["error"]
    (verdict,) = found["ranks"]
    assert verdict["equal"] and "not compared" not in verdict["messages"], verdict


@pytest.mark.parametrize(
    "probe, words",
    (
        ("mixed", "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"),
        ("strided", "Tensors must be contiguous: shape (3, 2), strides (1, 3)"),
        ("beyond", "CUDA error: invalid device ordinal"),
    ),
)
def test_what_a_device_does_not_take(probe: str, words: str, devices: Devices) -> None:
    assert words in devices.ask(probe=probe, world=2)["error"]


def test_a_tensor_of_the_host_in_a_group_of_nccl_alone(devices: Devices) -> None:
    found = devices.ask(probe="host_collective", world=2, backend="cuda:nccl_rules")
    assert "No backend type associated with device type cpu" in found["error"]


def test_tensors_of_host_and_device_have_a_backend_each(devices: Devices) -> None:
    ranks = devices.ask(probe="summed", world=2)["ranks"]
    assert [rank["value"] for rank in ranks] == [[3.0, 3.0, 3.0, 2.0, f"cuda:{k}"] for k in range(2)]


def test_what_the_host_waits_for_is_counted(devices: Devices) -> None:
    (rank,) = devices.ask(probe="waits", world=1)["ranks"]
    assert sum(rank["waits"].values()) == len(rank["waits"]) == 11, rank["waits"]
    assert all(line.startswith("device/shadow_jobs.py:") for line in rank["waits"])
    ranks = devices.ask(probe="no_waits", world=2)["ranks"]
    assert [rank["waits"] for rank in ranks] == [{}, {}]


def test_copies_beside_the_host_are_of_pinned_memory(devices: Devices) -> None:
    (rank,) = devices.ask(probe="pinned", world=1)["ranks"]
    assert rank["value"] == [True, True, False, [1.0, 2.0, 1.0, 2.0]] and rank["waits"] == {}
    ((line, n),) = rank["unpinned"].items()
    assert n == 1 and line.endswith("copy to the device of 16 bytes")


def test_a_number_that_a_loss_reads_is_over_the_budget(devices: Devices) -> None:
    (rank,), (plain,) = (devices.ask(name=n, plan="dp=1", device="cuda", steps=2)["ranks"] for n in ("reading", "mlp"))
    assert sum(rank["waits"].values()) == sum(plain["waits"].values()) + 1
    assert any(line.startswith("device/shadow_jobs.py:") and "a number is read" in line for line in rank["waits"])


# — streams —


@pytest.mark.parametrize(
    "probe, words",
    (
        ("unwaited_stream", "aten::add reads a tensor of shape [4] on the default stream while aten::mul writes it on stream"),
        ("unwaited_write", "aten::zero_ writes a tensor of shape [4] on the default stream while aten::sum reads it on stream"),
        ("event_before_its_time", "aten::sum reads a tensor of shape [4] on the default stream while aten::add writes it"),
        ("unwaited_collective", "aten::add reads a tensor of shape [4] on the default stream while a collective or a message writes"),
        ("collective_of_what_is_not_there", "a collective or a message reads a tensor of shape [4] on stream"),
        ("waited_on_another_stream", "aten::add reads a tensor of shape [4] on the default stream while a collective"),
    ),
)
def test_streams_that_race(probe: str, words: str, devices: Devices) -> None:
    told = devices.ask(probe=probe, world=2)["error"]
    assert f"a race between streams: {words}" in told and "nobody has waited for that" in told


def test_streams_that_wait(devices: Devices) -> None:
    assert [rank["value"] for rank in devices.ask(probe="waited_for", world=2)["ranks"]] == [[8.0] * 4] * 2
    assert [rank["value"] for rank in devices.ask(probe="other_parts", world=1)["ranks"]] == [[3.0] * 4]


def test_the_waits_of_sharded_parameters_are_needed(devices: Devices) -> None:
    """FSDP2 gathers and sums on streams of its own; where they wait for nothing, it races."""
    told = devices.ask(name="deep", plan="fsdp=2", device="cuda", steps=2, deaf=True)
    assert "a race between streams" in told.get("error", ""), told
