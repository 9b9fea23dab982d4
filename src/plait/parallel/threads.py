"""The classic DataParallel (dp=N processes=one): one process drives all devices, with one thread each.

What it does
    In every step, device 0 sends the weights to N replicas, splits the batch, and runs the replicas in threads. It
    gathers their outputs, computes the loss, and sends back the gradients of the outputs. Then it collects the
    replicas' gradients.

Picture
    device 0   weights─►  F0 ◄─outputs  loss ─►gradients  B0 ◄─gradients  step
    device 1         └─►  F1 ─┘             └─►           B1 ─┘           idle

Costs
    Time: the weights are sent in every step, and all threads wait for Python's one interpreter lock. Device 0 alone
    computes the loss and the optimizer step. Memory: device 0 has the optimizer state and all gathered outputs in
    addition to its replica, so its memory is full first. The engine reports both: the spans `replicate`, `loss` and
    `collect`, and `device_bytes` in the metrics, with device 0 first.

Choose when
    You want to see why the field stopped using it.

Avoid when
    You have the choice: dp=N with one process per device does the same without any of these costs.

How it stays exact
    The loss sees the gathered outputs of the global batch, as on one device. Random numbers are keyed by global sample,
    so each thread draws those of its samples. Batch normalization uses each replica's own statistics and keeps those of
    device 0, as in torch's DataParallel. This is inexact, and plait names it. Random numbers from Python's generator
    are inexact too, and named.

Paper
    Krizhevsky 2014, One weird trick for parallelizing convolutional neural networks.
"""

from collections.abc import Iterable

import torch

from plait.config.errors import Problem
from plait.config.plan import Plan
from plait.launch.devices import list_cuda_devices
from plait.model.sketch import Sketch
from plait.parallel.mutations import list_inexact_buffers
from plait.parallel.rank_model import SplitModel
from plait.parallel.replicas import Replicas

AXIS = None
EXACT = True


def is_enabled(plan: Plan) -> bool:
    return plan.processes == "one"


def validate(plan: Plan, batch: int, device: str) -> Iterable[Problem]:
    if plan.dp > batch:
        what, why = f"global batch {batch} is smaller than the number of devices ({plan.dp})", "devices would never get a sample"
        fix = (f'--plan "dp={batch} processes=one"', f"--batch {plan.dp}")
        yield Problem("P012", what, why=f"{plan.dp - batch} {why}", fix=fix)
    if device == "cuda" and len(list_cuda_devices()) < plan.dp:
        what = f"one process needs {plan.dp} devices, and {len(list_cuda_devices())} are visible"
        yield Problem("H003", what, fix=("--device cpu", f'--plan "dp={len(list_cuda_devices())} processes=one"'))


def inexact_reasons(plan: Plan, sketch: Sketch) -> Iterable[str]:
    for name in (*sketch.batch_norms, *sketch.batch_coupled):
        yield f"batch statistics in {name} are those of each replica; only those of device 0 are kept"
    yield from list_inexact_buffers(plan, sketch, plan.dp)
    if sketch.host_random:
        yield "the forward pass draws from Python's or numpy's generator, which all threads use"


def apply(split: SplitModel) -> SplitModel:
    cpu = split.device.type == "cpu"
    devices = [split.device if cpu else torch.device("cuda", i) for i in range(split.plan.dp)]
    return split.with_techniques(replicas=Replicas(split.module, devices, split.job.seed, split.sketch))
