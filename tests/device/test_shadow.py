"""Steps on simulated devices, with NCCL's rules. No tensor is left on the host, and no stream reads a tensor that another still writes.
The losses equal those of the CPU. The waits of the host in a step are counted and bounded.
"""

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
    """Compile shadow.cpp, once for each source and torch."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA of its own, and devices can be pretended in one without it alone")
    source, home = HERE / "shadow.cpp", Path(torch.__file__).parent
    parts = (source.read_bytes(), *(source.with_name(name).read_bytes() for name in ("blocks.h", "clocks.h")), torch.__version__.encode())
    key = hashlib.sha256(b"".join(parts)).hexdigest()[:16]
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
    """A process with simulated devices, which runs one case after another."""

    def __init__(self, made: Path):
        paths = [str(ROOT / "src"), str(HERE.parent)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "device.shadow_runs", str(made)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, cwd=HERE.parent,
        )  # fmt: skip

    def ask(self, **case: Any) -> dict[str, Any]:
        """Return the result of a case, within `PATIENCE` seconds."""
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

    def ranks(self, **case: Any) -> list[dict[str, Any]]:
        """Return the result of a case on each rank; an error in it fails the test."""
        found = self.ask(**case)
        assert "error" not in found, found["error"]
        return found["ranks"]

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
    def on_cpu(self, name: str, plan: str = "dp=1", cast: str | None = "float64", steps: int = 2) -> list[float]:
        return self.ranks(name=name, plan=plan, device="cpu", steps=steps, cast=cast)[0]["numbers"]


@pytest.fixture(scope="module")
def devices() -> Iterator[Devices]:
    found = Devices(library())
    yield found
    found.end()


BUDGET = {
    ("mlp", "dp=1"): 1, ("mlp", "dp=2"): 1, ("mlp fused", "dp=1"): 1, ("mlp fused", "dp=2"): 1,
    ("deep averaged", "dp=2"): 1, ("deep averaged", "fsdp=2"): 1,
    ("deep", "fsdp=2"): 1, ("deep fused", "fsdp=2"): 1, ("words", "tp=2"): 1, ("words fused", "tp=2"): 1,
    ("deep", "pp=2 microbatches=4"): 1, ("deep fused", "pp=2 microbatches=4"): 1,
    ("ungiven", "pp=2 microbatches=2"): 1, ("deep", "fsdp=2 offload=optimizer"): 2,
    ("attention", "cp=2"): 1, ("attention fused", "cp=2"): 1, ("attention", "cp=2 cp_method=ulysses"): 1,
    ("experts", "ep=2"): 17, ("experts fused", "ep=2"): 17, ("stacked", "ep=2"): 3, ("stacked", "ep=2 token_dispatcher=allgather"): 1,
    ("batch_norm", "dp=2"): 1, ("deep", "dp=2 microbatches=3"): 1, ("deep", "dp=2 offload=optimizer"): 2, ("deep", "fsdp=2 tp=2"): 1,
    ("deep", "dp=1 offload=all"): 47, ("deep fused", "fsdp=2 offload=all"): 47, ("deep", "dp=2 fsdp=2 offload=all"): 47,
    ("deep", "dp=2 fsdp=2"): 1, ("deep", "dp=2 fsdp=2 zero_stage=2 microbatches=3"): 1,
    ("words", "pp=2 tp=2 microbatches=2 schedule=zb"): 1, ("experts", "fsdp=2 ep=2"): 17,
}  # fmt: skip
"""The allowed waits of a rank's host in one step: one for the row of the step. Larger values are waits that plait has yet to remove, or
waits outside of plait: with `offload=all` FSDP2 waits when backward ends for each gradient on its way to the host. Updates of the fused
jobs are queued before that row is read."""
SILENT = ("data/", "engine/build.py", "parallel/data/batch_norm.py", "parallel/pipeline/", "parallel/expert/layers.py", "losses/")
"""Files without a line that makes the host wait in a step."""
ONCE = ("parallel/offload.py",)
"""Files that make it wait once."""
MASKS = "randomness/distributions.py"


@pytest.mark.parametrize("name, plan", BUDGET)
def test_a_step_on_devices(name: str, plan: str, devices: Devices) -> None:
    found = devices.ranks(name=name, plan=plan, device="cuda", steps=3)
    most = max((rank["waits"] for rank in found), key=lambda waits: sum(waits.values()))
    masks = sum(n for line, n in most.items() if line.startswith(MASKS))
    print(f"{name} under {plan}: {sum(most.values())} host synchronisations in a step, {masks} of them for masks")
    for line, n in sorted(most.items()):
        print(f"    {n:3} × {line}")
    for rank in found:
        assert rank["numbers"] == pytest.approx(devices.on_cpu(name, steps=3), rel=1e-9)
        assert rank["late"] or not name.endswith(("fused", "averaged")), "the update was not queued before its numbers were read"
    assert sum(most.values()) <= BUDGET[name, plan], most
    assert all(sum(rank["checked"].values()) <= 1 for rank in found), "copies are held against each other in one go"
    assert not [line for line in most if line.startswith(SILENT)]
    assert "offload=all" in plan or not [line for line in most if "spins" in line], most  # those are events of FSDP2
    assert not [
        line for rank in found for line in rank["unpinned"] if line.startswith(("data/", "engine/build"))
    ]
    assert all(sum(n for line, n in most.items() if line.startswith(file)) <= 1 for file in ONCE)


@pytest.mark.parametrize(
    "name, plan",
    (
        ("attention", "cp=2 precision=bf16"), ("mlp", "dp=2 precision=fp16"), ("deep", "fsdp=2 precision=bf16"),
        *rarely(("words", "tp=2 precision=bf16"), ("deep", "pp=2 microbatches=2 precision=bf16"), ("attention", "cp=2")),
    ),
)  # fmt: skip
def test_steps_in_the_formats_of_training(name: str, plan: str, devices: Devices) -> None:
    found = devices.ranks(name=name, plan=plan, device="cuda", steps=2, cast=None)
    for rank in found:
        assert rank["numbers"] == pytest.approx(devices.on_cpu(name, cast=None), rel=5e-2)


@pytest.mark.parametrize(
    "name, plan",
    (
        ("spoiled", "dp=2"), ("spoiled averaged", "fsdp=2"),
        *rarely(("spoiled", "fsdp=2"), ("spoiled", "dp=1"), ("spoiled averaged", "dp=2 microbatches=2")),
    ),
)  # fmt: skip
def test_steps_that_are_left_out_are_found_out_late(name: str, plan: str, devices: Devices) -> None:
    """The host detects it after the passes of the next step: these are repeated without it."""
    case = {"name": name, "plan": plan, "steps": 8}
    late, now = (devices.ranks(**case, device=kind, on_nan="skip") for kind in ("cuda", "cpu"))
    for mine, its in zip(late, now):
        assert mine["course"] == its["course"] and any(skipped for skipped, _, _ in mine["course"])
        assert mine["numbers"] == pytest.approx(its["numbers"], rel=1e-9, nan_ok=True)
        assert mine["held"] == pytest.approx(its["held"], rel=1e-9)
    stopped = [devices.ask(**case, device=kind)["error"].partition("Traceback")[0] for kind in ("cuda", "cpu")]
    assert "error[N001]" in stopped[0] and stopped[0] == stopped[1]


def near(mine: Any, its: Any) -> bool:
    """Compare JSON values; null stands for a value that is not finite."""
    return mine == its or (mine is not None and its is not None and mine == pytest.approx(its, rel=1e-5))


def test_what_is_kept_when_a_rank_is_lost_is_without_the_step_that_was_left_out(devices: Devices) -> None:
    found = devices.ranks(probe="given_up", world=1)
    assert found[0]["value"] == [True] * 12


@pytest.mark.parametrize(
    "name, plan, given",
    (
        ("deep fused", "dp=2", {}), ("deep fused", "fsdp=2", {"ends": 4}),
        ("logging", "dp=2", {"looks": True}),
        *rarely(("spoiled", "dp=2", {"on_nan": "skip"}), ("deep fused", "pp=2 microbatches=2", {}), ("deep", "dp=2", {})),
    ),
)  # fmt: skip
def test_a_run_on_devices_leaves_the_same_record(name: str, plan: str, given: dict[str, Any], devices: Devices, tmp_path: Path) -> None:
    """With checkpoints, evaluations and callbacks, although metrics are written one step late."""
    told = []
    for kind in ("cuda", "cpu"):
        case = {"run": name, "plan": plan, "device": kind, "folder": str(tmp_path / kind), **given}
        told.append(devices.ranks(**case))
    (late, *_), (now, *_) = told
    keys = ("step", "loss", "norm", "lr", "samples", "skipped", "norms", "logged", "evaluation")
    rows = [
        {(row["step"], "loss" in row): {k: row[k] for k in keys if k in row} for row in run["metrics"] if "memory" not in row}
        for run in (late, now)
    ]
    for found, behind in ((late, 2), (now, 1)):
        recorded = found["result"]["recorded"]
        assert all(n >= step - behind for step, n in enumerate(recorded, 1)), recorded
    assert late["result"]["ended"] == now["result"]["ended"] == ("it is enough" if given.get("ends") else "")
    later = now["result"]["step"] < late["result"]["step"]  # the request to stop is read in the next step
    assert later == bool(given.get("ends") and "fused" in name)
    for row in rows[0].keys() & rows[1].keys():
        mine, its = rows[0][row], rows[1][row]
        assert mine.keys() == its.keys()
        assert not {key: (mine[key], its[key]) for key in its if not near(mine[key], its[key])}
    assert [step for step, trained in rows[0] if trained] == list(range(1, late["result"]["step"] + 1))
    assert late["result"]["skipped"] == now["result"]["skipped"] and (late["result"]["skipped"] > 0) == (name == "spoiled")


def test_the_state_before_a_step_that_is_not_finite_is_saved(devices: Devices, tmp_path: Path) -> None:
    """Also if the evaluation after it detects the step, and not the next step."""
    told = []
    for kind in ("cuda", "cpu"):
        folder = tmp_path / kind
        error = devices.ask(run="bursting", plan="dp=2", device=kind, folder=str(folder), save_every=100)["error"]
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        saved = [path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith("step")]
        told.append((error.partition("Traceback")[0].replace(str(folder), "RUN"), [row["step"] for row in rows if "loss" in row], saved))
    assert told[0] == told[1] and "the state before it is saved in RUN/checkpoints/step-" in told[0][0], told
    assert len(told[0][2]) == 1


@pytest.mark.parametrize(
    "name, plan",
    (
        ("loud", "dp=2 precision=fp16"), ("loud norm", "dp=2 precision=fp16"),
        *rarely(("loud", "dp=1 precision=fp16"), ("loud", "fsdp=2 precision=fp16")),
    ),
)  # fmt: skip
def test_a_loss_scale_on_the_device_goes_as_one_on_the_host(name: str, plan: str, devices: Devices) -> None:
    """A step that overflows updates no weights, but its forward pass counts."""
    late, now = (devices.ranks(name=name, plan=plan, device=kind, steps=8, cast=None) for kind in ("cuda", "cpu"))
    for mine, its in zip(late, now):
        assert mine["course"] == its["course"] and [scale for _, scale, _ in mine["course"]][-1] < 65536
        assert mine["numbers"] == pytest.approx(its["numbers"], rel=1e-2, nan_ok=True)
        assert mine["counted"] == its["counted"]
        assert sum(mine["waits"].values()) <= 1


@pytest.mark.parametrize("name, plan", (("deep", "dp=2"), ("padded", "dp=2"), *rarely(("deep", "fsdp=2"), ("deep", "pp=2 microbatches=2"))))
def test_an_evaluation_waits_once(name: str, plan: str, devices: Devices) -> None:
    found = devices.ranks(name=name, plan=plan, device="cuda", steps=1)
    one = devices.ranks(name=name, plan="dp=1", device="cpu", steps=1, cast="float64")[0]
    for rank in found:
        assert rank["measured"] == pytest.approx(one["measured"], rel=1e-9)
        assert sum(rank["judged"].values()) == 1, rank["judged"]


@pytest.mark.parametrize("name, plan", (("deep", "fsdp=2"), *rarely(("mlp", "dp=1"), ("words", "pp=2 tp=2 microbatches=2"))))
def test_updates_are_fused_where_the_job_leaves_it_open(name: str, plan: str, devices: Devices) -> None:
    found = devices.ranks(name=name, plan=plan, device="cuda", steps=2)
    for rank in found:
        assert all(rank["fused"]) and rank["numbers"] == pytest.approx(devices.on_cpu(name), rel=1e-9)
    (offloaded,) = devices.ranks(name="deep", plan="dp=1 offload=optimizer", device="cuda", steps=1)
    assert not any(offloaded["fused"]), "the host updates what it holds as before"


def test_fsdp_gathers_ahead_by_its_own_messages(devices: Devices) -> None:
    """On a device, FSDP2's own all-gather, streams and prefetch are used."""
    found = devices.ranks(name="deep", plan="fsdp=2", device="cuda", steps=1)
    assert [rank["gathers"] for rank in found] == [["DefaultAllGather, DeviceScatter"]] * 2


