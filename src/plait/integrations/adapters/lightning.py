"""`plait.from_lightning`: a LightningModule as a job.

The job's model is the module, called with a batch; its loss is what `training_step` returns, the mean over the samples it was given
(over something else: `weight=`). A plan that cuts the batch weighs each part by its samples. `validation_step` is what is measured
on held-out data: what it logs is taken for the mean over the samples of its batch, as Lightning does when it averages batches.
Hooks that change training are refused by name, and so are Trainer's options that do.

A LightningModule whose forward is its training step, so that it is a model like any other.

A job's model is called with a batch and returns the loss. The module stays itself: its class becomes a subclass of its own, with
the parameters, names and submodules as they were, so that plans find its units and its weights load where they came from. Inside a
step the module may call itself (`self(x)`): that is its own forward. What a step asks of a Trainer has an answer where a job has
one, and is refused by name where it has none.
"""

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from plait import Evaluate, Job, PlaitError, log
from plait.config.errors import FAILED, Problem
from plait.data.orders import sequential
from plait.data.sampling import Order
from plait.integrations.adapters import loaders, loop

CODE = "J036"
TRAINING, HELD_OUT = "batch", "held_out"
"""What a batch is called among the inputs: the first goes to training_step, the second to validation_step."""
UNKNOWN = {
    "current_epoch": "the model does not know how far training is: a schedule does (Job.schedule)",
    "global_step": "the model does not know how far training is: plait.log records a number of every step",
    "global_rank": "a job is written for one device",
    "local_rank": "a job is written for one device",
    "optimizers": "a step of a job is forward, backward and update; the optimizer is out of the model's reach",
    "lr_schedulers": "a step of a job is forward, backward and update; the schedule is out of the model's reach",
    "manual_backward": "a job's backward pass comes after its loss",
    "clip_gradients": "give the limit to the job: clip=",
    "toggle_optimizer": "a job has one optimizer",
    "all_gather": "a loss over the whole batch uses plait.global_batch",
}
"""What a LightningModule has of a Trainer and a job does not -> why."""
COMPARED = ("__eq__", "__lt__", "__le__", "__gt__", "__ge__", "__mod__", "__add__", "__radd__", "__sub__", "__mul__", "__rmul__",
            "__floordiv__", "__truediv__", "__index__", "__int__", "__float__", "__bool__", "__hash__", "__str__", "__repr__",
            "__format__", "__iter__", "__getattr__")  # fmt: skip


def refuse(what: str, why: str, fix: str = "") -> NoReturn:
    """J036 of something that a step does."""
    raise PlaitError(Problem(CODE, what, why=why, fix=(fix,) if fix else ()), FAILED)


def _used(*_: object) -> NoReturn:
    refuse(
        "a step uses batch_idx, which a job does not have",
        "a batch is cut over devices and into micro-batches, so its parts have no number of their own",
        "def training_step(self, batch, batch_idx):    without a use of batch_idx",
    )


BatchIndex = type(
    "BatchIndex",
    (),
    {"__doc__": "The index of a batch, which may be handed on and not used."} | dict.fromkeys(COMPARED, _used),
)


class TrainerFacts:
    """What a job knows of what a Trainer knows: how long it trains, and that it is on one device."""

    def __init__(self, facts: dict[str, Any]):
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__.get("facts", {})
        if name in facts:
            return facts[name]
        if name.startswith("__"):
            raise AttributeError(name)
        refuse(f"the module asks for self.trainer.{name}", f"a job has no Trainer; it knows {', '.join(sorted(facts))}")


