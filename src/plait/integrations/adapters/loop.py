"""`plait.from_loop`: the objects of a training loop, the very ones that a script gives to `accelerator.prepare`, as a job.

What the loop does with them is said in words: how many steps or epochs, how many batches it accumulates, on how many processes it
ran, where it clips. The job's batch is what all of these make together in one optimizer step.

Losses that a model computes itself from its labels, as those of transformers do: apart from it, so that a plan can cut it.

The loss of a model of transformers is the mean over the labels that count (not −100). In parts of a batch that is another mean than
in the whole, so a job has it with the number of these labels as its weight: it is then the mean over those of the *global* batch,
whatever the plan. That is what the Trainer computes with `num_items_in_batch`.

A learning-rate scheduler as what a job has: a factor on the learning rate, of the samples seen.

The scheduler is not read but played: a copy of it steps an optimizer of empty parameters, and each step's learning rate over the
first one is the factor. So it may be of any class, chained or of one's own, as long as it knows nothing but how often it stepped.

[Note: Optimizers]
A model and an optimizer that are there already, made again: a job's are made several times, in several processes.

A model is handed out fresh at every call. An optimizer is made again for other parameters with its class, its groups and their settings:
a parameter is found again by its place among the model's trained parameters, an order that every plan keeps.
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
from plait.config.errors import Problem, in_a_line
from plait.data.sampling import Order
from plait.integrations.adapters import loaders
from plait.tensors.parameters import copy_module, like

NOT_SETTINGS = ("params", "param_names", "initial_lr")
"""Keys of a group that its constructor is not given. `initial_lr` is what a scheduler left: the rate that it multiplies."""

OptimizerMaker = Callable[[list[nn.Parameter]], Optimizer]


def optimizer_made_again(given: object, model: nn.Module, code: str) -> OptimizerMaker:
    """Makes optimizers like this one, of the model's trained parameters in their order.

    Raises `PlaitError` with the adapter's code for one that has taken steps, that has parameters of another model, or that
    cannot be made from what its groups say.
    """
    optimizer = _usable(given, code)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = _groups(optimizer, {id(p): i for i, p in enumerate(trained)}, code)
    accepted = inspect.signature(type(optimizer)).parameters
    everything = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    defaults = {k: v for k, v in optimizer.defaults.items() if everything or k in accepted}

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        grouped = [{**settings, "params": [parameters[i] for i in places]} for places, settings in groups]
        return type(optimizer)(grouped, **defaults)

    try:
        again = make([like(p, torch.empty_like(p, device="meta")) for p in trained])
        same = [_settings(g) for g in again.param_groups] == [settings for _, settings in groups]
    except Exception as error:  # a constructor may raise anything
        raise _unmade(optimizer, code, f"its class, given what its groups say, raised {in_a_line(error)}") from error
    if not same:
        raise _unmade(optimizer, code, "made from what its groups say, it has other settings")
    return make


def _usable(optimizer: object, code: str) -> Optimizer:
    """Refuse what is no optimizer of torch, and one that has begun."""
    if not isinstance(optimizer, Optimizer) or type(optimizer).__module__.startswith("accelerate"):
        what = f"the optimizer is a {type(optimizer).__module__}.{type(optimizer).__name__}"
        fix = ("give the torch.optim.Optimizer itself, as it is before accelerator.prepare",)
        raise PlaitError(Problem(code, what, why="it is made again for the parameters of each process", fix=fix))
    if optimizer.state:
        what = f"the {type(optimizer).__name__} has taken steps already"
        why = f"it has state for {len(optimizer.state)} tensors, which a job does not begin with"
        raise PlaitError(Problem(code, what, why=why, fix=("make the optimizer anew",)))
    return optimizer


def _groups(optimizer: Optimizer, places: dict[int, int], code: str) -> list[tuple[list[int], dict[str, Any]]]:
    """(places of its parameters among those that are trained, settings) of each group."""
    found = []
    for number, group in enumerate(optimizer.param_groups):
        strange = [p for p in group["params"] if p.requires_grad and id(p) not in places]
        if strange:
            what = f"group {number} of the {type(optimizer).__name__} has {len(strange)} parameters that are not the model's"
            why = f"the first has the shape {list(strange[0].shape)}; the job trains the parameters of its model"
            fix = ("make the optimizer of model.parameters(), of the model that you give",)
            raise PlaitError(Problem(code, what, why=why, fix=fix))
        found.append(([places[id(p)] for p in group["params"] if id(p) in places], _settings(group)))
    return found


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    settings = {k: v for k, v in group.items() if k not in NOT_SETTINGS}
    return {**settings, "lr": group["initial_lr"]} if "initial_lr" in group else settings


def _unmade(optimizer: Optimizer, code: str, why: str) -> PlaitError:
    what = f"the {type(optimizer).__name__} cannot be made again for other parameters"
    fix = ("optimizer=lambda parameters: …    a function that makes it",)
    return PlaitError(Problem(code, what, why=why, fix=fix))


def model_handed_out(model: nn.Module, code: str) -> Callable[[], nn.Module]:
    """Makes copies of the model, with the weights that it has now. No random number is drawn.

    The model is held, not copied before it is needed; one on a GPU is copied to host memory. Raises `PlaitError` with the
    adapter's code for what is no module, or cannot be copied.
    """
    if not isinstance(model, nn.Module):
        what = f"the model is a {type(model).__name__}, not a torch.nn.Module"
        raise PlaitError(Problem(code, what, fix=("give the model itself, as it is before training",)))
    if any(p.device.type not in ("cpu", "meta") for p in model.parameters()):
        model = copy_module(model).cpu()

    def fresh() -> nn.Module:
        try:
            return copy_module(model, {id(t): t.detach().clone() for t in _plain_tensors(model)})
        except (TypeError, RuntimeError, NotImplementedError) as error:
            what = f"the {type(model).__name__} cannot be copied: {in_a_line(error)}"
            why = "each process trains a copy of the model it was given"
            fix = ("dataclasses.replace(job, model=lambda: …)    a function that makes the model",)
            raise PlaitError(Problem(code, what, why=why, fix=fix)) from error

    return fresh


def _plain_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Its tensors that are no parameters. torch copies them storage by storage, which a model of fake tensors has not."""
    yield from model.buffers()
    for module in model.modules():
        yield from (t for t in vars(module).values() if type(t) is Tensor)