@pytest.mark.parametrize(
    "name, plan, cast",
    (
        ("words", "tp=2", "float64"), ("deep", "pp=2 microbatches=2", "float64"), ("attention", "cp=2", "float64"),
        ("stacked", "ep=2", "float64"), ("words", "pp=2 tp=2 microbatches=2 precision=bf16", None),
        *rarely(
            ("looking", "tp=2", "float64"), ("experts", "ep=2", "float64"),
            ("attention", "cp=2 cp_method=ulysses", "float64"), ("deep", "fsdp=2 tp=2", "float64"),
            ("attention", "tp=2 cp=2", "float64"), ("experts", "fsdp=2 ep=2", "float64"), ("attention", "cp=2 precision=bf16", None),
        ),
    ),
)  # fmt: skip
def test_a_model_that_a_device_has_no_room_for_is_cut_on_the_host(name: str, plan: str, cast: str | None, devices: Devices) -> None:
    """Its losses equal those of a model that was sharded on the device, to the last bit."""
    case = {"name": name, "plan": plan, "device": "cuda", "steps": 2, "cast": cast}
    here, there = (devices.ranks(**case, cut_on_host=on_host) for on_host in (False, True))
    for mine, its in zip(there, here):
        assert mine["numbers"] == its["numbers"] and mine["held"] == its["held"]


