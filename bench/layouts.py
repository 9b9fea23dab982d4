"""Predicts production layouts that their authors published, and compares them with the choice of `plait plan`.

    python bench/layouts.py [NAME ...] [--no-choice]

A row has the columns of `bench/data/published_runs.csv`. The choice is for a user of plait on torch, in bf16, on the same
machine, for the same batch. It uses plait's kernels, bytes per parameter and schedules, not those of the authors' stack.
"""

import argparse
import time
from typing import Any

from planner import Planner
from published import run_of
from sites import machine_of

from plait.planner.formulas import RuntimeCosts, TimeModel
from plait.planner.plan_request import get_usable_memory
from plait.planner.search import MEMORY_MARGIN, SearchResult, find_best_plans
from plait.planner.search_space import RECOMPUTES, SearchSpace

H100 = {"gpu": "H100-SXM-80GB", "gpus_per_node": "8", "precision": "bf16", "interconnect": "NVLink4; 400 Gb/s per GPU"}
SLOW = {"gpu": "H100-96GB-HBM2e-500W", "gpus_per_node": "8", "interconnect": "NVLink4; 400 Gb/s per GPU", "fsdp_or_zero_stage": "3",
        "recompute": "selective", "source": "torchtitan"}  # fmt: skip
A100 = {"gpu": "A100-SXM-80GB", "gpus_per_node": "8", "precision": "fp16", "recompute": "full", "seq_len": "2048", "vocab": "51200",
        "interconnect": "NVLink3; 8x200Gb/s HDR IB (Selene)", "source": "Megatron-LM, arXiv 2104.04473", "micro_batch": "1"}  # fmt: skip
LAYOUTS: dict[str, dict[str, str]] = {
    "Llama 3 405B, 8k": H100 | {"model": "Llama 3.1 405B", "gpus": "16384", "dp": "128", "fsdp_or_zero_stage": "2", "tp": "8", "pp": "16",
        "micro_batch": "1", "global_batch": "2048", "seq_len": "8192", "measured_iter_time_s": "6.69",
        "source": "arXiv 2407.21783, table 4", "note": "interleaved schedule"},
    "Llama 3 405B, 128k": H100 | {"model": "Llama 3.1 405B", "gpus": "16384", "dp": "8", "fsdp_or_zero_stage": "2", "tp": "8", "pp": "16",
        "cp": "16", "micro_batch": "1", "global_batch": "128", "seq_len": "131072", "measured_iter_time_s": "15.3",
        "source": "arXiv 2407.21783, table 4", "note": "interleaved schedule"},
    "torchtitan 8B": SLOW | {"model": "Llama 3.1 8B", "gpus": "128", "dp": "128", "micro_batch": "2", "global_batch": "256", "seq_len": "8192",
        "precision": "bf16", "compile": "yes", "measured_tokens_per_s_per_gpu": "6514"},
    "torchtitan 70B": SLOW | {"model": "Llama 3.1 70B", "gpus": "256", "dp": "32", "tp": "8", "micro_batch": "16", "global_batch": "512",
        "seq_len": "8192", "precision": "bf16", "compile": "yes", "recompute": "full", "measured_tokens_per_s_per_gpu": "597.3"},
    "torchtitan 405B": SLOW | {"model": "Llama 3.1 405B", "gpus": "512", "dp": "8", "tp": "8", "pp": "8", "global_batch": "256",
        "micro_batch": "1", "seq_len": "8192", "precision": "fp8", "compile": "yes", "recompute": "full", "measured_tokens_per_s_per_gpu": "128",
        "note": "Interleaved 1F1B"},
    "Megatron-LM GPT 175B": A100 | {"model": "GPT3 175B", "gpus": "64", "dp": "1", "tp": "8", "pp": "8", "vpp_interleave": "3", "global_batch": "64",
        "measured_iter_time_s": "18.13", "source": "Megatron-LM, arXiv 2205.05198, table 5"},
    "Megatron-LM GPT 530B": A100 | {"model": "GPT 530B", "layers": "105", "hidden": "20480", "heads": "128", "gpus": "2520", "dp": "9",
        "tp": "8", "pp": "35", "global_batch": "2520", "measured_tflops_per_gpu": "163"},
    "Megatron-LM GPT 1T": A100 | {"model": "GPT 1T", "layers": "128", "hidden": "25600", "heads": "160", "gpus": "3072", "dp": "6",
        "tp": "8", "pp": "64", "global_batch": "3072", "measured_tflops_per_gpu": "163"},
    "OLMo 2 32B": H100 | {"model": "OLMo 2 32B", "gpus": "1280", "dp": "1280", "fsdp_or_zero_stage": "3", "global_batch": "2560", "seq_len": "4096",
        "compile": "yes", "measured_tokens_per_s_per_gpu": "1800", "interconnect": "NVLink4; 200 Gb/s per GPU",
        "source": "allenai.org/blog/olmo2-32B", "note": "OLMo-core; HSDP on torch's FSDP2"},
    "Nemotron-4 340B": H100 | {"model": "Nemotron-4 340B", "gpus": "6144", "dp": "64", "tp": "8", "pp": "12", "vpp_interleave": "8",
        "micro_batch": "1", "global_batch": "2304", "seq_len": "4096",
        "measured_iter_time_s": "8.0", "source": "technical report of Nemotron-4 340B, table 2",
        "note": "Megatron-Core; Transformer Engine"},
    "DeepSeek-V3": {"model": "DeepSeek V3", "gpu": "H800", "gpus_per_node": "8", "gpus": "2048", "dp": "128", "fsdp_or_zero_stage": "1", "tp": "1",
        "pp": "16", "ep": "64", "micro_batch": "1", "global_batch": "15360", "seq_len": "4096", "precision": "fp8", "measured_iter_time_s": "19.9",
        "interconnect": "400 Gb/s per GPU", "source": "arXiv 2412.19437: 180,000 GPU hours for 10^12 tokens", "note": "DualPipe; DeepEP; zbv"},
    "MaxText 7B": H100 | {"model": "Llama2 7B", "gpus": "8", "dp": "8", "fsdp_or_zero_stage": "3", "measured_tflops_per_gpu": "492",
        "source": "AI-Hypercomputer/maxtext", "seq_len": "4096"},
    "nanoGPT 124M": {"model": "GPT-2 124M", "gpu": "A100-SXM-40GB", "gpus": "8", "gpus_per_node": "8", "dp": "8",
        "fsdp_or_zero_stage": "0", "seq_len": "1024", "micro_batch": "12", "global_batch": "480", "precision": "bf16", "compile": "yes",
        "measured_iter_time_s": "0.576", "recompute": "none",
        "source": "karpathy/nanoGPT's README: 600,000 steps in about four days"},
    "nanochat d34": H100 | {"model": "nanochat d34", "layers": "34", "hidden": "2176", "heads": "17", "vocab": "65536", "gpus": "8", "dp": "8",
        "micro_batch": "4", "global_batch": "256", "seq_len": "2048", "measured_tokens_per_s_per_gpu": "33200", "compile": "yes", "recompute": "none",
        "source": "karpathy/nanochat: MFU of 47.4 %"},
}  # fmt: skip


