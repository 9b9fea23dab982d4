"""An optimizer's state as checkpoints hold it, and whether one that takes it over goes on as the first would have.

A checkpoint has, of each parameter, tensors and numbers by name, and the hyperparameters of each group. An optimizer that
wraps others (Muon for matrices, AdamW for the rest) is saved and loaded through those. Plain values in attributes are saved like
a model's (`carried_state.py`). What is kept anywhere else would be lost: `check` finds out at the start, on small stand-ins of
the parameters, by making steps with and without a checkpoint in between.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.checkpoint.carried_state import CarriedState
from plait.config.errors import PlaitError, Problem
from plait.launch import one_device
from plait.model.mutations import OutsideWrites
from plait.model.optimizers import OPEN, has_modes, weights_in_eval_mode, wrapped
from plait.model.parameter_groups import optimizer_of
from plait.tensors.parameters import like

if TYPE_CHECKING:
    from plait.checkpoint.carried_state import Training

State = dict[int, dict[str, Any]]
"""Of parameters, by their number in the groups: what the optimizer keeps, by key."""
SIMPLE = (int, float, str, NoneType)
"""What is kept as it is, beside tensors."""
SMALL, TRIED = 4, 2000
"""The largest size of a stand-in's dim, and how many parameters get a gradient."""


def leaves(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that hold the state: this one, or those that it wraps. K011 when there are none."""
    inner = [o for o in wrapped(vars(optimizer)) if o is not optimizer]
    for each in inner:
        if each.state is optimizer.state and each.param_groups is optimizer.param_groups:
            return leaves(each)  # which loads them; a wrapper may have them as properties
    if _plain_layout(optimizer):
        return [optimizer]
    inner = [o for o in inner if _plain_layout(o)]
    mine = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if inner and sorted(mine) == sorted(id(p) for o in inner for group in o.param_groups for p in group["params"]):
        return inner
    why = "its state_dict() has not the layout of torch's optimizers (state, param_groups), and it wraps none that have"
    raise PlaitError(_lost(optimizer, why))


def _lost(optimizer: Optimizer, why: str) -> Problem:
    what = f"the state of the optimizer {type(optimizer).__name__} could not be loaded again"
    return Problem("K011", what, why=why, fix=_FIX)


_FIX = (
    "keep everything in optimizer.state[parameter], as tensors and numbers",
    "wrap whole optimizers as attributes, each with parameters of its own",
)


def _plain_layout(optimizer: Optimizer) -> bool:
    content = optimizer.state_dict()
    if not isinstance(content, dict) or not isinstance(content.get("param_groups"), list) or "state" not in content:
        return False
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    return [len(group.get("params", ())) for group in content["param_groups"]] == sizes


def groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The parameter groups, in the order in which checkpoints have them."""
    return [group for leaf in leaves(optimizer) for group in leaf.param_groups]


def states(optimizer: Optimizer) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """(parameter, what is kept of it). K011 for what is kept of something else."""
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for leaf in leaves(optimizer):
        for parameter, state in leaf.state.items():
            if id(parameter) not in known or not isinstance(state, dict):
                raise PlaitError(_lost(optimizer, f"state[{str(parameter)[:40]!r}] belongs to no parameter"))
            yield parameter, state


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Those of each group, as far as they are JSON."""
    try:
        return list(map(plain, groups(optimizer)))
    except PlaitError:  # it cannot be saved, which is said when it is to be
        return list(map(plain, optimizer.param_groups))


def plain(group: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group that are JSON; a tensor without dims is its number (`lr` may be one)."""
    own = {k: v for k, v in group.items() if k not in ("params", "param_names", *OPEN)}
    values = {k: v.item() if isinstance(v, Tensor) and v.dim() == 0 else v for k, v in own.items()}
    return {k: v for k, v in values.items() if _json(v)}


def _json(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_json, value))
    return isinstance(value, SIMPLE)


def restore(optimizer: Optimizer, state: State, hyper: list[dict[str, Any]]) -> None:
    """Give the optimizer this state and these hyperparameters; others of its hyperparameters stay as they are."""
    first = group_at = 0
    for leaf in leaves(optimizer):
        content = leaf.state_dict()
        count = sum(len(group["params"]) for group in leaf.param_groups)
        for mine in content["param_groups"]:
            for key, value in hyper[group_at].items():
                before = mine.get(key)
                if isinstance(before, Tensor):
                    value = torch.tensor(value, dtype=before.dtype, device=before.device)
                mine[key] = tuple(value) if isinstance(before, tuple) else value
            group_at += 1
        of_leaf = {i - first: kept for i, kept in state.items() if first <= i < first + count}
        _loaded(leaf, {"state": of_leaf, "param_groups": content["param_groups"]})
        _exactly(leaf, of_leaf)
        first += count


def _loaded(optimizer: Optimizer, content: dict[str, Any]) -> None:
    """Load; its groups and its state stay the objects that they were: whoever wraps it may hold them too."""
    old, state = optimizer.param_groups, optimizer.state
    optimizer.load_state_dict(content)
    for mine, new in zip(old, optimizer.param_groups):
        if mine is not new:
            mine.clear()
            mine.update(new)
    if state is not optimizer.state:
        state.clear()
        state.update(optimizer.state)
    optimizer.param_groups, optimizer.state = old, state