PLAYED = 256
"""Steps that are played at once, so that what cannot be meant is mostly refused before training."""
SAME = 1e-9
"""Two groups' factors that differ by less, relatively, are one."""


def factor(scheduler: object, clock: Callable[[int], int], code: str) -> Callable[[int], float]:
    """The job's schedule. `clock`: samples seen -> how often the scheduler has stepped by then.

    Raises `PlaitError` with the adapter's code for a scheduler that looks at a metric, moves anything but the learning rate, or
    moves groups' learning rates by unlike factors.
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        why = "a job's schedule is a function of the samples seen, so that a resumed run and every plan have the same"
        what = "the scheduler is a ReduceLROnPlateau, which goes by a metric"
        fix = ("a scheduler that goes by steps, such as torch.optim.lr_scheduler.CosineAnnealingLR",)
        raise PlaitError(Problem(code, what, why=why, fix=fix))
    if not isinstance(scheduler, LRScheduler):
        what = f"the scheduler is a {type(scheduler).__module__}.{type(scheduler).__name__}, not one of torch"
        fix = ("give the torch.optim.lr_scheduler.LRScheduler itself, as it is before accelerator.prepare",)
        raise PlaitError(Problem(code, what, fix=fix))
    played = _Played(scheduler, code)
    played.at(PLAYED)
    return lambda samples: played.at(clock(samples))


class _Played:
    """The factors of a scheduler, by the number of its steps."""

    def __init__(self, scheduler: LRScheduler, code: str):
        self.code, self.name = code, type(scheduler).__name__
        real = scheduler.optimizer
        groups = [{**group, "params": [nn.Parameter(torch.zeros(1))]} for group in real.param_groups]
        self.stub = torch.optim.SGD(groups, lr=1.0)
        try:
            self.scheduler = copy.deepcopy(scheduler, {id(real): self.stub})
        except Exception as error:  # it may hold anything
            what = f"the {self.name} cannot be copied: {in_a_line(error)}"
            fix = ("schedule=lambda samples: …    a function of the samples seen",)
            raise PlaitError(Problem(code, what, fix=fix)) from error
        self.still = self._settings()
        self.known = [self._factor()]

    def at(self, steps: int) -> float:
        """The factor after so many steps of the scheduler."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that its optimizer takes no steps
            while len(self.known) <= steps:
                try:
                    self.scheduler.step()
                except ValueError:  # OneCycleLR has a last step, and training ends with it
                    self.known.append(self.known[-1])
                    continue
                self.known.append(self._factor())
        return self.known[steps]

    def _settings(self) -> list[dict[str, Any]]:
        """What else the groups have: a job's schedule leaves it as it is."""
        return [{k: v for k, v in g.items() if k not in ("params", "lr")} for g in self.stub.param_groups]

    def _factor(self) -> float:
        moved = [k for now, then in zip(self._settings(), self.still) for k in now if now[k] != then[k]]
        if moved:
            what = f"the {self.name} moves {moved[0]}, and not only the learning rate"
            fix = ("cycle_momentum=False",) if moved[0] in ("momentum", "betas") else ()
            raise self._refused(what, "a job's schedule is a factor on the learning rate", fix)
        rates = [(float(g["lr"]), float(g["initial_lr"])) for g in self.stub.param_groups if float(g["initial_lr"])]
        factors = [now / first for now, first in rates] or [1.0]
        unlike = next((f for f in factors if not isclose(f, factors[0], rel_tol=SAME, abs_tol=SAME)), None)
        if unlike is not None:
            what = f"the {self.name} moves the learning rates of groups by unlike factors"
            why = f"after step {len(getattr(self, 'known', ()))} they are {factors[0]:.6g} and {unlike:.6g} of the first ones"
            raise self._refused(what, why, ("one factor for all groups; what differs goes into each group's own lr",))
        return factors[0]

    def _refused(self, what: str, why: str, fix: tuple[str, ...]) -> PlaitError:
        return PlaitError(Problem(self.code, what, why=why, fix=fix))


