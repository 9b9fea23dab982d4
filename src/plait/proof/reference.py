"""The reference: the job on one device in plain PyTorch, like a hand-written loop.

It shares with the engine only the meaning of a job: `Job` itself, the sample order and the keyed random numbers (and `Wide`, which keeps
both in float64). If the engine agrees with this code to rounding, the engine trains the job correctly.
"""

import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import default_collate

from plait.checkpoint.foreign_weights import open_weights
from plait.config.errors import FAILED, PlaitError, Problem
from plait.config.job import Job
from plait.data.batch import Data, is_map, lists_to_tensors, open_first_sample, split_pair
from plait.data.batch_rows import Pair
from plait.data.iterables import name_failing_samples
from plait.data.sampling import epoch_order
from plait.engine.step_log import use_recorder
from plait.launch import one_device
from plait.model.build_model import make_sparse_error
from plait.model.operations import Unit
from plait.model.optimizers import evaluation_mode
from plait.model.parameter_groups import build_optimizer
from plait.model.sketch import sketch_model
from plait.proof.activation_recorder import ActivationRecorder
from plait.randomness.keyed import Randomness, seed_host
from plait.tensors.float64 import Float64Mode
from plait.tensors.module_state import choose_dtype, convert_module, restore_loss_state, use_eval_mode
from plait.tensors.rows import make_dense
from plait.tensors.torch_private import tree_map_only

ReadSamples = tuple[int, list[int], list[Any]]


