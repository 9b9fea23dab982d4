"""What one optimizer step did: what the host knows at once, and what it reads of the device, late."""

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from plait.config.errors import Problem
from plait.config.phases import Phase
from plait.data.batch import Batch
from plait.engine.spans import Span
from plait.tensors.torch_private import tree_leaves


@dataclass
class StepNumbers:
    """What the ranks summed in a step, or found out in it."""

    loss: float
    """Weighted mean over the global batch."""
    norm: float
    """Gradient norm over all parameters, before clipping."""
    skipped: bool
    """Nothing was updated, on any rank: an fp16 overflow, or a step that was not finite and was to be left out."""
    spans: list[Span]
    """(name, start, seconds) of what took time on this rank; starts are `time.perf_counter`, and on a GPU the times are the device's.
    Names are those of `spans.SPANS`, and under `pp` those of actions, `receive F1.3`, `F1.3` and `send F1.3`: see `sort_of`."""
    by_rank: list[tuple[int, float]]
    """(samples of this step, seconds computing in the last step whose times were known) of each share; where ranks have the same,
    of the slowest."""
    data_by_rank: list[float] = field(default_factory=list)
    """Seconds that each rank waited for this step's samples."""
    note: str = ""
    """What is to be said of shares of the batch that change."""
    trouble: Problem | None = None
    """What was not finite in a step that was left out, and where it began."""
    logged: dict[str, float] = field(default_factory=dict)
    """What the job recorded with `plait.log`: means over the global batch; and a callback with `Engine.log`."""
    norms: dict[str, float] = field(default_factory=dict)
    """With `group_norms`, the gradient norm of each parameter group over all ranks, before clipping: by its number, or its "name"."""
    loss_scale: float | None = None
    """Under fp16, the factor on the losses of the step."""


class Numbered(Protocol):
    """What has the numbers of a step."""

    @property
    def known(self) -> bool:
        """Whether they are on the host, and complete: what a step logged for the first time, and why it was left out, comes last."""

    @property
    def numbers(self) -> StepNumbers:
        """The numbers. Waits for the device where they are not known."""


@dataclass(frozen=True)
class Known:
    """Numbers that are on the host."""

    numbers: StepNumbers
    known: bool = True


@dataclass
class Step:
    """What one optimizer step did. `samples`: seen after it, over all ranks.

    Each of `StepNumbers` is an attribute of the step too: `step.loss`, `step.norm`, …. On a GPU these are on their way to the host when
    the step returns: the first look at one of them waits for the device. `known` says whether they are there. Who looks one step
    later does not wait.
    """

    step: int
    lr: float
    """Learning rate of the first parameter group."""
    samples: int
    size: int
    """Samples in this step over all ranks."""
    tokens: int
    """Elements of integer inputs of rank 2 or more on this rank; 0 when the inputs are no tokens."""
    stop: bool
    """Some rank was asked to stop, as far as is known: all ranks see it in the same step, on a GPU in the one that follows."""
    source: "Numbered"
    """Where its numbers are, or will be."""
    lrs: list[float] = field(default_factory=list)
    """Learning rate of each parameter group."""
    phases: dict[str, dict[str, float]] = field(default_factory=dict)
    """Loss, norm and lr of each phase that was due, in a job that has phases; those above are of the first with every=1."""
    given: dict[str, float] = field(default_factory=dict)
    """What callbacks add to what was logged."""

    @property
    def known(self) -> bool:
        """Whether its numbers are on the host."""
        return self.source.known

    def __getattr__(self, name: str) -> Any:
        if name not in StepNumbers.__dataclass_fields__:
            raise AttributeError(f"a Step has no attribute {name!r}")
        found = getattr(self.source.numbers, name)
        return found | self.given if name == "logged" else found


def merged(steps: list[tuple[Phase | None, Step]]) -> Step:
    """What a step did, from what each of its turns did. Loss, norm and learning rate are those of the first phase that is due in
    every step, so that they are of one phase throughout a run; those of all are in `phases`."""
    last = steps[-1][1]
    if steps[-1][0] is None:
        return last
    main = next(step for phase, step in steps if phase is not None and phase.every == 1)
    trouble = next((step.trouble for _, step in steps if step.trouble is not None), None)
    norms, logged = dict[str, float](), dict[str, float]()
    for _, step in steps:
        norms, logged = norms | step.norms, logged | step.logged
    numbers = replace(
        last.source.numbers, loss=main.loss, norm=main.norm, trouble=trouble, norms=norms, logged=logged,
        skipped=any(step.skipped for _, step in steps), spans=[span for _, step in steps for span in step.spans],
    )  # fmt: skip
    phases = {phase.name: {"loss": step.loss, "norm": step.norm, "lr": step.lr} for phase, step in steps if phase}
    return replace(last, lr=main.lr, source=Known(numbers), phases=phases)


def tokens(batch: Batch) -> int:
    """Elements of the first integer input with a sequence dim."""
    count = 0
    for micro in batch.micro:
        first = next((t for t in tree_leaves(micro.inputs) if isinstance(t, Tensor)), None)
        if first is not None and first.dim() == 2 and not first.is_floating_point():
            count += first.numel() if micro.count else 0
    return count
