"""Published runs as something to predict: what a row states becomes a workload, a plan and a machine.

What a row does not state is not guessed from its result: sizes of well-known models come from `shapes.py`, and of a
micro-batch or a recomputation that is not printed the planner takes what it finds fastest of what fits.
"""

import csv
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from images import convolutional
from shapes import Shape, known, transformer
from sites import machine_of

from plait.config.plan import Plan
from plait.planner.from_sketch import Workload

PRECISIONS = (("nvfp4", "fp8"), ("fp8", "fp8"), ("bf16", "bf16"), ("fp16", "fp16"), ("tf32", "tf32"), ("fp32", "fp32"))
OLD = ("V100", "P100", "P40", "K80", "TITAN")
"""Devices that flash attention does not run on."""
BINNED = 288
"""Tokens of a sample of BERT's second phase at NVIDIA: more than half of 512 would be padding on Wikipedia (arXiv 2107.02027),
and its recipes put samples of like length together, in bins of 64 (`phase2_bin_size`), so that a bin of padding is left."""


@dataclass(frozen=True)
class Run:
    """One published run. `why` says what is missing when it cannot be expressed."""

    row: dict[str, str] = field(repr=False)
    work: Workload | None = None
    plans: tuple[tuple[Plan, float, float], ...] = ()
    """Candidates (plan, samples of a micro-batch, of a step): one, when the row states everything."""
    rate: float | None = None
    """Measured samples per second, of all devices."""
    memory: float | None = None
    """Measured peak, bytes of a device."""
    fits: bool | None = None
    why: str = ""
    modern: bool = True
    lora: bool = False
    portable: bool = True
    """Its kernels are torch's, not those that the vendor tunes for each device."""
    megatron: bool = False
    """Its optimizer is that of Megatron-LM."""
    layered: bool = True
    """A chain of alike layers, which stages share out by number; other chains are balanced by time."""
    tiled: bool = False
    """Its messages of tp go tile by tile beside matmuls, as NVIDIA's recipes since Megatron-Core document."""
    torch: bool = False
    """It holds what torch's FSDP2 holds."""
    allocator: bool = False
    """Its memory is what torch's allocator reserved, without the device's own context."""

    @property
    def source(self) -> str:
        return self.row["source"]

    @property
    def group(self) -> str:
        return self.row.get("rank_group", "")


def number(row: dict[str, str], key: str, default: float = 0.0) -> float:
    """A cell as a number; the default where it is empty or no number."""
    try:
        return float(row.get(key) or default)
    except ValueError:
        return default


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a file; columns that it lacks are empty."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if row["source"].startswith("VIA-Research/vTrain"):  # a source for each line of its file
            row["source"] = "VIA-Research/vTrain"
    return rows


def run_of(row: dict[str, str]) -> Run:
    """What a row says, or why it says too little."""
    gpus = int(number(row, "gpus"))
    if not gpus or not row.get("gpu"):
        return Run(row, why="number or kind of devices not stated")
    if machine_of(row, False) is None:
        return Run(row, why="no data sheet of its devices")
    if "strategy =" in row.get("note", "") and "data_parallel" not in row["note"] and "zero" not in row["note"]:
        return Run(row, why="its layout was found by a search and is not printed")
    modern = not any(name in row["gpu"] for name in OLD) and row.get("precision") != "fp16"
    shape = shape_of(row)
    tokens = int(number(row, "seq_len") or (shape.length if shape and modern else 1024))
    if tokens == 512 and re.search(r"(PyTorch|Paddle\w*)/LanguageModeling/BERT", row.get("table_or_file", "")):
        tokens = BINNED
    work = convolutional(row.get("model", ""), row.get("precision") == "fp32")
    if work is None and shape is not None:
        flash, fused = modern or number(row, "seq_len") > 4096, row.get("compile") == "yes"
        work = transformer(shape, tokens, flash=flash, fused=fused, name=row.get("model", ""))
    if work is None:
        return Run(row, why="sizes of the model not stated")
    plans = plans_of(row, gpus, bool(shape))
    if not plans:
        return Run(row, why="its layout does not multiply to its devices or its batch")
    rate = rate_of(row, shape, work, tokens, gpus)
    said = row["source"] + row.get("note", "")
    gib = (
        "GB" not in said or "logs GiB" in said
    )  # what is printed as GB is taken at its word, unless its program is known
    memory = number(row, "measured_peak_memory_gib") * (2**30 if gib else 1e9)
    fits = {"yes": False, "no": True}.get(row.get("oom", ""), True if rate else None)
    lora = "lora" in (row.get("model", "") + row.get("note", "")).lower()
    return Run(
        row,
        work,
        plans,
        rate,
        memory or None,
        fits,
        "",
        modern,
        lora,
        not re.search("Megatron|NeMo|Transformer ?Engine", said),
        bool(re.search("Megatron|NeMo|2104.04473|2205.05198", row["source"])),
        bool(shape),
        recipe(row),
        bool(re.search("torchtitan|torchao|pytorch/|PyTorch FSDP", said)),
        "torchtitan" in said,
    )


def recipe(row: dict[str, str]) -> bool:
    """Whether it is a run of NVIDIA's recipes since Megatron-Core, which document what their rows do not print."""
    return bool(re.search("NeMo|Megatron-Core", row["source"]))


