"""`plait.from_loop`: convert the objects of a training loop, as passed to `accelerator.prepare`, to a job.

The loop's own settings are arguments: steps or epochs, accumulated batches, processes, clipping. The job's batch is the number of samples
of one optimizer step over all of these.

A loss that a model computes from its labels, as in transformers, is separated from the model, so that a plan can split it.

The loss of a transformers model is the mean over the labels that count (not −100). A mean of parts differs from the mean over the batch, so
the job's weight is the number of these labels. The loss is then the mean over the *global* batch under every plan, as the Trainer computes
it with `num_items_in_batch`.

A learning-rate scheduler becomes the job's schedule: a factor on the learning rate, as a function of the samples seen.

The scheduler is replayed. A copy of it steps an optimizer of empty parameters, and the ratio of each learning rate to the first one is the
factor. So any class works, also chained or custom ones, if it depends only on the number of its steps.

[Note: Optimizers] Factories for an existing model and optimizer, because a job makes several of them, in several processes.

Each call returns a new model. An optimizer is made for other parameters from its class, its groups and their settings. A parameter is
identified by its index among the model's trained parameters, an order that every plan keeps.
"""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isclose
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from plait import Evaluate, Job, PlaitError
from plait.config.errors import Problem, summarize_error
from plait.data.sampling import Order
from plait.integrations.adapters import loaders
from plait.tensors.parameters import copy_module, make_parameter_like

EXCLUDED_KEYS = ("params", "param_names", "initial_lr")
"""Keys of a group that are not passed to the constructor. `initial_lr` comes from a scheduler, which multiplies this rate."""

OptimizerMaker = Callable[[list[nn.Parameter]], Optimizer]


def make_optimizer_factory(optimizer_given: object, model: nn.Module, code: str) -> OptimizerMaker:
    """Return a function that makes such optimizers of the model's trained parameters, in their order.

    Raises `PlaitError` with the adapter's code for an optimizer with state, with parameters of another model, or that cannot be rebuilt from
    its groups.
    """
    optimizer = _check_optimizer(optimizer_given, code)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = _read_groups(optimizer, {id(p): i for i, p in enumerate(trained)}, code)
    accepted = inspect.signature(type(optimizer)).parameters
    everything = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    defaults = {k: v for k, v in optimizer.defaults.items() if everything or k in accepted}

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        grouped = [{**settings, "params": [parameters[i] for i in places]} for places, settings in groups]
        return type(optimizer)(grouped, **defaults)

    try:
        again = make([make_parameter_like(p, torch.empty_like(p, device="meta")) for p in trained])
        same = [_read_settings(g) for g in again.param_groups] == [settings for _, settings in groups]
    except Exception as error:  # a constructor may raise anything
        raise _optimizer_error(optimizer, code, f"its class, called with the settings of its groups, raised {summarize_error(error)}") from error
    if not same:
        raise _optimizer_error(optimizer, code, "rebuilt from its groups, it has other settings")
    return make


def _check_optimizer(optimizer: object, code: str) -> Optimizer:
    """Return the optimizer, or reject one that is not torch's, or that has taken steps."""
    if not isinstance(optimizer, Optimizer) or type(optimizer).__module__.startswith("accelerate"):
        what = f"the optimizer is a {type(optimizer).__module__}.{type(optimizer).__name__}"
        fix = ("pass the torch.optim.Optimizer itself, as it is before accelerator.prepare",)
        raise PlaitError(Problem(code, what, why="it is rebuilt for the parameters of each process", fix=fix))
    if optimizer.state:
        what = f"the {type(optimizer).__name__} has already taken steps"
        why = f"it has state for {len(optimizer.state)} tensors, and a job starts without state"
        raise PlaitError(Problem(code, what, why=why, fix=("create a new optimizer",)))
    return optimizer


def _read_groups(optimizer: Optimizer, places: dict[int, int], code: str) -> list[tuple[list[int], dict[str, Any]]]:
    """Return (indices of its parameters among the trained ones, settings) of each group."""
    found = []
    for number, group in enumerate(optimizer.param_groups):
        strange = [p for p in group["params"] if p.requires_grad and id(p) not in places]
        if strange:
            what = f"group {number} of the {type(optimizer).__name__} has {len(strange)} parameters of another model"
            why = f"the first has the shape {list(strange[0].shape)}; the job trains the parameters of its model"
            fix = ("create the optimizer from model.parameters() of the same model",)
            raise PlaitError(Problem(code, what, why=why, fix=fix))
        found.append(([places[id(p)] for p in group["params"] if id(p) in places], _read_settings(group)))
    return found


