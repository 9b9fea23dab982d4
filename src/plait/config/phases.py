"""Several losses and optimizers in one job: a step has *phases*, each of which trains some of the model's parameters.

A GAN, a VAE-GAN or an actor with its critic has networks that are trained against each other or for different losses. Each has its own
loss and optimizer, and some are updated less often. Here all networks are parts of one model, and a `Phase` defines how some of its
parameters are trained. In a step, the phases that are due run one after another on the same batch: forward, backward, reduction over the
ranks, clipping, update. So a phase uses the parameters that earlier phases have updated.

The rest of plait handles such a job as if it had one loss and one optimizer: `JointModel`, `JointLoss` and `JointOptimizer` replace the
job's own. In their forward pass all phases run in order, their losses are added, and their optimizers act as one. Code that splits or
measures a model sees this sum, which contains every tensor of every phase. Only the training loop (`engine/passes.py`) and the proof's
reference run the phases one by one.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from plait.config.errors import PlaitError, Problem


@dataclass(frozen=True)
class Phase:
    """One part of a step, with its own parameters, loss, optimizer and frequency.

    `trains`: patterns of parameter names, such as "critic.*". A parameter is trained by at most one phase, and is frozen if no phase
    trains it. `forward(model, *inputs)` runs the phase with the inputs of the model's own forward (`**inputs` of a dict). It may compute
    derivatives, as for a gradient penalty (`create_graph=True`). Default: the model's own forward. `loss(outputs, targets)` and
    `optimizer(parameters)` are as in `Job`. The phase is due in the steps `every`, 2 × `every`, …, counted from 1. `clip` is the maximum
    norm of this phase's gradients (default: `Job.clip`).

    Random numbers of a forward pass differ between phases, as if each phase had its own seed.
    """

    name: str
    trains: tuple[str, ...]
    loss: Callable[[Any, Any], Any]
    optimizer: Callable[[list[Any]], Any]
    forward: Callable[..., Any] | None = None
    every: int = 1
    clip: float | None = None

    def due(self, step: int) -> bool:
        """Return True if the phase is due in a step, counted from 1."""
        return step % self.every == 0

    def has(self, parameter: str) -> bool:
        """Return True if the phase trains the parameter of this name."""
        return any(fnmatchcase(parameter, pattern) for pattern in self.trains)


class JointModel:
    """Makes the user's model, which then runs the phase named by `turn`, or all phases if `turn` is None."""

    def __init__(self, make_model: Callable[[], Any], phases: tuple[Phase, ...]):
        self.make_model, self.phases = make_model, phases

    def __call__(self) -> Any:
        model = self.make_model()
        if not hasattr(model, "named_parameters"):
            return model  # rejected where models are created
        check_trained([name for name, p in model.named_parameters() if p.requires_grad], self.phases)
        for name, parameter in model.named_parameters():
            if not any(phase.has(name) for phase in self.phases):
                parameter.requires_grad_(False)
        kind = type(model)
        if not issubclass(kind, PhasedModule):
            model.__class__ = type(kind.__name__, (PhasedModule, kind), {"__module__": kind.__module__})
        model.phases, model.turn, model.running = self.phases, None, False
        return model


class PhasedModule:
    """Base class added to a model with phases. Its outputs are a dict with the outputs of each phase that ran."""

    phases: tuple[Phase, ...]
    turn: str | None
    running: bool
    training: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the phase named by `turn`, or all phases. Evaluation, and calls inside of a phase, run the model's own forward.

        Phases always run with gradients enabled, because they may compute derivatives.
        """
        import torch

        own: Callable[..., Any] = super().forward  # type: ignore[misc]
        if self.running or not (self.training or torch.is_grad_enabled()):
            return own(*args, **kwargs)
        self.running = True
        try:
            with torch.enable_grad():
                return {
                    phase.name: own(*args, **kwargs) if phase.forward is None else phase.forward(self, *args, **kwargs)
                    for phase in self.phases
                    if self.turn in (None, phase.name)
                }
        finally:
            self.running = False


class JointLoss:
    """The sum of the losses of the phases that ran."""

    def __init__(self, phases: tuple[Phase, ...]):
        self.phases = phases

    def __call__(self, outputs: Mapping[str, Any], targets: object) -> Any:
        return sum(phase.loss(outputs[phase.name], targets) for phase in self.phases if phase.name in outputs)


class JointOptimizer:
    """Makes one optimizer from those of the phases, each of which receives the parameters that it trains."""

    def __init__(self, model: JointModel):
        self.model = model
        self.names: list[str] | None = None
        """Names of all trained parameters, in the model's order."""

    def __call__(self, parameters: list[Any]) -> Any:
        """Create the optimizer from all trained parameters, or from replacements, in the model's order."""
        self.names = self._trained_names() if self.names is None else self.names
        return self.build(dict(zip(self.names, parameters, strict=True)))

    def build(self, named: Mapping[str, Any]) -> Any:
        """Create the optimizer from some parameters by name. A phase without any of them has no optimizer."""
        lots = {phase: [p for name, p in named.items() if phase.has(name)] for phase in self.model.phases}
        return _optimizer_class()({phase.name: phase.optimizer(lot) for phase, lot in lots.items() if lot})

    def _trained_names(self) -> list[str]:
        import torch

        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return [name for name, p in self.model().named_parameters() if p.requires_grad]