IGNORED = -100
"""A label that does not count."""
SHIFTED = {"ForCausalLM": True, "ForMaskedLM": False, "ForTokenClassification": False}
"""The `loss_type` of models of transformers whose loss is over labels that count -> whether a label is the next token's."""
PER_SAMPLE = "ForSequenceClassification"


class _Logits(Protocol):
    """What a model of transformers returns without labels."""

    logits: Tensor


@dataclass(frozen=True)
class OwnLoss:
    """A model's own loss: `loss(outputs, labels)`, what it is a mean over, and a value for each label that counts."""

    loss: Callable[[Any, Any], Tensor]
    weight: Callable[[Any], Any] | None
    apart: bool
    """Computed from outputs; else the model is given the labels among its inputs, and returns it."""
    metrics: Callable[[Any, Any], dict[str, Tensor]] | None = None


def counted(shifted: bool) -> Callable[[Tensor], Tensor]:
    """Labels -> how many of each sample's count, of shape [samples]."""
    return lambda labels: (labels[..., 1:] if shifted else labels).ne(IGNORED).flatten(1).sum(1)


def of(model: nn.Module) -> OwnLoss:
    """The loss of a model of transformers, or of any that returns one when it is given labels."""
    kind, config = getattr(model, "loss_type", None), getattr(model, "config", None)
    compute = getattr(model, "loss_function", None)
    if config is None or compute is None or getattr(config, "output_router_logits", False):
        return OwnLoss(returned, None, False)
    if kind == PER_SAMPLE:
        return OwnLoss(lambda outputs, y: compute(labels=y, pooled_logits=outputs.logits, config=config), None, True)
    if kind not in SHIFTED:
        return OwnLoss(returned, None, False)
    more = (
        {"config": config} if kind == "ForTokenClassification" else {"vocab_size": config.get_text_config().vocab_size}
    )
    loss = lambda outputs, labels: compute(logits=outputs.logits, labels=labels, **more)  # noqa: E731
    return OwnLoss(loss, counted(SHIFTED[kind]), True, _each(SHIFTED[kind]))