def _read_settings(group: dict[str, Any]) -> dict[str, Any]:
    settings = {k: v for k, v in group.items() if k not in EXCLUDED_KEYS}
    return {**settings, "lr": group["initial_lr"]} if "initial_lr" in group else settings


def _optimizer_error(optimizer: Optimizer, code: str, why: str) -> PlaitError:
    what = f"the {type(optimizer).__name__} cannot be rebuilt for other parameters"
    fix = ("optimizer=lambda parameters: …    a function that makes it",)
    return PlaitError(Problem(code, what, why=why, fix=fix))


def make_model_factory(model: nn.Module, code: str) -> Callable[[], nn.Module]:
    """Return a function that copies the model with its present weights, without random numbers.

    The model is copied only when needed; a model on a GPU is first copied to host memory. Raises `PlaitError` with the adapter's code if it is
    not a module, or cannot be copied.
    """
    if not isinstance(model, nn.Module):
        what = f"the model is a {type(model).__name__}, not a torch.nn.Module"
        raise PlaitError(Problem(code, what, fix=("pass the model itself, before training",)))
    if any(p.device.type not in ("cpu", "meta") for p in model.parameters()):
        model = copy_module(model).cpu()

    def fresh() -> nn.Module:
        try:
            return copy_module(model, {id(t): t.detach().clone() for t in _plain_tensors(model)})
        except (TypeError, RuntimeError, NotImplementedError) as error:
            what = f"the {type(model).__name__} cannot be copied: {summarize_error(error)}"
            why = "each process trains a copy of the model it was given"
            fix = ("dataclasses.replace(job, model=lambda: …)    a function that makes the model",)
            raise PlaitError(Problem(code, what, why=why, fix=fix)) from error

    return fresh


def _plain_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield tensors that are not parameters. torch copies them storage by storage, and fake tensors have no storage."""
    yield from model.buffers()
    for module in model.modules():
        yield from (t for t in vars(module).values() if type(t) is Tensor)


REPLAYED_STEPS = 256
"""Number of steps that are replayed at once, so that most unsupported schedulers are rejected before training."""
FACTOR_TOLERANCE = 1e-9
"""Relative tolerance for equal factors of two groups."""


def make_schedule(scheduler: object, clock: Callable[[int], int], code: str) -> Callable[[int], float]:
    """Convert a scheduler to the job's schedule. `clock`: samples seen -> steps of the scheduler.

    Raises `PlaitError` with the adapter's code for a scheduler that uses a metric, that changes more than the learning rate, or that changes
    groups' learning rates by different factors.
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        why = "a job's schedule is a function of the samples seen, so it is equal in a resumed run and under every plan"
        what = "the scheduler is a ReduceLROnPlateau, which depends on a metric"
        fix = ("a scheduler that depends on steps only, such as torch.optim.lr_scheduler.CosineAnnealingLR",)
        raise PlaitError(Problem(code, what, why=why, fix=fix))
    if not isinstance(scheduler, LRScheduler):
        what = f"the scheduler is a {type(scheduler).__module__}.{type(scheduler).__name__}, not one of torch"
        fix = ("pass the torch.optim.lr_scheduler.LRScheduler itself, as it is before accelerator.prepare",)
        raise PlaitError(Problem(code, what, fix=fix))
    played = _ReplayedScheduler(scheduler, code)
    played.factor_at(REPLAYED_STEPS)
    return lambda samples: played.factor_at(clock(samples))