class PhaseOptimizers:
    """Base class that joins the optimizers of all phases to one `torch.optim.Optimizer`; `each` has them by phase name.

    It has the groups of all optimizers. They share this object's state dict, which is possible because their parameters differ. So
    checkpoints, offloading and owners of full tensors handle it like any optimizer.
    """

    state: dict[Any, Any]

    def __init__(self, each: Mapping[str, Any]):
        groups = [group for one in each.values() for group in one.param_groups]
        super().__init__([{"params": [p for group in groups for p in group["params"]]}], {})  # type: ignore[call-arg]
        self.each, self.turn = dict(each), ""
        self.param_groups = groups
        for one in each.values():
            self.state.update(one.state)
            one.state = self.state

    def step(self, closure: None = None) -> None:
        """Step the optimizer named by `turn`, or all if it is empty."""
        for name, one in self.each.items():
            if self.turn in ("", name):
                one.step()


@cache
def _optimizer_class() -> Callable[[Mapping[str, Any]], Any]:
    import torch

    return type("PhaseOptimizers", (PhaseOptimizers, torch.optim.Optimizer), {})


def build_joint_fields(model: Callable[[], Any], phases: tuple[Phase, ...]) -> dict[str, Any]:
    """Return the fields of a job that represent its phases."""
    check_phases(phases)
    made = JointModel(model.make_model if isinstance(model, JointModel) else model, phases)
    return {"model": made, "loss": JointLoss(phases), "optimizer": JointOptimizer(made)}


def check_phases(phases: tuple[Phase, ...]) -> None:
    """Raise P090 for invalid phases."""
    problems = [*_find_problems(phases)]
    if problems:
        raise PlaitError(problems)


def _find_problems(phases: tuple[Phase, ...]) -> Iterator[Problem]:
    for phase in phases:
        yield from _find_wrong_fields(phase)
    names = [phase.name for phase in phases]
    if len(set(names)) < len(names):
        yield Problem(
            "P090", f"two phases have the same name: {', '.join(names)}", fix=("give each phase a different name",)
        )
    if all(isinstance(phase.every, int) and phase.every > 1 for phase in phases):
        what = "no phase is due in every step"
        why = "every phase has every > 1, so some steps would train nothing"
        yield Problem("P090", what, why=why, fix=("set every=1 for the phase that updates most often",))


def _find_wrong_fields(phase: Phase) -> Iterator[Problem]:
    trains, every, clip = phase.trains, phase.every, phase.clip
    patterns = isinstance(trains, tuple) and bool(trains) and all(isinstance(n, str) for n in trains)
    made = hasattr(phase.optimizer, "param_groups")
    right = {
        "name": (isinstance(phase.name, str) and bool(phase.name), "a non-empty string"),
        "trains": (patterns, 'a tuple of patterns of parameter names: ("critic.*",)'),
        "loss": (callable(phase.loss), "a function of (outputs, targets)"),
        "optimizer": (callable(phase.optimizer) and not made, "a function that returns one: lambda parameters: …"),
        "forward": (phase.forward is None or callable(phase.forward), "a function of (model, *inputs), or None"),
        "every": (type(every) is int and every > 0, "a whole number ≥ 1"),
        "clip": (clip is None or (isinstance(clip, (int, float)) and clip > 0), "a number > 0, or None"),
    }  # fmt: skip
    for name, (fits, expected) in right.items():
        if not fits:
            yield Problem(
                "J004", f"Phase({name}={getattr(phase, name)!r}) is not {expected}", fix=(f"{name}={expected}",)
            )


def check_trained(names: list[str], phases: tuple[Phase, ...]) -> None:
    """Raise P090 if a phase trains nothing, or two phases train the same parameter. `names`: parameters that can be trained."""
    for phase in phases:
        if not any(phase.has(name) for name in names):
            what = f"the phase {phase.name} trains nothing: no parameter matches {' or '.join(phase.trains)}"
            why = f"the model's parameters are {', '.join(names[:6])}, …"
            fix = f'trains=("{names[0].partition(".")[0]}.*",)' if names else "let a parameter require gradients"
            raise PlaitError(Problem("P090", what, why=why, fix=(fix,)))
    for name in names:
        by = [phase.name for phase in phases if phase.has(name)]
        if len(by) > 1:
            what, why = f"{name} is trained by two phases: {', '.join(by)}", "each phase has its own optimizer"
            raise PlaitError(Problem("P090", what, why=why, fix=("use narrower patterns in Phase(trains=…)",)))