class _Steps(nn.Module):
    """Comes before the module's own class among its bases."""

    inside = False
    facts: TrainerFacts
    logged: dict[str, Any]
    own: type[nn.Module]
    training_step: Callable[..., Any]
    validation_step: Callable[..., Any]
    log_outside: Callable[..., None] | None = None

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if self.inside:
            return self.own.forward(self, *args, **kwargs)
        return super().__call__(*args, **kwargs)

    def forward(self, batch: object = None, held_out: object = None) -> Any:
        """The loss of a batch; of a held-out one what validation_step logs, as values for each sample."""
        with self._step():
            if held_out is not None:
                return self._validated(held_out)
            return loss_of(_called(self.training_step, batch))

    @contextmanager
    def _step(self) -> Iterator[None]:
        self.__dict__["inside"], self.__dict__["logged"] = True, {}
        try:
            yield
        finally:
            self.__dict__["inside"] = False

    def _validated(self, batch: object) -> dict[str, Tensor]:
        self.__dict__["collecting"] = True
        try:
            _called(self.validation_step, batch)
        finally:
            self.__dict__["collecting"] = False
        count = samples_of(batch)
        return {name: per_sample(name, value, count) for name, value in self.logged.items()}

    def log(self, name: str, value: object, *_: object, **__: object) -> None:
        """In validation a metric; in training a number beside the loss."""
        if hasattr(value, "compute"):
            refuse(
                f"self.log({name!r}) is given a {type(value).__name__}, which counts over batches",
                "its state would be that of one rank; a metric of a job is a mean over samples",
                f"self.log({name!r}, value)    with the mean over the samples of the batch",
            )
        if self.__dict__.get("collecting"):
            self.logged[name] = value
        elif self.log_outside is not None:
            self.log_outside(name, value)

    def log_dict(self, dictionary: Mapping[str, object], *_: object, **__: object) -> None:
        for name, value in dictionary.items():
            self.log(name, value)

    def print(self, *_: object, **__: object) -> None:
        """Nothing: every rank would."""

    @property
    def trainer(self) -> TrainerFacts:
        """Stands for the Trainer."""
        return self.facts

    @property
    def device(self) -> torch.device:
        """Where its parameters are."""
        return next((p.device for p in self.parameters()), torch.device("cpu"))


for _name, _why in UNKNOWN.items():
    setattr(_Steps, _name, property(lambda self, name=_name, why=_why: _unknown(self, name, why)))


def _unknown(module: _Steps, name: str, why: str) -> Any:
    if module.inside:
        refuse(f"a step of {module.own.__name__} uses self.{name}", why)
    if name in ("current_epoch", "global_step", "global_rank", "local_rank"):  # before training, as without a Trainer
        return 0
    raise AttributeError(name)


def _called(step: Callable[..., Any], batch: object) -> Any:
    """A step with its batch, and an index if it wants one."""
    code = getattr(step, "__func__", step).__code__
    return step(batch, BatchIndex()) if code.co_argcount > 2 else step(batch)


def loss_of(returned: object) -> Tensor:
    """What training_step returned: the loss, or a dict with it."""
    loss = returned.get("loss") if isinstance(returned, dict) else returned
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        told = "None, which leaves the batch out" if returned is None else f"a {type(returned).__name__}"
        refuse("training_step returned no loss", f"it returned {told}", "return loss,  or  {'loss': loss}")
    return loss


def samples_of(batch: object) -> int:
    """How many samples a batch has: the first dim of its first tensor."""
    stack: list[object] = [batch]
    while stack:
        one = stack.pop(0)
        if isinstance(one, Tensor) and one.dim():
            return one.shape[0]
        stack = [*(one.values() if isinstance(one, dict) else one if isinstance(one, (tuple, list)) else ()), *stack]
    refuse("a held-out batch has no tensor", "the number of its samples is needed for the mean of a metric")


def per_sample(name: str, value: object, count: int) -> Tensor:
    """What was logged of a batch, as one value for each of its samples: the mean of these is the mean over the samples."""
    value = value if isinstance(value, Tensor) else torch.as_tensor(value)
    if value.numel() not in (1, count):
        refuse(f"self.log({name!r}) is given a tensor of shape {list(value.shape)}", f"the batch has {count} samples")
    return value.detach().reshape(-1).expand(count) if value.numel() == 1 else value.detach().reshape(-1)


def as_model(module: nn.Module, facts: dict[str, Any], log: Callable[..., None] | None) -> None:
    """OptimizerMaker the module's forward its training step. `facts`: what `self.trainer` knows."""
    own = type(module)
    fields = {"own": own, "facts": TrainerFacts(facts), "log_outside": staticmethod(log) if log is not None else None}
    module.__class__ = type(
        own.__name__, (_Steps, own), {**fields, "__module__": own.__module__, "__doc__": own.__doc__}
    )