class _ReplayedScheduler:
    """Factors of a scheduler, by the number of its steps."""

    def __init__(self, scheduler: LRScheduler, code: str):
        self.code, self.name = code, type(scheduler).__name__
        real = scheduler.optimizer
        groups = [{**group, "params": [nn.Parameter(torch.zeros(1))]} for group in real.param_groups]
        self.stub = torch.optim.SGD(groups, lr=1.0)
        try:
            self.scheduler = copy.deepcopy(scheduler, {id(real): self.stub})
        except Exception as error:  # it may hold anything
            what = f"the {self.name} cannot be copied: {summarize_error(error)}"
            fix = ("schedule=lambda samples: …    a function of the samples seen",)
            raise PlaitError(Problem(code, what, fix=fix)) from error
        self.initial_settings = self._settings()
        self.known = [self._factor()]

    def factor_at(self, steps: int) -> float:
        """Return the factor after `steps` steps of the scheduler."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warning that its optimizer takes no steps
            while len(self.known) <= steps:
                try:
                    self.scheduler.step()
                except ValueError:  # OneCycleLR has a last step, and training ends with it
                    self.known.append(self.known[-1])
                    continue
                self.known.append(self._factor())
        return self.known[steps]

    def _settings(self) -> list[dict[str, Any]]:
        """Return the groups' other settings, which a job's schedule does not change."""
        return [{k: v for k, v in g.items() if k not in ("params", "lr")} for g in self.stub.param_groups]

    def _factor(self) -> float:
        moved = [k for now, then in zip(self._settings(), self.initial_settings) for k in now if now[k] != then[k]]
        if moved:
            what = f"the {self.name} changes {moved[0]}, and not only the learning rate"
            fix = ("cycle_momentum=False",) if moved[0] in ("momentum", "betas") else ()
            raise self._schedule_error(what, "a job's schedule is a factor on the learning rate", fix)
        rates = [(float(g["lr"]), float(g["initial_lr"])) for g in self.stub.param_groups if float(g["initial_lr"])]
        factors = [now / first for now, first in rates] or [1.0]
        unlike = next((f for f in factors if not isclose(f, factors[0], rel_tol=FACTOR_TOLERANCE, abs_tol=FACTOR_TOLERANCE)), None)
        if unlike is not None:
            what = f"the {self.name} changes the learning rates of groups by different factors"
            why = f"after step {len(getattr(self, 'known', ()))} they are {factors[0]:.6g} and {unlike:.6g} of the first ones"
            raise self._schedule_error(what, why, ("use one factor for all groups, and put differences into each group's lr",))
        return factors[0]

    def _schedule_error(self, what: str, why: str, fix: tuple[str, ...]) -> PlaitError:
        return PlaitError(Problem(self.code, what, why=why, fix=fix))


IGNORED_LABEL = -100
"""A label that does not count."""
SHIFTED_LOSSES = {"ForCausalLM": True, "ForMaskedLM": False, "ForTokenClassification": False}
"""`loss_type` of transformers models whose loss is over labels that count -> whether a label is the next token's."""
PER_SAMPLE_LOSS = "ForSequenceClassification"


class _Logits(Protocol):
    """Output of a transformers model without labels."""

    logits: Tensor


@dataclass(frozen=True)
class ModelLoss:
    """A model's own loss: `loss(outputs, labels)`, its weight, and its value for each label that counts."""

    loss: Callable[[Any, Any], Tensor]
    weight: Callable[[Any], Any] | None
    is_separate: bool
    """The loss is computed from the outputs. Otherwise the labels are among the model's inputs, and the model returns the loss."""
    metrics: Callable[[Any, Any], dict[str, Tensor]] | None = None


def make_label_counter(shifted: bool) -> Callable[[Tensor], Tensor]:
    """Return a function from labels to the number of labels that count per sample, of shape [samples]."""
    return lambda labels: (labels[..., 1:] if shifted else labels).ne(IGNORED_LABEL).flatten(1).sum(1)


def find_model_loss(model: nn.Module) -> ModelLoss:
    """Return the loss of a transformers model, or of a model that returns a loss when it gets labels."""
    kind, config = getattr(model, "loss_type", None), getattr(model, "config", None)
    compute = getattr(model, "loss_function", None)
    if config is None or compute is None or getattr(config, "output_router_logits", False):
        return ModelLoss(get_returned_loss, None, False)
    if kind == PER_SAMPLE_LOSS:
        return ModelLoss(lambda outputs, y: compute(labels=y, pooled_logits=outputs.logits, config=config), None, True)
    if kind not in SHIFTED_LOSSES:
        return ModelLoss(get_returned_loss, None, False)
    more = (
        {"config": config} if kind == "ForTokenClassification" else {"vocab_size": config.get_text_config().vocab_size}
    )
    loss = lambda outputs, labels: compute(logits=outputs.logits, labels=labels, **more)  # noqa: E731
    return ModelLoss(loss, make_label_counter(SHIFTED_LOSSES[kind]), True, _make_label_metrics(SHIFTED_LOSSES[kind]))


