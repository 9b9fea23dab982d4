"""Converts a row of the published runs to a workload, a plan and a machine, to predict it.

Missing values of a row are not guessed from its result. Sizes of well-known models come from `shapes.py`. If the micro-batch or
activation checkpointing is not printed, the planner uses the fastest setting that fits.
"""

import csv
import re
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from images import convolutional
from shapes import Shape, known, transformer, usual
from sites import machine_of
from stacks import DEFAULT, Stack, stack_of, text_of

from plait.config.plan import Plan
from plait.planner.workload import Workload

PRECISIONS = (("nvfp4", "fp8"), ("fp8", "fp8"), ("bf16", "bf16"), ("fp16", "fp16"), ("tf32", "tf32"), ("fp32", "fp32"))
BINNED = 288
"""Tokens of a sample of BERT's second phase at NVIDIA: more than half of 512 would be padding on Wikipedia (arXiv 2107.02027).
Its recipes group samples of similar length, in bins of 64 (`phase2_bin_size`), so that the padding of one bin remains."""


@dataclass(frozen=True)
class Run:
    """One published run. `why` states the missing values if the run cannot be expressed."""

    row: dict[str, str] = field(repr=False)
    work: Workload | None = None
    plans: tuple[tuple[Plan, float, float], ...] = ()
    """Candidates (plan, samples of a micro-batch, of a step): only one if the row is complete."""
    rate: float | None = None
    """Measured samples per second, of all devices."""
    memory: float | None = None
    """The measured peak in bytes of a device."""
    fits: bool | None = None
    why: str = ""
    lora: bool = False
    quantized: bool = False
    """Whether frozen weights are in 4 bits."""
    stack: Stack = DEFAULT
    layered: bool = True
    """Whether the layers are a chain of equal layers, which stages divide by number; other chains are balanced by time."""

    @property
    def source(self) -> str:
        return self.row["source"]

    @property
    def group(self) -> str:
        return self.row.get("rank_group", "")


def number(row: dict[str, str], key: str, default: float = 0.0) -> float:
    """Return a cell as a number, or the default if it is empty or no number."""
    try:
        return float(row.get(key) or default)
    except ValueError:
        return default


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file; missing columns are empty."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if row["source"].startswith("VIA-Research/vTrain"):  # one source per line of its file
            row["source"] = "VIA-Research/vTrain"
    return rows


def run_of(row: dict[str, str], known: frozenset[str] | None = None) -> Run:
    """Return the run of a row, or the reason why the row is incomplete. `known`: the stacks with known facts (None: all)."""
    gpus = int(number(row, "gpus"))
    if not gpus or not row.get("gpu"):
        return Run(row, why="number or kind of devices not stated")
    if machine_of(row) is None:
        return Run(row, why="no data sheet of its devices")
    if "strategy =" in row.get("note", "") and "data_parallel" not in row["note"] and "zero" not in row["note"]:
        return Run(row, why="its layout was found by a search and is not printed")
    stack = stack_of(row, known)
    shape = shape_of(row)
    decoder = shape is not None and shape.causal and shape.predicted == 1
    old = decoder and stack.attention == "unfused" and row.get("precision") in ("fp16", "")
    tokens = int(number(row, "seq_len") or (shape.length if shape and not old else 1024))
    if tokens == 512 and re.search(r"(PyTorch|Paddle\w*)/LanguageModeling/BERT", row.get("table_or_file", "")):
        tokens = BINNED
    work = convolutional(row.get("model", ""), row.get("precision") == "fp32", text_of(row))
    if work is None and shape is not None:
        flash = stack.attention != "unfused" and not any(name in row["gpu"] for name in OLD)
        copies = 1.0 if stack.fused_loss else 2.0 if row.get("compile") == "yes" else 4.0
        work = transformer(shape, tokens, flash=flash, copies=copies, name=row.get("model", ""))
    if work is None:
        return Run(row, why="sizes of the model not stated")
    plans = plans_of(row, gpus, bool(shape), stack, shape.experts if shape else 0)
    if not plans:
        return Run(row, why="its layout does not multiply to its devices or its batch")
    rate = rate_of(row, shape, work, tokens, gpus)
    said = row["source"] + row.get("note", "")
    gib = (
        "GB" not in said or "logs GiB" in said
    )  # printed GB are taken literally, unless the program is known
    memory = number(row, "measured_peak_memory_gib") * (2**30 if gib else 1e9)
    if not row.get("micro_batch") and not row.get("global_batch"):
        memory = 0.0  # of an unknown batch
    fits = {"yes": False, "no": True}.get(row.get("oom", ""), True if rate else None)
    said = f"{row.get('model', '')} {row.get('note', '')} {row.get('precision', '')}"
    lora = bool(re.search(r"(?i)lora\b", said))
    quantized = lora and bool(re.search(r"(?i)qlora|nf4|\bint4|4-?bit|\bbnb", said))
    return Run(row, work, plans, rate, memory or None, fits, "", lora, quantized, stack, bool(shape))