@pytest.mark.parametrize("plan", ("tp=2", "pp=2 microbatches=2"))
def test_what_a_device_holds_while_a_model_is_cut(plan: str, devices: Devices) -> None:
    """Half of the model, not all of it."""
    whole, parts = (
        [rank["most"] for rank in devices.ranks(name="many", plan=plan, device="cuda", steps=1, cast=None, cut_on_host=on_host)]
        for on_host in (False, True)
    )
    assert min(whole) > 4 * 16 * 16_512 and max(parts) < 0.7 * 4 * 16 * 16_512, (whole, parts)


@pytest.mark.parametrize("plan", ("fsdp=2", "fsdp=2 activation_checkpointing=full", "fsdp=2 zero_stage=2 microbatches=3"))
def test_fsdp_gathers_beside_what_computes(plan: str, devices: Devices) -> None:
    """Also ahead of a unit's forward pass: never from the stream that computes, and no parameter is used before it is gathered."""
    found = devices.ranks(name="deep", plan=plan, device="cuda", steps=2)
    for rank in found:
        assert rank["streams"]["gathers"] and 0 not in rank["streams"]["gathers"]
        assert rank["numbers"] == pytest.approx(devices.on_cpu("deep"), rel=1e-9)


@pytest.mark.parametrize("plan", ("tp=2 sequence_parallel=false", *rarely("fsdp=2 tp=2", "tp=2", "pp=2 tp=2 microbatches=2")))
def test_what_all_slices_hold_whole_stays_the_same(plan: str, devices: Devices) -> None:
    """This holds although GPU kernels with a varying order of summation return slightly different gradients on the ranks."""
    found = devices.ranks(name="words", plan=plan, device="cuda", steps=3, apart=1e-6)
    wholes = [rank["wholes"] for rank in found]
    for one, other in zip(wholes[::2], wholes[1::2]):  # ranks of tp are adjacent
        assert one and one == other
    assert found[-1]["numbers"] == pytest.approx(devices.on_cpu("words", steps=3), rel=1e-4)


