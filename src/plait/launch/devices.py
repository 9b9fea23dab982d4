"""List this machine's accelerators from the driver's files, without a CUDA call, so that this process can still fork.

[Note: Allocator] Configuration of a device's allocator: set before the first allocation of a rank, unless the user has set it.

By default a segment has the size of its first request, and is split into blocks. Batches of other lengths, an evaluation, or micro-batches
of several stages then leave gaps that no request fits into. With `expandable_segments` a segment grows page by page, and gaps in the
address space use no memory. It is not set on ROCm, where many versions lack the virtual memory that it needs. A driver without it (WSL,
some virtual machines) only prints a warning.
"""

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from plait.config.errors import PlaitError, Problem
from plait.config.hardware import DEVICE_KINDS, UNSUPPORTED_DEVICES
from plait.launch import forkable
from plait.launch.failures import unforkable

if TYPE_CHECKING:
    from plait.launch.place import Place

ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Names of torch's variable; the first is that of torch 2.9 and later."""
ALLOCATOR_SETTING = "expandable_segments:True"


def configure_allocator() -> None:
    """Set the allocator for this process and its children. Call it before the first allocation on a device."""
    import torch

    from plait.tensors.torch_private import configure_allocator

    if torch.version.hip is None and not any(name in os.environ for name in ALLOCATOR_NAMES):
        os.environ[ALLOCATOR_NAMES[0]] = ALLOCATOR_SETTING
        configure_allocator(ALLOCATOR_SETTING)  # torch has read the variable already, if the allocator was used before


VISIBLE_VARIABLES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""Variables that select devices. ROCm reads all three; if both of the last two are set, HIP's takes precedence."""
SYSFS = Path("/sys")
_NO_DEVICE_SIGNS = ("invalid device ordinal", "GPUs are available", "no CUDA-capable device", "no ROCm-capable device")
"""Parts of CUDA and HIP error messages for a missing device."""


def list_cuda_devices() -> list[str]:
    """Return the names of this process's devices in torch's order; [] if torch has neither CUDA nor HIP.

    There are as many as the driver reports to CUDA. Its files in /proc may list devices that a container was not given.
    """
    import torch

    from plait.tensors.torch_private import devices_by_driver

    if torch.version.cuda is None and torch.version.hip is None:
        return []
    names, count = _filter_visible(_list_nvidia_names() if torch.version.hip is None else _list_amd_names()), devices_by_driver()
    if count is None:
        return names
    return (names + ["a device"] * (count - len(names)))[:count]


def describe_kind(kind: str) -> tuple[str, str]:
    """Return the display names of a kind of device and of its communication library. torch uses the name cuda for ROCm too."""
    import torch

    if kind == "cpu":
        return "CPU", "gloo"
    return ("ROCm", "rccl") if torch.version.hip is not None else ("CUDA", "nccl")


def list_unused_kinds() -> list[str]:
    """Return the kinds of devices that torch supports here and plait does not support yet."""
    import torch

    built = {"xpu": torch.version.xpu is not None, "mps": torch.backends.mps.is_built()}
    return [kind for kind in UNSUPPORTED_DEVICES if built.get(kind)]


def _list_amd_names(system: Path = SYSFS) -> list[str]:
    """Return the AMD devices in the kernel's order: topology nodes with SIMD units, by the names of their boards."""
    found = list[str]()
    for node in sorted((system / "class/kfd/kfd/topology/nodes").glob("[0-9]*"), key=lambda path: int(path.name)):
        rows = dict(line.split()[:2] for line in _read_text_or_empty(node / "properties").splitlines() if len(line.split()) > 1)
        if int(rows.get("simd_count", 0)):
            board = system / f"class/drm/renderD{rows.get('drm_render_minor', '')}/device/product_name"
            found.append(_read_text_or_empty(board).strip() or "AMD device")
    return found


