"""Run steps of the job's optimizer on fake tensors, to find the bytes of its state.

Some optimizers read values of their tensors (`.item()`, `float(…)`), such as a norm or a step count. These reads return the values that the same
optimizer read on small real tensors. If that fails, the optimizer runs on real tensors.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plait.config.errors import PlaitError, Problem, summarize_error
from plait.config.job import Job, find_user_line
from plait.model.build_model import make_optimizer
from plait.model.fake_model import MOST_REAL_BYTES
from plait.model.mutations import RestoredWrites
from plait.model.parameter_groups import is_name_dependent
from plait.model.sketch import Sketch
from plait.model.sketch_table import format_size
from plait.parallel.fsdp.optimizer_check import shrink_shapes
from plait.randomness.keyed import preserve_host_state
from plait.tensors.fake import PartlyFakeMode
from plait.tensors.parameters import ParameterAttributes, apply_attributes, make_parameter_like
from plait.tensors.torch_private import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    item_op,
    no_modes,
    schema,
    tree_leaves,
)
from plait.tensors.trees import flatten_tensors

PROBE_STEPS = 2
"""The first step creates the state; the second one finds it."""
Formats = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of tensors, by name."""


@dataclass
class RecordedReads:
    """Values that an optimizer's steps read from their tensors, in order: of the first step, and of later ones."""

    steps: list[list[Any]] = field(default_factory=list)
    step: int = -1
    place: int = 0

    def start_step(self) -> None:
        self.step, self.place = self.step + 1, 0

    def answer_read(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Return the value for a read (`is_scalar_read`); a plausible one if the recorded read is missing or of another type."""
        dtype = args[0].dtype if func is item_op else torch.bool
        read = self.steps[min(self.step, len(self.steps) - 1)] if self.steps else []
        found = read[self.place] if self.place < len(read) else None
        self.place += 1
        kind = bool if dtype is torch.bool else float if dtype.is_floating_point else int
        return found if type(found) is kind else kind(1)


def is_scalar_read(func: OpOverload) -> bool:
    """Whether an operator returns Python values and no tensors, such as the one behind `.item()`."""
    returned = schema(func).returns
    return bool(returned) and all(str(one.type) in ("number", "Scalar", "bool", "int", "float") for one in returned)


class _ReadRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.read: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if is_scalar_read(func):
            self.read.append(result)
        return result


class _ReadReplay(TorchDispatchMode):
    """Answers reads of missing values in a step with the recorded ones."""

    def __init__(self, numbers: RecordedReads):
        super().__init__()
        self.numbers = numbers

    def __enter__(self) -> "_ReadReplay":
        self.numbers.start_step()
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if is_scalar_read(func):
            answer = self.numbers.answer_read(func, args)
            if any(isinstance(t, FakeTensor) for t in flatten_tensors(args)):
                return answer
        return func(*args, **(kwargs or {}))


def record_reads(job: Job, own: Mapping[str, Tensor], with_gradients: set[str] | None = None) -> RecordedReads:
    """Record the values that steps of the job's optimizer read, in a run on small tensors.

    `with_gradients`: names of parameters with a gradient. A step that raises records nothing; its reads then return 1.
    """
    trained, found = {n: p for n, p in own.items() if p.requires_grad}, list[list[Any]]()
    shapes = dict(zip(trained, shrink_shapes([tuple(p.shape) for p in trained.values()])))
    with preserve_host_state(), no_modes(), RestoredWrites(), suppress(Exception):  # such as from an optimizer that selects parameters by their sizes
        generator = torch.Generator().manual_seed(0)
        made = {n: make_parameter_like(trained[n], torch.randn(s, generator=generator).to(trained[n].dtype)) for n, s in shapes.items()}
        optimizer = make_optimizer(job, made)[0]
        for _ in range(PROBE_STEPS):
            for name, parameter in made.items():
                if with_gradients is None or name in with_gradients:
                    parameter.grad = torch.randn(shapes[name], generator=generator).to(parameter.dtype)
            with _ReadRecorder() as noting:
                optimizer.step()
            found.append(noting.read)
    return RecordedReads(found)


def step_fake_optimizer(job: Job, parts: Formats, attributes: Mapping[str, ParameterAttributes]) -> torch.optim.Optimizer:
    """Return the job's optimizer after its steps on fake parameters. Raises M015 if it needs real ones that are too large."""
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with fakes:
            own = {n: nn.Parameter(torch.zeros(shape, dtype=dtype)) for n, (shape, dtype) in parts.items()}
            apply_attributes(own, attributes)
            for parameter in own.values():
                parameter.grad = torch.zeros_like(parameter)
        return _take_steps(job, own, PartlyFakeMode(fakes), _ReadReplay(record_reads(job, own)))
    except PlaitError:
        raise
    except Exception as error:  # an operator without a fake implementation, or with a result size that depends on values
        total = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in parts.values())
        if total > MOST_REAL_BYTES:
            why = f"on fake tensors it raised {summarize_error(error)}; the weights are {format_size(total)}"
            what = "the memory of the job's optimizer is unknown without a real step of it"
            fix = ("a smaller model of the same kind", "torch.optim.AdamW")
            raise PlaitError(Problem("M015", what, why, find_user_line(error), fix)) from error
    generator = torch.Generator().manual_seed(0)
    real = {n: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for n, (shape, dtype) in parts.items()}
    for parameter in apply_attributes(real, attributes).values():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return _take_steps(job, real)


def _take_steps(job: Job, own: dict[str, nn.Parameter], *modes: TorchDispatchMode) -> torch.optim.Optimizer:
    optimizer = make_optimizer(job, own)[0]
    for _ in range(PROBE_STEPS):
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            optimizer.step()
    return optimizer


def _is_name_dependent(job: Job, sketch: Sketch) -> bool:
    """Whether the optimizer's treatment of a parameter may depend on its name."""
    names = [name for name, _, _ in sketch.parameters]
    stand_ins = (nn.Parameter(torch.zeros(shape)) for shape in shrink_shapes([shape for _, shape, _ in sketch.parameters]))
    with preserve_host_state(), no_modes():
        return is_name_dependent(job, apply_attributes(dict(zip(names, stand_ins)), sketch.attributes))


def measure_state_bytes(job: Job, sketch: Sketch) -> int:
    """Return the bytes of a job's optimizer state on one device.

    One parameter of each shape and dtype is measured, because others of the same kind need equal state. Each parameter is measured if the
    optimizer reads names, or if parameters have attributes.
    """
    alike = Counter((shape, dtype) for _, shape, dtype in sketch.parameters)
    first = {(shape, dtype): name for name, shape, dtype in reversed(sketch.parameters)}
    parts = {name: form for form, name in first.items()}
    if sketch.attributes or _is_name_dependent(job, sketch):
        alike, parts = Counter(first.keys()), {name: (shape, dtype) for name, shape, dtype in sketch.parameters}
    total = 0
    for parameter, state in step_fake_optimizer(job, parts, sketch.attributes).state.items():
        storages = (t.untyped_storage() for t in tree_leaves(state) if isinstance(t, Tensor))
        kept = sum({id(storage): storage.nbytes() for storage in storages}.values())
        total += alike[tuple(parameter.shape), parameter.dtype] * kept
    return total
