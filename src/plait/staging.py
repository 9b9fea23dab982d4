"""Running a model's own forward on a stage: units of other stages give what was received, or an unknown.

An unknown is a fake tensor on the run's device: it has a shape and no numbers, an operation that meets one gives
another and costs nothing, and a unit of this stage that is handed one is an error. So rotary tables, masks, positions,
skip connections and whatever else the model's code does between its units simply work, on every stage.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plait.cutting import Cut
from plait.errors import FAILED, PlaitError, Problem
from plait.sketch import Sketch
from plait.templates import Template, known
from plait.torchseam import FakeTensor, FakeTensorMode, tree_leaves, tree_map, tree_map_only


@dataclass
class Run:
    """One forward pass of one stage on one micro-batch."""

    stage: int
    samples: int
    received: dict[int, Any]
    kept: dict[int, Any]
    wanted: frozenset[int]
    """Calls whose outputs later stages need."""
    number: int = 0


class Stages:
    """The units of a model on this rank. `run` is the forward pass that is going on."""

    def __init__(self, model: nn.Module, sketch: Sketch, cut: Cut, device: torch.device):
        self.model, self.sketch, self.cut, self.device = model, sketch, cut, device
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self.unknown = _Unknown(self)
        self.inside = 0
        self.current: Run | None = None
        self.again: Run | None = None
        """During a backward pass: the forward pass it belongs to."""
        self.skip: Callable[[int], None] = lambda call: None
        """Told of every call that another stage makes."""

    def drop(self, names: set[str]) -> None:
        """Replace parameters by fake ones: they live on other stages."""
        gone: dict[int, nn.Parameter] = {}
        named = {id(p): n for n, p in self.model.named_parameters()}
        for module in self.model.modules():
            for key, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if named.get(id(parameter)) in names:
                    if id(parameter) not in gone:
                        with self.fakes:
                            hollow = torch.empty(parameter.shape, dtype=parameter.dtype, device=self.device)
                        gone[id(parameter)] = nn.Parameter(hollow, requires_grad=parameter.requires_grad)
                    setattr(module, key, gone[id(parameter)])

    def install(self) -> None:
        """From now on units run only where they belong."""
        for name in dict.fromkeys(call.unit for call in self.sketch.calls):
            module = self.model.get_submodule(name)
            module.forward = unit = _Unit(self, name, module)
            module.register_forward_hook(unit.keep)

    def forward(self, stage: int, samples: int, received: dict[int, Any], call: Callable[[], Any]) -> tuple[Any, Run]:
        """(the model's output, the run: its `kept` are outputs of calls that later stages need) of one stage."""
        later = self.cut.crossing[stage + 1] if stage + 1 < self.cut.stages else ()
        kept = {i: received[i] for i in later if i in received}
        self.current = Run(stage, samples, received, kept, frozenset(later))
        try:
            with self.unknown:
                output = call()
        finally:
            run, self.current = self.current, None
        if run.number != len(self.sketch.calls):
            what = f"the forward pass called {run.number} units, the sketch {len(self.sketch.calls)}"
            why = "the model's code takes another course here than in the sketch; stages cannot follow it"
            raise PlaitError(Problem("P024", what, why=why, fix=("pp=1",)), FAILED)
        return output, run

    def outputs_of(self, call: int, samples: int) -> Any:
        """Unknowns in the shape of what a call returns."""
        with self.fakes, torch.no_grad():
            return self.template(call).make(
                samples, lambda shape, dtype: torch.empty(shape, dtype=dtype, device=self.device)
            )

    def template(self, call: int) -> Template:
        """The structure of what a call returns."""
        return self.sketch.calls[call].template


def copied(tree: Any) -> Any:
    """What the model's code may change in place, when the value itself is also for other stages."""
    return tree_map_only(Tensor, torch.clone, tree)


class _Unit:
    """A unit's forward on a stage."""

    def __init__(self, stages: Stages, name: str, module: nn.Module):
        self.stages, self.name, self.module = stages, name, module
        self.replaced = module.__dict__.get("forward")
        self.number: int | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stages, run = self.stages, self.stages.current
        if stages.inside:
            return self.own(*args, **kwargs)
        if run is None:
            return self._again(*args, **kwargs)
        number = run.number
        run.number += 1
        if number >= len(stages.sketch.calls) or stages.sketch.calls[number].unit != self.name:
            what = f"call {number + 1} of the forward pass is {self.name}, in the sketch it was another unit"
            raise PlaitError(
                Problem("P024", what, why="the model's course depends on its input", fix=("pp=1",)), FAILED
            )
        if stages.cut.owner[number] != run.stage:
            stages.skip(number)
            return copied(run.received[number]) if number in run.received else stages.outputs_of(number, run.samples)
        if any(isinstance(t, FakeTensor) for t in tree_leaves((args, kwargs))):
            what = f"unit {self.name} of stage {run.stage} is handed a value that only another stage has"
            why = "the way from the unit that made it could not be followed (through a Python number, a list, another library)"
            raise PlaitError(Problem("P024", what, why=why, fix=("pp=1", "Job(stages=…) cuts elsewhere")), FAILED)
        stages.inside += 1
        try:
            output = self.own(*args, **kwargs)
        finally:
            stages.inside -= 1
        self.number = number
        return output

    def keep(self, module: nn.Module, args: Any, output: Any) -> Any:
        """After all other hooks: put what later stages need by, and give the model's code a copy it may write to."""
        run, number = self.stages.current, self.number
        if run is None or self.stages.inside or number is None:
            return output
        self.number = None
        if number not in run.wanted:
            return output
        known(output, self.stages.template(number), run.samples, self.name)
        run.kept[number] = output
        return copied(output)

    def _again(self, *args: Any, **kwargs: Any) -> Any:
        """Inside a recomputation by the model's own code: what the first pass gave here is given again."""
        run = self.stages.again
        numbers = [i for i, call in enumerate(self.stages.sketch.calls) if call.unit == self.name]
        if run is None or len(numbers) != 1 or self.stages.cut.owner[numbers[0]] == run.stage:
            return self.own(*args, **kwargs)
        return (
            copied(run.received[numbers[0]])
            if numbers[0] in run.received
            else self.stages.outputs_of(numbers[0], run.samples)
        )

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """The unit's forward as it was."""
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


class _Unknown(TorchFunctionMode):
    """An operation that meets an unknown gives an unknown. Inside units of this stage nothing is unknown."""

    def __init__(self, stages: Stages):
        super().__init__()
        self.stages = stages

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.stages.inside or not any(isinstance(t, FakeTensor) for t in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        args, kwargs = tree_map(self._fake, (args, kwargs))
        with self.stages.fakes, torch.no_grad():
            return func(*args, **kwargs)

    def _fake(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        return self.stages.fakes.from_tensor(leaf.detach())