def recipe(row: dict[str, str]) -> bool:
    """Whether it is a run of NVIDIA's recipes since Megatron-Core, which document settings that their rows do not print."""
    return bool(re.search("NeMo|Megatron-Core", row["source"]))


def shape_of(row: dict[str, str]) -> Shape | None:
    """Return the printed sizes, or those of a model that is known by its name."""
    public = known(row.get("model", ""), text_of(row))
    layers, hidden = int(number(row, "layers")), int(number(row, "hidden"))
    billions = number(row, "params_b")
    if not layers or not hidden:
        decoder = re.match(r"(?i)gpt|.*(llama|qwen|mistral|transformer|decoder|\blm\b)", row.get("model", ""))
        if public or not billions or not decoder or "moe" in row["model"].lower():
            return public
        gated = not row["model"].lower().startswith("gpt")
        return usual(billions, gated, int(number(row, "vocab", 51200)), hidden)
    ffn, heads = int(number(row, "ffn_hidden")), int(number(row, "heads"))
    gated = (public.gated if public else False) or bool(ffn and ffn != 4 * hidden)
    found = Shape(layers, hidden, ffn, heads, int(number(row, "kv_heads")), int(number(row, "vocab", 51200)), gated)
    if "mem_len" in row.get("note", ""):  # a segment attends to the same number of previous words
        found = replace(found, window=2.0)
    if public and public.predicted < 1:
        found = replace(found, predicted=public.predicted, vocab=public.vocab)
    if public and public.experts:
        found = replace(public, layers=layers, hidden=hidden)
    return found


def layout_of(row: dict[str, str], gpus: int) -> tuple[int, int, int] | None:
    """Return (tp, pp, number of local batches). If only the product of the first two is printed, tp stays inside a node."""
    tp, pp, cp = (int(number(row, key, 1)) or 1 for key in ("tp", "pp", "cp"))
    both = re.search(r"\(tp\*pp\) = (\d+)", row.get("note", ""))
    if both and not row.get("tp"):
        tp = min(int(both[1]), int(number(row, "gpus_per_node", 8)))
        pp = int(both[1]) // tp
    shares = gpus // (tp * pp * cp)
    return (tp, pp, shares) if shares and shares * tp * pp * cp == gpus else None


def plans_of(row: dict[str, str], gpus: int, layered: bool, stack: Stack, experts: int) -> tuple[tuple[Plan, float, float], ...]:
    """Return the plans that a row allows, with the samples of a micro-batch and of a step."""
    layout = layout_of(row, gpus)
    if layout is None:
        return ()
    tp, pp, shares = layout
    cp = int(number(row, "cp", 1)) or 1
    spread = [int(number(row, "ep"))] if row.get("ep") else [n for n in SIZES if n == 1 or (shares % n == 0 and experts % n == 0 and n <= experts)]
    batch, size = number(row, "global_batch"), number(row, "micro_batch")
    deep = 4 * pp if pp > 1 else 1  # micro-batches of a step whose batch is not printed
    sizes = [size] if size else SIZES
    if batch:
        sizes = [s for s in sizes if s <= batch / shares and (batch / shares) % s == 0] or [batch / shares]
    again = [row["recompute"]] if row.get("recompute") in ("none", "selective", "full") else [stack.recompute or "none"]
    if layered and not row.get("recompute") and not stack.recompute:
        again = ["none", "selective"] if recipe(row) else ["none", *["selective"] * (not stack.layers), "full"]
    stretched = row.get("recompute") != "full" or "torchtitan" in row["source"]
    note = row.get("note", "")
    said = note if "offload" in note.lower() else row.get("table_or_file") or ""  # a table's heading applies to all of its rows
    away = "none"
    if re.search(r"offload(?! N)|Offload", said):
        away = "all" if re.search(r"ZeRO-3 (with CPU )?offload|ZeRO-Infinity|Full Offload|param\w* offload(?! N)", said) else "optimizer"
    ways: dict[str, Any] = {"cp_method": "ulysses"} if cp > 1 and re.search(r"(?i)ulysses|a2a cp|cp a2a", note) else {}
    found = []
    for zero, fsdp in sharded(row, shares, stack, pp):
        if stack.over_cp and cp > 1 and zero == 3:
            ways["shard_over_cp"] = True
        plan = Plan(pp=pp, dp=shares // fsdp, fsdp=fsdp, tp=tp, cp=cp, zero_stage=zero or 3,
                    precision=precision_of(row), sequence_parallel=tp > 1 and stretched, offload=away)  # fmt: skip
        for each, ep in product(sizes, spread):
            micro = max(1, round(batch / shares / each)) if batch else deep
            order = schedule_of(row, pp, micro) | ways | {"ep": max(1, min(ep, gpus))}
            total = batch or each * shares * micro
            found += [(replace(plan, microbatches=micro, activation_checkpointing=word, **order), total / shares / micro, total) for word in again]
    return tuple(found)


