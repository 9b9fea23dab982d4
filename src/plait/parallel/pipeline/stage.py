"""Running a model's own forward on a stage: units of other stages give what was received, or an unknown.

An unknown is a fake tensor on the run's device: it has a shape and no numbers, an operation that meets one gives
another and costs nothing, and a unit of this stage that is handed one is an error. So rotary tables, masks, positions,
skip connections and whatever else the model's code does between its units simply work, on every stage.

A backward pass in two halves: first the gradients of the inputs, which another stage waits for; later the weights'.

The first half runs the operators that lie on a way to the inputs, for that way only. Where such an operator also leads
to a parameter, the gradient that came to it is kept; the second half starts there. Nothing is computed twice: what a
checkpoint recomputes in the first half is kept for the second. Three kinds of parameters are not put off, because the second
half would go a way again: those that several such operators lead to (a unit that is called twice, a bias that all layers
share, a decoder's first layer, which each attention to the encoder's states leads to), the others that one of these operators
leads to, and those behind an operator written in Python, which computes all its gradients at once.
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
from plait.model.meter import tensors_in
from plait.parallel.pipeline.partition import ForwardPath, ForwardPaths
from plait.tensors.fake import hollow, is_unknown
from plait.tensors.modules import own_forward
from plait.tensors.torch_private import (
    FakeTensor,
    GraphExecGroup,
    WrapperTensor,
    leaves,
    own_buffers,
    storage_key,
    tree_map,
    tree_map_only,
    version,
)
from plait.tensors.trees import arguments, known, nodes_behind, refill


@dataclass
class StageForward:
    """One forward pass of one stage on one micro-batch."""

    stage: int
    samples: int
    path: ForwardPath
    received: dict[int, Any]
    kept: dict[int, Any]
    wanted: frozenset[int]
    """Calls whose outputs later stages need."""
    number: int = 0
    lost: dict[int, Tensor] = field(default_factory=dict)
    """By storage: tensors that were to be written with an unknown, and so are unknown themselves."""


class PipelineStages:
    """The units of a model on this rank. `run` is the forward pass that is going on."""

    def __init__(self, model: nn.Module, paths: ForwardPaths, device: torch.device):
        self.model, self.paths, self.device = model, paths, device
        self.sketch, self.cut, self.fakes = paths.sketch, paths.first.cut, paths.fakes
        self.whole = paths.sketch
        """With what calls return as code between units sees it; `sketch` has it as it crosses."""
        self.unknown = _Unknown(self)
        self.inside = 0
        self.elsewhere = ""
        """The unit of another stage that runs on unknowns."""
        self.current: StageForward | None = None
        self.again: StageForward | None = None
        """During a backward pass: the forward pass it belongs to."""
        self.between: list[nn.Module] = []
        """Modules with buffers that lie in no unit."""
        self.skip: Callable[[str], None] = lambda unit: None
        """Told of every unit that another stage calls."""

    def drop(self, names: set[str]) -> None:
        """Replace parameters by fake ones: they live on other stages."""
        hollow(self.model, names, self.device, self.fakes)

    def install(self) -> None:
        """From now on units run only where they belong."""
        names = [unit.name for unit in self.sketch.units]
        inside = {id(m) for name in names for m in self.model.get_submodule(name).modules()}
        self.between = [m for m in self.model.modules() if id(m) not in inside and own_buffers(m)]
        for name in names:
            module = self.model.get_submodule(name)
            module.forward = unit = _Unit(self, name, module)
            module.register_forward_hook(unit.keep)

    def forward(
        self, stage: int, samples: int, path: ForwardPath, received: dict[int, Any], call: Callable[[], Any]
    ) -> tuple[Any, StageForward]:
        """(the model's output, the run: its `kept` are outputs of calls that later stages need) of one stage."""
        later = path.cut.crossing[stage + 1] if stage + 1 < self.cut.stages else ()
        kept = {i: received[i] for i in later if i in received}
        self.current = StageForward(stage, samples, path, received, kept, frozenset(later))
        try:
            with self.unknown:
                output = call()
        finally:
            run, self.current = self.current, None
        if run.number != len(path.calls):
            what = f"the forward pass called {run.number} units, the sketch {len(path.calls)}"
            why = "the model's code takes another course here than in the sketch; stages cannot follow it"
            raise PlaitError(Problem("P024", what, why=why, fix=("pp=1",)))
        self._checked(output if stage + 1 == self.cut.stages else None, path)
        return output, run

    def _checked(self, output: object, path: ForwardPath) -> None:
        """P024 when the model's output is unknown where the loss is computed, or a buffer was replaced by an unknown."""
        what = "the model's output depends on a value that only another stage has"
        if path.aside or not any(map(is_unknown, leaves(output))):  # what nobody looks at may be unknown
            replaced = (n for module in self.between for n, b in own_buffers(module).items() if is_unknown(b))
            name = next(replaced, None)
            if name is None:
                return
            what = f"code between units writes a value that only another stage has into the buffer {name}"
        raise PlaitError(Problem("P024", what, why="only what units return travels", fix=("pp=1",)))

    def look(self, result: object, of: str) -> None:
        """P024 when what the job's own code made of the model's output is unknown."""
        if any(map(is_unknown, leaves(result))):
            what = f"the job's {of} depends on a value that only another stage has"
            why = "only what units return travels, not what they leave in lists, caches or attributes"
            raise PlaitError(Problem("P024", what, why=why, fix=("let the unit return it", "pp=1")))

    def lose(self, tensor: Tensor) -> None:
        """A tensor was to be written with an unknown: it is unknown from now on. P024 when it outlives the forward pass."""
        run, key = self.current, storage_key(tensor)
        name = next((n for n, b in self.model.named_buffers() if b is tensor or storage_key(b) == key), None)
        if name is not None and self.elsewhere and name.startswith(f"{self.elsewhere}."):
            return  # its own stage has the buffer
        if name is not None:
            what = f"code between units writes a value that only another stage has into the buffer {name}"
            why = "each stage would keep another one"
            raise PlaitError(Problem("P024", what, why=why, fix=("write it inside a unit", "pp=1")))
        if run is not None:
            run.lost[key] = tensor

    def outputs_of(self, run: StageForward, call: int) -> Any:
        """What a call on another stage returns: what was received, to be written to; or unknowns in its shape, those of last
        time unless the model's code wrote to them."""
        if call in run.received:
            return copied(run.received[call])
        calls = self.whole.calls if run.path is self.paths.first else run.path.calls
        template, samples, unknowns = calls[call].template, run.samples, run.path.unknowns
        known = unknowns.get((call, samples))
        if known is None or any(version(t) != before for t, before in known):
            with self.fakes, torch.no_grad():
                new = [slot.empty(samples, self.device) for slot in template.slots]
            known = unknowns[call, samples] = [(t, version(t)) for t in new]
        return template.fill(t for t, _ in known)

    def new_unknown(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A fake tensor on the run's device."""
        with self.fakes, torch.no_grad():
            return torch.empty(shape, dtype=dtype, device=self.device)


def copied(tree: object) -> Any:
    """What the model's code may change in place, when the value itself is also for other stages."""
    return tree.clone() if isinstance(tree, Tensor) else tree_map_only(Tensor, torch.clone, tree)


class _Unit:
    """A unit's forward on a stage."""

    def __init__(self, stages: PipelineStages, name: str, module: nn.Module):
        self.stages, self.name, self.own = stages, name, own_forward(module)
        self.number: int | None = None
        self.changed: object = None
        """An argument that the unit changes and returns, where it does so."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stages, run = self.stages, self.stages.current
        if stages.inside:
            return self.own(*args, **kwargs)
        if run is None:
            return self._again(*args, **kwargs)
        number = run.number
        run.number += 1
        calls = run.path.calls
        if number >= len(calls) or calls[number].unit != self.name:
            what = f"call {number + 1} of the forward pass is {self.name}, in the sketch it was another unit"
            raise PlaitError(Problem("P024", what, why="the model's course depends on its input", fix=("pp=1",)))
        self.changed = None
        if run.path.cut.owner[number] != run.stage:
            if number in run.path.aside:
                self._leave(args, kwargs)
            else:
                stages.skip(self.name)
            run.path.passed(number)
            back = calls[number].back
            if back is not None:
                self.changed = args[back] if isinstance(back, int) else kwargs[back]
            self.number = number
            return stages.outputs_of(run, number)
        values = arguments(args, kwargs)  # a list or a cache may hold what nobody looks at
        self.check(
            run, values if not run.path.aside else (a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
        )
        stages.inside += 1
        try:
            output = self.own(*args, **kwargs)
        finally:
            stages.inside -= 1
        self.check(run, tensors_in(output))
        self.number = number
        return output

    def _leave(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a unit of another stage on unknowns: what it leaves in lists, caches and attributes is unknown here."""
        self.stages.elsewhere = self.name
        try:
            self.own(*args, **kwargs)
        finally:
            self.stages.elsewhere = ""

    def check(self, run: StageForward, values: Iterable[object]) -> None:
        """P024 when an unknown is among what the unit is given, or returns."""
        if any(map(is_unknown, values)):
            what = f"unit {self.name} of stage {run.stage} is handed a value that only another stage has"
            why = "the way from the unit that made it could not be followed (through a Python number, a list, another library)"
            raise PlaitError(Problem("P024", what, why=why, fix=("pp=1", "Job(stages=…) cuts elsewhere")))

    def keep(self, module: nn.Module, args: tuple[Any, ...], output: object) -> object:
        """After all other hooks: put what later stages need by, and give the model's code a copy it may write to.

        What was received is put in again: hooks on the unit may see it, but have done their work on it where it was made.
        """
        run, number = self.stages.current, self.number
        if run is None or self.stages.inside or number is None:
            return output
        self.number = None
        if run.path.cut.owner[number] != run.stage:
            result = copied(run.received[number]) if number in run.received else output
            if self.changed is None:
                return result
            refill(self.changed, result)
            return self.changed
        if number not in run.wanted:
            return output
        known(output, run.path.calls[number].template, run.samples, self.name)
        run.kept[number] = output
        return copied(output)

    def _again(self, *args: Any, **kwargs: Any) -> Any:
        """Inside a recomputation by the model's own code: what the first pass gave here is given again."""
        run = self.stages.again
        numbers = [i for i, call in enumerate(run.path.calls) if call.unit == self.name] if run is not None else []
        if run is None or len(numbers) != 1 or run.path.cut.owner[numbers[0]] == run.stage:
            return self.own(*args, **kwargs)
        return self.stages.outputs_of(run, numbers[0])


class _Unknown(TorchFunctionMode):
    """An operation that meets an unknown gives an unknown. Inside units of this stage nothing is unknown."""

    def __init__(self, stages: PipelineStages):
        super().__init__()
        self.stages = stages

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.stages.inside or not any(map(self._unknown, arguments(args, kwargs))):
            return func(*args, **kwargs)
        replaced: list[tuple[Tensor, Tensor, int]] = []

        def fake(leaf: object) -> object:
            if not isinstance(leaf, Tensor) or is_unknown(leaf):
                return leaf
            if isinstance(leaf, (WrapperTensor, FakeTensor)):
                other = self.stages.new_unknown(leaf.shape, leaf.dtype)
            else:
                other = self.stages.fakes.from_tensor(leaf.detach())
            replaced.append((leaf, other, version(other)))
            return other

        args, kwargs = tree_map(fake, (args, kwargs))
        try:
            with self.stages.fakes, torch.no_grad():
                result = func(*args, **kwargs)
        except Exception as error:
            raise self._refused(func, error) from error
        for real, other, before in replaced:
            if version(other) != before:
                self.stages.lose(real)
        return result

    def _unknown(self, leaf: object) -> bool:
        lost = self.stages.current.lost if self.stages.current is not None else ()
        return is_unknown(leaf) or (bool(lost) and isinstance(leaf, Tensor) and storage_key(leaf) in lost)

    def _refused(self, func: Callable[..., Any], error: Exception) -> PlaitError:
        run = self.stages.current
        place = (
            f"after unit {run.path.calls[run.number - 1].unit}" if run is not None and run.number else "before any unit"
        )
        what = (
            f"{place} the model's code asks for numbers that only another stage has: {getattr(func, '__name__', func)}"
        )
        first_line = str(error).partition("\n")[0]
        why = f"its course, or a shape, depends on values ({type(error).__name__}: {first_line})"
        return PlaitError(Problem("P024", what, why=why, fix=("pp=1", "Job(stages=…) cuts elsewhere")))


def halves(outputs: list[Tensor], gradients: list[Tensor | None], inputs: list[Tensor]) -> Callable[[], None]:
    """Put the gradients of `inputs` into their `.grad`; the function that is returned does it for all parameters.

    Shapes of `gradients` are those of `outputs`; None stands for a scalar's 1. The graph lives until the second half.
    """
    ends = [(t, g) for t, g in zip(outputs, gradients) if t.requires_grad and t.grad_fn is not None]
    goals = {get_gradient_edge(t).node for t in inputs}
    leading = _leading([get_gradient_edge(t).node for t, _ in ends], goals)
    later, now = _put_off([node for node in leading if node not in goals], leading)
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

    def weights() -> None:
        with group:
            for node, targets in later:
                edges = [(GradientEdge(node, i), g) for i, g in enumerate(came.pop(node, ())) if g is not None]
                if edges:
                    torch.autograd.backward(*map(list, zip(*edges)), retain_graph=True, inputs=targets)
            if outer:
                torch.autograd.backward([t for t, _ in outer], [g for _, g in outer], retain_graph=True)

    return weights


def _put_off(nodes: list[Node], leading: Collection[Node]) -> tuple[list[tuple[Node, list[Tensor]]], list[Tensor]]:
    """(operators on the way to the inputs, each with the parameters that the second half finds from it; the parameters that
    are not put off)."""
    led = {node: {id(t): t for t in _parameters(node, leading)} for node in nodes}
    times = Counter(key for parameters in led.values() for key in parameters)
    later, now = list[tuple[Node, list[Tensor]]](), dict[int, Tensor]()
    for node, parameters in led.items():
        if isinstance(node, BackwardCFunction) or any(times[key] > 1 for key in parameters):
            now |= parameters
        elif parameters:
            later.append((node, list(parameters.values())))
    return later, list(now.values())


def _leading(roots: list[Node], goals: set[Node]) -> Collection[Node]:
    """Nodes from which a goal can be reached, those next to it first: in an order that is always the same."""
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


def _parameters(node: Node, leading: Collection[Node]) -> Iterator[Tensor]:
    """Parameters that are reached from a node without touching the way to the inputs."""
    yield from (at.variable for at in nodes_behind((n for n, _ in node.next_functions), leading) if hasattr(at, "variable"))