def test_copies_of_shards_are_summed_beside_the_next_shards(devices: Devices) -> None:
    """On a separate stream, which the optimizer waits for; the losses equal those of one device."""
    found = devices.ranks(name="deep fused", plan="dp=2 fsdp=2", device="cuda", steps=2)
    for rank in found:
        parts, copies = rank["streams"]["parts"], rank["streams"]["copies"]
        assert len(parts) == len(copies) == 1 and parts != copies and 0 not in (*parts, *copies)
        assert rank["numbers"] == pytest.approx(devices.on_cpu("deep fused"), rel=1e-9)


def test_checkpoints_and_evaluation(devices: Devices, tmp_path: Path) -> None:
    """Saved on devices under one plan, read on the CPU under another."""
    case = {"name": "deep", "folder": str(tmp_path), "steps": 2}
    one = devices.ranks(name="deep", plan="dp=1", device="cpu", steps=4)[0]
    found = devices.ranks(**case, plan="fsdp=2", device="cuda")
    for plan, device in (("pp=2 microbatches=2", "cuda"), ("dp=1", "cpu")):
        then = devices.ranks(**case, plan=plan, device=device, resume=True)
        if device == "cuda":
            assert found[0]["numbers"] + then[0]["numbers"] == pytest.approx(one["numbers"], rel=1e-9)
            assert all(rank["measured"] == pytest.approx(one["measured"], rel=1e-9) for rank in then)