if TYPE_CHECKING:
    from lightning import LightningModule, Trainer

HOOKS = (
    "on_fit_start", "on_train_start", "on_train_end", "on_fit_end", "on_train_batch_start", "on_train_batch_end",
    "on_train_epoch_start", "on_train_epoch_end", "on_validation_start", "on_validation_end", "on_validation_batch_start",
    "on_validation_batch_end", "on_validation_epoch_start", "on_validation_epoch_end", "on_before_zero_grad",
    "on_before_backward", "on_after_backward", "on_before_optimizer_step", "optimizer_step", "optimizer_zero_grad", "backward",
    "lr_scheduler_step", "configure_gradient_clipping", "on_before_batch_transfer", "on_after_batch_transfer",
    "transfer_batch_to_device", "configure_callbacks", "on_save_checkpoint", "on_load_checkpoint",
)  # fmt: skip
"""Methods that a Trainer calls and a job does not."""
INSTEAD = {
    "on_after_batch_transfer": "change the batch in training_step",
    "on_before_batch_transfer": "change the batch in the DataLoader's collate_fn",
    "configure_gradient_clipping": "clip=",
    "on_validation_epoch_end": "self.log in validation_step: plait takes the mean over all samples",
    "on_train_epoch_end": "self.log in training_step",
}
HARMLESS = ("ModelCheckpoint", "LearningRateMonitor", "DeviceStatsMonitor", "Timer", "ModelSummary", "RichModelSummary",
            "TQDMProgressBar", "RichProgressBar", "ProgressBar")  # fmt: skip
"""Callbacks of Lightning that do not change what is trained."""


PRECISIONS = {"bf16": "bf16", "16": "fp16"}
"""Beginnings of a Trainer's `precision` -> the plan's."""
PARTIAL = {"limit_train_batches": 1.0, "overfit_batches": 0.0}
"""Options of a Trainer that leave data out -> their values when they do not."""


@runtime_checkable
class _Loaders(Protocol):
    """A LightningModule or LightningDataModule."""

    def train_dataloader(self) -> object: ...
    def val_dataloader(self) -> object: ...


def from_lightning(
    module: "LightningModule", data: object = None, *, batch: int | None = None, steps: int | None = None, epochs: float | None = None,
    trainer: "Trainer | None" = None, held_out: object = None, every: int = 0, clip: float | None = None, seed: int = 0,
    weight: Callable[[Any], Any] | None = None, order: Order | None = None, world: int = 1,
) -> Job:  # fmt: skip
    """The job that a LightningModule trains; that of `lightning` or of `pytorch_lightning`.

    data: a DataLoader, a LightningDataModule, or a data set of single samples; None: the module's own `train_dataloader`. batch:
    samples of an optimizer step over all devices; None: the loader's × the Trainer's accumulate_grad_batches × world, the number
    of processes the script ran on. steps or epochs: how long; None: as the Trainer says. trainer: a Lightning Trainer, whose
    max_steps, max_epochs, accumulate_grad_batches and gradient_clip_val are taken; a warning names the plan's keys for its
    precision and devices. held_out: as data, for `validation_step`,
    every so many steps. clip: gradient_clip_val. weight: batch -> what the loss is a mean over, such as the tokens that count;
    None: samples. order: as `Job.order`, instead of the loader's sampler.

    Raises `PlaitError` J036 for what a job cannot mean: several optimizers, manual optimization, ReduceLROnPlateau, hooks that
    are called between the parts of a step, and in a step `batch_idx`, `self.current_epoch` and what else only a Trainer has.
    """
    _lightning_module(module)
    options = _options(trainer)
    _refuse(module, data, trainer)
    _begin(module, data)
    train, held = _loaders(module, data, held_out)
    loaded = loaders.read(train, _named(TRAINING), CODE, world=world, order=order)
    batch = batch or loaded.batch * options["accumulation"] * world
    if not batch:
        raise PlaitError(Problem(CODE, "nothing says how many samples a step has", fix=("batch=N",)))
    if steps is None and epochs is None:
        steps, epochs = options["steps"], options["epochs"] if options["steps"] is None else None
    steps = loaded.length_of(batch, steps, epochs, CODE)
    told = _plan_keys(trainer)
    if told:
        warnings.warn(f'a plan says how to compute, and not the job: --plan "{told}"', stacklevel=2)
    facts = _facts(loaded, batch, steps, clip or options["clip"])
    as_model(module, facts, log)
    optimizer, schedule = _configured(module, loaded, batch)
    evaluate = None
    if held is not None:
        data_of = loaders.read(held, _named(HELD_OUT), CODE, order=sequential).data
        evaluate = Evaluate(data_of, lambda outputs, targets: outputs, every=every)
    return Job(
        model=loop.model_handed_out(module, CODE), loss=lambda outputs, targets: outputs, data=loaded.data, optimizer=optimizer,
        batch=batch, steps=steps, weight=weight, schedule=schedule, clip=clip or options["clip"], seed=seed, evaluate=evaluate,
        order=loaded.order,
    )  # fmt: skip


