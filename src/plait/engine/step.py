"""What one optimizer step did, and where its time went."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from torch import Tensor

from plait.config.errors import Problem
from plait.data.batch import Batch
from plait.tensors.torch_private import tree_leaves

SPANS = ("data", "receive", "send", "replicate", "forward", "loss", "backward", "collect", "reduce", "optimizer")


@dataclass
class Step:
    """What one optimizer step did. `samples`: seen after it, over all ranks."""

    step: int
    loss: float
    """Weighted mean over the global batch."""
    norm: float
    """Gradient norm over all parameters, before clipping."""
    lr: float
    """Learning rate of the first parameter group."""
    samples: int
    size: int
    """Samples in this step over all ranks."""
    tokens: int
    """Elements of integer inputs of rank 2 or more on this rank; 0 when the inputs are no tokens."""
    skipped: bool
    """Nothing was updated, on any rank: an fp16 overflow, or a step that was not finite and was to be left out."""
    stop: bool
    """Some rank was asked to stop: all ranks see it in the same step."""
    spans: list[tuple[str, float, float]]
    """(name, start, seconds) of what took time on this rank; starts are `time.perf_counter`. Names are those of `SPANS`,
    and under `pp` those of actions, `receive F1.3`, `F1.3` and `send F1.3`: see `sort_of`."""
    by_rank: list[tuple[int, float]]
    """(samples of this step, seconds computing in the step before) of each rank."""
    data_by_rank: list[float] = field(default_factory=list)
    """Seconds that each rank waited for this step's samples."""
    trouble: Problem | None = None
    """What was not finite in a step that was left out, and where it began."""


def sort_of(name: str) -> str:
    """Which of `SPANS` a span counts as: F1.3 is forward, B, I and W are backward, `receive F1.3` is receive."""
    return _SORTS.get(name[0]) or name.partition(" ")[0]


class Spans:
    """(name, start, seconds) of what takes time in a step; spans may nest. `beat` is told of each beginning."""

    def __init__(self, beat: Callable[[str], None]):
        self.beat = beat
        self.open: list[tuple[str, float, float]] = []

    def begin(self, name: str) -> None:
        """Something begins."""
        self.beat(name if name in _PHASES else "forward")
        self.open.append((name, perf_counter(), 0.0))

    def end(self, name: str) -> None:
        """The innermost open span of this name ends."""
        now = perf_counter()
        for i in range(len(self.open) - 1, -1, -1):
            if self.open[i][0] == name and self.open[i][2] == 0.0:
                self.open[i] = (name, self.open[i][1], now - self.open[i][1])
                return

    def taken(self) -> list[tuple[str, float, float]]:
        """The spans of the step, which is over."""
        spans, self.open = self.open, []
        return spans


_SORTS = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}
_PHASES = ("data", "forward", "backward", "reduce", "optimizer")


def tokens(batch: Batch) -> int:
    """Elements of the first integer input with a sequence dim."""
    count = 0
    for micro in batch.micro:
        first = next((t for t in tree_leaves(micro.inputs) if isinstance(t, Tensor)), None)
        if first is not None and first.dim() == 2 and not first.is_floating_point():
            count += first.numel() if micro.count else 0
    return count
