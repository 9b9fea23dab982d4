"""Several losses and optimizers in one job: a step as *phases*, each of which trains some of the model's parameters.

A GAN, a VAE-GAN or an actor with its critic has networks that are trained against each other or for different ends: each has a
loss and an optimizer of its own, and some are updated more rarely than others. All of them are parts of one model here, and a
`Phase` says of some of its parameters how they are trained. In a step the phases that are due come one after the other, on
the step's one batch: forward, backward into what the phase trains, sum over the ranks, clip, update. So a phase sees what the
phases before it have made of the parameters.

The rest of plait looks at such a job as if it had one loss and one optimizer: `JointModel`, `JointLoss` and `JointOptimizer` are put
in the place of the job's own. In their forward pass all phases follow each other, their losses are added up, their optimizers
are one. What splits a model or measures it looks at this sum, which has every tensor that any phase has; only the loop
(`engine/passes.py`) and the proof's reference take the phases one by one.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from plait.config.errors import PlaitError, Problem


@dataclass(frozen=True)
class Phase:
    """One part of a step: what it trains, for which loss, with which optimizer, how often.

    `trains`: patterns of parameter names, such as "critic.*". A parameter is trained by one phase at most; one that no phase trains is
    frozen. `forward(model, *inputs)` runs what the phase needs, with inputs as the model's own forward would get them (`**inputs`
    of a dict), and may ask for derivatives itself, as a gradient penalty does (`create_graph=True`). By default it is the model's own.
    `loss(outputs, targets)` and `optimizer(parameters)` are as in `Job`. The phase is due in the steps `every`, 2 × `every`, …,
    counted from 1. `clip` is the largest norm of this phase's gradients; by default `Job.clip`.

    Random numbers of a forward pass differ from phase to phase, as if each came with a seed of its own.
    """

    name: str
    trains: tuple[str, ...]
    loss: Callable[[Any, Any], Any]
    optimizer: Callable[[list[Any]], Any]
    forward: Callable[..., Any] | None = None
    every: int = 1
    clip: float | None = None

    def due(self, step: int) -> bool:
        """Whether it is due in a step, counted from 1."""
        return step % self.every == 0

    def has(self, parameter: str) -> bool:
        """Whether it trains the parameter of this name."""
        return any(fnmatchcase(parameter, pattern) for pattern in self.trains)


class JointModel:
    """Makes the user's model, which then runs phases: `turn` says which one; None: all of them."""

    def __init__(self, given: Callable[[], Any], phases: tuple[Phase, ...]):
        self.given, self.phases = given, phases

    def __call__(self) -> Any:
        model = self.given()
        if not hasattr(model, "named_parameters"):
            return model  # which is refused where models are made
        check_trained([name for name, p in model.named_parameters() if p.requires_grad], self.phases)
        for name, parameter in model.named_parameters():
            if not any(phase.has(name) for phase in self.phases):
                parameter.requires_grad_(False)
        kind = type(model)
        if not issubclass(kind, RunsPhases):
            model.__class__ = type(kind.__name__, (RunsPhases, kind), {"__module__": kind.__module__})
        model.phases, model.turn, model.running = self.phases, None, False
        return model


class RunsPhases:
    """What a model with phases is besides what its own class says. Its outputs are a dict of those of each phase that ran."""

    phases: tuple[Phase, ...]
    turn: str | None
    running: bool
    training: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of the phase whose turn it is, or of all; the model's own in an evaluation, and inside of a phase. Phases
        run with gradients, also for who only looks on: they may ask for derivatives."""
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
    """Makes one optimizer of those of the phases, which are given the parameters that each trains."""

    def __init__(self, model: JointModel):
        self.model = model
        self.names: list[str] | None = None
        """Of all trained parameters, in the model's order."""

    def __call__(self, parameters: list[Any]) -> Any:
        """Of all trained parameters, or of others in their place, in the model's order."""
        self.names = self._names() if self.names is None else self.names
        return self.of(dict(zip(self.names, parameters, strict=True)))

    def of(self, named: Mapping[str, Any]) -> Any:
        """Of some of them, by name. A phase none of whose parameters are among them has no optimizer."""
        lots = {phase: [p for name, p in named.items() if phase.has(name)] for phase in self.model.phases}
        return _optimizers()({phase.name: phase.optimizer(lot) for phase, lot in lots.items() if lot})

    def _names(self) -> list[str]:
        import torch

        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return [name for name, p in self.model().named_parameters() if p.requires_grad]


class PhaseOptimizers:
    """What the one optimizer of all phases is besides a `torch.optim.Optimizer`: optimizers by the name of their phase.

    It has the groups of all, and they keep their state in one dict, this one's, since their parameters are different ones. So
    checkpoints, offloading and owners of whole tensors treat it as they treat any optimizer.
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
        """The step of the optimizer whose `turn` it is; of all where that is empty."""
        for name, one in self.each.items():
            if self.turn in ("", name):
                one.step()


@cache
def _optimizers() -> Callable[[Mapping[str, Any]], Any]:
    import torch

    return type("PhaseOptimizers", (PhaseOptimizers, torch.optim.Optimizer), {})


def joint(model: Callable[[], Any], phases: tuple[Phase, ...]) -> dict[str, Any]:
    """The fields of a job that stand for its phases."""
    check(phases)
    made = JointModel(model.given if isinstance(model, JointModel) else model, phases)
    return {"model": made, "loss": JointLoss(phases), "optimizer": JointOptimizer(made)}


def check(phases: tuple[Phase, ...]) -> None:
    """P090 of phases that cannot be meant."""
    problems = [*_wrong(phases)]
    if problems:
        raise PlaitError(problems)


def _wrong(phases: tuple[Phase, ...]) -> Iterator[Problem]:
    for phase in phases:
        yield from _wrong_fields(phase)
    names = [phase.name for phase in phases]
    if len(set(names)) < len(names):
        yield Problem(
            "P090", f"two phases have the same name: {', '.join(names)}", fix=("give each phase a different name",)
        )
    if all(isinstance(phase.every, int) and phase.every > 1 for phase in phases):
        what = "no phase is due in every step"
        why = "every phase has every > 1, so some steps would train nothing"
        yield Problem("P090", what, why=why, fix=("set every=1 for the phase that updates most often",))


def _wrong_fields(phase: Phase) -> Iterator[Problem]:
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
    """P090 when a phase trains nothing, or two train the same. `names`: of the parameters that can be trained."""
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