@pytest.mark.parametrize(
    "name, plan",
    (("words", "fsdp=2"), *rarely(("words", "pp=2 tp=2 microbatches=2"), ("experts", "ep=2"), ("mlp", "dp=2 precision=tf32"))),
)
def test_a_proof_on_devices(name: str, plan: str, devices: Devices) -> None:
    (verdict,) = devices.ranks(prove=name, plan=plan)
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


def test_a_device_that_is_listed_and_not_there(devices: Devices) -> None:
    told = devices.ask(probe="listed", world=1)["error"]
    assert "H003" in told and "process 17 of this machine needs device 17; 4 are visible" in told, told
    assert "the driver lists 18" in told and "--nproc 4" in told and "CUDA error" not in told.partition("Traceback")[0]


def test_a_tensor_of_the_host_in_a_group_of_nccl_alone(devices: Devices) -> None:
    found = devices.ask(probe="host_collective", world=2, backend="cuda:nccl_rules")
    assert "No backend type associated with device type cpu" in found["error"]


def test_tensors_of_host_and_device_have_a_backend_each(devices: Devices) -> None:
    ranks = devices.ranks(probe="summed", world=2)
    assert [rank["value"] for rank in ranks] == [[3.0, 3.0, 3.0, 2.0, f"cuda:{k}"] for k in range(2)]


def test_what_the_host_waits_for_is_counted(devices: Devices) -> None:
    (rank,) = devices.ranks(probe="waits", world=1)
    assert sum(rank["waits"].values()) == len(rank["waits"]) == 11, rank["waits"]
    assert all(line.startswith("device/shadow_jobs.py:") for line in rank["waits"])
    ranks = devices.ranks(probe="no_waits", world=2)
    assert [rank["waits"] for rank in ranks] == [{}, {}]


def test_copies_beside_the_host_are_of_pinned_memory(devices: Devices) -> None:
    (rank,) = devices.ranks(probe="pinned", world=1)
    assert rank["value"] == [True, True, False, [1.0, 2.0, 1.0, 2.0]] and rank["waits"] == {}
    ((line, n),) = rank["unpinned"].items()
    assert n == 1 and line.endswith("copy to the device of 16 bytes")


def test_numbers_on_their_way_to_the_host_are_nonsense_until_they_are_waited_for(devices: Devices) -> None:
    (rank,) = devices.ranks(probe="late", world=1)
    assert rank["value"] == [[True] * 3, [0.0, 1.0, 2.0]] and len(rank["waits"]) == 1


