"""Steps of the job's optimizer on tensors without numbers: how many bytes it keeps from step to step.

Some optimizers read numbers from their tensors (`.item()`, `float(…)`), such as a norm or a count of steps. They are told
what a step of theirs on small real tensors read at the same place. One that cannot be followed so is run for real.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plait.config.errors import PlaitError, Problem, in_a_line
from plait.config.job import Job, user_line
from plait.model.fake_model import HOLDS
from plait.model.make import make_optimizer
from plait.model.mutations import OutsideWrites
from plait.model.parameter_groups import asks_for_names
from plait.model.sketch import Sketch
from plait.model.table import size
from plait.parallel.fsdp.optimizer_check import small
from plait.randomness.keyed import host_kept
from plait.tensors.fake import PartlyFake
from plait.tensors.parameters import ParameterAttributes, like, with_attributes
from plait.tensors.torch_private import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    no_modes,
    scalar_of,
    schema,
    tree_leaves,
)
from plait.tensors.trees import flat

STEPS = 2
"""The first makes the state, the second finds it there."""
Formats = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and number format of tensors, by name."""


@dataclass
class Numbers:
    """What a step of an optimizer reads from its tensors, in order: the first, and any later one."""

    steps: list[list[Any]] = field(default_factory=list)
    step: int = -1
    place: int = 0

    def begin(self) -> None:
        self.step, self.place = self.step + 1, 0

    def told(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """The answer of an operator that `reads`: a plausible one where the small run read another kind, or less."""
        dtype = args[0].dtype if func is scalar_of else torch.bool
        read = self.steps[min(self.step, len(self.steps) - 1)] if self.steps else []
        found = read[self.place] if self.place < len(read) else None
        self.place += 1
        kind = bool if dtype is torch.bool else float if dtype.is_floating_point else int
        return found if type(found) is kind else kind(1)


def reads(func: OpOverload) -> bool:
    """Whether an operator gives numbers and no tensors, as the one behind `.item()` does."""
    returned = schema(func).returns
    return bool(returned) and all(str(one.type) in ("number", "Scalar", "bool", "int", "float") for one in returned)


class _Noting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.read: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if reads(func):
            self.read.append(result)
        return result


class _Telling(TorchDispatchMode):
    """In a step, answers what has no number by what was read at the same place."""

    def __init__(self, numbers: Numbers):
        super().__init__()
        self.numbers = numbers

    def __enter__(self) -> "_Telling":
        self.numbers.begin()
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if reads(func):
            answer = self.numbers.told(func, args)
            if any(isinstance(t, FakeTensor) for t in flat(args)):
                return answer
        return func(*args, **(kwargs or {}))


def read(job: Job, own: Mapping[str, Tensor], given: set[str] | None = None) -> Numbers:
    """What steps of the job's optimizer read, from a run on small tensors. `given`: names of those that have a gradient.
    Nothing of a step that raises: then what it reads is taken to be 1."""
    trained, found = {n: p for n, p in own.items() if p.requires_grad}, list[list[Any]]()
    shapes = dict(zip(trained, small([tuple(p.shape) for p in trained.values()])))
    with host_kept(), no_modes(), OutsideWrites(), suppress(Exception):  # as of one that chooses parameters by their sizes
        generator = torch.Generator().manual_seed(0)
        made = {n: like(trained[n], torch.randn(s, generator=generator).to(trained[n].dtype)) for n, s in shapes.items()}
        optimizer = make_optimizer(job, made)[0]
        for _ in range(STEPS):
            for name, parameter in made.items():
                if given is None or name in given:
                    parameter.grad = torch.randn(shapes[name], generator=generator).to(parameter.dtype)
            with _Noting() as noting:
                optimizer.step()
            found.append(noting.read)
    return Numbers(found)


def stepped(job: Job, parts: Formats, attributes: Mapping[str, ParameterAttributes]) -> torch.optim.Optimizer:
    """The job's optimizer after its steps on fake parts. M015 when it can be followed on real ones only, which are too large."""
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with fakes:
            own = {n: nn.Parameter(torch.zeros(shape, dtype=dtype)) for n, (shape, dtype) in parts.items()}
            with_attributes(own, attributes)
            for parameter in own.values():
                parameter.grad = torch.zeros_like(parameter)
        return _taken(job, own, PartlyFake(fakes), _Telling(read(job, own)))
    except PlaitError:
        raise
    except Exception as error:  # an operator without a fake form, or one whose result's size depends on numbers
        total = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in parts.values())
        if total > HOLDS:
            why = f"on tensors without numbers it raised {in_a_line(error)}; the weights are {size(total)}"
            what = "the memory of the job's optimizer cannot be found without running it"
            fix = ("a smaller model of the same kind", "torch.optim.AdamW")
            raise PlaitError(Problem("M015", what, why, user_line(error), fix)) from error
    generator = torch.Generator().manual_seed(0)
    real = {n: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for n, (shape, dtype) in parts.items()}
    for parameter in with_attributes(real, attributes).values():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return _taken(job, real)


def _taken(job: Job, own: dict[str, nn.Parameter], *modes: TorchDispatchMode) -> torch.optim.Optimizer:
    optimizer = make_optimizer(job, own)[0]
    for _ in range(STEPS):
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            optimizer.step()
    return optimizer


def _asks(job: Job, sketch: Sketch) -> bool:
    """Whether what the optimizer does with a parameter may depend on its name."""
    names = [name for name, _, _ in sketch.parameters]
    stand_ins = (nn.Parameter(torch.zeros(shape)) for shape in small([shape for _, shape, _ in sketch.parameters]))
    with host_kept(), no_modes():
        return asks_for_names(job, with_attributes(dict(zip(names, stand_ins)), sketch.attributes))


def optimizer_state(job: Job, sketch: Sketch) -> int:
    """Bytes that a job's optimizer keeps from step to step, on one device: found for one parameter of each shape and
    format, since it keeps as much for the others; for each where the job's optimizer looks at names, or parameters have attributes."""
    alike = Counter((shape, dtype) for _, shape, dtype in sketch.parameters)
    first = {(shape, dtype): name for name, shape, dtype in reversed(sketch.parameters)}
    parts = {name: form for form, name in first.items()}
    if sketch.attributes or _asks(job, sketch):
        alike, parts = Counter(first.keys()), {name: (shape, dtype) for name, shape, dtype in sketch.parameters}
    total = 0
    for parameter, state in stepped(job, parts, sketch.attributes).state.items():
        storages = (t.untyped_storage() for t in tree_leaves(state) if isinstance(t, Tensor))
        kept = sum({id(storage): storage.nbytes() for storage in storages}.values())
        total += alike[tuple(parameter.shape), parameter.dtype] * kept
    return total
