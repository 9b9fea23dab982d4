"""The optimizer's state in checkpoints, and a check that a restored optimizer continues exactly.

A checkpoint has tensors and scalars of each parameter by name, and the hyperparameters of each group. An optimizer that wraps others (Muon
for matrices, AdamW for the rest) is saved and loaded through those. Plain values in attributes are saved like a model's
(`carried_state.py`). State anywhere else would be lost. `check_resumable` finds such state at the start of a run. It makes steps on small
stand-ins of the parameters, with and without a checkpoint between them.
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
from plait.model.mutations import RestoredWrites
from plait.model.optimizers import KERNEL_OPTIONS, get_eval_weights, has_modes, iter_optimizers
from plait.model.parameter_groups import build_optimizer
from plait.tensors.parameters import make_parameter_like

if TYPE_CHECKING:
    from plait.checkpoint.carried_state import Training

State = dict[int, dict[str, Any]]
"""Index of a parameter in the groups -> its state by key."""
PLAIN_TYPES = (int, float, str, NoneType)
"""Types that are saved unchanged, in addition to tensors."""
MAX_DIM, MAX_TRIED = 4, 2000
"""Largest size of a stand-in's dim, and number of parameters that get a gradient."""


def find_leaf_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that hold the state: this one, or those that it wraps. K011 if there are none."""
    inner = [o for o in iter_optimizers(vars(optimizer)) if o is not optimizer]
    for each in inner:
        if each.state is optimizer.state and each.param_groups is optimizer.param_groups:
            return find_leaf_optimizers(each)  # loads them; a wrapper may have them as properties
    if _has_torch_layout(optimizer):
        return [optimizer]
    inner = [o for o in inner if _has_torch_layout(o)]
    mine = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if inner and sorted(mine) == sorted(id(p) for o in inner for group in o.param_groups for p in group["params"]):
        return inner
    why = "its state_dict() lacks the layout of torch's optimizers (state, param_groups), and it wraps no optimizer with it"
    raise PlaitError(_unloadable_problem(optimizer, why))


def _unloadable_problem(optimizer: Optimizer, why: str) -> Problem:
    what = f"the state of the optimizer {type(optimizer).__name__} cannot be restored"
    return Problem("K011", what, why=why, fix=_FIX)


_FIX = (
    "keep everything in optimizer.state[parameter], as tensors and numbers",
    "wrap whole optimizers as attributes, each with parameters of its own",
)


def _has_torch_layout(optimizer: Optimizer) -> bool:
    content = optimizer.state_dict()
    if not isinstance(content, dict) or not isinstance(content.get("param_groups"), list) or "state" not in content:
        return False
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    return [len(group.get("params", ())) for group in content["param_groups"]] == sizes


def list_parameter_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups in checkpoint order."""
    return [group for leaf in find_leaf_optimizers(optimizer) for group in leaf.param_groups]


def iter_states(optimizer: Optimizer) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Yield (parameter, its state). K011 for state of anything but a parameter."""
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for leaf in find_leaf_optimizers(optimizer):
        for parameter, state in leaf.state.items():
            if id(parameter) not in known or not isinstance(state, dict):
                raise PlaitError(_unloadable_problem(optimizer, f"state[{str(parameter)[:40]!r}] belongs to no parameter"))
            yield parameter, state


def list_hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the JSON-compatible hyperparameters of each group."""
    try:
        return list(map(plain_hyperparameters, list_parameter_groups(optimizer)))
    except PlaitError:  # it cannot be saved; the save raises the error
        return list(map(plain_hyperparameters, optimizer.param_groups))


def plain_hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON-compatible hyperparameters of a group; a tensor without dims (`lr` may be one) becomes a number."""
    own = {k: v for k, v in group.items() if k not in ("params", "param_names", *KERNEL_OPTIONS)}
    values = {k: v.item() if isinstance(v, Tensor) and v.dim() == 0 else v for k, v in own.items()}
    return {k: v for k, v in values.items() if _is_json(v)}


def _is_json(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_json, value))
    return isinstance(value, PLAIN_TYPES)


def restore_optimizer(optimizer: Optimizer, state: State, hyper: list[dict[str, Any]]) -> None:
    """Load the state and hyperparameters into the optimizer; its other hyperparameters are unchanged."""
    first = group_at = 0
    for leaf in find_leaf_optimizers(optimizer):
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
        _load_in_place(leaf, {"state": of_leaf, "param_groups": content["param_groups"]})
        _undo_casts(leaf, of_leaf)
        first += count


def _load_in_place(optimizer: Optimizer, content: dict[str, Any]) -> None:
    """Load `content`, keeping the state and group objects, since a wrapper may reference them."""
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


def _undo_casts(optimizer: Optimizer, state: State) -> None:
    """Restore the saved dtypes and strings, since torch casts loaded state to the parameter's dtype and turns strings into generators."""
    for i, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        loaded = optimizer.state.get(parameter, {})
        for key, value in state.get(i, {}).items():
            cast = loaded.get(key)
            if isinstance(value, Tensor) and isinstance(cast, Tensor) and cast.dtype != value.dtype:
                loaded[key] = value.to(cast.device)
            elif key in loaded and not isinstance(value, Tensor):
                loaded[key] = value