def returned(outputs: object, targets: object) -> Tensor:
    """The loss that a model returned: `outputs["loss"]`, `outputs.loss`, the first of a tuple, or the output itself."""
    if isinstance(outputs, dict):
        return outputs["loss"]
    loss = outputs[0] if isinstance(outputs, (tuple, list)) else getattr(outputs, "loss", outputs)
    return torch.as_tensor(loss)


def _each(shifted: bool) -> Callable[[Any, Tensor], dict[str, Tensor]]:
    """The loss of each label that counts."""

    def metrics(outputs: _Logits, labels: Tensor) -> dict[str, Tensor]:
        logits, labels = (outputs.logits[:, :-1], labels[:, 1:]) if shifted else (outputs.logits, labels)
        counts = labels != IGNORED
        return {"loss": cross_entropy(logits[counts], labels[counts], reduction="none")}

    return metrics


CODE = "J038"


def from_loop(
    model: nn.Module, optimizer: object, dataloader: object, loss: Callable[[Any, Any], Any] | None = None, scheduler: object = None, *,
    steps: int | None = None, epochs: int | None = None, accumulation: int = 1, world: int = 1, clip: float | None = None,
    split: loaders.Split | None = None, weight: Callable[[Any], Any] | None = None, order: Order | None = None,
    per_epoch: bool = False, seed: int = 0, evaluate: Evaluate | None = None,
) -> Job:  # fmt: skip
    """The job that a training loop over these objects is.

    model: a module, whose weights are where training starts. optimizer: a torch optimizer of its parameters that has taken no
    step, or a function from parameters to one. dataloader: its data set, `collate_fn`, `batch_size`, `drop_last` and whether it
    shuffles are used. loss: (outputs, targets) -> the mean over the samples; None: the model computes it when it is given the whole
    batch, as those of transformers do with labels (see `plait/integrations/adapters/py`). scheduler: one of torch that steps after
    every optimizer step, or with `per_epoch` after every epoch; or a function from samples seen to a factor.

    steps or epochs: how long. accumulation, world: batches that the loop accumulates, and processes it ran on; a step of the job
    has batch_size × accumulation × world samples. clip: the norm given to `clip_grad_norm_`. split: a batch -> (inputs,
    targets), where it is neither a pair nor a dict with labels. weight: as `Job.weight`, for a loss that is a mean over something
    else than samples. order: as `Job.order`, instead of the loader's sampler.

    Raises `PlaitError` J038 for what a job cannot mean.
    """
    own = of(model) if loss is None and isinstance(model, nn.Module) else None
    cut = split or loaders.pair(CODE)
    if own is not None and not own.apart:
        cut = loaders.labels_kept(cut)
    loaded = loaders.read(dataloader, cut, CODE, world=world, order=order)
    if not loaded.batch:
        fix = ("torch.utils.data.DataLoader(dataset, batch_size=N, shuffle=True)",)
        raise PlaitError(Problem(CODE, f"the data is a {type(dataloader).__name__}, not a DataLoader", fix=fix))
    batch = loaded.batch * accumulation * world
    if own is not None:
        loss, weight = own.loss, weight or own.weight
    make = optimizer if callable(optimizer) else optimizer_made_again(optimizer, model, CODE)
    schedule = scheduler if callable(scheduler) else None
    if scheduler is not None and schedule is None:
        clock = loaded.epochs_made(CODE) if per_epoch else loaded.steps_made(batch)
        schedule = factor(scheduler, clock, CODE)
    return Job(
        model=model_handed_out(model, CODE), loss=_given(loss), data=loaded.data, optimizer=make, batch=batch,
        steps=loaded.length_of(batch, steps, epochs, CODE), weight=weight, schedule=schedule, clip=clip, seed=seed,
        evaluate=evaluate, order=loaded.order,
    )  # fmt: skip


def _given(loss: Callable[[Any, Any], Any] | None) -> Callable[[Any, Any], Any]:
    if loss is None:
        raise PlaitError(Problem(CODE, "there is no loss, and no model that could have its own", fix=("loss=…",)))
    return loss
