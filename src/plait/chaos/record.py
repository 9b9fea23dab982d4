"""What a run left: losses, the samples of every step, evaluations, weights and optimizer state, to be held against another's."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from plait.checkpoint.checkpoints import Checkpoints
from plait.checkpoint.reading import tensors

ALIKE = 1e-3
"""How far the losses of a run may lie from those of another plan's, as a share: sums are in another order from then on."""


@dataclass(frozen=True)
class Record:
    """Of one run."""

    losses: dict[int, object]
    samples: dict[int, set[tuple[int, ...]]]
    evaluations: dict[int, object]
    tensors: dict[str, Tensor]
    twice: list[int]
    """Steps of which there are two rows."""

    @staticmethod
    def of(run: Path) -> "Record":
        """Read it from the run's directory."""
        losses, evaluations, twice = dict[int, object](), dict[int, object](), list[int]()
        for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
            if "loss" in row:
                twice += [row["step"]] * (row["step"] in losses)
                losses[row["step"]] = row["loss"]
            elif "evaluation" in row:
                evaluations[row["step"]] = row["evaluation"]
        samples: dict[int, set[tuple[int, ...]]] = {}
        for path in (run / "events").glob("*.jsonl"):
            for row in map(json.loads, path.read_text().splitlines()):
                samples.setdefault(row["step"], set()).add((row["epoch"], row["start"], row["size"]))
        found = Checkpoints(run / "checkpoints").found()
        return Record(losses, samples, evaluations, tensors(found[0]) if found else {}, twice)

    def differs(self, other: "Record") -> list[str]:
        """In what it is not the other, bit for bit."""
        wrong = [f"step {self.twice[0]} was written down twice"] if self.twice else []
        if self.samples != other.samples:
            wrong.append("samples differ")
        if self.losses != other.losses:
            wrong.append("losses differ")
        if self.evaluations != other.evaluations:
            wrong.append("evaluations differ")
        same = self.tensors.keys() == other.tensors.keys()
        if not same or not all(torch.equal(tensor, other.tensors[name]) for name, tensor in self.tensors.items()):
            wrong.append("weights or optimizer state differ")
        return wrong

    def close(self, other: "Record") -> tuple[float, list[str]]:
        """As under another plan: (largest difference of a loss, as a share; in what it is another training)."""
        wrong = ["samples differ"] if self.samples != other.samples else []
        if self.losses.keys() != other.losses.keys():
            return 1.0, [*wrong, "other steps"]
        pairs = [(float(str(loss)), float(str(other.losses[step]))) for step, loss in self.losses.items()]
        share = max((abs(a - b) / max(abs(b), 1e-12) for a, b in pairs), default=0.0)
        return share, wrong + [f"a loss differs by {share:.1e}"] * (share > ALIKE)