def test_samples_are_copied_ahead(devices: Devices) -> None:
    (rank,) = devices.ranks(probe="copied_ahead", world=1)
    assert rank["value"] == ["cuda:0", [[3], [0]], True, [0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]]
    assert len(rank["waits"]) == 2 and all(line.startswith("device/") for line in rank["waits"])  # the probe reads two
    assert not rank["unpinned"]


@pytest.mark.parametrize(
    "name, plan, workers", (("padded", "dp=2", 2), ("streamed", "dp=2 microbatches=2", 0), ("streamed", "fsdp=2", 1))
)
def test_samples_of_all_kinds_come_by_way_of_pinned_memory(
    name: str, plan: str, workers: int, devices: Devices
) -> None:
    found = devices.ranks(name=name, plan=plan, device="cuda", steps=2, workers=workers)
    for rank in found:
        assert rank["numbers"] == pytest.approx(devices.on_cpu(name), rel=1e-9)
        assert not [line for line in [*rank["waits"], *rank["unpinned"]] if line.startswith(SILENT)]


@pytest.mark.parametrize(
    "fault, words", (("forgets", "memory of stream"), ("deaf", "while aten::copy_ writes it on stream"))
)
def test_the_stream_that_copies_samples_is_waited_for(fault: str, words: str, devices: Devices) -> None:
    """Its memory is freed only after the last use of the samples."""
    assert devices.ranks(probe="samples_let_go", world=1)[0]["value"] == [0.0, 2.0, 4.0, 6.0]
    told = devices.ask(probe="samples_let_go", world=1, **{fault: True})
    assert words in told.get("error", "") and "a race between streams" in told["error"], told


def test_a_number_that_a_loss_reads_is_over_the_budget(devices: Devices) -> None:
    (rank,), (plain,) = (devices.ranks(name=n, plan="dp=1", device="cuda", steps=3) for n in ("reading", "mlp"))
    assert sum(rank["waits"].values()) == sum(plain["waits"].values()) + 1
    assert any(line.startswith("device/shadow_jobs.py:") and "a number is read" in line for line in rank["waits"])


@pytest.mark.parametrize(
    "spoil, words",
    (("used", "this process has used CUDA"), ("asked", "this process has called the CUDA runtime")),
)
def test_cuda_before_the_fork(spoil: str, words: str, devices: Devices) -> None:
    """The launcher rejects it. Without the launcher's check, ranks find after the fork that CUDA is unusable."""
    told = devices.ask(prove="mlp", plan="dp=2", spoil=spoil)["error"]
    assert "H011" in told and words in told, told
    late = devices.ask(name="mlp", plan="dp=2", device="cuda", steps=1, spoil=spoil)["error"]
    assert "H011" in late and (words in late or "Cannot re-initialize CUDA in forked subprocess" in late), late


def test_the_allocator_counts(devices: Devices) -> None:
    ((found, used, _),) = (rank["value"] for rank in devices.ranks(probe="counted", world=1))
    a, b, segment = 4096, 3 << 20, 2 << 20
    assert found == [
        [4000 + b, a + b, a + b, 2 * segment], [4000 + b, a + b, a + b, 2 * segment], [4000, a, a + b, 2 * segment],
        [4000, a, a, 2 * segment], [4000, a, a, segment],
    ]  # fmt: skip
    assert used == segment
    (rank,) = devices.ranks(probe="full", world=1)
    said, retries, failures = rank["value"]
    assert said.startswith("CUDA out of memory. Tried to allocate 8 MiB. GPU 0 has a total capacity of 8 MiB")
    assert (retries, failures) == (1, 1)