def get_returned_loss(outputs: object, targets: object) -> Tensor:
    """Return the loss that a model returned: `outputs["loss"]`, `outputs.loss`, the first element of a tuple, or the output itself."""
    if isinstance(outputs, dict):
        return outputs["loss"]
    loss = outputs[0] if isinstance(outputs, (tuple, list)) else getattr(outputs, "loss", outputs)
    return torch.as_tensor(loss)


def _make_label_metrics(shifted: bool) -> Callable[[Any, Tensor], dict[str, Tensor]]:
    """Return a metric with the loss of each label that counts."""

    def metrics(outputs: _Logits, labels: Tensor) -> dict[str, Tensor]:
        logits, labels = (outputs.logits[:, :-1], labels[:, 1:]) if shifted else (outputs.logits, labels)
        counts = labels != IGNORED_LABEL
        return {"loss": cross_entropy(logits[counts], labels[counts], reduction="none")}

    return metrics


CODE = "J038"


def from_loop(
    model: nn.Module, optimizer: object, dataloader: object, loss: Callable[[Any, Any], Any] | None = None, scheduler: object = None, *,
    steps: int | None = None, epochs: int | None = None, accumulation: int = 1, world: int = 1, clip: float | None = None,
    split: loaders.Split | None = None, weight: Callable[[Any], Any] | None = None, order: Order | None = None,
    per_epoch: bool = False, seed: int = 0, evaluate: Evaluate | None = None,
) -> Job:  # fmt: skip
    """Convert the objects of a training loop to a job.

    model: a module with the initial weights. optimizer: a torch optimizer of its parameters that has taken no step, or a function from
    parameters to an optimizer. dataloader: its dataset, `collate_fn`, `batch_size`, `drop_last` and shuffling are used. loss: (outputs,
    targets) -> the mean over the samples; None: the model computes it from a batch with labels, as transformers models do (see
    `plait/integrations/adapters/loop.py`). scheduler: a torch scheduler that steps after every optimizer step, or with `per_epoch` after every
    epoch; or a function from samples seen to a factor.

    steps or epochs: training length. accumulation, world: accumulated batches, and processes of the script; a step of the job has batch_size ×
    accumulation × world samples. clip: the norm for `clip_grad_norm_`. split: a batch -> (inputs, targets), if it is neither a pair nor a dict
    with labels. weight: as `Job.weight`, for a loss that is not a mean over samples. order: as `Job.order`, instead of the loader's sampler.

    Raises `PlaitError` J038 for unsupported training.
    """
    own = find_model_loss(model) if loss is None and isinstance(model, nn.Module) else None
    cut = split or loaders.make_pair_split(CODE)
    if own is not None and not own.is_separate:
        cut = loaders.keep_labels(cut)
    loaded = loaders.read_loader(dataloader, cut, CODE, world=world, order=order)
    if not loaded.batch:
        fix = ("torch.utils.data.DataLoader(dataset, batch_size=N, shuffle=True)",)
        raise PlaitError(Problem(CODE, f"the data is a {type(dataloader).__name__}, not a DataLoader", fix=fix))
    batch = loaded.batch * accumulation * world
    if own is not None:
        loss, weight = own.loss, weight or own.weight
    make = optimizer if callable(optimizer) else make_optimizer_factory(optimizer, model, CODE)
    schedule = scheduler if callable(scheduler) else None
    if scheduler is not None and schedule is None:
        clock = loaded.make_epoch_counter(CODE) if per_epoch else loaded.make_step_counter(batch)
        schedule = make_schedule(scheduler, clock, CODE)
    return Job(
        model=make_model_factory(model, CODE), loss=_require_loss(loss), data=loaded.data, optimizer=make, batch=batch,
        steps=loaded.count_total_steps(batch, steps, epochs, CODE), weight=weight, schedule=schedule, clip=clip, seed=seed,
        evaluate=evaluate, order=loaded.order,
    )  # fmt: skip


def _require_loss(loss: Callable[[Any, Any], Any] | None) -> Callable[[Any, Any], Any]:
    if loss is None:
        raise PlaitError(Problem(CODE, "the loss is missing, and the model is not a module with its own loss", fix=("loss=…",)))
    return loss