OLD = ("V100", "P100", "P40", "K80", "TITAN", "T4")
"""Devices without bf16, and without FlashAttention-2."""


def precision_of(row: dict[str, str]) -> str:
    """Return the precision for a row's format; the default is the 16-bit format of the device."""
    usual = "fp16" if any(name in row["gpu"] for name in OLD) else "bf16"
    return next((ours for word, ours in PRECISIONS if word in row.get("precision", "")), usual)


def schedule_of(row: dict[str, str], pp: int, micro: int) -> dict[str, Any]:
    """Return the keys of a pipeline's schedule, if the row names one other than 1F1B."""
    note, v = row.get("note", ""), int(number(row, "vpp_interleave", 1)) or 1
    if pp == 1:
        return {}
    if re.search(r"(?i)\bzb-?v|\bzbv|schedule v-", note):
        return {"schedule": "zbv", "stages_per_rank": 2}
    if re.search(r"(?i)\bzb-\dp|zero.bubble \(|schedule zero-bubble", note):
        return {"schedule": "zb"}
    if v == 1 and re.search(r"(?i)interleaved (?:1f1b|schedule)|1f1b-(?:i\b|interleaved)", note):
        v = 2
    return {"schedule": "interleaved", "stages_per_rank": v} if v > 1 and micro % pp == 0 else {}


SIZES = [1, 2, 4, 8, 16, 32, 64, 128]


def sharded(row: dict[str, str], shares: int, stack: Stack, pp: int) -> list[tuple[int, int]]:
    """Return (zero stage, ranks that shard one replica) of the row. If the row has none, the candidates are full replicas, a sharded
    optimizer state and, with torch's FSDP, everything sharded."""
    zero = int(number(row, "fsdp_or_zero_stage"))
    if not row.get("fsdp_or_zero_stage") and (found := re.search(r"(FSDP|FULL_SHARD|fully_shard)|ZeRO[- ]?([123])", row.get("note", ""))):
        zero = 3 if found[1] else int(found[2])
    if zero:
        group = re.search(r"group(?: size)? (\d+)", row.get("note", ""))
        return [(zero, min(shares, int(group[1])) if group else shares)]
    if row.get("fsdp_or_zero_stage") or shares == 1 or row.get("precision") in ("fp32", "tf32", "amp_fp16"):
        return [(0, 1)]
    if re.search(r"data_parallel|\bDDP\b|DistributedDataParallel", row.get("note", "")):
        return [(0, 1)]
    if recipe(row) or stack.held == "zero":  # all of them have the distributed optimizer
        return [(1, shares)]
    return [(0, 1), (1, shares)] + [(3, shares)] * (stack.held in ("fsdp2", "pure") and pp == 1)


def rate_of(row: dict[str, str], shape: Shape | None, work: Workload, tokens: int, gpus: int) -> float | None:
    """Return the measured samples per second, from any figure of the row. Deterministic runs have none, because they are slower on purpose."""
    if "deterministic" in row.get("note", ""):
        return None
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
