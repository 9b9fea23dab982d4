"""Which accelerators this machine has, asked of the driver's files: no CUDA call, so that forking stays possible.

[Note: Allocator]
How the allocator of a device takes memory: chosen before the first allocation of a rank, never over what the user has set.

A segment of the device has by itself the size of what was first asked for, and is cut into blocks: after batches of other lengths, an
evaluation, or micro-batches of several stages there are holes that nothing fits into. With `expandable_segments` a segment grows
page by page, and holes of the address space cost no memory. Not on ROCm, where the virtual memory that this takes is missing from
many versions; a driver without it (WSL, some virtual machines) says so in a warning, and nothing else changes.
"""

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from plait.config.errors import PlaitError, Problem
from plait.config.hardware import KINDS, NOT_YET
from plait.launch import forkable
from plait.launch.failures import unforkable

if TYPE_CHECKING:
    from plait.launch.place import Place

ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Names of torch's variable; the first is that of torch 2.9 and later."""
ALLOCATOR = "expandable_segments:True"


def settle_allocator() -> None:
    """Choose for this process, and say it in the environment. Before the first allocation on a device."""
    import torch

    from plait.tensors.torch_private import set_allocator

    if torch.version.hip is None and not any(name in os.environ for name in ALLOCATOR_NAMES):
        os.environ[ALLOCATOR_NAMES[0]] = ALLOCATOR
        set_allocator(ALLOCATOR)  # torch has read the variable already, where something asked the allocator


VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""Variables that choose among the devices. ROCm reads all; of the last two, HIP's own where both are set."""
SYSTEM = Path("/sys")
_UNSEEN = ("invalid device ordinal", "GPUs are available", "no CUDA-capable device", "no ROCm-capable device")
"""Words of errors of the CUDA or HIP runtime that has no device of a number, or none at all."""


def cuda_names() -> list[str]:
    """Names of the devices this process may use, in the order in which torch numbers them; [] when torch has neither CUDA nor HIP.

    As many as the driver shows to CUDA: its files in /proc may list devices that a container was not given.
    """
    import torch

    from plait.tensors.torch_private import devices_by_driver

    if torch.version.cuda is None and torch.version.hip is None:
        return []
    names, count = _visible(_listed() if torch.version.hip is None else _amd()), devices_by_driver()
    if count is None:
        return names
    return (names + ["a device"] * (count - len(names)))[:count]


def called(kind: str) -> tuple[str, str]:
    """What a kind of device and its communication library are called: torch says cuda for ROCm too."""
    import torch

    if kind == "cpu":
        return "CPU", "gloo"
    return ("ROCm", "rccl") if torch.version.hip is not None else ("CUDA", "nccl")


def unused() -> list[str]:
    """Kinds of devices that torch could use here and plait does not yet."""
    import torch

    built = {"xpu": torch.version.xpu is not None, "mps": torch.backends.mps.is_built()}
    return [kind for kind in NOT_YET if built.get(kind)]


def _amd(system: Path = SYSTEM) -> list[str]:
    """What the kernel lists of AMD's devices, in its order: nodes of the topology that compute, by the names of their boards."""
    found = list[str]()
    for node in sorted((system / "class/kfd/kfd/topology/nodes").glob("[0-9]*"), key=lambda path: int(path.name)):
        rows = dict(line.split()[:2] for line in _text(node / "properties").splitlines() if len(line.split()) > 1)
        if int(rows.get("simd_count", 0)):
            board = system / f"class/drm/renderD{rows.get('drm_render_minor', '')}/device/product_name"
            found.append(_text(board).strip() or "AMD device")
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _listed() -> list[str]:
    """What the driver's files, or nvidia-smi, list."""
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    names = [_model(card) for card in cards] or ["NVIDIA device" for _ in Path("/dev").glob("nvidia[0-9]*")]
    if not names and shutil.which("nvidia-smi"):  # a virtual machine without the driver's files
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
        names = [line.partition(": ")[2].partition(" (")[0] for line in listed.splitlines() if line.startswith("GPU ")]
    return names


def _visible(names: list[str]) -> list[str]:
    """Those that the environment leaves: each variable chooses among what the ones before it have left."""
    import torch

    for name in VISIBLE if torch.version.hip is not None else VISIBLE[-1:]:
        visible = os.environ.get(name)
        if visible is None or (
            name == "CUDA_VISIBLE_DEVICES" and "HIP_VISIBLE_DEVICES" in os.environ and torch.version.hip
        ):
            continue
        chosen = [word for word in visible.split(",") if word.strip() not in ("", "-1")]
        other = "AMD device" if torch.version.hip is not None else "NVIDIA device"
        known = [names[int(word)] if word.isdigit() and int(word) < len(names) else other for word in chosen]
        names = known[: len(names)]
    return names