def chosen(row: dict[str, str]) -> SearchResult:
    """Return the choice of `plait plan` for a row's model, batch and machine."""
    run, machine = run_of(row), machine_of(row)
    assert machine is not None and run.work is not None
    layers = max(block.count for block in run.work.blocks)
    products = [p for block in run.work.blocks for p in block.products]
    heads = int(max((p.batch for p in products if not p.weight), default=1))
    experts = tuple(sorted({int(p.experts) for p in products if p.experts}))
    values = {"precision": ("bf16",), "activation_checkpointing": RECOMPUTES, "offload": ("none", "optimizer", "all"), "compile": (False, True),
              "sequence_parallel": (True,)}  # fmt: skip
    memory = machine.device.memory
    space = SearchSpace(
        machine.devices,
        int(run.plans[0][2]),
        {},
        get_usable_memory(machine),
        2.0 * memory,
        values,
        layers,
        True,
        True,
        experts,
        heads,
        (),
        MEMORY_MARGIN * memory,
    )
    refused = lambda plan: "" if heads % plan.tp == 0 and not (plan.compile and plan.activation_checkpointing == "selective") else "uneven"  # noqa: E731
    return find_best_plans(TimeModel(run.work, machine, RuntimeCosts()), space, refused)


def line(name: str, row: dict[str, str], choice: bool) -> str:
    """Format one line of the table."""
    run = run_of(row)
    if run.why or not run.rate:
        return f"| {name} | {run.why or 'no rate'} |"
    got: Any = Planner()(run)
    rate = run.rate
    measured, predicted = got.batch / rate, got.estimate.seconds
    cells = [name, f"`{got.estimate.plan}`", f"{measured:.3g}", f"{predicted:.3g}", f"{100 * (predicted / measured - 1):+.0f} %"]
    if choice:
        begun = time.monotonic()
        found = chosen(row).best
        best = found[0] if found else None
        cells += [f"`{best.plan}`" if best else "nothing fits", f"{best.seconds:.3g}" if best else "–", f"{time.monotonic() - begun:.0f} s"]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", help="layouts whose names begin with these; all without")
    parser.add_argument("--no-choice", action="store_true", help="only predict")
    options = parser.parse_args()
    for name, row in LAYOUTS.items():
        if not options.names or name.startswith(tuple(options.names)):
            print(line(name, {"row_id": name, "table_or_file": "", **row}, not options.no_choice), flush=True)


if __name__ == "__main__":
    main()
