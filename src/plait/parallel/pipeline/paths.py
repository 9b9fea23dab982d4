"""The path of a forward pass: which units it calls, what they return, and so what crosses between stages.

As a rule it is that of the sketch. Inputs of another size (padded to another length, images of another size), and models
that decide at random what to run, take others: then every rank finds the path itself, by running a hollow copy of
the model, on fake tensors, with the inputs that all of them have and the host generators where training has them.
Nothing has to be sent to agree on it. What a stage owns stays: a call belongs to the stage of its unit.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from plait.config.errors import PlaitError, Problem, in_a_line
from plait.model.costs import UnitCall
from plait.model.meter import KNOWN, OUTPUT
from plait.model.sketch import PROBES, Sketch, single
from plait.model.trace import Call, Keys, trace_run
from plait.parallel.pipeline.partition import ForwardPath, StagePartition, check_calls, crossings, homes
from plait.randomness import keyed
from plait.tensors.fake import Unknowns, emptied_on
from plait.tensors.modules import attributes_of, put_back
from plait.tensors.torch_private import own_buffers
from plait.tensors.trees import Slot, Template, TensorForm, taken, template

KEPT = 256
"""Paths that are remembered."""


@dataclass(frozen=True)
class Forward:
    """A forward pass to come: its inputs, and which samples of which step these are. `step` −1: an evaluation."""

    inputs: object
    samples: int
    first: int = 0
    step: int = -1


class ForwardPaths:
    """The forward paths of a model that is cut into stages. `call` runs the model in the format of training."""

    def __init__(
        self, model: nn.Module, sketch: Sketch, cut: StagePartition, call: Call, inputs: Callable[[int], Any], device: torch.device
    ):
        self.model, self.sketch, self.call = model, sketch, call
        self.first = ForwardPath(sketch.calls, cut)
        self.seed = 0
        """The job's, which the host generators start from."""
        self.fixed = False
        """There is no other path than the first: what crosses is a stretch of a sequence (cp), which no run here shows."""
        self.fakes = Unknowns(allow_non_fake_inputs=True)
        self.form: Template = template(taken(inputs(PROBES[0])), taken(inputs(PROBES[1])), PROBES)
        """Of the inputs that the sketch has seen."""
        self.random = sketch.host_random or sketch.decides
        self.known: OrderedDict[Any, ForwardPath] = OrderedDict()
        self.owner = homes(sketch, cut)
        try:
            self.hollow: nn.Module | None = emptied_on(model, self.fakes, device)
        except Exception:  # a model that cannot be copied has the first path only
            self.hollow = None

    def of(self, forward: Forward) -> ForwardPath:
        """The path of a forward pass. P025 when it cannot be found, P024 when stages cannot follow it."""
        if self.fixed:
            return self.first
        form = signature(forward.inputs)
        if form == self._usual(forward.samples) and not self.random:
            return self.first
        key = (form, self.model.training, (forward.step, forward.first) if self.random else None)
        if key not in self.known or (self.random and forward.step < 0):
            self.known[key] = self._run(forward)
            while len(self.known) > KEPT:
                self.known.popitem(last=False)
        self.known.move_to_end(key)
        return self.known[key]

    def _usual(self, samples: int) -> tuple[Any, ...]:
        """The signature of inputs like those of the sketch."""
        form = lambda slot: TensorForm(slot.shape(samples), slot.dtype, slot.grad)  # noqa: E731
        rows = (_row(form(leaf) if isinstance(leaf, Slot) else leaf) for leaf in self.form.leaves)
        return repr(self.form.spec), tuple(rows)

    def _run(self, forward: Forward) -> ForwardPath:
        if self.hollow is None:
            raise self._unknown("the model cannot be copied")
        for module, other in zip(self.hollow.modules(), self.model.modules()):
            module.training = other.training
        state = keyed.host_state()
        if forward.step >= 0:
            keyed.seed_host(self.seed, "forward", forward.step)
        keys = Keys((self.seed, forward.step, forward.first, forward.samples), self.sketch.places, self.random)
        units = [unit.name for unit in self.sketch.units]
        held = attributes_of(self.model.modules())  # a function kept in one may know it and not its copy
        for module, other in zip(self.hollow.modules(), self.model.modules()):
            vars(other).update(_parameters=module._parameters, _buffers=own_buffers(module))
        try:
            trace = trace_run(self.hollow, forward.inputs, self.call, True, units, keys)
        except Exception as error:
            raise self._unknown(in_a_line(error)) from error
        finally:
            keyed.restore_host(state)
            put_back(held)
        calls = tuple(self._judged(single(call)) for call in trace.metered.calls)
        owner = self._owned(calls)
        check_calls(calls, owner)
        stages = self.first.cut.stages
        cut = StagePartition(stages, owner, crossings(calls, trace.metered.needs, owner, stages))
        return ForwardPath(calls, cut, tuple(keys.after) if self.sketch.host_random else ())

    def _judged(self, call: UnitCall) -> UnitCall:
        """The call, without leaks to a loss that the sketch has seen depend on nothing of the kind."""
        known = {leak for other in self.sketch.calls if other.unit == call.unit for leak in other.leaks}
        return replace(call, leaks=tuple(leak for leak in call.leaks if leak not in (OUTPUT, KNOWN) or leak in known))

    def _owned(self, calls: tuple[UnitCall, ...]) -> tuple[int, ...]:
        """The stage of every call: that of its unit's call in the sketch. P024 when they are not in order."""
        times: dict[str, int] = {}
        owner: list[int] = []
        for call in calls:
            stages = self.owner[call.unit]
            number = times[call.unit] = times.get(call.unit, -1) + 1
            owner.append(stages[min(number, len(stages) - 1)])
            if len(owner) > 1 and owner[-1] < owner[-2]:
                what = f"unit {call.unit} of stage {owner[-1]} is called after one of stage {owner[-2]}"
                why = "on other inputs, or other random numbers, the model calls its units in another order than in the sketch"
                raise PlaitError(Problem("P024", what, why=why, fix=("pp=1", "Job(stages=…) cuts elsewhere")))
        return tuple(owner)

    def _unknown(self, why: str) -> PlaitError:
        if self.random:
            what = "the model decides by random numbers what to run, and that cannot be found without values of other stages"
            return PlaitError(Problem("P024", what, why=why, fix=("pp=1",)))
        what = "what crosses between stages cannot be found for inputs of this size"
        return PlaitError(Problem("P025", what, why=why, fix=("pad samples to one length", "pp=1")))


def signature(inputs: object) -> tuple[Any, ...]:
    """The tree of some inputs, shapes and formats of tensors, and what else is in it."""
    spec, rows = taken(inputs)
    return repr(spec), tuple(map(_row, rows))


def _row(leaf: object) -> object:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, TensorForm) else repr(leaf)