class OptimizerTrial:
    """The job's optimizer on small stand-ins of its parameters. Every trial has the same values."""

    def __init__(self, training: "Training"):
        self.device, self.generator = training.rank_model.device, torch.Generator().manual_seed(1)
        named: dict[str, nn.Parameter] = {}
        for name, p in training.rank_model.module.named_parameters():
            if p.requires_grad:
                small = torch.randn([min(d, MAX_DIM) for d in p.shape], generator=self.generator)
                named[name] = make_parameter_like(p, small.to(self.device, p.dtype))
        self.parameters = list(named.values())
        self.optimizer = build_optimizer(training.job, named)
        self.steps_made, self.scheduled = 0, training.job.schedule is not None
        real = [len(group["params"]) for group in training.optimizer.param_groups]
        if real != [len(group["params"]) for group in self.optimizer.param_groups]:
            raise ValueError("small parameters are grouped otherwise")
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.carried = CarriedState(nn.Module(), None, self.optimizer, self.device, watch=False)

    def make_steps(self, number: int) -> None:
        """Make steps, each on gradients that depend on the number of earlier steps."""
        for _ in range(number):
            self.steps_made += 1
            for group in self.optimizer.param_groups if self.scheduled else ():
                group["lr"] = group["initial_lr"] / self.steps_made
            for p in self.parameters[:MAX_TRIED]:
                p.grad = torch.randn(p.shape, generator=self.generator).to(self.device, p.dtype)
            torch.manual_seed(2)
            self.optimizer.step()

    def list_parameters(self) -> list[Tensor]:
        """Return the parameters in the order of the groups."""
        return [p for group in list_parameter_groups(self.optimizer) for p in group["params"]]

    def take_state(self) -> tuple[State, list[dict[str, Any]]]:
        """Return the state and hyperparameters for a checkpoint. K005, K011 if they cannot be saved."""
        numbers = {id(p): i for i, p in enumerate(self.list_parameters())}
        state: State = {}
        for parameter, kept in iter_states(self.optimizer):
            state[numbers[id(parameter)]] = {key: _copy_state_value(key, value) for key, value in kept.items()}
        return state, [plain_hyperparameters(group) for group in list_parameter_groups(self.optimizer)]

    def copy_from(self, other: "OptimizerTrial") -> None:
        """Restore this trial from a checkpoint of `other`."""
        with torch.no_grad():
            for mine, theirs in zip(self.parameters, other.parameters):
                mine.copy_(theirs)
        self.generator.set_state(other.generator.get_state())
        self.steps_made = other.steps_made
        restore_optimizer(self.optimizer, *other.take_state())
        self.carried.copy_from(other.carried)

    def has_same_weights(self, other: "OptimizerTrial") -> bool:
        """Return whether both trials have the same weights, in train mode and in eval mode."""
        mine, theirs = ([t for _, t in get_eval_weights(trial.optimizer)] for trial in (self, other))
        pairs = zip((*self.parameters, *mine), (*other.parameters, *theirs))
        return all(torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True) for a, b in pairs)


def _copy_state_value(key: str, value: object) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, PLAIN_TYPES):
        return value
    what = f"the optimizer keeps {key}, a {type(value).__name__}, which cannot be saved"
    raise PlaitError(Problem("K005", what, why="checkpoints hold tensors, numbers and strings only", fix=_FIX))


def check_resumable(training: "Training") -> None:
    """K005, K011 if a resume or an evaluation changes the optimizer's later steps."""
    with torch.random.fork_rng(), warnings.catch_warnings(), RestoredWrites():
        warnings.simplefilter("ignore")
        try:
            first, again = OptimizerTrial(training), OptimizerTrial(training)
            with one_device.name_job_part("the job's optimizer"):
                first.make_steps(2), again.make_steps(2)
        except PlaitError as error:
            if error.problems[0].code != "J044":  # inconclusive
                return
            raise
        except Exception:  # it cannot run on small stand-ins: inconclusive
            return
        if not first.has_same_weights(again):
            return  # it draws random numbers of its own
        get_eval_weights(first.optimizer)
        wrong = _compare_resumed(first, training) or _compare_after_eval(first, again)
    if wrong is not None:
        raise PlaitError(wrong)


def _compare_resumed(first: OptimizerTrial, training: "Training") -> Problem | None:
    """Return a problem if a trial restored from `first` makes other steps than `first`."""
    resumed = OptimizerTrial(training)
    before = _list_attributes(resumed.optimizer)
    try:
        resumed.copy_from(first)
    except PlaitError as error:
        return error.problems[0]
    except Exception as error:
        why = f"loading its saved state raised {type(error).__name__}: {str(error)[:200]}"
        return _unloadable_problem(first.optimizer, why)
    first.make_steps(2)
    try:
        resumed.make_steps(2)
    except Exception as error:
        return _unloadable_problem(first.optimizer, f"the next step raised {type(error).__name__}: {str(error)[:200]}")
    if first.has_same_weights(resumed):
        return None
    after = _list_attributes(first.optimizer)
    moved = [name for name in after if after[name] != before.get(name)]
    why = "after a save and load at step two, its third step gives other weights"
    why += f": it keeps {', '.join(moved[:3])} outside its state" if moved else ""
    return _unloadable_problem(first.optimizer, why)