def _read_text_or_empty(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _list_nvidia_names() -> list[str]:
    """Return the NVIDIA devices that the driver's files or nvidia-smi list."""
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    names = [_read_model_name(card) for card in cards] or ["NVIDIA device" for _ in Path("/dev").glob("nvidia[0-9]*")]
    if not names and shutil.which("nvidia-smi"):  # a virtual machine without the driver's files
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
        names = [line.partition(": ")[2].partition(" (")[0] for line in listed.splitlines() if line.startswith("GPU ")]
    return names


def _filter_visible(names: list[str]) -> list[str]:
    """Apply the variables that select devices. Each one selects from the devices that the previous ones left."""
    import torch

    for name in VISIBLE_VARIABLES if torch.version.hip is not None else VISIBLE_VARIABLES[-1:]:
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


def resolve_kind(requested: str) -> str:
    """Return cpu or cuda for `auto`, `cpu` or `cuda`.

    Raises H001 if CUDA is requested and no device is visible, H012 for an unsupported kind.
    """
    if requested not in DEVICE_KINDS:
        what = (
            f"plait does not train on {requested} devices yet" if requested in UNSUPPORTED_DEVICES else f"{requested} is not a kind of device"
        )
        fix = ("--device cuda    NVIDIA's and, with ROCm, AMD's", "--device cpu")
        raise PlaitError(Problem("H012", what, fix=fix))
    names = list_cuda_devices()
    if requested == "cuda" and not names:
        import torch

        lacks = torch.version.cuda is None and torch.version.hip is None
        why = f"torch {torch.__version__} {'has neither CUDA nor ROCm' if lacks else 'sees no device'}"
        why += "".join(f"; it has {kind}, which plait does not use yet" for kind in list_unused_kinds())
        fix = ("--device cpu    runs the same plan on CPU processes",)
        raise PlaitError(Problem("H001", "this run needs CUDA, and no CUDA device is visible", why=why, fix=fix))
    return "cuda" if names and requested != "cpu" else "cpu"


def check_devices(kind: str, ranks: int) -> None:
    """Check the devices before ranks are forked.

    Raises H003 if this machine has fewer devices than ranks, H011 if a fork of this process cannot use a device.
    """
    if kind != "cuda":
        return
    if len(list_cuda_devices()) < ranks:
        raise too_few_devices(f"the plan starts {ranks} processes on this machine, one per device", ranks)
    if why := forkable.find_fork_obstacle(on_devices=True):
        raise PlaitError(unforkable(why))


def too_few_devices(what: str, ranks: int, usable: int | None = None) -> PlaitError:
    """H003. `usable`: number of devices that CUDA reports, if it is below the number of listed devices."""
    listed = len(list_cuda_devices())
    count = listed if usable is None else usable
    fix = (f"--nproc {count}", f"--device cpu    runs {ranks} CPU processes") if count else ("--device cpu",)
    reasons = [f"{name}={os.environ[name]}" for name in VISIBLE_VARIABLES if name in os.environ]
    if count < listed:
        reasons.append(f"the driver lists {listed}: this process cannot use all of them, as in some containers and with MIG")
    why = ", ".join(reasons)
    return PlaitError(Problem("H003", f"{what}; {count} are visible", why=why, fix=fix))


def find_rank_device(place: "Place") -> int:
    """Return the index of a rank's device. Raises H003 if this machine has no such device, L004 if the local rank is unknown."""
    count, local_rank = len(list_cuda_devices()), place.local_rank
    if place.unsaid and place.world > 1 and count > 1:
        what = f"this machine has {count} devices, and the local rank of this process is unknown"
        why = "RANK is set and LOCAL_RANK is not: all processes of the machine would share device 0"
        fix = ("start it with torchrun", "export LOCAL_RANK=<number of this process on its machine>")
        raise PlaitError(Problem("L004", what, why=why, fix=fix))
    if place.is_one_per_node and count > 1:
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
        raise too_few_devices(f"process {local_rank} of this machine needs device {local_rank}", local_rank + 1)
    return local_rank


def explain_missing_device(index: int, error: RuntimeError) -> PlaitError | None:
    """Return H003 for the error of a rank whose device CUDA does not report; None for another error."""
    if not any(words in str(error) for words in _NO_DEVICE_SIGNS):
        return None
    import torch

    usable = torch.cuda.device_count() if torch.cuda.is_initialized() else 0  # the runtime's own count, once it has begun
    return too_few_devices(f"process {index} of this machine needs device {index}", index + 1, usable)


def _read_model_name(card: Path) -> str:
    rows = dict(line.split(":", 1) for line in card.read_text().splitlines() if ":" in line)
    return rows.get("Model", "NVIDIA device").strip()
