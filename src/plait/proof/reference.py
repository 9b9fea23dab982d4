"""The reference: the job on one device in plain PyTorch, as anyone would write it by hand.

It shares with the engine only what a job *means*: `Job` itself, the sample order and the keyed random numbers (and `Wide`, which keeps
both in float64). If the
engine and these lines agree to rounding, the engine trains what the job says.
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

from plait.checkpoint.opening import open_weights
from plait.config.errors import FAILED, PlaitError, Problem
from plait.config.job import Job
from plait.data.batch import Data, example, in_tensors, is_map, pair_of
from plait.data.batch_rows import Pair
from plait.data.iterables import naming_samples
from plait.data.sampling import epoch_order
from plait.engine.logged import recording
from plait.launch import one_device
from plait.model.make import sparse_gradients_error
from plait.model.operations import Unit
from plait.model.optimizers import evaluation_mode
from plait.model.parameter_groups import optimizer_of
from plait.model.sketch import sketch
from plait.proof.notes import Notes
from plait.randomness.keyed import Randomness, seed_host
from plait.tensors.float64 import Wide
from plait.tensors.modules import convert, evaluating, format_in, loss_kept
from plait.tensors.rows import dense
from plait.tensors.torch_private import tree_map_only

Samples = tuple[int, list[int], list[Any]]


@dataclass
class OneDevice:
    """The job on one device, as it stands after some steps."""

    job: Job
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    keyed: Randomness
    rates: list[float]
    dtype: torch.dtype
    device: str
    kept: float
    """Bytes that units keep for backward, for each sample."""
    notes: Notes
    """What its steps gave, unit by unit."""
    units: tuple[Unit, ...]
    steps: int = 0
    seen: int = 0
    seconds: list[float] = field(default_factory=list)
    """Of processor time of each step's passes, for each sample and thread."""
    average: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of the trained parameters by name, once `Job.ema` has taken them for the first time."""
    logged: dict[str, list[float]] = field(default_factory=dict)
    """What the job logged in the last step's passes."""

    @staticmethod
    def of(job: Job, data: Data, dtype: torch.dtype, device: str) -> "OneDevice":
        """The job before its first step. Its model is made anew after the sketch, so that nothing of a trial is in the reference."""
        sample, trial = example(job.data, data)[0], make_model(job, dtype, device)
        with Wide():
            sketched = sketch(trial, lambda n: _ready(_collate(data, [sample] * n), dtype, device)[0], call, job.units)
        del trial
        model = make_model(job, dtype, device)
        keyed = Randomness(job.seed, sketched.places, sketched.host_random).install(model)
        optimizer = optimizer_of(job, dict(model.named_parameters()))
        kept = sketched.saved_between.each + sum(unit.saved.each for unit in sketched.calls)
        notes, rates = Notes(model, [unit.name for unit in sketched.units]), [g["lr"] for g in optimizer.param_groups]
        notes.tensors("initial", dict(model.named_parameters()))
        return OneDevice(job, model, optimizer, keyed, rates, dtype, device, kept, notes, sketched.units)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def passes(
        self, data: Data, read: Samples, moves: Callable[[], None] = lambda: None
    ) -> tuple[Any, Any, torch.Tensor]:
        """(outputs, targets, loss) of a step's samples, after its forward and backward passes."""
        began = time.process_time()
        inputs, targets = _ready(_collate(data, read[2]), self.dtype, self.device)
        self.notes.batch(self.steps, [(0, len(read[1]), (inputs, targets))])
        self.logged = {}
        record = lambda name, value: self.logged.setdefault(name, []).append(float(value))  # noqa: E731
        with Wide(), self.keyed.at(self.steps, 0, len(read[1])), recording(record):
            outputs = call(self.model, inputs)
            loss = self.job.loss(outputs, targets)
        moves()
        with self.keyed.replay():
            loss.backward()
        self.notes.gradients()
        self.seconds.append((time.process_time() - began) / torch.get_num_threads() / len(read[1]))
        return outputs, targets, loss.detach()

    def update(self, read: Samples, loss: torch.Tensor, limit: float) -> dict[str, Any]:
        """Clip to the limit and take the optimizer's step: loss, norm before clipping, learning rate, samples so far."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, limit)
        if not (torch.isfinite(loss).all() and torch.isfinite(norm)):
            raise nonfinite(self.steps + 1, float(loss), float(norm), read[1])
        for group, rate in zip(self.optimizer.param_groups, self.rates):
            group["lr"] = rate * self.job.schedule(self.seen) if self.job.schedule else rate
        lr = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.notes.updated(self.optimizer)
        self.model.zero_grad(set_to_none=True)  # also of parameters that the optimizer was not given
        self.seen, self.steps = self.seen + len(read[1]), self.steps + 1
        with evaluation_mode(self.optimizer):
            self.move_average()
        logged = {name: sum(values) / len(values) for name, values in self.logged.items()}
        return {"loss": float(loss), "norm": float(norm), "lr": lr, "samples": self.seen, "logged": logged}

    def move_average(self) -> None:
        """After a step: move the average of the weights, as `Job.ema` says."""
        ema, trained = self.job.ema, copied((n, p) for n, p in self.model.named_parameters() if p.requires_grad)
        if ema is None or self.steps % ema.every:
            return
        k = self.steps // ema.every
        decay = min(ema.decay, k / (9 + k)) if ema.warmup else ema.decay
        before = self.average or trained
        self.average = {n: decay * before[n] + (1 - decay) * p for n, p in trained.items()} if k > 1 else trained


def train(
    job: Job, steps: int, clip: float, dtype: torch.dtype, device: str = "cpu", *,
    moves: Callable[[], None] = lambda: None, then: Callable[[OneDevice], dict[str, Any]] = lambda one: {},
) -> dict[str, Any]:  # fmt: skip
    """Train `steps` steps. `clip` is a share of the first gradient norm, so that clipping is always active.
    `moves` is called at each step, and before its backward pass. `then` goes on with the model, and adds what it returns.

    Returns `rows` (per step: loss, norm, lr, samples), `ids` (per step), `clip` (the norm used), and by name the
    tensors `initial`, `gradients` (of step 1, before clipping), `weights` and `buffers` (at the end of the steps).
    """
    data = job.data()
    one = OneDevice.of(job, data, dtype, device)
    model = one.model
    out: dict[str, Any] = {"initial": copied(model.named_parameters()), "rows": [], "ids": []}
    stream, seen = samples(job, data), None
    for step in range(steps):
        moves()
        read = next(stream)
        outputs, targets, loss = one.passes(data, read, moves)
        if step == 0:
            out["gradients"] = gradients(model)
            first = float(torch.nn.utils.get_total_norm([p.grad for p in one.parameters if p.grad is not None]))
            out["clip"] = clip * first or clip  # a first gradient of zero: any limit is as good
            seen = (*tree_map_only(torch.Tensor, torch.Tensor.detach, (outputs, targets)), len(read[1]))
        out["rows"].append(one.update(read, loss, out["clip"]))
        out["ids"].append([read[0], read[1]])
    out |= end(one) | then(one)
    with Wide():  # last, because a loss may have a state that each call changes
        out["mean"] = _is_mean(job, one.model, *seen) if seen else None
    return out


def end(one: OneDevice) -> dict[str, dict[str, torch.Tensor]]:
    """The `weights`, `buffers` and, where the job has one, the `average` of the weights, as they are after the steps."""
    buffers = copied(one.model.named_buffers())
    return {"weights": copied(one.model.named_parameters()), "buffers": buffers, "average": copied(one.average.items())}


def shares(
    one: OneDevice,
    data: Data,
    read: Samples,
    counts: list[int],
    microbatches: int,
    moves: Callable[[], None] = lambda: None,
) -> tuple[list[dict[str, torch.Tensor]], torch.Tensor]:
    """The gradients of each share of a step's samples, computed in micro-batches, by name: those that the share used. And the loss
    of all. A loss enters with its weight over that of the batch. Shares are contiguous; `counts`: samples of each."""
    job, batch = one.job, _ready(_collate(data, read[2]), one.dtype, one.device)
    cut = lambda first, n: tree_map_only(torch.Tensor, lambda t: dense(t[first : first + n]), batch)  # noqa: E731
    weigh = lambda n, y: weight_of(job, y, n)  # noqa: E731
    buffers = list(one.model.buffers())
    whole, before, found = weigh(len(read[1]), batch[1]), [b.clone() for b in buffers], []
    loss = torch.zeros((), dtype=one.dtype, device=one.device)
    for start, held in ((sum(counts[:i]), n) for i, n in enumerate(counts)):
        for buffer, value in zip(buffers, before):  # each share is computed on a copy of the model
            buffer.copy_(value)
        for first, n in _split(start, held, microbatches):
            inputs, targets = cut(first, n)
            if not (weight := weigh(n, targets)):
                continue
            with Wide(), one.keyed.at(one.steps, first, n):
                part = job.loss(call(one.model, inputs), targets) * (weight / whole)
            moves()
            with one.keyed.replay():
                part.backward()
            loss += part.detach()
        found.append(gradients(one.model))
        one.model.zero_grad(set_to_none=True)
    return found, loss


def weight_of(job: Job, targets: object, samples: int) -> float:
    """What the loss of so many samples is a mean over."""
    return float(samples) if job.weight is None or not samples else float(torch.as_tensor(job.weight(targets)).sum())


def _split(first: int, size: int, parts: int) -> list[tuple[int, int]]:
    """(first, count) of each part."""
    counts = [size // parts + (i < size % parts) for i in range(parts)]
    return [(first + sum(counts[:i]), n) for i, n in enumerate(counts)]


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The gradients that are there, by name."""
    return copied((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)


def evaluate(one: OneDevice) -> dict[str, float]:
    """The mean of each of the job's metrics over its held-out data, in batches of a step's samples, with the average of the
    weights if it has one, or those of its optimizer's eval mode; {} when it has no metrics."""
    job, wanted = one.job, one.job.evaluate
    if wanted is None:
        return {}
    data, sums, weights = wanted.data(), dict[str, list[float]](), copied(one.model.named_parameters())
    with evaluation_mode(one.optimizer), evaluating(one.model), torch.no_grad():
        _put(one.model, one.average)
        seed_host(job.seed, "evaluate")
        numbered = _numbered(data, range(len(data)) if is_map(data) else (), (job.seed, "evaluate"))
        while read := [sample for _, sample in islice(numbered, job.batch)]:
            inputs, targets = _ready(_collate(data, read), one.dtype, one.device)
            with Wide():
                values = wanted.metrics(call(one.model, inputs), targets)
            for name, row in ((str(name), torch.as_tensor(value)) for name, value in values.items()):
                total = sums.setdefault(name, [0.0, 0])
                total[0], total[1] = total[0] + float(row.double().sum()), total[1] + row.numel()
    _put(one.model, weights)
    return {name: total / count for name, (total, count) in sums.items()}


def _put(model: nn.Module, numbers: dict[str, torch.Tensor]) -> None:
    """Give the parameters of these names these numbers."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(numbers.get(name, parameter))


def nonfinite(step: int, loss: float, norm: float, ids: list[int]) -> PlaitError:
    """J011: there is nothing to compare a split run with."""
    what = (
        f"the job's numbers are not finite on one device: in step {step} the loss is {loss}, the gradient norm {norm}"
    )
    why = f"it was trained in plain PyTorch in float64, on samples {', '.join(map(str, ids))}: there is nothing to compare"
    fix = ("look at what the job's data gives for these samples", "a lower learning rate")
    return PlaitError(Problem("J011", what, why=why, fix=fix), FAILED)


def plain(job: Job, dtype: torch.dtype | None, device: str = "cpu") -> None:
    """One step of the job with nothing of plait's around it, in a number format or (None) in the job's own: whatever fails here
    fails in plain PyTorch. J012 for gradients that are sparse."""
    model, data = make_model(job, dtype, device), job.data()
    optimizer = optimizer_of(job, dict(model.named_parameters()))
    batch = tree_map_only(torch.Tensor, lambda t: t.to(device), _collate(data, next(samples(job, data))[2]))
    inputs, targets = batch if dtype is None else _ready(batch, dtype, device)
    job.loss(call(model, inputs), targets).backward()
    if sparse := [n for n, p in model.named_parameters() if p.grad is not None and p.grad.layout is not torch.strided]:
        raise sparse_gradients_error(f"the job's use of {sparse[0]}")
    optimizer.step()


def make_model(job: Job, dtype: torch.dtype | None, device: str) -> torch.nn.Module:
    """The job's model in a number format (None: its own), in training mode; parts that the job itself put in eval mode stay there."""
    random.seed(job.seed)
    np.random.seed(job.seed & 0xFFFFFFFF)
    torch.manual_seed(job.seed)
    model = convert(job.model(), torch.device(device), dtype)
    if hasattr(job.loss, "attach"):
        job.loss.attach(model)
    frozen = [m for m in model.modules() if model.training and not m.training]
    model.train()
    for module in frozen:
        module.training = False
    for (
        module
    ) in model.modules():  # as all who train do: a cache is for generation, and hides where packed documents begin
        if getattr(getattr(module, "config", None), "use_cache", None) is True:
            module.config.use_cache = False  # type: ignore[union-attr]
    if job.weights is not None:
        start_from(model, Path(job.weights))
    return model


def start_from(model: torch.nn.Module, path: Path) -> None:
    """Load weights as `load_state_dict` does. In a model that peft has wrapped, into the base; what the file has not stays as
    it was drawn."""
    stored = stored_in(path)
    inner = model.get_base_model() if hasattr(model, "peft_config") else model  # pyrefly: ignore
    head, found = f"{getattr(inner, 'base_model_prefix', '')}.", dict[str, torch.Tensor]()
    for name in inner.state_dict():
        words = re.sub(r"modules_to_save\.\w+\.|original_module\.|base_layer\.", "", name)
        own = name if model is inner else f"base_model.model.{name}"
        names = [n for n in (own, words, words.removeprefix(head), head + words) if n in stored]
        if names:
            found[name] = stored[names[0]]
    inner.load_state_dict(found, strict=False)


def stored_in(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, of a folder of them, or of a checkpoint's model."""
    if (
        path.suffix == ".safetensors"
        or not path.is_dir()
        or (list(path.glob("model*.safetensors")) and not (path / "manifest.json").exists())
    ):
        files = [path] if path.is_file() else sorted(path.glob("model*.safetensors"))
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
    reader = open_weights(path)
    return {name: reader.whole(name) for name in reader.entries}


def samples(job: Job, data: Data, length: int | None = None) -> Iterator[Samples]:
    """(epoch, sample ids, samples) of each step, epoch after epoch, the last batch of an epoch short. `length`: of the
    data that are read, instead of all."""
    for epoch in count():
        words = (job.seed, "sample", epoch)
        if is_map(data):
            order = epoch_order(job.order, job.seed, epoch, len(data) if length is None else length)
            for ids in _steps(job, order.tolist()):
                yield epoch, ids, [sample for _, sample in _numbered(data, ids, words)]
            continue
        if hasattr(data, "set_epoch"):
            data.set_epoch(epoch)
        seed_host(job.seed, "epoch", epoch)
        numbered = _numbered(data, (), words)
        while read := list(islice(numbered, job.batch)):
            yield epoch, [i for i, _ in read], [sample for _, sample in read]


def _steps(job: Job, order: list[int]) -> Iterator[list[int]]:
    """The sample ids of each step of an epoch: the next of the order, as long as they fit the batch and the token budget."""
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


def _numbered(data: Data, order: Iterable[int], words: tuple[int | str, ...]) -> Iterator[tuple[int, object]]:
    """(number, sample) of the data in an order, of an iterable as they come; the host's generators are seeded before each by
    `words` and its number."""
    if is_map(data):
        for i in order:
            seed_host(*words, i)
            yield i, data[i]
        return
    source = iter(data)
    for i in count():
        seed_host(*words, i)
        with naming_samples([i], "of the data"):
            sample = next(source, None)
        if sample is None:
            return
        yield i, sample


def seeded(job: Job, epoch: int, i: int, load: Callable[[], Any]) -> Any:
    """What `load` gives, with the host's generators in the state that belongs to a sample of an epoch. C014 for what it raises."""
    seed_host(job.seed, "sample", epoch, i)
    with naming_samples([i], f"of epoch {epoch}"):
        return load()


def _is_mean(job: Job, model: torch.nn.Module, outputs: object, targets: object, n: int) -> bool | None:
    """Whether the loss of a batch of n samples is the weighted mean of the losses of its two parts; None when it
    cannot be cut. What has no dim, such as a temperature that is returned, belongs to both parts."""

    def ask(outputs: object, targets: object) -> float:
        with loss_kept(job.loss, model):
            return float(job.loss(outputs, targets))

    try:
        with torch.no_grad():
            total, weights = 0.0, 0.0
            for part in (slice(0, n // 2), slice(n // 2, n)):
                o, t = tree_map_only(torch.Tensor, lambda x, part=part: x[part] if x.ndim else x, (outputs, targets))
                weight = float(torch.as_tensor(job.weight(t)).sum()) if job.weight else part.stop - part.start
                total, weights = total + weight * ask(o, t), weights + weight
            whole = ask(outputs, targets)
    except Exception:  # outputs without a batch dim: nothing can be said
        return None
    return abs(total / weights - whole) <= 1e-9 * max(abs(whole), 1e-9) if weights and np.isfinite(total) else None


def floating(model: nn.Module) -> dict[str, torch.Tensor]:
    """Its parameters and buffers that are no whole numbers, by name: the tensors themselves."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor for name, tensor in named if tensor.is_floating_point()}


def ready(one: OneDevice, data: Data, samples: list[Any]) -> Any:
    """(inputs, targets) of some samples, for the model."""
    return _ready(_collate(data, samples), one.dtype, one.device)


def _collate(data: Data, samples: list[Any]) -> Any:
    if hasattr(data, "collate"):
        return pair_of(data.collate(samples))
    return pair_of(default_collate([in_tensors(sample) for sample in samples]))


def _ready(pair: Pair, dtype: torch.dtype | None, device: str) -> Any:
    return tree_map_only(torch.Tensor, lambda t: t.to(device, format_in(t, dtype)), tuple(pair))


def collated(data: Data, samples: list[Any], dtype: torch.dtype | None, device: str) -> Any:
    """(inputs, targets) of some samples, in a number format; None: in their own."""
    return _ready(_collate(data, samples), dtype, device)


def call(model: nn.Module, inputs: object) -> Any:
    """The model's outputs."""
    with one_device.naming("the job's model"):
        if isinstance(inputs, dict):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def copied(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The tensors as they are now, by name."""
    return {name: tensor.detach().clone() for name, tensor in named}