def _exactly(optimizer: Optimizer, state: State) -> None:
    """torch casts loaded state to the parameter's number format and makes a generator of a text: put back what was saved."""
    for i, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        loaded = optimizer.state.get(parameter, {})
        for key, value in state.get(i, {}).items():
            cast = loaded.get(key)
            if isinstance(value, Tensor) and isinstance(cast, Tensor) and cast.dtype != value.dtype:
                loaded[key] = value.to(cast.device)
            elif key in loaded and not isinstance(value, Tensor):
                loaded[key] = value


class Trial:
    """The job's optimizer on small stand-ins of its parameters, alike every time it is made."""

    def __init__(self, training: "Training"):
        self.device, self.draw = training.rank_model.device, torch.Generator().manual_seed(1)
        named: dict[str, nn.Parameter] = {}
        for name, p in training.rank_model.module.named_parameters():
            if p.requires_grad:
                small = torch.randn([min(d, SMALL) for d in p.shape], generator=self.draw)
                named[name] = like(p, small.to(self.device, p.dtype))
        self.parameters = list(named.values())
        self.optimizer = optimizer_of(training.job, named)
        self.steps_made, self.scheduled = 0, training.job.schedule is not None
        real = [len(group["params"]) for group in training.optimizer.param_groups]
        if real != [len(group["params"]) for group in self.optimizer.param_groups]:
            raise ValueError("small parameters are grouped otherwise")
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.carried = CarriedState(nn.Module(), None, self.optimizer, self.device, watch=False)

    def steps(self, number: int) -> None:
        """Make steps, each on gradients that depend on how many were made before."""
        for _ in range(number):
            self.steps_made += 1
            for group in self.optimizer.param_groups if self.scheduled else ():
                group["lr"] = group["initial_lr"] / self.steps_made
            for p in self.parameters[:TRIED]:
                p.grad = torch.randn(p.shape, generator=self.draw).to(self.device, p.dtype)
            torch.manual_seed(2)
            self.optimizer.step()

    def ordered(self) -> list[Tensor]:
        """The parameters in the order of the groups."""
        return [p for group in groups(self.optimizer) for p in group["params"]]

    def taken(self) -> tuple[State, list[dict[str, Any]]]:
        """What a checkpoint would hold of it. K005, K011 for what none can."""
        numbers = {id(p): i for i, p in enumerate(self.ordered())}
        state: State = {}
        for parameter, kept in states(self.optimizer):
            state[numbers[id(parameter)]] = {key: _kept(key, value) for key, value in kept.items()}
        return state, [plain(group) for group in groups(self.optimizer)]

    def take_over(self, other: "Trial") -> None:
        """Go on from a checkpoint of the other."""
        with torch.no_grad():
            for mine, theirs in zip(self.parameters, other.parameters):
                mine.copy_(theirs)
        self.draw.set_state(other.draw.get_state())
        self.steps_made = other.steps_made
        restore(self.optimizer, *other.taken())
        self.carried.take_over(other.carried)

    def same(self, other: "Trial") -> bool:
        """Whether both have the same weights, in train mode and in eval mode."""
        mine, theirs = ([t for _, t in weights_in_eval_mode(trial.optimizer)] for trial in (self, other))
        pairs = zip((*self.parameters, *mine), (*other.parameters, *theirs))
        return all(torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True) for a, b in pairs)


def _kept(key: str, value: object) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, SIMPLE):
        return value
    what = f"the optimizer keeps {key}, a {type(value).__name__}, which cannot be saved"
    raise PlaitError(Problem("K005", what, why="state in checkpoints is tensors, numbers and texts", fix=_FIX))


def check(training: "Training") -> None:
    """K005, K011 when an optimizer that is resumed from a checkpoint, or was in eval mode, would not continue as one that was not."""
    with torch.random.fork_rng(), warnings.catch_warnings(), OutsideWrites():
        warnings.simplefilter("ignore")
        try:
            first, again = Trial(training), Trial(training)
            with one_device.naming("the job's optimizer"):
                first.steps(2), again.steps(2)
        except PlaitError as error:
            if error.problems[0].code != "J044":  # nothing is known
                return
            raise
        except Exception:  # it cannot be tried on small stand-ins: nothing is known
            return
        if not first.same(again):
            return  # it draws numbers of its own
        weights_in_eval_mode(first.optimizer)
        wrong = _unlike_resumed(first, training) or _unlike_after_eval(first, again)
    if wrong is not None:
        raise PlaitError(wrong)


