"""Compares the memory of a training step: predicted by a dry run, measured, and that of hand-written FSDP2 and Accelerate.

Memory is the peak of the tensors on one rank (`plait/planner/dryrun/allocations.py`), not the memory of the process. The third
step is measured, so that the optimizer has its state; the rank with the most memory counts. Each plan runs in its own processes.
The models are small for a quick run, but large enough that tensors dominate.

A dry run (`plait plan --dry-run`) is compared on every rank, for all strategies, with the models of tests/exact/test_dryrun.py.

    plait          Engine.step under the plan
    hand-written   fully_shard on every block and on the model, clip_grad_norm_, the optimizer on DTensors
    Accelerate     its FSDP2 plugin, the same blocks
"""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import sharding
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from plait.config.job import Job, load_job
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place
from plait.planner.dryrun.allocations import AllocationRecorder
from plait.planner.dryrun.dry_run import dry_run
from plait.planner.dryrun.measure import measure_step
from plait.planner.dryrun.memory_table import make_memory_table
from plait.tensors.torch_private import tree_leaves, tree_map

EXAMPLES = Path(__file__).parents[1] / "examples"
SINGLE = ("dp=1", "dp=1 microbatches=3", "dp=1 activation_checkpointing=full", "dp=1 activation_checkpointing=selective", "dp=1 precision=bf16")
COPIES = ("dp=2", "dp=2 microbatches=3", "dp=2 offload=optimizer", "dp=2 precision=bf16 activation_checkpointing=selective")
SHARDED = (
    "fsdp=2", "fsdp=2 zero_stage=2", "fsdp=2 zero_stage=1", "fsdp=4", "dp=2 fsdp=2", "fsdp=2 microbatches=3", "fsdp=2 zero_stage=1 microbatches=3",
    "fsdp=2 zero_stage=2 microbatches=2", "dp=2 fsdp=2 microbatches=2", "fsdp=2 activation_checkpointing=full", "fsdp=2 precision=bf16",
    "fsdp=2 offload=optimizer",
)  # fmt: skip
PLANS = SINGLE + COPIES + SHARDED


class Made:
    """Samples computed from their index: inputs of `shape`, and a class; with a vocabulary, tokens."""

    def __init__(self, shape: tuple[int, ...], classes: int, vocabulary: int = 0):
        self.shape, self.classes, self.vocabulary = shape, classes, vocabulary

    def __len__(self) -> int:
        return 512

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        source = torch.Generator().manual_seed(i)
        x = (
            torch.randint(self.vocabulary, self.shape, generator=source)
            if self.vocabulary
            else torch.randn(self.shape, generator=source)
        )
        return x, torch.tensor(i % self.classes)


class Cnn(nn.Module):
    """Three convolutions with batch norms, a dropout and a head. x: [batch, 3, 32, 32]."""

    def __init__(self, width: int = 32):
        super().__init__()
        sizes = [3, width, 2 * width, 4 * width]
        self.blocks = nn.Sequential(*(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)) for a, b in itertools.pairwise(sizes)
        ))  # fmt: skip
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(4 * width * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.blocks(x).flatten(1)))


class Lstm(nn.Module):
    """Tokens -> embedding -> two recurrent layers -> the last state's class. x: [batch, length]."""

    def __init__(self, width: int = 256):
        super().__init__()
        self.embed, self.rnn, self.head = (
            nn.Embedding(1000, width),
            nn.LSTM(width, width, 2, batch_first=True),
            nn.Linear(width, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(x))[0][:, -1])


def mlp(width: int = 512, depth: int = 4) -> nn.Module:
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(nn.Linear(128, width), *layers, nn.Linear(width, 10))


def _job(model: Callable[[], nn.Module], data: Any, optimizer: Any, batch: int) -> Job:
    return Job(
        model=model, loss=cross_entropy, data=lambda: data, optimizer=optimizer, batch=batch, steps=100, clip=1.0
    )


def workloads() -> dict[str, Job]:
    """Models of several kinds, with three optimizers: one without state, one in a loop over tensors, one fused."""
    adam = lambda p: torch.optim.AdamW(p, lr=1e-3)  # noqa: E731
    fused = lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True)  # noqa: E731
    momentum = lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9)  # noqa: E731
    with redirect_stdout(sys.stderr):
        gpt = load_job(str(EXAMPLES / "stdlib_gpt/job.py"), {"depth": "4", "width": "256", "batch": "12"})
        dropped = load_job(
            str(EXAMPLES / "stdlib_gpt/job.py"), {"depth": "6", "width": "128", "batch": "12", "dropout": "0.1"}
        )
        unet = load_job(str(EXAMPLES / "unet/job.py"), {"width": "64", "levels": "3", "batch": "24"})
    return {
        "mlp": _job(mlp, Made((128,), 10), adam, 96),
        "cnn": _job(Cnn, Made((3, 32, 32), 10), momentum, 24),
        "lstm": _job(Lstm, Made((48,), 10, 1000), fused, 24),
        "gpt": gpt,
        "gpt-dropout": dropped,
        "unet": replace(unet, steps=100),
        "llama": llama(),
    }