def kind_of(wanted: str) -> str:
    """`auto`, `cpu` or `cuda` as cpu or cuda. H001 when CUDA is asked for and none is visible, H012 for another kind."""
    if wanted not in KINDS:
        what = (
            f"plait does not train on {wanted} devices yet" if wanted in NOT_YET else f"{wanted} is no kind of device"
        )
        fix = ("--device cuda    NVIDIA's and, with ROCm, AMD's", "--device cpu")
        raise PlaitError(Problem("H012", what, fix=fix))
    names = cuda_names()
    if wanted == "cuda" and not names:
        import torch

        lacks = torch.version.cuda is None and torch.version.hip is None
        why = f"torch {torch.__version__} {'has neither CUDA nor ROCm' if lacks else 'sees no device'}"
        why += "".join(f"; it has {kind}, which plait does not use yet" for kind in unused())
        fix = ("--device cpu    runs the same plan on CPU processes",)
        raise PlaitError(Problem("H001", "this run asks for CUDA, none is visible", why=why, fix=fix))
    return "cuda" if names and wanted != "cpu" else "cpu"


def check(kind: str, ranks: int) -> None:
    """Before ranks are forked. H003 when so many on this machine have no device each, H011 when a fork of this process cannot use one."""
    if kind != "cuda":
        return
    if len(cuda_names()) < ranks:
        raise too_few(f"the plan starts {ranks} processes here, one for each device", ranks)
    if why := forkable.spoilt(on_devices=True):
        raise PlaitError(unforkable(why))


def too_few(what: str, ranks: int, usable: int | None = None) -> PlaitError:
    """H003. `usable`: how many CUDA sees, where that is known to be fewer than are listed."""
    listed = len(cuda_names())
    count = listed if usable is None else usable
    fix = (f"--nproc {count}", f"--device cpu    runs {ranks} CPU processes") if count else ("--device cpu",)
    reasons = [f"{name}={os.environ[name]}" for name in VISIBLE if name in os.environ]
    if count < listed:
        reasons.append(f"the driver lists {listed}: this process cannot use all of them, as in some containers and with MIG")
    why = ", ".join(reasons)
    return PlaitError(Problem("H003", f"{what}; {count} are visible", why=why, fix=fix))


def of_rank(place: "Place") -> int:
    """The number of a rank's device. H003 when the machine has no such device, L004 when nobody says which it is."""
    count, local_rank = len(cuda_names()), place.local_rank
    if place.unsaid and place.world > 1 and count > 1:
        what = f"this machine has {count} devices, and nobody says which one this process drives"
        why = "RANK is set and LOCAL_RANK is not: all processes of the machine would share device 0"
        fix = ("start it with torchrun", "export LOCAL_RANK=<number of this process on its machine>")
        raise PlaitError(Problem("L004", what, why=why, fix=fix))
    if place.only and count > 1:
        what = f"this machine has {count} devices, and one process was started on it"
        why = f"each process drives one device: {count - 1} would be idle"
        all_of_them = f"--nnodes {place.world}    plait starts the ranks of each machine"
        fix = (
            f"one process for each device (srun --ntasks-per-node {count})",
            all_of_them,
            "CUDA_VISIBLE_DEVICES=0    for one",
        )
        raise PlaitError(Problem("L004", what, why=why, fix=fix))
    if local_rank >= count:
        raise too_few(f"process {local_rank} of this machine wants device {local_rank}", local_rank + 1)
    return local_rank


def unseen(index: int, error: RuntimeError) -> PlaitError | None:
    """H003, when a rank could not take its device because CUDA sees fewer than are listed."""
    if not any(words in str(error) for words in _UNSEEN):
        return None
    import torch

    usable = torch.cuda.device_count() if torch.cuda.is_initialized() else 0  # the runtime's own count, once it has begun
    return too_few(f"process {index} of this machine wants device {index}", index + 1, usable)


def _model(card: Path) -> str:
    rows = dict(line.split(":", 1) for line in card.read_text().splitlines() if ":" in line)
    return rows.get("Model", "NVIDIA device").strip()