def _unlike_resumed(first: Trial, training: "Training") -> Problem | None:
    """What goes on otherwise when a second trial takes over from the first."""
    resumed = Trial(training)
    before = _attributes(resumed.optimizer)
    try:
        resumed.take_over(first)
    except PlaitError as error:
        return error.problems[0]
    except Exception as error:
        why = f"loading what it had saved raised {type(error).__name__}: {str(error)[:200]}"
        return _lost(first.optimizer, why)
    first.steps(2)
    try:
        resumed.steps(2)
    except Exception as error:
        return _lost(first.optimizer, f"the next step raised {type(error).__name__}: {str(error)[:200]}")
    if first.same(resumed):
        return None
    after = _attributes(first.optimizer)
    moved = [name for name in after if after[name] != before.get(name)]
    why = "after two steps, saved and loaded, its third step moves the weights differently"
    why += f": it keeps {', '.join(moved[:3])} outside its state" if moved else ""
    return _lost(first.optimizer, why)


def _unlike_after_eval(first: Trial, again: Trial) -> Problem | None:
    """What the first trial, which was in eval mode after two of its four steps, does otherwise than one that was not."""
    if not has_modes(first.optimizer):
        return None
    again.steps(2)
    if first.same(again):
        return None
    name = type(first.optimizer).__name__
    why = "after eval() and train(), and with the weights from before them, its next steps move the weights differently"
    fix = ("change nothing but the parameters in eval(), and change it back in train()",)
    return Problem("K011", f"an evaluation changes the state of the optimizer {name}", why=why, fix=fix)


def _attributes(optimizer: Optimizer) -> dict[str, str]:
    """What an optimizer keeps beside state and groups."""
    known = {"state", "param_groups", "defaults"}
    kept = {}
    for name, value in vars(optimizer).items():
        counts = isinstance(value, (bool, int, float, Tensor)) or type(value) in (list, dict, tuple)
        if name not in known and not name.startswith("_optimizer_") and counts:
            kept[name] = repr(value)[:10_000]
    return kept


def plausible(
    training: "Training", state: Callable[[int], dict[str, Any] | None], hyper: list[dict[str, Any]]
) -> str | None:
    """Why the optimizer could not go on with these numbers, or None.

    `state` tells what is saved of a parameter: for a tensor with dims, whether it has the parameter's shape; or a number.
    """
    with torch.random.fork_rng(), warnings.catch_warnings(), OutsideWrites():
        warnings.simplefilter("ignore")
        try:
            trial = Trial(training)
            trial.steps(1)
            fresh_state, ordered = trial.taken()[0], trial.ordered()
        except Exception:  # nothing is known
            return None
        combined: State = {}
        for i, fresh in fresh_state.items():
            saved = state(i)
            if saved is None:
                continue
            shape = tuple(ordered[i].shape)
            for key, value in saved.items():
                wrong = _unlike(fresh.get(key), value, shape)
                if wrong:
                    return f"{key} {wrong}"
            combined[i] = {k: fresh.get(k) if isinstance(v, SavedTensor) else v for k, v in saved.items()}
        try:
            sound = _finite(trial)
            restore(trial.optimizer, combined, hyper)
            trial.steps(2)
        except Exception as error:
            return f"the optimizer's next step raises {type(error).__name__}: {str(error)[:150]}"
        return "the optimizer's next step makes weights that are not finite" if sound and not _finite(trial) else None


def _finite(trial: Trial) -> bool:
    return all(bool(p.isfinite().all()) for p in trial.parameters)


@dataclass(frozen=True)
class SavedTensor:
    """What `plausible` is told of a saved tensor with dims."""

    alike: bool
    """It has the parameter's shape."""


def _unlike(fresh: object, saved: object, shape: tuple[int, ...]) -> str | None:
    """How a saved value differs in kind from what the optimizer makes itself."""
    if fresh is None:
        return None
    many = fresh if isinstance(fresh, Tensor) and fresh.dim() > 0 else None
    if isinstance(saved, SavedTensor):
        if many is None:
            return "is a tensor"
        return "has not the parameter's shape" if tuple(many.shape) == shape and not saved.alike else None
    if many is not None:
        return "is a number, and should be a tensor"
    if isinstance(fresh, Tensor) != isinstance(saved, Tensor) or isinstance(fresh, str) != isinstance(saved, str):
        return "is of another kind than the optimizer makes"
    return None


def watched(optimizer: Optimizer) -> None:
    """K005 after the first step where the optimizer keeps tensors of another make, such as blocks of 8 bits and their scales."""

    looked = False

    def look(*_: object) -> None:
        nonlocal looked
        for state in () if looked else optimizer.state.values():
            for key, value in state.items() if isinstance(state, dict) else ():
                if hasattr(value, "__tensor_flatten__"):  # of a class that stands for several tensors
                    raise PlaitError(_unlike_tensors(optimizer, str(key), type(value).__name__))
        looked = looked or bool(optimizer.state)

    optimizer.register_step_post_hook(look)


def _unlike_tensors(optimizer: Optimizer, key: str, kind: str) -> Problem:
    what = f"{type(optimizer).__name__} keeps {key} as {kind}, which checkpoints do not hold"
    why = "its blocks and their scales are those of a whole tensor: the part that a rank has under another plan has other ones"
    fix = ("torch.optim.AdamW", "torch.optim.Adafactor    keeps a row and a column for each matrix", "fsdp or offload=optimizer")
    return Problem("K005", what, why=why, fix=fix)