def shape_of(row: dict[str, str]) -> Shape | None:
    """Printed sizes, else those of a model that is known by its name."""
    public = known(row.get("model", ""))
    layers, hidden = int(number(row, "layers")), int(number(row, "hidden"))
    if not layers or not hidden:
        return public
    ffn, heads = int(number(row, "ffn_hidden")), int(number(row, "heads"))
    gated = (public.gated if public else False) or bool(ffn and ffn != 4 * hidden)
    found = Shape(layers, hidden, ffn, heads, int(number(row, "kv_heads")), int(number(row, "vocab", 51200)), gated)
    if public and public.predicted < 1:
        found = replace(found, predicted=public.predicted, vocab=public.vocab)
    if public and public.experts:
        found = replace(public, layers=layers, hidden=hidden)
    return found


def layout_of(row: dict[str, str], gpus: int) -> tuple[int, int, int] | None:
    """(tp, pp, shares of the batch); of a product of the first two that alone is printed, tp stays inside a node."""
    tp, pp, cp = (int(number(row, key, 1)) or 1 for key in ("tp", "pp", "cp"))
    both = re.search(r"\(tp\*pp\) = (\d+)", row.get("note", ""))
    if both and not row.get("tp"):
        tp = min(int(both[1]), int(number(row, "gpus_per_node", 8)))
        pp = int(both[1]) // tp
    shares = gpus // (tp * pp * cp)
    return (tp, pp, shares) if shares and shares * tp * pp * cp == gpus else None


def plans_of(row: dict[str, str], gpus: int, layered: bool) -> tuple[tuple[Plan, float, float], ...]:
    """The plans a row may mean, with the samples of a micro-batch and of a step."""
    layout = layout_of(row, gpus)
    if layout is None:
        return ()
    tp, pp, shares = layout
    cp, ep = (int(number(row, key, 1)) or 1 for key in ("cp", "ep"))
    batch, size = number(row, "global_batch"), number(row, "micro_batch")
    deep = 4 * pp if pp > 1 else 1  # micro-batches of a step whose batch nobody printed
    sizes = [size] if size else SIZES
    if batch:
        sizes = [s for s in sizes if s <= batch / shares and (batch / shares) % s == 0] or [batch / shares]
    again = [row["recompute"]] if row.get("recompute") in ("none", "selective", "full") else ["none"]
    if layered and not row.get("recompute"):
        again = ["none", "selective"] if recipe(row) else ["none", "selective", "full"]
    stretched = row.get("recompute") != "full" or "torchtitan" in row["source"]
    found = []
    for zero, fsdp in sharded(row, shares):
        plan = Plan(pp=pp, dp=shares // fsdp, fsdp=fsdp, tp=tp, cp=cp, ep=min(ep, gpus), zero=zero or 3,
                    precision=next((ours for word, ours in PRECISIONS if word in row.get("precision", "")), "bf16"),
                    compile=row.get("compile") == "yes", sequence_parallel=tp > 1 and stretched)  # fmt: skip
        for each in sizes:
            micro = max(1, round(batch / shares / each)) if batch else deep
            v = int(number(row, "vpp_interleave", 1)) or 1
            looped = pp > 1 and v > 1 and micro % pp == 0
            order = {"schedule": "interleaved", "stages_per_rank": v} if looped else {}
            for word in again:
                total = batch or each * shares * micro
                found.append(
                    (replace(plan, microbatches=micro, recompute=word, **order), total / shares / micro, total)
                )
    return tuple(found)


SIZES = [1, 2, 4, 8, 16, 32, 64, 128]


def sharded(row: dict[str, str], shares: int) -> list[tuple[int, int]]:
    """(zero, devices that share a copy) of the row; both whole copies and a shared optimizer state when it does not say."""
    zero = int(number(row, "fsdp_or_zero_stage"))
    if zero:
        group = re.search(r"group(?: size)? (\d+)", row.get("note", ""))
        return [(zero, min(shares, int(group[1])) if group else shares)]
    if row.get("fsdp_or_zero_stage") or shares == 1 or row.get("precision") in ("fp32", "tf32", "amp_fp16"):
        return [(0, 1)]
    return [(0, 1), (1, shares)]


def rate_of(row: dict[str, str], shape: Shape | None, work: Workload, tokens: int, gpus: int) -> float | None:
    """Measured samples per second, from whichever figure the row has."""
    batch = number(row, "global_batch")
    if number(row, "measured_iter_time_s") and batch:
        return batch / number(row, "measured_iter_time_s")
    if number(row, "measured_tokens_per_s_per_gpu"):
        return number(row, "measured_tokens_per_s_per_gpu") * gpus / tokens
    if number(row, "measured_samples_per_s"):
        return number(row, "measured_samples_per_s")
    rate = number(row, "measured_tflops_per_gpu") * 1e12
    if not rate or shape is None:
        return None
    hardware = "hardware FLOPs" in row.get("note", "") or "tflops counts full" in row.get("note", "")
    passes = 4 if hardware or (row.get("recompute") == "full" and "model FLOPs" not in row.get("note", "")) else 3
    head = work.blocks[-1].products[0].flops * 3
    return rate * gpus / ((work.flops - head / 3) * passes + head)
