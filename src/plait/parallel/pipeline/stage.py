"""Execution of a model's own forward on one stage. Units of other stages return the received activation or a
placeholder.

A placeholder is a fake tensor on the run's device: it has a shape and no values. An operator on a placeholder returns a
placeholder and costs nothing. A unit of this stage raises if it receives one. So code between units, such as rotary
tables, masks, positions and skip connections, runs on every stage unchanged.

[Note: Split backward]
The first half computes the gradients of the inputs, which another stage waits for. The second half computes the
gradients of the weights.

The first half runs only operators on a path to the inputs. If such an operator also leads to a parameter, its incoming
gradient is stored, and the second half starts there. Nothing is computed twice: recomputed activations of the first
half are kept for the second. Three kinds of parameters are not deferred, because the second half would repeat a path:

- Parameters that several such operators lead to. Examples are a unit that is called twice, a bias of all layers, and a
  decoder's first layer, which each cross-attention leads to.
- The other parameters that one of these operators leads to.
- Parameters behind an operator written in Python, which computes all its gradients at once.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.overrides import TorchFunctionMode

from plait.config.errors import PlaitError, Problem
from plait.model.meter import iter_tensors
from plait.parallel.pipeline.partition import ForwardPath, ForwardPaths
from plait.tensors.fake import is_remote_fake, replace_with_fakes
from plait.tensors.module_state import bind_forward
from plait.tensors.torch_private import (
    FakeTensor,
    GraphExecGroup,
    WrapperTensor,
    dataclass_leaves,
    own_buffers,
    storage_key,
    tree_map,
    tree_map_only,
    version,
)
from plait.tensors.trees import check_output, flatten_arguments, iter_backward_nodes, refill


@dataclass
class StageForward:
    """One forward pass of one stage on one micro-batch."""

    stage: int
    samples: int
    path: ForwardPath
    received: dict[int, Any]
    kept: dict[int, Any]
    needed_later: frozenset[int]
    """Calls whose outputs later stages need."""
    call_count: int = 0
    unknown_tensors: dict[int, Tensor] = field(default_factory=dict)
    """By storage: tensors that an unknown value was written into, which are therefore unknown."""


class PipelineStages:
    """The units of a model on this rank. `current` is the forward pass that runs now."""

    def __init__(self, model: nn.Module, paths: ForwardPaths, device: torch.device):
        self.model, self.paths, self.device = model, paths, device
        self.sketch, self.partition, self.fakes = paths.sketch, paths.sketch_path.partition, paths.fakes
        self.global_sketch = paths.sketch
        """Has outputs of calls as code between units sees them; `sketch` has them as they cross between stages."""
        self.unknown_mode = _UnknownMode(self)
        self.unit_depth = 0
        self.remote_unit = ""
        """The unit of another stage that currently runs on placeholders."""
        self.current: StageForward | None = None
        self.recomputed_run: StageForward | None = None
        """During a backward pass: the forward pass that it belongs to."""
        self.outside_modules: list[nn.Module] = []
        """Modules with buffers that are in no unit."""
        self.report_skip: Callable[[str], None] = lambda unit: None
        """Called with the name of every unit that another stage runs."""

    def drop_parameters(self, names: set[str]) -> None:
        """Replace parameters of other stages by fake tensors."""
        replace_with_fakes(self.model, names, self.device, self.fakes)

    def install_units(self) -> None:
        """Replace the forwards of units, so that each unit runs only on its own stage."""
        names = [unit.name for unit in self.sketch.units]
        inside = {id(m) for name in names for m in self.model.get_submodule(name).modules()}
        self.outside_modules = [m for m in self.model.modules() if id(m) not in inside and own_buffers(m)]
        for name in names:
            module = self.model.get_submodule(name)
            module.forward = unit = _StageUnit(self, name, module)
            module.register_forward_hook(unit.store_output)

    def forward(
        self, stage: int, samples: int, path: ForwardPath, received: dict[int, Any], call: Callable[[], Any]
    ) -> tuple[Any, StageForward]:
        """Run one stage. Return the model's output, and the run, whose `kept` has the outputs that later stages need."""
        later = path.partition.crossing[stage + 1] if stage + 1 < self.partition.stages else ()
        kept = {i: received[i] for i in later if i in received}
        self.current = StageForward(stage, samples, path, received, kept, frozenset(later))
        try:
            with self.unknown_mode:
                output = call()
        finally:
            run, self.current = self.current, None
        if run.call_count != len(path.calls):
            what = f"the forward pass called {run.call_count} units, the sketch {len(path.calls)}"
            why = "the model takes a different path here than in the sketch, so stages cannot run it"
            raise PlaitError(Problem("P024", what, why=why, fix=("pp=1",)))
        self._check_output(output if stage + 1 == self.partition.stages else None, path)
        return output, run

    def _check_output(self, output: object, path: ForwardPath) -> None:
        """Raise P024 if the model's output is unknown where the loss is computed, or a buffer was replaced by a
        placeholder."""
        what = "the model's output depends on a value that only another stage has"
        if path.side_effect_calls or not any(map(is_remote_fake, dataclass_leaves(output))):  # values that no code reads may be unknown
            replaced = (n for module in self.outside_modules for n, b in own_buffers(module).items() if is_remote_fake(b))
            name = next(replaced, None)
            if name is None:
                return
            what = f"code between units writes a value that only another stage has into the buffer {name}"
        raise PlaitError(Problem("P024", what, why="only outputs of units are sent between stages", fix=("pp=1",)))

    def check_job_result(self, result: object, name: str) -> None:
        """Raise P024 if a value that the job's own code computed from the model's output is unknown."""
        if any(map(is_remote_fake, dataclass_leaves(result))):
            what = f"the job's {name} depends on a value that only another stage has"
            why = "only outputs of units are sent, not values that they store in lists, caches or attributes"
            raise PlaitError(Problem("P024", what, why=why, fix=("return the value from the unit", "pp=1")))

    def mark_unknown(self, tensor: Tensor) -> None:
        """Mark a tensor as unknown, because an unknown value was written into it. Raises P024 if it is a buffer."""
        run, key = self.current, storage_key(tensor)
        name = next((n for n, b in self.model.named_buffers() if b is tensor or storage_key(b) == key), None)
        if name is not None and self.remote_unit and name.startswith(f"{self.remote_unit}."):
            return  # the buffer belongs to that unit's own stage
        if name is not None:
            what = f"code between units writes a value that only another stage has into the buffer {name}"
            why = "each stage would store a different value"
            raise PlaitError(Problem("P024", what, why=why, fix=("write the buffer inside a unit", "pp=1")))
        if run is not None:
            run.unknown_tensors[key] = tensor

    def make_remote_outputs(self, run: StageForward, call: int) -> Any:
        """Return the output of a call on another stage: a writable copy of the received value, or placeholders in its
        shape. Placeholders are reused unless the model's code wrote to them."""
        if call in run.received:
            return clone_tensors(run.received[call])
        calls = self.global_sketch.calls if run.path is self.paths.sketch_path else run.path.calls
        template, samples, unknowns = calls[call].template, run.samples, run.path.unknowns
        known = unknowns.get((call, samples))
        if known is None or any(version(t) != before for t, before in known):
            with self.fakes, torch.no_grad():
                new = [slot.allocate(samples, self.device) for slot in template.slots]
            known = unknowns[call, samples] = [(t, version(t)) for t in new]
        return template.fill(t for t, _ in known)

    def make_unknown(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a fake tensor on the run's device."""
        with self.fakes, torch.no_grad():
            return torch.empty(shape, dtype=dtype, device=self.device)


def clone_tensors(tree: object) -> Any:
    """Clone tensors that the model's code may change in place, because other stages also get them."""
    return tree.clone() if isinstance(tree, Tensor) else tree_map_only(Tensor, torch.clone, tree)


class _StageUnit:
    """The forward of a unit on a stage."""

    def __init__(self, stages: PipelineStages, name: str, module: nn.Module):
        self.stages, self.name, self.own = stages, name, bind_forward(module)
        self.call_index: int | None = None
        self.returned_argument: object = None
        """An argument that the unit changes and returns, if there is one."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stages, run = self.stages, self.stages.current
        if stages.unit_depth:
            return self.own(*args, **kwargs)
        if run is None:
            return self._recompute(*args, **kwargs)
        number = run.call_count
        run.call_count += 1
        calls = run.path.calls
        if number >= len(calls) or calls[number].unit != self.name:
            what = f"call {number + 1} of the forward pass is {self.name}, but a different unit in the sketch"
            raise PlaitError(Problem("P024", what, why="the model's sequence of unit calls depends on its input", fix=("pp=1",)))
        self.returned_argument = None
        if run.path.partition.owner[number] != run.stage:
            if number in run.path.side_effect_calls:
                self._run_remote(args, kwargs)
            else:
                stages.report_skip(self.name)
            run.path.advance_host_rng(number)
            back = calls[number].back
            if back is not None:
                self.returned_argument = args[back] if isinstance(back, int) else kwargs[back]
            self.call_index = number
            return stages.make_remote_outputs(run, number)
        values = flatten_arguments(args, kwargs)  # a list or a cache may contain values that no code reads
        self.check_known(
            run, values if not run.path.side_effect_calls else (a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
        )
        stages.unit_depth += 1
        try:
            output = self.own(*args, **kwargs)
        finally:
            stages.unit_depth -= 1
        self.check_known(run, iter_tensors(output))
        self.call_index = number
        return output

    def _run_remote(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a unit of another stage on placeholders, so that values which it stores in lists, caches and attributes exist
        here."""
        self.stages.remote_unit = self.name
        try:
            self.own(*args, **kwargs)
        finally:
            self.stages.remote_unit = ""

    def check_known(self, run: StageForward, values: Iterable[object]) -> None:
        """Raise P024 if a value that the unit receives or returns is unknown."""
        if any(map(is_remote_fake, values)):
            what = f"unit {self.name} of stage {run.stage} receives a value that only another stage has"
            why = "plait could not follow the value from the unit that made it, e.g. through a Python number, a list, another library"
            raise PlaitError(Problem("P024", what, why=why, fix=("pp=1", "choose other stages with Job(stages=…)")))

    def store_output(self, module: nn.Module, args: tuple[Any, ...], output: object) -> object:
        """Store the output if later stages need it, and return a copy that the model's code may change. Runs after all
        other hooks.

        A received value is returned again in place of the output. Hooks on the unit see it, but have already had their
        effect on its own stage.
        """
        run, number = self.stages.current, self.call_index
        if run is None or self.stages.unit_depth or number is None:
            return output
        self.call_index = None
        if run.path.partition.owner[number] != run.stage:
            result = clone_tensors(run.received[number]) if number in run.received else output
            if self.returned_argument is None:
                return result
            refill(self.returned_argument, result)
            return self.returned_argument
        if number not in run.needed_later:
            return output
        check_output(output, run.path.calls[number].template, run.samples, self.name)
        run.kept[number] = output
        return clone_tensors(output)

    def _recompute(self, *args: Any, **kwargs: Any) -> Any:
        """Return the same output again in a recomputation by the model's own code."""
        run = self.stages.recomputed_run
        numbers = [i for i, call in enumerate(run.path.calls) if call.unit == self.name] if run is not None else []
        if run is None or len(numbers) != 1 or run.path.partition.owner[numbers[0]] == run.stage:
            return self.own(*args, **kwargs)
        return self.stages.make_remote_outputs(run, numbers[0])


class _UnknownMode(TorchFunctionMode):
    """Makes operators on unknown values return unknown values, outside of the units of this stage."""

    def __init__(self, stages: PipelineStages):
        super().__init__()
        self.stages = stages

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.stages.unit_depth or not any(map(self._is_unknown, flatten_arguments(args, kwargs))):
            return func(*args, **kwargs)
        replaced: list[tuple[Tensor, Tensor, int]] = []

        def make_fake(leaf: object) -> object:
            if not isinstance(leaf, Tensor) or is_remote_fake(leaf):
                return leaf
            if isinstance(leaf, (WrapperTensor, FakeTensor)):
                other = self.stages.make_unknown(leaf.shape, leaf.dtype)
            else:
                other = self.stages.fakes.from_tensor(leaf.detach())
            replaced.append((leaf, other, version(other)))
            return other

        args, kwargs = tree_map(make_fake, (args, kwargs))
        try:
            with self.stages.fakes, torch.no_grad():
                result = func(*args, **kwargs)
        except Exception as error:
            raise self._make_error(func, error) from error
        for real, other, before in replaced:
            if version(other) != before:
                self.stages.mark_unknown(real)
        return result

    def _is_unknown(self, leaf: object) -> bool:
        lost = self.stages.current.unknown_tensors if self.stages.current is not None else ()
        return is_remote_fake(leaf) or (bool(lost) and isinstance(leaf, Tensor) and storage_key(leaf) in lost)

    def _make_error(self, func: Callable[..., Any], error: Exception) -> PlaitError:
        run = self.stages.current
        place = (
            f"after unit {run.path.calls[run.call_count - 1].unit}" if run is not None and run.call_count else "before any unit"
        )
        what = (
            f"{place} the model's code reads values that only another stage has: {getattr(func, '__name__', func)}"
        )
        first_line = str(error).partition("\n")[0]
        why = f"a branch or a shape depends on these values ({type(error).__name__}: {first_line})"
        return PlaitError(Problem("P024", what, why=why, fix=("pp=1", "choose other stages with Job(stages=…)")))


def split_backward(outputs: list[Tensor], gradients: list[Tensor | None], inputs: list[Tensor]) -> Callable[[], None]:
    """Compute the gradients of `inputs` into their `.grad`. Return a function that does it for all parameters (see
    [Note: Split backward]).

    `gradients` have the shapes of `outputs`; None stands for a scalar 1. The graph is kept until the second half has
    run.
    """
    ends = [(t, g) for t, g in zip(outputs, gradients) if t.requires_grad and t.grad_fn is not None]
    goals = {get_gradient_edge(t).node for t in inputs}
    leading = _find_leading([get_gradient_edge(t).node for t, _ in ends], goals)
    later, now = _defer_parameters([node for node in leading if node not in goals], leading)
    came: dict[Node, tuple[Tensor | None, ...]] = {}
    group = GraphExecGroup()
    handles = [node.register_prehook(partial(came.__setitem__, node)) for node, _ in later]
    inner = [(t, g) for t, g in ends if get_gradient_edge(t).node in leading]
    if inner:
        with group:
            torch.autograd.backward(*map(list, zip(*inner)), retain_graph=True, inputs=[*inputs, *now])
    for handle in handles:
        handle.remove()
    outer = [(t, g) for t, g in ends if get_gradient_edge(t).node not in leading]

    def run_weights() -> None:
        with group:
            for node, targets in later:
                edges = [(GradientEdge(node, i), g) for i, g in enumerate(came.pop(node, ())) if g is not None]
                if edges:
                    torch.autograd.backward(*map(list, zip(*edges)), retain_graph=True, inputs=targets)
            if outer:
                torch.autograd.backward([t for t, _ in outer], [g for _, g in outer], retain_graph=True)

    return run_weights


def _defer_parameters(nodes: list[Node], leading: Collection[Node]) -> tuple[list[tuple[Node, list[Tensor]]], list[Tensor]]:
    """Return the operators on the path to the inputs with their deferred parameters, and the parameters that are not
    deferred."""
    led = {node: {id(t): t for t in _find_parameters(node, leading)} for node in nodes}
    times = Counter(key for parameters in led.values() for key in parameters)
    later, now = list[tuple[Node, list[Tensor]]](), dict[int, Tensor]()
    for node, parameters in led.items():
        if isinstance(node, BackwardCFunction) or any(times[key] > 1 for key in parameters):
            now |= parameters
        elif parameters:
            later.append((node, list(parameters.values())))
    return later, list(now.values())


def _find_leading(roots: list[Node], goals: set[Node]) -> Collection[Node]:
    """Find the nodes from which a goal is reachable, nearest first, in a deterministic order."""
    leading, met, stack = dict.fromkeys(goals), set[Node](), [(node, False) for node in roots]
    while stack:
        node, done = stack.pop()
        if done:
            if any(n in leading for n, _ in node.next_functions):
                leading[node] = None
        elif node not in met:
            met.add(node)
            stack.append((node, True))
            stack += [(n, False) for n, _ in node.next_functions if n is not None and n not in met]
    return leading


def _find_parameters(node: Node, leading: Collection[Node]) -> Iterator[Tensor]:
    """Iterate over parameters that are reachable from a node outside of the path to the inputs."""
    yield from (at.variable for at in iter_backward_nodes((n for n, _ in node.next_functions), leading) if hasattr(at, "variable"))
