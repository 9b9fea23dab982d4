"""The classic DataParallel (dp=N processes=one): one process drives all devices, one thread each.

What it does
    In every step device 0 sends the weights to N replicas, cuts the batch, runs the replicas in threads, gathers
    their outputs, computes the loss, sends the outputs' gradients back, and collects the replicas' gradients.

Picture
    device 0   weights─►  F0 ◄─outputs  loss ─►gradients  B0 ◄─gradients  step
    device 1         └─►  F1 ─┘             └─►           B1 ─┘           idle

Costs
    Time: the weights travel every step, Python's interpreter lock is shared by all threads, and device 0 alone
    computes the loss and the optimizer step. Memory: device 0 holds the optimizer state and all gathered outputs
    besides its own replica, so it is full first. The engine reports both: the spans `replicate`, `loss` and
    `collect`, and `device_bytes` in the metrics, device 0 first.

Choose when
    To see why it was given up.

Avoid when
    You have the choice: dp=N with a process per device does the same without any of these costs.

How it stays exact
    The loss sees the gathered outputs of the whole batch, as on one device. Random numbers are keyed by global
    sample, so each thread draws its stretch. Batch normalisation uses each replica's own statistics and keeps those
    of device 0, as it always did in DataParallel: inexact, and named. So are numbers drawn from Python's generator.

Paper
    Krizhevsky 2014, One weird trick for parallelizing convolutional neural networks.
"""

import copy
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from plait.config.errors import Problem
from plait.config.plan import Plan
from plait.data.batch import split
from plait.launch.devices import cuda_names
from plait.model.sketch import Sketch
from plait.parallel.mutations import apart
from plait.randomness.keyed import Randomness
from plait.tensors.torch_private import leaves, tree_flatten, tree_map, tree_map_only, tree_unflatten

AXIS = None
EXACT = True


def wanted(plan: Plan) -> bool:
    return plan.processes == "one"


def refuse(plan: Plan, batch: int, device: str) -> Iterable[Problem]:
    if plan.dp > batch:
        yield Problem(
            "P012",
            f"global batch {batch} does not split over {plan.dp} devices",
            why=f"{plan.dp - batch} devices would never have a sample",
            fix=(f'--plan "dp={batch} processes=one"', f"--batch {plan.dp}"),
        )
    if device == "cuda" and len(cuda_names()) < plan.dp:
        what = f"{plan.dp} devices are needed in one process, {len(cuda_names())} are visible"
        yield Problem("H003", what, fix=("--device cpu", f'--plan "dp={len(cuda_names())} processes=one"'))


def inexact(plan: Plan, sketch: Sketch) -> Iterable[str]:
    for name in (*sketch.batch_norms, *sketch.batch_coupled):
        yield f"batch statistics in {name} are those of each replica; only device 0's are kept"
    yield from apart(sketch, plan.dp)
    if sketch.host_random:
        yield "the forward pass draws from Python's or numpy's generator, which all threads share"


def apply(built: Any) -> None:
    devices = (
        [built.device] * built.plan.dp
        if built.device.type == "cpu"
        else [torch.device("cuda", i) for i in range(built.plan.dp)]
    )
    built.replicas = Replicas(built.model, devices, built.job.seed, built.sketch)


Call = Callable[[nn.Module, Any], Any]


class Replicas:
    """N copies of a model and the threads that run them."""

    def __init__(self, model: nn.Module, devices: list[torch.device], seed: int, sketch: Sketch):
        self.master = model
        self.devices = devices
        self.models = [model, *(copy.deepcopy(model).to(d) for d in devices[1:])]
        self.randomness = [Randomness(m, seed, sketch.places, sketch.host_random) for m in self.models]
        for each in self.randomness:
            each.shared = True

    def send_weights(self) -> None:
        """Copy the master's parameters and buffers to every replica."""
        with torch.no_grad():
            source = [*self.master.parameters(), *self.master.buffers()]
            for model in self.models[1:]:
                for target, value in zip([*model.parameters(), *model.buffers()], source):
                    target.copy_(value, non_blocking=True)

    def forward(
        self, call: Call, number_format: Callable[[], Any], inputs: Any, step: int, first: int, count: int
    ) -> tuple[Any, Callable[[list[Tensor | None]], None]]:
        """Outputs of the whole micro-batch on device 0 as leaves, and the function that runs backward from them.

        `number_format` makes the context of a forward pass: such contexts belong to a thread.
        """
        parts = [(i, *split(count, len(self.models), i)) for i in range(len(self.models))]
        parts = [part for part in parts if part[2]]
        results: dict[int, Any] = {}

        def run(i: int, offset: int, n: int) -> None:
            mine = tree_map_only(Tensor, lambda t: t[offset : offset + n].to(self.devices[i]), inputs)
            with number_format(), self.randomness[i].at(step, first + offset, n):
                results[i] = call(self.models[i], mine)

        _in_threads(run, parts)
        leaves(results[parts[0][0]])  # makes trees of dataclasses
        outputs = [tree_flatten(results[i])[0] for i, _, _ in parts]
        spec = tree_flatten(results[parts[0][0]])[1]
        whole = [_gather([o[k] for o in outputs], self.devices[0]) for k in range(len(outputs[0]))]

        def backward(gradients: list[Tensor | None]) -> None:
            def back(i: int, offset: int, n: int) -> None:
                mine = tree_flatten(results[i])[0]
                pairs = [
                    (o, g[offset : offset + n].to(o.device))
                    for o, g in zip(mine, gradients)
                    if g is not None and o.requires_grad
                ]
                with self.randomness[i].replay():
                    torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])

            _in_threads(back, parts)

        return tree_unflatten(whole, spec), backward

    def collect(self) -> None:
        """Add the replicas' gradients to the master's."""
        for model in self.models[1:]:
            for mine, theirs in zip(self.master.parameters(), model.parameters()):
                if theirs.grad is not None:
                    grad = theirs.grad.to(mine.device)
                    mine.grad = grad if mine.grad is None else mine.grad.add_(grad)
                    theirs.grad = None

    def device_bytes(self, optimizer: torch.optim.Optimizer, outputs: int) -> list[int]:
        """Bytes of tensors each device holds for good (weights, gradients, optimizer state) and, on 0, the outputs."""
        each = [sum(2 * p.nbytes for p in m.parameters()) + sum(b.nbytes for b in m.buffers()) for m in self.models]
        state = tree_map(
            lambda v: v.nbytes if isinstance(v, Tensor) else 0, [list(s.values()) for s in optimizer.state.values()]
        )
        each[0] += sum(map(sum, state)) + outputs
        return each


def _gather(parts: list[Any], device: torch.device) -> Any:
    """Detached leaf of the concatenation over the batch dim, requiring gradients where the parts do."""
    if not isinstance(parts[0], Tensor):
        return parts[0]
    whole = torch.cat([p.detach().to(device) for p in parts])
    return whole.requires_grad_(parts[0].requires_grad)


def _in_threads(run: Callable[..., None], parts: list[tuple[int, int, int]]) -> None:
    """Run each part in its own thread; the first exception is raised here."""
    failures: list[BaseException] = []

    def guarded(part: tuple[int, int, int]) -> None:
        try:
            run(*part)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(part,)) for part in parts[1:]]
    for thread in threads:
        thread.start()
    guarded(parts[0])
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