def llama() -> Job:
    """The example's model, with a size between `tiny` and `1b`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    found = load_job(str(EXAMPLES / "llama/job.py"), {"length": "64", "batch": "12"})
    config = LlamaConfig(
        hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=2048, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return replace(found, model=lambda: LlamaForCausalLM(config))


def with_plait(place: Place, job: Job, plan: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    engine = Engine(job, Plan.parse(plan), place=place, device="cpu")
    peak = measure_step(engine)
    return {"total": peak.total, "categories": peak.categories}


def with_other(place: Place, job: Job, other: str) -> dict[str, Any]:
    """Run three steps of a hand-written or Accelerate loop and measure the third. The meter runs from the start and counts all tensors."""
    torch.set_num_threads(1)
    place.connect(torch.device("cpu"))
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(place.rank))
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(place.world)) | {"MASTER_ADDR": "127.0.0.1"}
    data = job.data()
    samples = [tree_map(torch.clone, data[i]) for i in range(3 * job.batch)]
    job = replace(job, data=lambda: samples, schedule=job.schedule or (lambda _: 1.0))
    with AllocationRecorder() as meter:
        meter.add_existing("", tree_leaves(samples), free=True)
        if other == "Accelerate":
            take = sharding.with_accelerate(job, place)
        else:
            take = sharding.by_hand(job, place, other == "hand-written")
        take()
        take()
        first = len(meter.tape.changes)
        take()
    levels = list(itertools.accumulate(c.bytes for c in meter.tape.changes))
    return {"total": max(levels[first - 1 :])}


def largest(target: Callable[..., Any], ranks: int) -> dict[str, Any]:
    return max(fork.run_ranks(target, ranks), key=lambda r: r["total"])


def predicted(jobs: dict[str, Job], plans: tuple[str, ...], as_json: bool) -> float:
    """Print prediction and measurement for every pair, and return the largest error."""
    worst = 0.0
    print(f"{'':<14}{'plan':<42}{'predicted':>10}{'measured':>10}{'error':>9}   (MB, %)")
    for name, job in jobs.items():
        for plan in plans:
            table = make_memory_table(job, Plan.parse(plan))
            found = largest(partial(with_plait, job=job, plan=plan), Plan.parse(plan).devices)
            error = table.total / found["total"] - 1
            worst = max(worst, abs(error))
            row = f"{name:<14}{plan:<42}{table.total / 1e6:>10.2f}{found['total'] / 1e6:>10.2f}{error:>+9.2%}"
            print(json.dumps({"job": name, **table.to_dict(), "measured": found}) if as_json else row, flush=True)
    return worst


def dry(wanted: list[str] | None) -> float:
    """Compare the dry run with the measurement of every rank, for the models and plans of its tests."""
    sys.path += [str(EXAMPLES.parent / "tests"), str(EXAMPLES.parent / "tests/exact")]
    import test_dryrun as tests

    worst = 0.0
    print(
        f"\n{'':<14}{'plan':<48}{'dry run':>10}{'measured':>10}{'error':>9}{'seconds':>9}   (kB of the fullest rank; of any kind, %)"
    )
    for name, lines in tests.EVERY.items():
        for line in lines if wanted is None or name in wanted else ():
            job, plan = tests.MODELS[name](), Plan.parse(line)
            found = dry_run(job, plan)
            run = fork.run_ranks(partial(tests.measured, job=job, plan=plan), plan.world)
            error = max((k.peak.total / run[k.rank]["total"] - 1 for k in found.kinds), key=abs)
            worst, most = max(worst, abs(error)), max(r["total"] for r in run)
            row = f"{name:<14}{line:<48}{found.fullest.peak.total / 1e3:>10.1f}{most / 1e3:>10.1f}{error:>+9.2%}"
            print(f"{row}{found.seconds:>9.1f}", flush=True)
    return worst


def compared(jobs: dict[str, Job]) -> None:
    """Print the memory of plait's sharded step and of hand-written FSDP2's and Accelerate's."""
    print(f"\n{'':<14}" + "".join(f"{n:>20}" for n in ("plait fsdp=2", *OTHERS)) + "   (MB per rank)")
    for name, job in jobs.items():
        row = [largest(partial(with_plait, job=job, plan="fsdp=2"), 2)]
        row += [largest(partial(with_other, job=job, other=other), 2) for other in OTHERS]
        print(f"{name:<14}" + "".join(f"{found['total'] / 1e6:>20.2f}" for found in row), flush=True)


OTHERS = ("hand-written", *(("Accelerate",) if find_spec("accelerate") else ()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", default="", help="only these, as mlp,gpt")
    parser.add_argument("--plans", default="", help="only these, separated by semicolons")
    parser.add_argument("--only", choices=("predicted", "dry", "compared"), help="one of the three tables")
    parser.add_argument("--json", action="store_true", help="one JSON object per pair")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    wanted = asked.jobs.split(",") if asked.jobs else None
    jobs = {n: j for n, j in workloads().items() if wanted is None or n in wanted}
    worst = 0.0
    if asked.only in (None, "predicted"):
        worst = predicted(jobs, tuple(asked.plans.split(";")) if asked.plans else PLANS, asked.json)
        print(f"largest error {worst:.2%}")
    if asked.only in (None, "dry"):
        worst = max(worst, dry(wanted))
        print(f"largest error {worst:.2%}")
    if asked.only in (None, "compared"):
        wide = {"depth": "6", "width": "512", "batch": "4"}  # blocks of 12.6 MB; each is a separate group
        with redirect_stdout(sys.stderr):
            jobs["gpt-wide"] = load_job(str(EXAMPLES / "stdlib_gpt/job.py"), wide)
        compared({n: jobs[n] for n in ("gpt", "llama", "gpt-wide") if n in jobs})
    return 0 if worst <= 0.05 else 1


if __name__ == "__main__":
    sys.exit(main())