def _compare_after_eval(first: OptimizerTrial, again: OptimizerTrial) -> Problem | None:
    """Return a problem if `first`, which was in eval mode after two of its four steps, differs from `again`, which was not."""
    if not has_modes(first.optimizer):
        return None
    again.make_steps(2)
    if first.has_same_weights(again):
        return None
    name = type(first.optimizer).__name__
    why = "after eval() and train(), with the same weights, its next steps give other weights"
    fix = ("change only the parameters in eval(), and restore them in train()",)
    return Problem("K011", f"an evaluation changes the state of the optimizer {name}", why=why, fix=fix)


def _list_attributes(optimizer: Optimizer) -> dict[str, str]:
    """Return the optimizer's attributes other than state and groups."""
    known = {"state", "param_groups", "defaults"}
    kept = {}
    for name, value in vars(optimizer).items():
        counts = isinstance(value, (bool, int, float, Tensor)) or type(value) in (list, dict, tuple)
        if name not in known and not name.startswith("_optimizer_") and counts:
            kept[name] = repr(value)[:10_000]
    return kept


def find_implausible_state(
    training: "Training", state: Callable[[int], dict[str, Any] | None], hyper: list[dict[str, Any]]
) -> str | None:
    """Return a reason if the optimizer cannot make steps from these values, else None.

    `state`: index of a parameter -> its saved state by key, either a `SavedTensor` or a number.

    """
    with torch.random.fork_rng(), warnings.catch_warnings(), RestoredWrites():
        warnings.simplefilter("ignore")
        try:
            trial = OptimizerTrial(training)
            trial.make_steps(1)
            fresh_state, ordered = trial.take_state()[0], trial.list_parameters()
        except Exception:  # inconclusive
            return None
        combined: State = {}
        for i, fresh in fresh_state.items():
            saved = state(i)
            if saved is None:
                continue
            shape = tuple(ordered[i].shape)
            for key, value in saved.items():
                wrong = _compare_kinds(fresh.get(key), value, shape)
                if wrong:
                    return f"{key} {wrong}"
            combined[i] = {k: fresh.get(k) if isinstance(v, SavedTensor) else v for k, v in saved.items()}
        try:
            sound = _is_finite(trial)
            restore_optimizer(trial.optimizer, combined, hyper)
            trial.make_steps(2)
        except Exception as error:
            return f"the optimizer's next step raises {type(error).__name__}: {str(error)[:150]}"
        return "the optimizer's next step makes weights that are not finite" if sound and not _is_finite(trial) else None


def _is_finite(trial: OptimizerTrial) -> bool:
    return all(bool(p.isfinite().all()) for p in trial.parameters)


@dataclass(frozen=True)
class SavedTensor:
    """A saved tensor with dims, as an input of `find_implausible_state`."""

    has_same_shape: bool
    """It has the parameter's shape."""


def _compare_kinds(fresh: object, saved: object, shape: tuple[int, ...]) -> str | None:
    """Return a message if a saved value differs in kind from the optimizer's own, else None."""
    if fresh is None:
        return None
    many = fresh if isinstance(fresh, Tensor) and fresh.dim() > 0 else None
    if isinstance(saved, SavedTensor):
        if many is None:
            return "is a tensor"
        return "differs from the parameter's shape" if tuple(many.shape) == shape and not saved.has_same_shape else None
    if many is not None:
        return "is a number, and should be a tensor"
    if isinstance(fresh, Tensor) != isinstance(saved, Tensor) or isinstance(fresh, str) != isinstance(saved, str):
        return "has another type than the optimizer's own"
    return None


def watch_wrapper_tensors(optimizer: Optimizer) -> None:
    """Raise K005 after the first step if the optimizer keeps wrapper tensors, such as 8-bit blocks with scales."""

    looked = False

    def check_state(*_: object) -> None:
        nonlocal looked
        for state in () if looked else optimizer.state.values():
            for key, value in state.items() if isinstance(state, dict) else ():
                if hasattr(value, "__tensor_flatten__"):  # a wrapper of several tensors
                    raise PlaitError(_wrapper_tensor_problem(optimizer, str(key), type(value).__name__))
        looked = looked or bool(optimizer.state)

    optimizer.register_step_post_hook(check_state)


def _wrapper_tensor_problem(optimizer: Optimizer, key: str, kind: str) -> Problem:
    what = f"{type(optimizer).__name__} keeps {key} as {kind}, which checkpoints cannot hold"
    why = "its blocks and scales depend on the full tensor; a shard under another plan has different ones"
    fix = ("torch.optim.AdamW", "torch.optim.Adafactor    keeps a row and a column for each matrix", "fsdp or offload=optimizer")
    return Problem("K005", what, why=why, fix=fix)