@dataclass
class OneDevice:
    """The job on one device, after some steps."""

    job: Job
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    keyed: Randomness
    rates: list[float]
    dtype: torch.dtype
    device: str
    saved_bytes: float
    """Bytes that units save for backward, per sample."""
    recorder: ActivationRecorder
    """Records of its steps, unit by unit."""
    units: tuple[Unit, ...]
    steps: int = 0
    sample_count: int = 0
    seconds: list[float] = field(default_factory=list)
    """Processor time of each step's passes, per sample and thread."""
    average: dict[str, torch.Tensor] = field(default_factory=dict)
    """Averages of the trained parameters by name, after the first update of `Job.ema`."""
    logged: dict[str, list[float]] = field(default_factory=dict)
    """Values that the job logged in the last step."""

    @staticmethod
    def from_job(job: Job, data: Data, dtype: torch.dtype, device: str) -> "OneDevice":
        """The job before its first step. The model is created again after the sketch, so that trial runs leave no trace in it."""
        sample, trial = open_first_sample(job.data, data)[0], make_reference_model(job, dtype, device)
        with Float64Mode():
            sketched = sketch_model(trial, lambda n: _to_device(_collate_samples(data, [sample] * n), dtype, device)[0], call_model, job.units)
        del trial
        model = make_reference_model(job, dtype, device)
        keyed = Randomness(job.seed, sketched.places, sketched.host_random).install(model)
        optimizer = build_optimizer(job, dict(model.named_parameters()))
        kept = sketched.saved_between.per_sample + sum(unit.saved.per_sample for unit in sketched.calls)
        notes, rates = ActivationRecorder(model, [unit.name for unit in sketched.units]), [g["lr"] for g in optimizer.param_groups]
        notes.record_tensors("initial", dict(model.named_parameters()))
        return OneDevice(job, model, optimizer, keyed, rates, dtype, device, kept, notes, sketched.units)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def run_passes(
        self, data: Data, read: ReadSamples, moves: Callable[[], None] = lambda: None
    ) -> tuple[Any, Any, torch.Tensor]:
        """Run forward and backward on a step's samples. Returns (outputs, targets, loss)."""
        began = time.process_time()
        inputs, targets = _to_device(_collate_samples(data, read[2]), self.dtype, self.device)
        self.recorder.begin_batch(self.steps, [(0, len(read[1]), (inputs, targets))])
        self.logged = {}
        record = lambda name, value: self.logged.setdefault(name, []).append(float(value))  # noqa: E731
        with Float64Mode(), self.keyed.forward_pass(self.steps, 0, len(read[1])), use_recorder(record):
            outputs = call_model(self.model, inputs)
            loss = self.job.loss(outputs, targets)
        moves()
        with self.keyed.replay():
            loss.backward()
        self.recorder.record_gradients()
        self.seconds.append((time.process_time() - began) / torch.get_num_threads() / len(read[1]))
        return outputs, targets, loss.detach()

    def update(self, read: ReadSamples, loss: torch.Tensor, limit: float) -> dict[str, Any]:
        """Clip to `limit` and run the optimizer step. Returns loss, norm before clipping, learning rate, samples so far, and logged values."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, limit)
        if not (torch.isfinite(loss).all() and torch.isfinite(norm)):
            raise make_nonfinite_error(self.steps + 1, float(loss), float(norm), read[1])
        for group, rate in zip(self.optimizer.param_groups, self.rates):
            group["lr"] = rate * self.job.schedule(self.sample_count) if self.job.schedule else rate
        lr = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.recorder.record_update(self.optimizer)
        self.model.zero_grad(set_to_none=True)  # also for parameters without an optimizer
        self.sample_count, self.steps = self.sample_count + len(read[1]), self.steps + 1
        with evaluation_mode(self.optimizer):
            self.move_average()
        logged = {name: sum(values) / len(values) for name, values in self.logged.items()}
        return {"loss": float(loss), "norm": float(norm), "lr": lr, "samples": self.sample_count, "logged": logged}

    def move_average(self) -> None:
        """Update the average of the weights after a step, as defined by `Job.ema`."""
        ema, trained = self.job.ema, copy_tensors((n, p) for n, p in self.model.named_parameters() if p.requires_grad)
        if ema is None or self.steps % ema.every:
            return
        k = self.steps // ema.every
        decay = min(ema.decay, k / (9 + k)) if ema.warmup else ema.decay
        before = self.average or trained
        self.average = {n: decay * before[n] + (1 - decay) * p for n, p in trained.items()} if k > 1 else trained


def train_reference(
    job: Job, steps: int, clip: float, dtype: torch.dtype, device: str = "cpu", *,
    moves: Callable[[], None] = lambda: None, then: Callable[[OneDevice], dict[str, Any]] = lambda one: {},
) -> dict[str, Any]:  # fmt: skip
    """Train `steps` steps. `clip` is a fraction of the first gradient norm, so that clipping is always active. `moves` is called at each step
    and before its backward pass. `then` runs last, with the model; its result is added.

    Returns `rows` (per step: loss, norm, lr, samples), `ids` (per step) and `clip` (the norm used). Also returns, by name, the tensors
    `initial`, `gradients` (of step 1, before clipping), and `weights` and `buffers` after the last step.
    """
    data = job.data()
    one = OneDevice.from_job(job, data, dtype, device)
    model = one.model
    out: dict[str, Any] = {"initial": copy_tensors(model.named_parameters()), "rows": [], "ids": []}
    stream, seen = iterate_samples(job, data), None
    for step in range(steps):
        moves()
        read = next(stream)
        outputs, targets, loss = one.run_passes(data, read, moves)
        if step == 0:
            out["gradients"] = copy_gradients(model)
            first = float(torch.nn.utils.get_total_norm([p.grad for p in one.parameters if p.grad is not None]))
            out["clip"] = clip * first or clip  # if the first gradient is zero, any limit works
            seen = (*tree_map_only(torch.Tensor, torch.Tensor.detach, (outputs, targets)), len(read[1]))
        out["rows"].append(one.update(read, loss, out["clip"]))
        out["ids"].append([read[0], read[1]])
    out |= copy_final_state(one) | then(one)
    with Float64Mode():  # last, because each call may change the state of the loss
        out["mean"] = _is_mean(job, one.model, *seen) if seen else None
    return out


def copy_final_state(one: OneDevice) -> dict[str, dict[str, torch.Tensor]]:
    """Copy `weights`, `buffers` and (if the job has one) the `average` of the weights after the last step."""
    buffers = copy_tensors(one.model.named_buffers())
    return {"weights": copy_tensors(one.model.named_parameters()), "buffers": buffers, "average": copy_tensors(one.average.items())}


def compute_share_gradients(
    one: OneDevice,
    data: Data,
    read: ReadSamples,
    counts: list[int],
    microbatches: int,
    moves: Callable[[], None] = lambda: None,
) -> tuple[list[dict[str, torch.Tensor]], torch.Tensor]:
    """Compute gradients of each local batch of a step in micro-batches, by parameter name, without unused parameters; and the total loss. Each
    loss is weighted by its weight over that of the batch. Local batches are contiguous; `counts`: samples of each."""
    job, batch = one.job, _to_device(_collate_samples(data, read[2]), one.dtype, one.device)
    cut = lambda first, n: tree_map_only(torch.Tensor, lambda t: make_dense(t[first : first + n]), batch)  # noqa: E731
    weigh = lambda n, y: compute_loss_weight(job, y, n)  # noqa: E731
    buffers = list(one.model.buffers())
    whole, before, found = weigh(len(read[1]), batch[1]), [b.clone() for b in buffers], []
    loss = torch.zeros((), dtype=one.dtype, device=one.device)
    for start, held in ((sum(counts[:i]), n) for i, n in enumerate(counts)):
        for buffer, value in zip(buffers, before):  # each local batch starts from the same buffers
            buffer.copy_(value)
        for first, n in _split_evenly(start, held, microbatches):
            inputs, targets = cut(first, n)
            if not (weight := weigh(n, targets)):
                continue
            with Float64Mode(), one.keyed.forward_pass(one.steps, first, n):
                part = job.loss(call_model(one.model, inputs), targets) * (weight / whole)
            moves()
            with one.keyed.replay():
                part.backward()
            loss += part.detach()
        found.append(copy_gradients(one.model))
        one.model.zero_grad(set_to_none=True)
    return found, loss


def compute_loss_weight(job: Job, targets: object, samples: int) -> float:
    """Weight of a loss: the number of samples, or the sum of `Job.weight`."""
    return float(samples) if job.weight is None or not samples else float(torch.as_tensor(job.weight(targets)).sum())


def _split_evenly(first: int, size: int, parts: int) -> list[tuple[int, int]]:
    """(first, count) of each part."""
    counts = [size // parts + (i < size % parts) for i in range(parts)]
    return [(first + sum(counts[:i]), n) for i, n in enumerate(counts)]


def copy_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copy all existing gradients, by name."""
    return copy_tensors((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)


def evaluate_metrics(one: OneDevice) -> dict[str, float]:
    """Mean of each metric of the job over its held-out data, in batches of the job's size. The model has averaged weights if the job has an
    average, else the weights of its optimizer's eval mode. Returns {} if the job has no metrics."""
    job, wanted = one.job, one.job.evaluate
    if wanted is None:
        return {}
    data, sums, weights = wanted.data(), dict[str, list[float]](), copy_tensors(one.model.named_parameters())
    with evaluation_mode(one.optimizer), use_eval_mode(one.model), torch.no_grad():
        _set_parameters(one.model, one.average)
        seed_host(job.seed, "evaluate")
        numbered = _iterate_numbered(data, range(len(data)) if is_map(data) else (), (job.seed, "evaluate"))
        while read := [sample for _, sample in islice(numbered, job.batch)]:
            inputs, targets = _to_device(_collate_samples(data, read), one.dtype, one.device)
            with Float64Mode():
                values = wanted.metrics(call_model(one.model, inputs), targets)
            for name, row in ((str(name), torch.as_tensor(value)) for name, value in values.items()):
                total = sums.setdefault(name, [0.0, 0])
                total[0], total[1] = total[0] + float(row.double().sum()), total[1] + row.numel()
    _set_parameters(one.model, weights)
    return {name: total / count for name, (total, count) in sums.items()}


def _set_parameters(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Set the parameters with these names to these values."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values.get(name, parameter))


def make_nonfinite_error(step: int, loss: float, norm: float, ids: list[int]) -> PlaitError:
    """Make the error J011: a split run cannot be compared with a non-finite reference."""
    what = (
        f"non-finite values on one device: in step {step} the loss is {loss}, the gradient norm {norm}"
    )
    why = f"the job was trained in plain PyTorch in float64 on samples {', '.join(map(str, ids))}, so a split run cannot be compared"
    fix = ("check the job's data at these samples", "lower the learning rate")
    return PlaitError(Problem("J011", what, why=why, fix=fix), FAILED)


def run_plain_step(job: Job, dtype: torch.dtype | None, device: str = "cpu") -> None:
    """Run one step of the job without any plait code around it, in `dtype` or (None) in the job's own formats. Any failure here is a failure
    of plain PyTorch. Raises J012 for sparse gradients."""
    model, data = make_reference_model(job, dtype, device), job.data()
    optimizer = build_optimizer(job, dict(model.named_parameters()))
    batch = tree_map_only(torch.Tensor, lambda t: t.to(device), _collate_samples(data, next(iterate_samples(job, data))[2]))
    inputs, targets = batch if dtype is None else _to_device(batch, dtype, device)
    job.loss(call_model(model, inputs), targets).backward()
    if sparse := [n for n, p in model.named_parameters() if p.grad is not None and p.grad.layout is not torch.strided]:
        raise make_sparse_error(f"the job's use of {sparse[0]}")
    optimizer.step()


def make_reference_model(job: Job, dtype: torch.dtype | None, device: str) -> torch.nn.Module:
    """The job's model in a number format (None: its own), in training mode. Modules that the job itself put in eval mode stay there."""
    random.seed(job.seed)
    np.random.seed(job.seed & 0xFFFFFFFF)
    torch.manual_seed(job.seed)
    model = convert_module(job.model(), torch.device(device), dtype)
    if hasattr(job.loss, "attach"):
        job.loss.attach(model)
    frozen = [m for m in model.modules() if model.training and not m.training]
    model.train()
    for module in frozen:
        module.training = False
    for (
        module
    ) in model.modules():  # as usual in training: a cache is for generation, and hides the starts of packed documents
        if getattr(getattr(module, "config", None), "use_cache", None) is True:
            module.config.use_cache = False  # type: ignore[union-attr]
    if job.weights is not None:
        load_initial_weights(model, Path(job.weights))
    return model


def load_initial_weights(model: torch.nn.Module, path: Path) -> None:
    """Load weights as `load_state_dict` does; for a peft model, into the base model. Parameters that are missing in the file stay as initialized."""
    stored = read_stored_tensors(path)
    inner = model.get_base_model() if hasattr(model, "peft_config") else model  # pyrefly: ignore
    head, found = f"{getattr(inner, 'base_model_prefix', '')}.", dict[str, torch.Tensor]()
    for name in inner.state_dict():
        words = re.sub(r"modules_to_save\.\w+\.|original_module\.|base_layer\.", "", name)
        own = name if model is inner else f"base_model.model.{name}"
        names = [n for n in (own, words, words.removeprefix(head), head + words) if n in stored]
        if names:
            found[name] = stored[names[0]]
    inner.load_state_dict(found, strict=False)


def read_stored_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a safetensors file, of a folder of such files, or of a checkpoint's model."""
    if (
        path.suffix == ".safetensors"
        or not path.is_dir()
        or (list(path.glob("model*.safetensors")) and not (path / "manifest.json").exists())
    ):
        files = [path] if path.is_file() else sorted(path.glob("model*.safetensors"))
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
    reader = open_weights(path)
    return {name: reader.read_full(name) for name in reader.entries}


def iterate_samples(job: Job, data: Data, length: int | None = None) -> Iterator[ReadSamples]:
    """Yield (epoch, sample ids, samples) of each step, epoch after epoch; the last batch of an epoch is short. `length`: read only the first
    `length` samples."""
    for epoch in count():
        words = (job.seed, "sample", epoch)
        if is_map(data):
            order = epoch_order(job.order, job.seed, epoch, len(data) if length is None else length)
            for ids in _iterate_step_ids(job, order.tolist()):
                yield epoch, ids, [sample for _, sample in _iterate_numbered(data, ids, words)]
            continue
        if hasattr(data, "set_epoch"):
            data.set_epoch(epoch)
        seed_host(job.seed, "epoch", epoch)
        numbered = _iterate_numbered(data, (), words)
        while read := list(islice(numbered, job.batch)):
            yield epoch, [i for i, _ in read], [sample for _, sample in read]


def _iterate_step_ids(job: Job, order: list[int]) -> Iterator[list[int]]:
    """Yield the sample ids of each step of an epoch: as many in order as fit the batch and the token budget."""
    budget, ids = job.token_budget, list[int]()
    lengths = budget.lengths() if budget else ()
    for i in order:
        if budget:
            tokens = [int(lengths[j]) for j in (*ids, i)]
            full = (len(tokens) * max(tokens) if budget.padded else sum(tokens)) > budget.tokens
        else:
            full = False
        if ids and (full or len(ids) == job.batch):
            yield ids
            ids = []
        ids.append(i)
    yield ids


def _iterate_numbered(data: Data, order: Iterable[int], words: tuple[int | str, ...]) -> Iterator[tuple[int, object]]:
    """Yield (number, sample) in the given order, or for an iterable in its own. Before each sample, the host's generators are seeded by
    `words` and its number."""
    if is_map(data):
        for i in order:
            seed_host(*words, i)
            yield i, data[i]
        return
    source = iter(data)
    for i in count():
        seed_host(*words, i)
        with name_failing_samples([i], "of the data"):
            sample = next(source, None)
        if sample is None:
            return
        yield i, sample


def load_seeded(job: Job, epoch: int, i: int, load: Callable[[], Any]) -> Any:
    """Call `load` with the host's generators seeded for sample `i` of `epoch`. Raises C014 if it fails."""
    seed_host(job.seed, "sample", epoch, i)
    with name_failing_samples([i], f"of epoch {epoch}"):
        return load()


def _is_mean(job: Job, model: torch.nn.Module, outputs: object, targets: object, n: int) -> bool | None:
    """True if the loss of a batch of n samples is the weighted mean of the losses of its two halves; None if the batch cannot be split. Values
    without a dim, such as a returned temperature, belong to both halves."""

    def compute_loss(outputs: object, targets: object) -> float:
        with restore_loss_state(job.loss, model):
            return float(job.loss(outputs, targets))

    try:
        with torch.no_grad():
            total, weights = 0.0, 0.0
            for part in (slice(0, n // 2), slice(n // 2, n)):
                o, t = tree_map_only(torch.Tensor, lambda x, part=part: x[part] if x.ndim else x, (outputs, targets))
                weight = float(torch.as_tensor(job.weight(t)).sum()) if job.weight else part.stop - part.start
                total, weights = total + weight * compute_loss(o, t), weights + weight
            whole = compute_loss(outputs, targets)
    except Exception:  # outputs without a batch dim cannot be split
        return None
    return abs(total / weights - whole) <= 1e-9 * max(abs(whole), 1e-9) if weights and np.isfinite(total) else None


def get_float_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Floating-point parameters and buffers of a model by name, not copied."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor for name, tensor in named if tensor.is_floating_point()}


def prepare_batch(one: OneDevice, data: Data, samples: list[Any]) -> Any:
    """(inputs, targets) of some samples, for the model."""
    return _to_device(_collate_samples(data, samples), one.dtype, one.device)


def _collate_samples(data: Data, samples: list[Any]) -> Any:
    if hasattr(data, "collate"):
        return split_pair(data.collate(samples))
    return split_pair(default_collate([lists_to_tensors(sample) for sample in samples]))


def _to_device(pair: Pair, dtype: torch.dtype | None, device: str) -> Any:
    return tree_map_only(torch.Tensor, lambda t: t.to(device, choose_dtype(t, dtype)), tuple(pair))


def collate_to_device(data: Data, samples: list[Any], dtype: torch.dtype | None, device: str) -> Any:
    """(inputs, targets) of some samples, in a number format (None: their own)."""
    return _to_device(_collate_samples(data, samples), dtype, device)


def call_model(model: nn.Module, inputs: object) -> Any:
    with one_device.name_job_part("the job's model"):
        if isinstance(inputs, dict):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def copy_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Copy tensors by name."""
    return {name: tensor.detach().clone() for name, tensor in named}
