"""Which accelerators this machine has, asked of the driver's files: no CUDA call, so that forking stays possible."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from plait.config.errors import PlaitError, Problem

if TYPE_CHECKING:
    from plait.launch.place import Place


def cuda_names() -> list[str]:
    """Names of the devices this process may use, in the order in which torch numbers them; [] when torch has neither CUDA nor HIP.

    As many as the driver shows to CUDA: its files in /proc may list devices that a container was not given.
    """
    import torch

    from plait.tensors.torch_private import devices_by_driver

    if torch.version.cuda is None and torch.version.hip is None:
        return []
    names, count = _listed() if torch.version.hip is None else [], devices_by_driver()
    if count is None:
        return names
    return (names + ["a device"] * (count - len(names)))[:count]


def _listed() -> list[str]:
    """What the driver's files, or nvidia-smi, list of the devices that CUDA_VISIBLE_DEVICES names."""
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    names = [_model(card) for card in cards] or ["NVIDIA device" for _ in Path("/dev").glob("nvidia[0-9]*")]
    if not names and shutil.which("nvidia-smi"):  # a virtual machine without the driver's files
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
        names = [line.partition(": ")[2].partition(" (")[0] for line in listed.splitlines() if line.startswith("GPU ")]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return names
    chosen = [word for word in visible.split(",") if word.strip() not in ("", "-1")]
    known = [names[int(word)] if word.isdigit() and int(word) < len(names) else "NVIDIA device" for word in chosen]
    return known[: len(names)]


def kind_of(wanted: str) -> str:
    """`auto`, `cpu` or `cuda` as cpu or cuda. H001 when CUDA is asked for and none is visible."""
    names = cuda_names()
    if wanted == "cuda" and not names:
        import torch

        lacks = torch.version.cuda is None and torch.version.hip is None
        why = f"torch {torch.__version__} {'has no CUDA' if lacks else 'sees no device'}"
        fix = ("--device cpu    runs the same plan on CPU processes",)
        raise PlaitError(Problem("H001", "this run asks for CUDA, none is visible", why=why, fix=fix))
    return "cuda" if names and wanted != "cpu" else "cpu"


def check(kind: str, ranks: int) -> None:
    """H003 when so many ranks on this machine have no device each."""
    if kind == "cuda" and len(cuda_names()) < ranks:
        raise too_few(f"the plan starts {ranks} processes here, one for each device", ranks)


def too_few(what: str, ranks: int) -> PlaitError:
    """H003."""
    count = len(cuda_names())
    fix = (f"--nproc {count}", f"--device cpu    runs {ranks} CPU processes") if count else ("--device cpu",)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    why = "" if visible is None else f"CUDA_VISIBLE_DEVICES={visible}"
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


def _model(card: Path) -> str:
    rows = dict(line.split(":", 1) for line in card.read_text().splitlines() if ":" in line)
    return rows.get("Model", "NVIDIA device").strip()