@pytest.mark.parametrize("name, plan", (("words fused", "dp=1"), *rarely(("large", "fsdp=2"))))
def test_memory_beside_its_bill(name: str, plan: str, devices: Devices, tmp_path: Path) -> None:
    """A full `plait train`, whose launcher never uses CUDA. The memory table includes the optimizer's few values on the host."""
    (run,) = devices.ranks(launch=name, plan=plan, folder=str(tmp_path))
    assert run["code"] == 0 and not run["used"], run["error"]
    first, end = (run["memory"]["0"][when] for when in ("first", "end"))
    assert end["held"]["parameters"] == run["bill"]["parameters"]
    assert end["held"]["optimizer"] + end["host"].get("optimizer", 0) == run["bill"]["optimizer"]
    assert end["requested"] == pytest.approx(sum(run["bill"].values()), rel=1e-3)
    print(f"{name} under {plan}: {end['requested']:,} bytes at the fullest moment, {sum(run['bill'].values()):,} in the bill")
    assert end["made"] == end["allocated"] - end["held"]["parameters"] - end["held"]["optimizer"]
    assert end["allocated"] <= end["reserved"] and end["beside"] == 1 << 20 and end["total"] == 1 << 36
    assert [row["memory"]["when"] for row in run["rows"]] == ["first", "end"] and run["rows"][1]["memory"]["made"] == end["made"]
    assert "memory  rank " in run["said"] and "memory      rank " in run["report"] and "of 64.00 GiB at most" in run["report"]
    assert first["requested"] > 0


@pytest.mark.parametrize(
    "name, size, steps, words",
    (
        ("hoarding", 12, 20, ("made in a step: 2.3 KiB predicted, 10.0 MiB on rank", "shadow_jobs.py", "no other plan fits")),
        ("large", 8, 4, ("made in a step: 2.9 MiB predicted, 3.9 MiB on rank", '--plan "tp=2"    takes 2.6 MiB', "of 8.0 MiB, if its prediction")),
    ),
)  # fmt: skip
def test_a_device_that_is_full(name: str, size: int, steps: int, words: tuple[str, ...], devices: Devices, tmp_path: Path) -> None:
    (run,) = devices.ranks(launch=name, plan="dp=2", folder=str(tmp_path), size=size << 20, steps=steps)
    assert run["code"] == 1 and "error[M002] out of memory on rank" in run["error"] and not run["used"]
    for word in (*words, "Tried to allocate", "context, NCCL and others 1.0 MiB", "predicted memory was"):
        assert word in run["error"], run["error"]


def test_a_model_on_two_devices(devices: Devices) -> None:
    told = devices.ask(name="spread", plan="dp=1", device="cuda", steps=1)["error"]
    assert "J043" in told and "on cuda:0" in told and "on cuda:1" in told, told


# — streams —


@pytest.mark.parametrize(
    "probe, words",
    (
        (
            "unwaited_stream",
            "aten::add reads a tensor of shape [4] on the default stream while aten::mul writes it on stream",
        ),
        (
            "unwaited_write",
            "aten::zero_ writes a tensor of shape [4] on the default stream while aten::sum reads it on stream",
        ),
        (
            "event_before_its_time",
            "aten::sum reads a tensor of shape [4] on the default stream while aten::add writes it",
        ),
        (
            "unwaited_collective",
            "aten::add reads a tensor of shape [4] on the default stream while a collective or a message writes",
        ),
        ("collective_of_what_is_not_there", "a collective or a message reads a tensor of shape [4] on stream"),
        ("waited_on_another_stream", "aten::add reads a tensor of shape [4] on the default stream while a collective"),
        (
            "freed_too_early",
            "memory of the default stream is freed, and may be used again, while aten::sum reads it on stream",
        ),
    ),
)
def test_streams_that_race(probe: str, words: str, devices: Devices) -> None:
    told = devices.ask(probe=probe, world=2)["error"]
    assert f"a race between streams: {words}" in told and "nobody has waited for that" in told


def test_streams_that_wait(devices: Devices) -> None:
    assert [rank["value"] for rank in devices.ranks(probe="waited_for", world=2)] == [[8.0] * 4] * 2
    assert [rank["value"] for rank in devices.ranks(probe="other_parts", world=1)] == [[3.0] * 4]
    assert [rank["value"] for rank in devices.ranks(probe="freed_in_time", world=1)] == [8.0]


def test_the_waits_of_sharded_parameters_are_needed(devices: Devices) -> None:
    """FSDP2 gathers and reduces on its own streams; without their waits, they race."""
    told = devices.ask(name="deep", plan="fsdp=2", device="cuda", steps=2, deaf=True)
    assert "a race between streams" in told.get("error", ""), told