def _named(name: str) -> loaders.Split:
    """The whole batch as the model's input of that name, and beside it as targets, for `Job.weight`."""
    return lambda batch: ({name: batch}, batch)


def _lightning_module(module: "LightningModule") -> None:
    """J036 for what is none; there are two packages that have it."""
    if all(c.__name__ != "LightningModule" for c in type(module).__mro__):
        what = f"from_lightning was given a {type(module).__name__}, which is no LightningModule"
        raise PlaitError(Problem(CODE, what, fix=("plait.from_loop    for a module and the objects of its loop",)))


def _refuse(module: "LightningModule", data: object, trainer: "Trainer | None") -> None:
    """J036 of all that a job cannot mean."""
    name, problems = type(module).__name__, list[Problem]()
    if not module.automatic_optimization:
        why = "its training_step makes the steps itself; a step of a job is one forward, backward and update"
        problems.append(Problem(CODE, f"{name} optimizes by hand (automatic_optimization = False)", why=why))
    for one, hook in itertools.product((module, data) if isinstance(data, _Loaders) else (module,), HOOKS):
        if hasattr(one, hook) and _overridden(one, hook):
            why = "plait does not call it, and training without it may be another one"
            fix = (INSTEAD.get(hook, "leave it out, or write the job without the adapter"),)
            problems.append(Problem(CODE, f"{type(one).__name__} overrides {hook}", why=why, fix=fix))
    if trainer is not None and trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
        why = "a job clips by the norm of all gradients"
        problems.append(Problem(CODE, 'the Trainer clips by value (gradient_clip_algorithm="value")', why=why))
    for option, all_of_it in PARTIAL.items():
        value = getattr(trainer, option, all_of_it)
        if value != all_of_it:
            what = f"Trainer({option}={value!r}) trains on some batches of the data"
            problems.append(Problem(CODE, what, why="an epoch of a job has all of its data", fix=("give the smaller data set",)))
    for callback in getattr(trainer, "callbacks", ()):
        if type(callback).__name__ not in HARMLESS:
            why = "it may change what is trained, and plait does not call it"
            fix = ("leave it out of the Trainer",)
            problems.append(Problem(CODE, f"the Trainer has the callback {type(callback).__name__}", why=why, fix=fix))
    if problems:
        raise PlaitError(problems)


def _options(trainer: "Trainer | None") -> dict[str, Any]:
    """What of a Trainer decides the result."""
    if trainer is None:
        return {"steps": None, "epochs": None, "accumulation": 1, "clip": None}
    steps = trainer.max_steps if trainer.max_steps > 0 else None
    return {
        "steps": steps, "epochs": trainer.max_epochs, "accumulation": trainer.accumulate_grad_batches,
        "clip": trainer.gradient_clip_val or None,
    }  # fmt: skip


