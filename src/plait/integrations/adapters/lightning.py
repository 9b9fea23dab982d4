"""`plait.from_lightning`: convert a LightningModule to a job.

The job's model is the module, called with a batch. Its loss is the value of `training_step`, a mean over the samples of the batch (or over
another weight: `weight=`). A plan that splits the batch weights each part by its samples. `validation_step` gives the metrics on held-out
data. Its logged values count as means over the samples of the batch, as Lightning assumes when it averages batches. Hooks and Trainer
options that change training are rejected by name.

The forward of the converted module is its training step, so it is a model like any other.

A job's model is called with a batch and returns the loss. The module keeps its identity. Its class becomes a subclass, with unchanged
parameters, names and submodules, so plans find its units and its weights load as before the conversion. Inside a step the module may call
itself (`self(x)`), which runs its own forward. Trainer attributes that a job can provide are available in a step; others raise an error
that names them.
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
"""Names of a batch among the inputs: the first goes to training_step, the second to validation_step."""
UNSUPPORTED_NAMES = {
    "current_epoch": "a job's model has no access to the progress of training; use a schedule (Job.schedule)",
    "global_step": "a job's model has no access to the progress of training; plait.log records values of every step",
    "global_rank": "a job is written for one device",
    "local_rank": "a job is written for one device",
    "optimizers": "a step of a job is forward, backward and update; the model has no access to the optimizer",
    "lr_schedulers": "a step of a job is forward, backward and update; the model has no access to the schedule",
    "manual_backward": "a job's backward pass comes after its loss",
    "clip_gradients": "give the limit to the job: clip=",
    "toggle_optimizer": "a job has one optimizer",
    "all_gather": "a loss over the whole batch uses plait.global_batch",
}
"""Attributes of a LightningModule that need a Trainer and that a job does not support -> the reason."""
BLOCKED_METHODS = ("__eq__", "__lt__", "__le__", "__gt__", "__ge__", "__mod__", "__add__", "__radd__", "__sub__", "__mul__", "__rmul__",
            "__floordiv__", "__truediv__", "__index__", "__int__", "__float__", "__bool__", "__hash__", "__str__", "__repr__",
            "__format__", "__iter__", "__getattr__")  # fmt: skip


def raise_unsupported(what: str, why: str, fix: str = "") -> NoReturn:
    """Raise J036 for an unsupported operation of a step."""
    raise PlaitError(Problem(CODE, what, why=why, fix=(fix,) if fix else ()), FAILED)


def _reject_batch_index(*_: object) -> NoReturn:
    raise_unsupported(
        "a step uses batch_idx, which a job does not have",
        "a batch is split over devices and into micro-batches, so its parts have no index of their own",
        "def training_step(self, batch, batch_idx):    without a use of batch_idx",
    )


BatchIndex = type(
    "BatchIndex",
    (),
    {"__doc__": "The index of a batch, which may be handed on and not used."} | dict.fromkeys(BLOCKED_METHODS, _reject_batch_index),
)


class TrainerFacts:
    """Replaces the Trainer inside a step: training length, and a single device."""

    def __init__(self, facts: dict[str, Any]):
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__.get("facts", {})
        if name in facts:
            return facts[name]
        if name.startswith("__"):
            raise AttributeError(name)
        raise_unsupported(f"the module uses self.trainer.{name}", f"a job has no Trainer; it provides {', '.join(sorted(facts))}")


class _StepModule(nn.Module):
    """Mixin that precedes the module's own class among its bases."""

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
        """Return the loss of a batch, or for a held-out batch the values that validation_step logs, one per sample."""
        with self._enter_step():
            if held_out is not None:
                return self._run_validation(held_out)
            return extract_loss(_call_step(self.training_step, batch))

    @contextmanager
    def _enter_step(self) -> Iterator[None]:
        self.__dict__["inside"], self.__dict__["logged"] = True, {}
        try:
            yield
        finally:
            self.__dict__["inside"] = False

    def _run_validation(self, batch: object) -> dict[str, Tensor]:
        self.__dict__["collecting"] = True
        try:
            _call_step(self.validation_step, batch)
        finally:
            self.__dict__["collecting"] = False
        count = count_samples(batch)
        return {name: expand_per_sample(name, value, count) for name, value in self.logged.items()}

    def log(self, name: str, value: object, *_: object, **__: object) -> None:
        """Log a metric in validation, or an additional value in training."""
        if hasattr(value, "compute"):
            raise_unsupported(
                f"self.log({name!r}) is given a {type(value).__name__}, which accumulates over batches",
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
        """Print nothing, since every rank would print it."""

    @property
    def trainer(self) -> TrainerFacts:
        """The Trainer's replacement."""
        return self.facts

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next((p.device for p in self.parameters()), torch.device("cpu"))


for _name, _why in UNSUPPORTED_NAMES.items():
    setattr(_StepModule, _name, property(lambda self, name=_name, why=_why: _reject_attribute(self, name, why)))


def _reject_attribute(module: _StepModule, name: str, why: str) -> Any:
    if module.inside:
        raise_unsupported(f"a step of {module.own.__name__} uses self.{name}", why)
    if name in ("current_epoch", "global_step", "global_rank", "local_rank"):  # before training, as without a Trainer
        return 0
    raise AttributeError(name)


def _call_step(step: Callable[..., Any], batch: object) -> Any:
    """Call a step with its batch, and with a batch index if it has that parameter."""
    code = getattr(step, "__func__", step).__code__
    return step(batch, BatchIndex()) if code.co_argcount > 2 else step(batch)


def extract_loss(returned: object) -> Tensor:
    """Return the loss from the value of training_step: a tensor, or a dict with `loss`."""
    loss = returned.get("loss") if isinstance(returned, dict) else returned
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        told = "None, which skips the batch" if returned is None else f"a {type(returned).__name__}"
        raise_unsupported("training_step returned no loss", f"it returned {told}", "return loss,  or  {'loss': loss}")
    return loss


def count_samples(batch: object) -> int:
    """Return the number of samples of a batch: the first dimension of its first tensor."""
    stack: list[object] = [batch]
    while stack:
        one = stack.pop(0)
        if isinstance(one, Tensor) and one.dim():
            return one.shape[0]
        stack = [*(one.values() if isinstance(one, dict) else one if isinstance(one, (tuple, list)) else ()), *stack]
    raise_unsupported("a held-out batch has no tensor", "the number of its samples is needed for the mean of a metric")


def expand_per_sample(name: str, value: object, count: int) -> Tensor:
    """Expand a logged value to one value per sample, whose mean is the mean over the samples."""
    value = value if isinstance(value, Tensor) else torch.as_tensor(value)
    if value.numel() not in (1, count):
        raise_unsupported(f"self.log({name!r}) is given a tensor of shape {list(value.shape)}", f"the batch has {count} samples")
    return value.detach().reshape(-1).expand(count) if value.numel() == 1 else value.detach().reshape(-1)


def convert_to_model(module: nn.Module, facts: dict[str, Any], log: Callable[..., None] | None) -> None:
    """Make the module's forward its training step. `facts`: attributes of `self.trainer`."""
    own = type(module)
    fields = {"own": own, "facts": TrainerFacts(facts), "log_outside": staticmethod(log) if log is not None else None}
    module.__class__ = type(
        own.__name__, (_StepModule, own), {**fields, "__module__": own.__module__, "__doc__": own.__doc__}
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
ALTERNATIVES = {
    "on_after_batch_transfer": "change the batch in training_step",
    "on_before_batch_transfer": "change the batch in the DataLoader's collate_fn",
    "configure_gradient_clipping": "clip=",
    "on_validation_epoch_end": "self.log in validation_step: plait takes the mean over all samples",
    "on_train_epoch_end": "self.log in training_step",
}
HARMLESS_CALLBACKS = ("ModelCheckpoint", "LearningRateMonitor", "DeviceStatsMonitor", "Timer", "ModelSummary", "RichModelSummary",
            "TQDMProgressBar", "RichProgressBar", "ProgressBar")  # fmt: skip
"""Callbacks of Lightning that do not affect training."""


PRECISIONS = {"bf16": "bf16", "16": "fp16"}
"""Prefix of a Trainer's `precision` -> the plan's value."""
PARTIAL_OPTIONS = {"limit_train_batches": 1.0, "overfit_batches": 0.0}
"""Options of a Trainer that exclude data -> their values that exclude nothing."""


@runtime_checkable
class _HasLoaders(Protocol):
    """A LightningModule or LightningDataModule."""

    def train_dataloader(self) -> object: ...
    def val_dataloader(self) -> object: ...


def from_lightning(
    module: "LightningModule", data: object = None, *, batch: int | None = None, steps: int | None = None, epochs: float | None = None,
    trainer: "Trainer | None" = None, held_out: object = None, every: int = 0, clip: float | None = None, seed: int = 0,
    weight: Callable[[Any], Any] | None = None, order: Order | None = None, world: int = 1,
) -> Job:  # fmt: skip
    """Convert a LightningModule of `lightning` or `pytorch_lightning` to a job.

    data: a DataLoader, a LightningDataModule, or a dataset of single samples; None: the module's own `train_dataloader`. batch: samples of an
    optimizer step over all devices; None: the loader's × the Trainer's accumulate_grad_batches × world. world: number of processes of the
    script. steps or epochs: training length; None: the Trainer's. trainer: a Lightning Trainer, whose max_steps, max_epochs,
    accumulate_grad_batches and gradient_clip_val are used; a warning lists the plan keys for its precision and devices. held_out: like data,
    for `validation_step` after each `every` steps. clip: gradient_clip_val. weight: batch -> the weight of its mean loss, such as the number of
    unmasked tokens; None: samples. order: as `Job.order`, instead of the loader's sampler.

    Raises `PlaitError` J036 for unsupported training: several optimizers, manual optimization, ReduceLROnPlateau, hooks between the parts of a
    step, and uses of `batch_idx`, `self.current_epoch` and other Trainer attributes in a step.
    """
    _check_module(module)
    options = _read_trainer_options(trainer)
    _check_supported(module, data, trainer)
    _prepare_module(module, data)
    train, held = _find_loaders(module, data, held_out)
    loaded = loaders.read_loader(train, _name_batch(TRAINING), CODE, world=world, order=order)
    batch = batch or loaded.batch * options["accumulation"] * world
    if not batch:
        raise PlaitError(Problem(CODE, "the number of samples per step is unknown", fix=("batch=N",)))
    if steps is None and epochs is None:
        steps, epochs = options["steps"], options["epochs"] if options["steps"] is None else None
    steps = loaded.count_total_steps(batch, steps, epochs, CODE)
    told = _suggest_plan(trainer)
    if told:
        warnings.warn(f'settings of computation belong to a plan and not to the job: --plan "{told}"', stacklevel=2)
    facts = _collect_facts(loaded, batch, steps, clip or options["clip"])
    convert_to_model(module, facts, log)
    optimizer, schedule = _convert_optimizers(module, loaded, batch)
    evaluate = None
    if held is not None:
        data_of = loaders.read_loader(held, _name_batch(HELD_OUT), CODE, order=sequential).data
        evaluate = Evaluate(data_of, lambda outputs, targets: outputs, every=every)
    return Job(
        model=loop.make_model_factory(module, CODE), loss=lambda outputs, targets: outputs, data=loaded.data, optimizer=optimizer,
        batch=batch, steps=steps, weight=weight, schedule=schedule, clip=clip or options["clip"], seed=seed, evaluate=evaluate,
        order=loaded.order,
    )  # fmt: skip


def _name_batch(name: str) -> loaders.Split:
    """Pass the whole batch as the model's input of that name, and also as targets, for `Job.weight`."""
    return lambda batch: ({name: batch}, batch)


def _check_module(module: "LightningModule") -> None:
    """Raise J036 unless the class derives from LightningModule, which two packages define."""
    if all(c.__name__ != "LightningModule" for c in type(module).__mro__):
        what = f"from_lightning was given a {type(module).__name__}, which is not a LightningModule"
        raise PlaitError(Problem(CODE, what, fix=("plait.from_loop    for a module and the objects of its loop",)))


def _check_supported(module: "LightningModule", data: object, trainer: "Trainer | None") -> None:
    """Raise J036 with all unsupported features."""
    name, problems = type(module).__name__, list[Problem]()
    if not module.automatic_optimization:
        why = "its training_step makes the steps itself; a step of a job is one forward, backward and update"
        problems.append(Problem(CODE, f"{name} uses manual optimization (automatic_optimization = False)", why=why))
    for one, hook in itertools.product((module, data) if isinstance(data, _HasLoaders) else (module,), HOOKS):
        if hasattr(one, hook) and _is_overridden(one, hook):
            why = "plait does not call it, and its absence may change the training result"
            fix = (ALTERNATIVES.get(hook, "remove it, or write the job without the adapter"),)
            problems.append(Problem(CODE, f"{type(one).__name__} overrides {hook}", why=why, fix=fix))
    if trainer is not None and trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
        why = "a job clips by the norm of all gradients"
        problems.append(Problem(CODE, 'the Trainer clips by value (gradient_clip_algorithm="value")', why=why))
    for option, all_of_it in PARTIAL_OPTIONS.items():
        value = getattr(trainer, option, all_of_it)
        if value != all_of_it:
            what = f"Trainer({option}={value!r}) trains on some batches of the data"
            problems.append(Problem(CODE, what, why="an epoch of a job has all of its data", fix=("give the smaller data set",)))
    for callback in getattr(trainer, "callbacks", ()):
        if type(callback).__name__ not in HARMLESS_CALLBACKS:
            why = "it may change the training result, and plait does not call it"
            fix = ("remove it from the Trainer",)
            problems.append(Problem(CODE, f"the Trainer has the callback {type(callback).__name__}", why=why, fix=fix))
    if problems:
        raise PlaitError(problems)


def _read_trainer_options(trainer: "Trainer | None") -> dict[str, Any]:
    """Return the Trainer's options that affect the result."""
    if trainer is None:
        return {"steps": None, "epochs": None, "accumulation": 1, "clip": None}
    steps = trainer.max_steps if trainer.max_steps > 0 else None
    return {
        "steps": steps, "epochs": trainer.max_epochs, "accumulation": trainer.accumulate_grad_batches,
        "clip": trainer.gradient_clip_val or None,
    }  # fmt: skip


def _suggest_plan(trainer: "Trainer | None") -> str:
    """Return the plan keys for a Trainer's precision and devices."""
    if trainer is None:
        return ""
    precision = next((ours for theirs, ours in PRECISIONS.items() if trainer.precision.startswith(theirs)), "")
    keys = [f"dp={trainer.world_size}"] if trainer.world_size > 1 else []
    return " ".join([*keys, *([f"precision={precision}"] if precision else [])])


def _prepare_module(module: "LightningModule", data: object) -> None:
    """Call the methods that a Trainer calls before it requests loaders and optimizers."""
    for one in (data, module):
        if hasattr(one, "prepare_data") and hasattr(one, "setup"):
            one.prepare_data()
            one.setup("fit")
    module.configure_model()


def _find_loaders(module: "LightningModule", data: object, held_out: object) -> tuple[Any, Any]:
    """Return the training loader and the held-out loader, if any."""
    source = data if isinstance(data, _HasLoaders) else module if data is None else None
    if source is None:
        return data, held_out
    try:
        train = source.train_dataloader()
    except Exception as error:  # Lightning's default method raises
        fix = ("from_lightning(module, DataLoader(…))",)
        raise PlaitError(Problem(CODE, f"{type(source).__name__} has no train_dataloader", fix=fix)) from error
    if held_out is None and _is_overridden(source, "val_dataloader"):
        held_out = source.val_dataloader()
    return train, held_out


def _is_overridden(thing: object, name: str) -> bool:
    """Whether a LightningModule or LightningDataModule overrides a method that a Trainer calls."""
    base = next(c for c in type(thing).__mro__ if c.__name__ in ("LightningModule", "LightningDataModule"))
    return getattr(type(thing), name, None) is not getattr(base, name, None) or name in vars(thing)


def _collect_facts(loaded: loaders.LoadedData, batch: int, steps: int, clip: float | None) -> dict[str, Any]:
    """Return the attributes of `self.trainer`."""
    epochs = -(-steps // loaded.steps_per_epoch(batch)) if loaded.length else None
    return {
        "estimated_stepping_batches": steps, "max_steps": steps, "max_epochs": epochs, "accumulate_grad_batches": 1,
        "num_training_batches": loaded.steps_per_epoch(batch) if loaded.length else float("inf"), "world_size": 1, "num_devices": 1,
        "num_nodes": 1, "gradient_clip_val": clip, "is_global_zero": True, "sanity_checking": False, "logger": None, "loggers": [],
    }  # fmt: skip


def _convert_optimizers(
    module: "LightningModule", loaded: loaders.LoadedData, batch: int
) -> tuple[loop.OptimizerMaker, Callable[[int], float] | None]:
    """Convert the result of configure_optimizers to the job's optimizer and schedule."""
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
    make = loop.make_optimizer_factory(next(iter(found[0]), None), module, CODE)
    if not found[1]:
        return make, None
    config = found[1][0] if isinstance(found[1][0], dict) else {"scheduler": found[1][0]}
    if config.get("reduce_on_plateau"):
        raise PlaitError(Problem(CODE, "the scheduler depends on a metric (reduce_on_plateau)"))
    clock = loaded.make_step_counter(batch) if config.get("interval") == "step" else loaded.make_epoch_counter(CODE)
    frequency = config.get("frequency") or 1
    return make, loop.make_schedule(config["scheduler"], lambda samples: clock(samples) // frequency, CODE)
