"""A dry run allocates the same bytes as a run, for each strategy and for different models, within 1 % on each rank.

The same meter measures both: tensors without data in one process, and real tensors in the processes of a run.
"""

from functools import partial
from typing import Any

import jobs
import jobs_moe
import jobs_pipeline
import jobs_real
import jobs_twosided
import jobs_unlike
import pytest
import torch
from jobs_small import job as small
from rarely import sampled

from plait import Job, Plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place
from plait.parallel.offload import is_on_host
from plait.planner.dryrun.dry_run import dry_run
from plait.planner.dryrun.measure import measure_evaluation, measure_step

ERROR = 0.01
MODELS = {
    "mlp": jobs.mlp, "cnn": partial(small, "cnn"), "lstm": partial(small, "lstm"),
    "transformer": partial(small, "transformer"), "digits": jobs_real.digits,
    "unet": jobs_real.unet, "gpt": jobs_real.gpt, "llama": jobs_real.llama, "bert": jobs_pipeline.bert, "t5": jobs_pipeline.t5,
    "vit": jobs_pipeline.vit, "mamba": jobs_pipeline.mamba, "mixtral": jobs_moe.mixtral, "aligned": jobs_twosided.ALL["aligned"],
    "unused": jobs_unlike.ALL["unused"], "scalars": jobs_unlike.ALL["scalars"],
}  # fmt: skip
ONE_AXIS = (
    "dp=1 microbatches=3", "dp=2", "dp=3 activation_checkpointing=selective", "dp=2 activation_checkpointing=full precision=bf16",
    "dp=2 offload=optimizer",
    "fsdp=2", "fsdp=3 zero_stage=2 microbatches=2", "fsdp=2 zero_stage=1 microbatches=2", "fsdp=2 offload=all", "dp=2 fsdp=2",
)  # fmt: skip
PIPES = tuple(
    f"pp=2 microbatches=4 schedule={how}"
    for how in ("1f1b", "gpipe", "sequential", "zb", "interleaved stages_per_rank=2", "zbv stages_per_rank=2", "auto")
)
SLICES = ("tp=2", "tp=2 sequence_parallel=false", "tp=2 activation_checkpointing=full", "tp=2 precision=bf16")
STRETCHES = ("cp=2", "cp=2 cp_method=ulysses", "cp=3", "cp=2 shard_over_cp=true", "cp=3 zero_stage=1 shard_over_cp=true")
PRODUCTS = (
    "fsdp=2 tp=2", "dp=2 tp=2", "cp=2 tp=2", "fsdp=2 cp=2", "pp=2 tp=2 microbatches=2", "pp=2 fsdp=2 microbatches=2",
    "pp=2 cp=2 microbatches=2", "pp=2 dp=2 microbatches=2 activation_checkpointing=full",
    "fsdp=2 cp=2 shard_over_cp=true", "dp=2 cp=2 zero_stage=2 microbatches=2 shard_over_cp=true",
)  # fmt: skip
SAMPLE = {
    "gpt": ("pp=2 microbatches=3", "cp=2"),
    "transformer": ("fsdp=2 zero_stage=2 microbatches=3",),
    "unused": ("fsdp=2", "dp=2 grad_compression=int8", "pp=2 fsdp=2 microbatches=2"), "scalars": ("fsdp=2", "pp=2 fsdp=2 microbatches=2"),
}  # fmt: skip
UNUSED = ("dp=2", "dp=2 microbatches=2", "fsdp=2 zero_stage=1 microbatches=2", "dp=2 fsdp=2", "tp=2", "fsdp=2 tp=2")
EVERY = {
    "aligned": ("cp=2",),
    "gpt": (*ONE_AXIS, *PIPES, *SLICES, *STRETCHES, *PRODUCTS),
    "llama": (*ONE_AXIS, "cp=2", *SLICES, "fsdp=2 tp=2", "pp=2 tp=2 microbatches=2"),
    **dict.fromkeys(("bert", "vit", "mamba"), ("dp=1", "fsdp=2", "tp=2", "pp=2 microbatches=2", "pp=2 tp=2 microbatches=2")),
    "t5": ("dp=1", "fsdp=2", "tp=2", "cp=2", "pp=2 microbatches=2", "pp=2 tp=2 microbatches=2"),
    **dict.fromkeys(("mlp", "unet"), (*ONE_AXIS, "tp=2", "pp=2 microbatches=2 schedule=gpipe")),
    **dict.fromkeys(("cnn", "lstm", "digits"), (*ONE_AXIS, "pp=2 microbatches=2")),
    "mixtral": ("dp=1", "dp=2", "fsdp=2"), **dict.fromkeys(("unused", "scalars"), UNUSED),
    "transformer": (
        "dp=1", "dp=1 microbatches=3", "dp=1 activation_checkpointing=selective precision=bf16", "dp=2 activation_checkpointing=full", "fsdp=2",
        "fsdp=2 precision=bf16", "fsdp=2 zero_stage=2 microbatches=3", "fsdp=2 zero_stage=1 microbatches=2", "dp=2 fsdp=2 microbatches=2",
        "fsdp=3 offload=optimizer activation_checkpointing=selective",
    ),
}  # fmt: skip


def measured(place: Place, job: Job, plan: Plan) -> dict[str, Any]:
    torch.set_num_threads(1)
    engine, host = Engine(job, plan, place=place, device="cpu"), partial(is_on_host, plan)
    peaks = [measure_step(engine, 1, on_host=host)]
    peaks += [measure_evaluation(engine, on_host=host)] if job.evaluate is not None else []
    peak = max(peaks, key=lambda peak: peak.total)
    return {"total": peak.total, "categories": peak.categories, "moment": peak.moment}


def compared(name: str, line: str) -> None:
    job, plan = MODELS[name](), Plan.parse(line)
    found = dry_run(job, plan)
    run = fork.run_ranks(partial(measured, job=job, plan=plan), plan.world)
    for kind in found.kinds:
        assert kind.peak.total == pytest.approx(run[kind.rank]["total"], rel=ERROR), (kind, run[kind.rank])
    most = max(range(plan.world), key=lambda rank: run[rank]["total"])
    assert found.fullest.peak.total == pytest.approx(run[most]["total"], rel=ERROR), (found.fullest, run[most])


@pytest.mark.parametrize("name, line", sampled(3, [(n, p) for n, lines in SAMPLE.items() for p in lines]))
def test_a_dry_run_allocates_what_a_run_allocates(name: str, line: str) -> None:
    compared(name, line)


@pytest.mark.prove
@pytest.mark.parametrize("name, line", [(n, p) for n, lines in EVERY.items() for p in lines])
def test_of_every_model_and_strategy(name: str, line: str) -> None:
    compared(name, line)
