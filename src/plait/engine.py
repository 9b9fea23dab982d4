"""The engine: one rank's training loop under a plan, for those who want to own the loop and for `plait train`.

>>> with Engine(job(), Plan.parse("dp=2")) as engine:          # doctest: +SKIP
...     for batch in engine.batches():
...         step = engine.step(batch)

A step is forward, backward, reduce, clip, update. The loss of each micro-batch enters with its weight over the weight
of the global batch, so what is optimised is the weighted mean over the batch, however it was split.
"""

import gc
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.across import Across
from plait.build import Built, build, check_copies, pick_device
from plait.checkpoint import Checkpoints
from plait.data import Batch, Position, Share, weigh
from plait.errors import PlaitError, Problem
from plait.evaluation import evaluate
from plait.job import Job
from plait.launch.place import Place, current
from plait.loading import batches
from plait.passes import Passes
from plait.plan import Plan
from plait.steps import Spans, Step, sort_of, tokens
from plait.torchseam import scale_
from plait.weights import load_weights


class Engine:
    """Trains one rank of `job` under `plan`. Joins the processes a launcher started (RANK set), or runs alone.

    `device` is auto, cpu or cuda. `directory` is where checkpoints live. `workers` loader processes fetch ahead.
    Raises `PlaitError` for whatever is wrong with the job, the plan or the machine.
    """

    def __init__(
        self, job: Job, plan: Plan | str = "dp=*", *, device: str = "auto", directory: str | Path = "checkpoints",
        workers: int = 0, place: Place | None = None, cast: torch.dtype | None = None,
    ):  # fmt: skip
        plan = Plan.parse(plan) if isinstance(plan, str) else plan
        self.place = current() if place is None else place
        plan = plan.fill(self.place.world)
        self.built: Built = self._build(job, plan, pick_device(device, self.place), cast)
        self.job, self.plan, self.workers = job, plan, workers
        self.position = Position()
        self.checkpoints = Checkpoints(Path(directory))
        self._stop = False
        self._busy = 0.0
        self._spans = Spans(lambda phase: self.place.beat(self.position.step, phase))
        self._passes = Passes(self.built, self._spans)

    def _build(self, job: Job, plan: Plan, device: torch.device, cast: torch.dtype | None) -> Built:
        return build(job, plan, self.place, device, cast)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def close(self) -> None:
        """Leave the process group, if this engine joined one for itself."""
        if self.place.joined and dist.is_initialized():
            self.built.reducer = None
            gc.collect()
            dist.destroy_process_group()
            time.sleep(0.2)  # gloo's threads may abort a correct program that ends at once

    @property
    def model(self) -> torch.nn.Module:
        return self.built.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.built.optimizer

    @property
    def output_bytes(self) -> int:
        """Bytes of outputs gathered on the first device by processes=one; else 0."""
        return self._passes.output_bytes

    @property
    def share(self) -> Share:
        return Share(self.plan.share(self.place.rank), self.plan.ranks, self.plan.microbatches)

    def batches(self) -> Iterator[Batch]:
        """This rank's share of each step's batch, from where the run is to the job's last step (or a stop)."""
        job = self.job
        source = batches(self.built.data, job.batch, job.seed, self.share, self.position, self.workers)
        while self.position.step < job.steps and not self._stop:
            self._spans.begin("data")
            batch = next(source)
            self._spans.end("data")
            yield batch

    def step(self, batch: Batch) -> Step:
        """Forward, backward, reduce, clip, update. All ranks must take the same steps."""
        loss = self.backward(batch)
        return self.update(batch, loss)

    def backward(self, batch: Batch) -> Tensor:
        """Leave the gradient of the global batch in every parameter's `.grad`; return the summed rider (see `_rider`)."""
        built = self.built
        weights = [weigh(self.job.weight, micro) for micro in batch.micro]
        total = self._total_weight(batch, weights)
        pieces = self._passes.pieces(batch, {i: weights[i] / total for i in self.runs(batch, weights)})
        rider = self._passes.run(pieces, batch.position.step, lambda losses: self._armed(batch, losses))
        self._spans.begin("reduce")
        if built.reducer is not None:
            rider = built.reducer.finish()
        self._spans.end("reduce")
        built.begun = True
        return rider

    def runs(self, batch: Batch, weights: list[float]) -> list[int]:
        """Numbers of the micro-batches that this rank runs: those that weigh something, or that every rank must run."""
        most = Share(0, self.plan.ranks, self.plan.microbatches).parts(batch.size)  # rank 0's parts are the largest
        return [i for i, w in enumerate(weights) if w or (self.built.together and most[i][1])]

    def _total_weight(self, batch: Batch, weights: list[float]) -> float:
        """Weight of the global batch. Without `Job.weight` it is its number of samples: nothing to ask."""
        if self.job.weight is None:
            return float(batch.size)
        total = torch.tensor(sum(weights), dtype=torch.float64)
        if self.plan.ranks > 1:
            total = total.to(self.built.device)
            dist.all_reduce(total, group=self.built.peers)
        if not float(total) > 0:
            raise PlaitError(Problem("J009", f"the weights of step {batch.position.step + 1} sum to {float(total)}",
                                     why="Job.weight counts nothing in the whole batch, so its mean loss is 0 / 0"))  # fmt: skip
        return float(total)

    def _armed(self, batch: Batch, losses: list[Tensor]) -> Tensor:
        """The rider, with the reducer ready to sum it and the gradients of the backward that follows."""
        rider = self._rider(batch, losses)
        if self.built.reducer is not None:
            self.built.reducer.arm(rider)
        return rider

    def _rider(self, batch: Batch, losses: list[Tensor]) -> Tensor:
        """What all ranks must know, summed beside the gradients: loss, wish to stop, samples and busy time by rank, saving."""
        rank, ranks = self.plan.share(self.place.rank), self.plan.ranks
        row = [0.0] * (2 + 2 * ranks) + [self.checkpoints.word(self.place.world)]
        alike = self.plan.cp * self.plan.tp  # ranks that compute the same loss
        together = self.plan.pp * alike
        row[1], row[2 + rank], row[2 + ranks + rank] = (
            float(self.place.stopping()),
            batch.count / together,
            self._busy / together,
        )
        if self.built.device.type == "cpu":
            row[0] = sum(float(loss) for loss in losses) / alike
            return torch.tensor(row, dtype=torch.float64)
        rider = torch.tensor(row, dtype=torch.float64, device=self.built.device)
        rider[0] = torch.stack(losses).sum() / alike if losses else 0.0
        return rider

    def update(self, batch: Batch, rider: Tensor) -> Step:
        """Clip by the global norm, take the optimizer step, advance the clock."""
        built, optimizer = self.built, self.optimizer
        self._spans.begin("optimizer")
        self._set_rate()
        lr = float(optimizer.param_groups[0]["lr"])
        gradients = [p.grad for p in built.own.values() if p.grad is not None]
        early = isinstance(built.reducer, Across) and self.job.clip is None and built.scaler is None
        if early:  # its norm is on its way, and nothing here waits for it
            optimizer.step()
        norm = torch.nn.utils.get_total_norm(gradients) if built.reducer is None else built.reducer.norm(gradients)
        unscale = 1.0 / built.scaler.value if built.scaler else 1.0
        norm = float(norm) if built.device.type == "cpu" else norm  # there, asking costs nothing
        finite = built.scaler is None or math.isfinite(float(norm))
        if finite and not early:
            factor = _clip_factor(norm * unscale, self.job.clip) * unscale
            if gradients and not (isinstance(factor, float) and factor == 1.0):
                scale_(gradients, factor)
            optimizer.step()
        if built.scaler is not None:
            built.scaler.update(finite)
        for parameter in built.own.values():
            parameter.grad = None
        self.position = batch.after
        self._spans.end("optimizer")
        return self._told(batch, rider, norm, unscale, lr, not finite)

    def _set_rate(self) -> None:
        if self.job.schedule is None:
            return
        rate = float(self.job.schedule(self.position.samples))
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * rate

    def _told(
        self, batch: Batch, rider: Tensor, norm: Tensor | float, unscale: float, lr: float, skipped: bool
    ) -> Step:
        ranks = self.plan.ranks
        loss, stop, *rows, saved = rider.tolist()
        self.checkpoints.heard(self, saved)
        spans = self._spans.taken()
        self._busy = sum(
            took for name, _, took in spans if sort_of(name) in ("forward", "backward", "loss", "replicate")
        )
        self._stop = stop > 0
        return Step(
            batch.after.step, loss, float(norm) * unscale, lr, batch.after.samples, batch.size, tokens(batch), skipped, self._stop,
            spans, [(int(n), seconds) for n, seconds in zip(rows[:ranks], rows[ranks:])],
        )  # fmt: skip

    def evaluate(self) -> dict[str, float]:
        """The job's metrics over its whole evaluation set, every sample once (see `evaluation.py`)."""
        self.place.beat(self.position.step, "evaluate")
        return evaluate(self.built)

    def save(self, keep: int = 3, wait: bool = True) -> Path:
        """Write a checkpoint of this step, beside training unless `wait`; keep the newest `keep`. All ranks call it."""
        self.place.beat(self.position.step, "checkpoint")
        check_copies(self.built, self.position.step)
        path = self.checkpoints.save(self, keep, wait)
        self.place.beat(self.position.step, "checkpoint")
        return path

    def load_weights(self, path: str | Path) -> None:
        """Start from these weights: a safetensors file, a Hugging Face folder or a checkpoint. All ranks call it."""
        load_weights(self, Path(path))

    def resume(self, missing_ok: bool = False) -> Path | None:
        """Load the newest good checkpoint. K001 when there is none and `missing_ok` is false."""
        return self.checkpoints.resume(self, missing_ok)


def _clip_factor(norm: Tensor | float, clip: float | None) -> Tensor | float:
    """As `torch.nn.utils.clip_grad_norm_`: clip / (norm + 1e-6), at most 1; NaN stays NaN."""
    if clip is None:
        return 1.0
    factor = clip / (norm + 1e-6)
    return torch.clamp(factor, max=1.0) if isinstance(factor, Tensor) else 1.0 if factor > 1.0 else factor
