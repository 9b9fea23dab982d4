"""Which accelerators this machine has, asked of the driver's files: no CUDA call, so that forking stays possible."""

import os
import shutil
import subprocess
from pathlib import Path

from plait.errors import PlaitError, Problem


def cuda_names() -> list[str]:
    """Names of the NVIDIA devices this process may use, in CUDA's order of visibility; [] when torch has no CUDA."""
    import torch

    if torch.version.cuda is None:
        return []
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    names = [_model(card) for card in cards] or ["NVIDIA device" for _ in Path("/dev").glob("nvidia[0-9]*")]
    if not names and shutil.which("nvidia-smi"):  # a virtual machine without the driver's files
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
        names = [line.partition(": ")[2].partition(" (")[0] for line in listed.splitlines() if line.startswith("GPU ")]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return names
    chosen = [word for word in visible.split(",") if word.strip() not in ("", "-1")]
    return [names[int(word)] if word.isdigit() and int(word) < len(names) else "NVIDIA device" for word in chosen][
        : len(names)
    ]


def kind_of(wanted: str) -> str:
    """`auto`, `cpu` or `cuda` as cpu or cuda. H001 when CUDA is asked for and none is visible."""
    names = cuda_names()
    if wanted == "cuda" and not names:
        import torch

        why = f"torch {torch.__version__} " + ("has no CUDA" if torch.version.cuda is None else "sees no device")
        raise PlaitError(
            Problem(
                "H001",
                "this run asks for CUDA, none is visible",
                why=why,
                fix=("--device cpu    runs the same plan on CPU processes",),
            )
        )
    return "cuda" if names and wanted != "cpu" else "cpu"


def _model(card: Path) -> str:
    rows = dict(line.split(":", 1) for line in card.read_text().splitlines() if ":" in line)
    return rows.get("Model", "NVIDIA device").strip()
