"""`plait.from_lightning`: a LightningModule as a job.

The job's model is the module, called with a batch; its loss is what `training_step` returns, the mean over the samples it was given
(over something else: `weight=`). A plan that cuts the batch weighs each part by its samples. `validation_step` is what is measured
on held-out data: what it logs is taken for the mean over the samples of its batch, as Lightning does when it averages batches.
Hooks that change training are refused by name, and so are Trainer's options that do.
"""

import itertools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from plait import Evaluate, Job, PlaitError, log
from plait.config.errors import Problem
from plait.data.orders import sequential
from plait.data.sampling import Order
from plait.integrations.adapters import loaders, optimizers, schedulers
from plait.integrations.adapters.lightning_module import CODE, HELD_OUT, TRAINING, as_model

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
        model=optimizers.handed_out(module, CODE), loss=lambda outputs, targets: outputs, data=loaded.data, optimizer=optimizer,
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
) -> tuple[optimizers.Make, Callable[[int], float] | None]:
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
    make = optimizers.made_again(next(iter(found[0]), None), module, CODE)
    if not found[1]:
        return make, None
    config = found[1][0] if isinstance(found[1][0], dict) else {"scheduler": found[1][0]}
    if config.get("reduce_on_plateau"):
        raise PlaitError(Problem(CODE, "the scheduler goes by a metric (reduce_on_plateau)"))
    clock = loaded.steps_made(batch) if config.get("interval") == "step" else loaded.epochs_made(CODE)
    frequency = config.get("frequency") or 1
    return make, schedulers.factor(config["scheduler"], lambda samples: clock(samples) // frequency, CODE)
