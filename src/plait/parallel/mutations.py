"""What a forward pass writes into the model itself (`model/mutations.py`): what a plan would lose of it, and how it is undone."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from plait.config.errors import PlaitError, Problem
from plait.config.plan import SAME_SLICES, Plan
from plait.model.sketch import Sketch
from plait.tensors.torch_private import own_buffers


def refused(plan: Plan, sketch: Sketch, cut: Collection[str]) -> Problem | None:
    """P031 when the plan would lose or multiply what the forward pass writes into weights. `cut`: those that tp cuts."""
    for name in sketch.rewritten:
        if plan.fsdp > 1 or plan.offload == "all":
            why = "a rank has the whole weight only while its unit runs, and drops it with what was written"
        elif plan.offload == "optimizer":
            why = "the optimizer's copy on the host would take its place"
        elif plan.processes == "one":
            why = "threads share the weight, and each would write it"
        elif name in cut:
            why = f"tp={plan.tp} gives every rank a slice of it"
        elif name in sketch.sampled and plan.along(SAME_SLICES) > 1:
            why = f"what is written comes from the samples, and {plan.along(SAME_SLICES)} copies see different ones"
        else:
            continue
        what = f"the forward pass changes the weight {name}, which does not work with {plan}"
        copies = 1 if name in sketch.sampled else plan.world
        fix = (f'--plan "dp={copies}"', "pp, when one unit holds it and changes it")
        return Problem("P031", what, why=why, fix=fix)
    return None


def check(plan: Plan, sketch: Sketch) -> None:
    """Raise what is `refused`."""
    if problem := refused(plan, sketch, {cut.parameter for cut in sketch.cuts}):
        raise PlaitError(problem)


def apart(sketch: Sketch, ranks: int) -> Iterator[str]:
    """What cannot equal one device when so many ranks see different samples: buffers made from them."""
    for name in sketch.sampled:
        if name not in sketch.rewritten:
            yield f"buffer {name} is made from the samples that a rank sees: each of {ranks} ranks has its own"


def copied(buffer: Tensor | None) -> Tensor | None:
    """A copy of a buffer, which may be None."""
    return None if buffer is None else buffer.clone()


def set_attributes(module: nn.Module, attributes: dict[str, object]) -> None:
    """Give a module these attributes and no others."""
    vars(module).clear()
    vars(module).update(attributes)


@contextmanager
def undone(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, modules write into copies of their buffers; after, their attributes and buffers are what they were."""
    before = [(m, dict(vars(m)), dict(own_buffers(m))) for m in modules]
    for module, _, buffers in before:
        own_buffers(module).update({name: copied(buffer) for name, buffer in buffers.items()})
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            set_attributes(module, attributes)
            own_buffers(module).update(buffers)
