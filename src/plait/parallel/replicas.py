"""Replicas of a model in one process, one thread per device (see `parallel/threads.py`)."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.model.sketch import Sketch
from plait.randomness.keyed import Randomness
from plait.tensors.parameters import copy_module
from plait.tensors.rows import split_evenly
from plait.tensors.torch_private import dataclass_leaves, tree_flatten, tree_map_only, tree_unflatten

Call = Callable[[nn.Module, Any], Any]


class Replicas:
    """N replicas of a model, with the threads that run them."""

    def __init__(self, model: nn.Module, devices: list[torch.device], seed: int, sketch: Sketch):
        self.master = model
        self.devices = devices
        self.models = [model, *(copy_module(model).to(d) for d in devices[1:])]
        self.randomness = [Randomness(seed, sketch.places, sketch.host_random).install(m) for m in self.models]
        for each in self.randomness:
            each.is_shared = True

    def send_weights(self) -> None:
        """Copy the master's parameters and buffers to every replica."""
        with torch.no_grad():
            source = [*self.master.parameters(), *self.master.buffers()]
            for model in self.models[1:]:
                for target, value in zip([*model.parameters(), *model.buffers()], source):
                    target.copy_(value, non_blocking=True)

    def forward(
        self, call: Call, number_format: Callable[[], Any], inputs: object, step: int, first: int, count: int
    ) -> tuple[Any, Callable[[list[Tensor | None]], None]]:
        """Run all replicas. Return the output of the full micro-batch on device 0 as leaves, and a function that runs
        backward.

        `number_format` makes the context of a forward pass; a context belongs to one thread.
        """
        parts = [(i, *split_evenly(count, len(self.models), i)) for i in range(len(self.models))]
        parts = [part for part in parts if part[2]]
        results: dict[int, Any] = {}

        def run(i: int, offset: int, n: int) -> None:
            mine = tree_map_only(Tensor, lambda t: t[offset : offset + n].to(self.devices[i]), inputs)
            with number_format(), self.randomness[i].forward_pass(step, first + offset, n):
                results[i] = call(self.models[i], mine)

        _run_in_threads([partial(run, *part) for part in parts])
        dataclass_leaves(results[parts[0][0]])  # registers dataclasses as trees
        outputs = [tree_flatten(results[i])[0] for i, _, _ in parts]
        spec = tree_flatten(results[parts[0][0]])[1]
        whole = [_concat_outputs([o[k] for o in outputs], self.devices[0]) for k in range(len(outputs[0]))]

        def backward(gradients: list[Tensor | None]) -> None:
            def run_backward(i: int, offset: int, n: int) -> None:
                mine = tree_flatten(results[i])[0]
                pairs = [(o, g) for o, g in zip(mine, gradients) if g is not None and o.requires_grad]
                upstream = [g[offset : offset + n].to(o.device) for o, g in pairs]
                with self.randomness[i].replay():
                    torch.autograd.backward([o for o, _ in pairs], upstream)

            _run_in_threads([partial(run_backward, *part) for part in parts])

        return tree_unflatten(whole, spec), backward

    def collect_gradients(self) -> None:
        """Add the replicas' gradients to the master's."""
        for model in self.models[1:]:
            for mine, theirs in zip(self.master.parameters(), model.parameters()):
                if theirs.grad is not None:
                    grad = theirs.grad.to(mine.device)
                    mine.grad = grad if mine.grad is None else mine.grad.add_(grad)
                    theirs.grad = None

    def device_bytes(self, optimizer: torch.optim.Optimizer, outputs: int) -> list[int]:
        """Return the bytes of weights, gradients and optimizer state per device; device 0 also has the outputs."""
        each = [sum(2 * p.nbytes for p in m.parameters()) + sum(b.nbytes for b in m.buffers()) for m in self.models]
        state = (value for of_one in optimizer.state.values() for value in of_one.values())
        each[0] += sum(value.nbytes for value in state if isinstance(value, Tensor)) + outputs
        return each


def _concat_outputs(parts: list[Any], device: torch.device) -> Any:
    """Concatenate outputs over the batch dim into a detached leaf. It requires gradients if the parts do."""
    if not isinstance(parts[0], Tensor):
        return parts[0]
    whole = torch.cat([p.detach().to(device) for p in parts])
    return whole.requires_grad_(parts[0].requires_grad)


def _run_in_threads(runs: list[Callable[[], None]]) -> None:
    """Run each function in a thread, the first one in the current thread. Raises the first exception."""
    failures: list[BaseException] = []

    def run_guarded(run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run_guarded, args=(run,)) for run in runs[1:]]
    for thread in threads:
        thread.start()
    run_guarded(runs[0])
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