def _plan_keys(trainer: "Trainer | None") -> str:
    """What of a Trainer a plan says."""
    if trainer is None:
        return ""
    precision = next((ours for theirs, ours in PRECISIONS.items() if trainer.precision.startswith(theirs)), "")
    keys = [f"dp={trainer.world_size}"] if trainer.world_size > 1 else []
    return " ".join([*keys, *([f"precision={precision}"] if precision else [])])


def _begin(module: "LightningModule", data: object) -> None:
    """What a Trainer calls before it asks for loaders and optimizers."""
    for one in (data, module):
        if hasattr(one, "prepare_data") and hasattr(one, "setup"):
            one.prepare_data()
            one.setup("fit")
    module.configure_model()


def _loaders(module: "LightningModule", data: object, held_out: object) -> tuple[Any, Any]:
    """What to train on, and what is held out, if anything."""
    source = data if isinstance(data, _Loaders) else module if data is None else None
    if source is None:
        return data, held_out
    try:
        train = source.train_dataloader()
    except Exception as error:  # Lightning's own says that there is none
        fix = ("from_lightning(module, DataLoader(…))",)
        raise PlaitError(Problem(CODE, f"{type(source).__name__} has no train_dataloader", fix=fix)) from error
    if held_out is None and _overridden(source, "val_dataloader"):
        held_out = source.val_dataloader()
    return train, held_out


def _overridden(thing: object, name: str) -> bool:
    """Whether a LightningModule or LightningDataModule has its own of what a Trainer calls."""
    base = next(c for c in type(thing).__mro__ if c.__name__ in ("LightningModule", "LightningDataModule"))
    return getattr(type(thing), name, None) is not getattr(base, name, None) or name in vars(thing)


def _facts(loaded: loaders.Loaded, batch: int, steps: int, clip: float | None) -> dict[str, Any]:
    """What `self.trainer` knows."""
    epochs = -(-steps // loaded.steps(batch)) if loaded.length else None
    return {
        "estimated_stepping_batches": steps, "max_steps": steps, "max_epochs": epochs, "accumulate_grad_batches": 1,
        "num_training_batches": loaded.steps(batch) if loaded.length else float("inf"), "world_size": 1, "num_devices": 1,
        "num_nodes": 1, "gradient_clip_val": clip, "is_global_zero": True, "sanity_checking": False, "logger": None, "loggers": [],
    }  # fmt: skip


def _configured(
    module: "LightningModule", loaded: loaders.Loaded, batch: int
) -> tuple[loop.OptimizerMaker, Callable[[int], float] | None]:
    """The job's optimizer and schedule, of what configure_optimizers returns."""
    returned: object = module.configure_optimizers()
    found: tuple[list[Any], list[Any]]
    if isinstance(returned, dict):
        found = [returned["optimizer"]], [returned["lr_scheduler"]] if returned.get("lr_scheduler") is not None else []
    elif isinstance(returned, (tuple, list)) and len(returned) == 2 and isinstance(returned[0], (tuple, list)):
        found = list(returned[0]), list(returned[1]) if isinstance(returned[1], (tuple, list)) else [returned[1]]
    elif isinstance(returned, (tuple, list)):
        found = list(returned), []
    else:
        found = [returned], []
    for things, name in zip(found, ("optimizers", "learning-rate schedulers")):
        if len(things) > 1:
            why = "a job has one of each: one optimizer with groups of parameters can have several settings"
            what = f"configure_optimizers of {type(module).__name__} returns {len(things)} {name}"
            raise PlaitError(Problem(CODE, what, why=why))
    make = loop.optimizer_made_again(next(iter(found[0]), None), module, CODE)
    if not found[1]:
        return make, None
    config = found[1][0] if isinstance(found[1][0], dict) else {"scheduler": found[1][0]}
    if config.get("reduce_on_plateau"):
        raise PlaitError(Problem(CODE, "the scheduler goes by a metric (reduce_on_plateau)"))
    clock = loaded.steps_made(batch) if config.get("interval") == "step" else loaded.epochs_made(CODE)
    frequency = config.get("frequency") or 1
    return make, loop.factor(config["scheduler"], lambda samples: clock(samples) // frequency, CODE)
