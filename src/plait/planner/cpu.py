"""What a step costs on processors beyond computing: their cores launch the operators, run plait and copy the messages too.

On an accelerator all that goes on beside the computing; a core does one thing after the other. Costs are counted in
operators, the time of the forward pass of a small one (`Machine.operator`, measured by `plait bench compute`), since all of
it is Python calling operators. The numbers were measured on two cores that did nothing else, with the plans of
`bench/choice.py`.
"""

from dataclasses import dataclass

from plait.config.machine import Machine
from plait.config.plan import Plan

OPERATOR = 9.3e-6
"""Seconds of a small operator's forward pass on a processor where nothing was measured."""


@dataclass(frozen=True)
class Cores:
    """Costs in operators, of every rank."""

    operator: float = OPERATOR
    """Seconds."""
    crowd: float = 1.0
    """Processes for each core, where there are more of them than cores."""
    launch: float = 1.5
    """An operator of a model, forward, and again backward: its code and what it reads are no longer in a cache."""
    update: float = 1.7
    """An operator's weights in the optimizer and in the gradient norm."""
    step: float = 96.0
    """A step: reading a batch, the loss, the learning rate, the clock."""
    bucket: float = 36.0
    """The sum of a bucket of gradients, for every other rank: each is another message to wake up for."""
    hook: float = 1.0
    """An operator's gradients on their way into a bucket."""
    bucketed: float = 7.0
    """Bytes moved in memory for one of gradients that goes through a bucket."""
    unit: float = 61.0
    """A unit of fsdp, gathered and scattered, with its hooks."""
    shard: float = 2.3
    """An operator's weights that are parts."""
    fresh: float = 14.4
    """Bytes moved in memory for one that fsdp gathers or scatters: through copies, in pages just taken from the system."""
    slice: float = 25.5
    """What tp and cp put around an operator, forward and backward."""
    plain: float = 20.5
    """The same of tp alone, where what lies between slices is whole on every rank."""
    statistics: float = 2.3
    """All-reduces of a few bytes, in time, that a batch norm takes in each direction."""
    ahead: float = 138.0
    """A forward of a pipeline, with its messages."""
    passed: float = 1.9
    """For every operator of the model, in each of them: the model's own code runs on every stage."""
    behind: float = 195.0
    """A backward of a pipeline."""
    staged: float = 46.0
    """The sum of a pipeline's gradients, which begins when the last backward has ended."""

    @staticmethod
    def of(machine: Machine) -> "Cores":
        """Of a machine's processes."""
        crowd = machine.devices_per_node / (machine.cores or machine.devices_per_node)
        return Cores(machine.operator or OPERATOR, max(1.0, crowd))

    def passes(self, kernels: float, plan: Plan) -> tuple[float, float]:
        """Seconds to launch so many operators forward, and backward."""
        stretched = plan.cp > 1 or plan.sequence_parallel
        around = (self.slice if stretched else self.plain) / 2 if plan.tp * plan.cp > 1 else 0.0
        each = (self.launch + around) * kernels * self.operator
        return each, each

    def reduced(self, units: float, kernels: float, size: float, stream: float, plan: Plan) -> float:
        """Seconds of a step that dp and fsdp take apart from their messages: for units, operators and `size` bytes of weights.

        `stream`: bytes/s of memory.
        """
        late = self.staged * self.operator if plan.pp > 1 and plan.shares > 1 else 0.0
        if plan.fsdp > 1:
            again, passes = (plan.microbatches, 3) if plan.zero == 3 else (1, 2)
            copied = again * passes * size * self.fresh / stream
            return (again * self.unit * units + self.shard * kernels) * self.operator + copied + late
        if plan.shares == 1:
            return 0.0
        return (
            (self.bucket * (plan.shares - 1) + self.hook * kernels) * self.operator
            + size * self.bucketed / stream
            + late
        )
