"""The state of a training as named parts of tensors and JSON values, and back: what a checkpoint holds.

A rank knows its own parts only (`RankModel.parts`). Optimizer state of a parameter's shape is split as the parameter is;
tensors without dims are numbers; a tensor of another shape belongs to a whole parameter. Of compressed sums every copy has
residuals of its own, which other copies cannot use; the factors of powersgd are the same on all.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from plait.checkpoint import carried_state, fingerprint, optimizer_state, replica_groups
from plait.checkpoint.carried_state import Training
from plait.checkpoint.manifest import DEPTH, EVAL, MANIFEST, OWN, Entry, Manifest, SavedNumber, shallow
from plait.checkpoint.optimizer_state import SIMPLE, SavedTensor
from plait.checkpoint.reading import room_for
from plait.checkpoint.safetensors_file import DTYPES, NAMES, Damaged, HeldChunk
from plait.config.errors import PlaitError, Problem
from plait.config.version import __version__
from plait.data.batch import Position
from plait.model.optimizers import weights_in_eval_mode
from plait.parallel.compression.compressor import RESIDUAL
from plait.tensors.rows import Part, whole


def parts_of(training: Training) -> dict[str, Part]:
    """This rank's part of every tensor to save: `model/<name>`, `optimizer/<parameter>/<key>`, `ema/<parameter>`, `eval/<parameter>`, of
    replica groups what `checkpoint/replica_groups.py` names, and of compressed sums `compress/residual/<copy or group>/<parameter>` and
    `compress/factor/<parameter>`."""
    model, own = model_parts(training), replica_groups.prefix(training)
    parts, base = replica_groups.parts_of(training, model), training.base
    for name in base.tensors if base is not None else ():
        parts.pop(f"model/{name}", None)
    owned = training.rank_model.table.owned(training.rank_model.mesh.at)
    for name, key, value in _state(training):
        if isinstance(value, Tensor) and value.dim():
            part = whole(value) if name in owned else _state_part(name, key, value, model[name])
            parts[f"{own}optimizer/{name}/{key}"] = part
    if training.rank_model.techniques.average is not None:
        parts |= training.rank_model.techniques.average.parts(model)
    parts |= _evaluated(training, model)
    return parts | {name: part for name, _, part in _compressed(training, model)}


def _evaluated(training: Training, model: dict[str, Part]) -> dict[str, Part]:
    """What this rank's optimizer has in eval mode of the parameters that it updates, if it has such a mode. Nothing is sent: a rank
    that has lost another calls it too."""
    rank_model, found = training.rank_model, dict[str, Part]()
    owned = rank_model.table.owned(rank_model.mesh.at)
    for parameter, tensor in weights_in_eval_mode(rank_model.optimizer):
        name = (rank_model.optimizer_names or {})[id(parameter)]
        if name not in rank_model.params:
            continue  # a placeholder of what another rank holds
        found[f"{EVAL}{name}"] = whole(tensor) if name in owned else replace(model[name], tensor=tensor)
    return found


def _compressed(training: Training, model: dict[str, Part]) -> Iterator[tuple[str, str, Part]]:
    """(name in a checkpoint, name in `Compressor.state`, part) of what compressed sums keep on this rank."""
    rank_model = training.rank_model
    place = rank_model.mesh.at["dp" if rank_model.techniques.replica_groups is None else "replica_groups"]
    for key, tensor in (rank_model.techniques.compressor.state() if rank_model.techniques.compressor is not None else {}).items():
        kind, _, parameter = key.partition("/")
        if kind == RESIDUAL:
            own = replace(model[parameter], tensor=tensor)
            yield f"compress/{kind}/{place}/{parameter}", key, own
        else:
            yield f"compress/{key}", key, whole(tensor)


def _state(training: Training) -> Iterator[tuple[str, str, object]]:
    """(parameter, key, value) of all that the optimizer keeps."""
    names = training.rank_model.optimizer_names or {}
    for parameter, state in optimizer_state.states(training.optimizer):
        yield from ((names[id(parameter)], key, value) for key, value in state.items())


def _split(name: str) -> tuple[str, str]:
    """(parameter, key) of `optimizer/<parameter>/<key>`, of a group's own too."""
    parameter, _, key = OWN.sub("", name, 1).removeprefix("optimizer/").rpartition("/")
    return parameter, key


def model_parts(training: Training) -> dict[str, Part]:
    """This rank's part of every parameter, and of every buffer that belongs to the model's state."""
    kept = set(training.model.state_dict(keep_vars=True)) | {name for name, _ in training.model.named_parameters()}
    buffers, reshaped = {name for name, _ in training.model.named_buffers()}, training.carried.reshaped()
    parts = {name: part for name, part in training.rank_model.parts().items() if name in kept or name not in buffers}
    return {name: part for name, part in parts.items() if name not in reshaped}


def _state_part(name: str, key: str, value: Tensor, part: Part) -> Part:
    if value.shape == part.tensor.shape:
        return replace(part, tensor=value)
    if part.whole:
        return whole(value)
    what = f"the optimizer's {key} of {name} cannot be saved under this plan"
    shapes = f"{name} is {list(part.shape)}, here {list(part.tensor.shape)} of it, and {key} is {list(value.shape)}"
    why = f"{shapes}: neither like the part nor of a whole parameter"
    fix = ("a plan that leaves parameters whole", "an optimizer whose state has the parameter's shape")
    raise PlaitError(Problem("K006", what, why=why, fix=fix))


def held_of(parts: dict[str, Part]) -> list[HeldChunk]:
    """What this rank holds, in the words of `assign` of `checkpoint/safetensors_file.py`. K005 for a number format that files cannot hold."""
    wrong = [name for name, part in parts.items() if part.tensor.dtype not in NAMES]
    if wrong:
        dtype = parts[wrong[0]].tensor.dtype
        raise PlaitError(Problem("K005", f"{wrong[0]} is {dtype}, which safetensors files cannot hold"))
    return [
        HeldChunk(name, NAMES[p.tensor.dtype], p.tensor.element_size(), p.shape, p.start, tuple(p.tensor.shape))
        for name, part in parts.items()
        for p in part.pieces()
    ]


def values_of(training: Training) -> dict[str, Any]:
    """What a manifest says of the run besides tensors, as far as this rank knows it. K005 for what is not JSON."""
    try:
        position = json.loads(json.dumps(asdict(training.position)))
    except (TypeError, ValueError) as error:
        why = str(error)
        raise PlaitError(Problem("K005", "the data set's state_dict() is not made of JSON values", why=why)) from None
    try:
        callbacks = shallow(json.loads(json.dumps(training.callbacks.state_dict(), allow_nan=False)), DEPTH)
    except (TypeError, ValueError) as error:
        what = "the state_dict() of a callback is not made of JSON values"
        raise PlaitError(
            Problem("K005", what, why=str(error), fix=("numbers that are finite, texts, lists, dicts",))
        ) from None
    return {
        "position": position,
        "plan": str(training.plan),
        "seed": training.job.seed,
        "batch": training.job.batch,
        "versions": {"plait": __version__, "torch": str(torch.__version__)},
        "aliases": aliases_of(training.model),
        "base": training.base.stored(training.rank_model.params) if training.base is not None else None,
        "scaler": training.rank_model.techniques.loss_scale.state_dict() if training.rank_model.techniques.loss_scale else None,
        "groups": replica_groups.values_of(training),
        "average": training.rank_model.techniques.average.state_dict() if training.rank_model.techniques.average else None,
        "shares": training.rank_model.techniques.balance.state_dict() if training.rank_model.techniques.balance else None,
        "callbacks": callbacks,
        "job": {**training.fingerprint, "factor": fingerprint.factor(training.job, training.position.samples)},
        "optimizer": {
            "type": type(training.optimizer).__name__,
            "groups": _groups(training),
            "scalars": _scalars(training),
        },
    }


def aliases_of(model: torch.nn.Module) -> dict[str, str]:
    """Names of tied tensors -> the name they are stored under."""
    first: dict[int, str] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: kept for name, tensor in named if (kept := first.setdefault(id(tensor), name)) != name}


def _groups(training: Training) -> list[dict[str, Any]]:
    """The optimizer's parameter groups as a manifest has them, with the names of their parameters on this rank."""
    names, groups = training.rank_model.optimizer_names or {}, optimizer_state.groups(training.optimizer)
    return [{**optimizer_state.plain(group), "params": [names[id(p)] for p in group["params"]]} for group in groups]


def _updated(training: Training) -> list[str]:
    """The names of the parameters that this rank's optimizer updates, in its order."""
    return [name for group in _groups(training) for name in group["params"]]


def _scalars(training: Training) -> dict[str, Any]:
    scalars: dict[str, Any] = {}
    for parameter, key, value in _state(training):
        name = f"{replica_groups.prefix(training)}{parameter}/{key}"
        if isinstance(value, Tensor) and value.dim() == 0 and value.dtype in NAMES and not value.is_complex():
            scalars[name] = {"dtype": NAMES[value.dtype], "value": value.item()}
        elif isinstance(value, SIMPLE):
            scalars[name] = value
        elif not isinstance(value, Tensor) or value.dim() == 0:
            what = f"optimizer state {name} is a {type(value).__name__}, which cannot be saved"
            raise PlaitError(Problem("K005", what))
    return scalars


def mismatch(training: Training, manifest: Manifest, everyone: set[str]) -> str | None:
    """Why the checkpoint is not of this training's job, or None. `everyone`: names of the model's tensors on all ranks."""
    saved = {name.removeprefix("model/") for name in manifest.tensors if name.startswith("model/")}
    specs = {name: (manifest.tensors[f"model/{name}"].dtype, manifest.tensors[f"model/{name}"].shape) for name in saved}
    specs |= {
        name: (kind, shape) for name, (_, kind, shape) in (manifest.base.tensors if manifest.base else {}).items()
    }
    reshaped = manifest.carried.values.keys() - saved
    wrong = sorted((specs.keys() ^ everyone) - reshaped)
    for name, part in model_parts(training).items():
        kind, shape = specs.get(name, (None, None))
        if kind is not None and (shape != part.shape or DTYPES[kind] != part.tensor.dtype):
            wrong.append(name)
    if wrong:
        return f"{len(wrong)} tensors differ: {', '.join(wrong[:3])}"
    if manifest.optimizer.type != type(training.optimizer).__name__:
        return f"its optimizer is {manifest.optimizer.type}, the job's is {type(training.optimizer).__name__}"
    mine = _groups(training)
    if len(mine) != len(manifest.optimizer.groups) or not all(map(_same_group, mine, manifest.optimizer.groups)):
        return "the parameter groups of the optimizer differ"
    return None


def _same_group(mine: dict[str, Any], saved: dict[str, Any]) -> bool:
    """Whether this rank's parameters are among the saved group's, and every value is of the kind it has here."""
    kinds = all(k not in mine or _alike(mine[k], v) for k, v in saved.items() if k != "params")
    return kinds and set(mine["params"]) <= set(saved["params"])


def _alike(a: object, b: object) -> bool:
    number = (int, float)
    if isinstance(a, (list, tuple)) and isinstance(b, list):
        return len(a) == len(b) and all(map(_alike, a, b))
    both = isinstance(a, number) and isinstance(b, number) and isinstance(a, bool) == isinstance(b, bool)
    if both and isinstance(b, float) and not math.isfinite(b) and math.isfinite(a):
        return False
    return both or a is None or b is None or type(a) is type(b)


def wanted(training: Training, manifest: Manifest) -> dict[str, Part]:
    """The parts this rank must read: its own of the model, and new tensors for its optimizer's state."""
    model = model_parts(training)
    parts, own = replica_groups.wanted(training, manifest, model), _own(training, manifest)
    for name in (*(manifest.base.tensors if manifest.base is not None else ()), *manifest.carried.values):
        if f"model/{name}" not in manifest.tensors:
            parts.pop(f"model/{name}", None)
    elsewhere = training.rank_model.table.owned_by_others(training.rank_model.mesh.at)
    owned = training.rank_model.table.owned(training.rank_model.mesh.at)
    mine = {name for name in _updated(training) if name in model and name not in elsewhere}
    for name, entry in manifest.tensors.items():
        parameter, _ = _split(name)
        if name.startswith(f"{own}optimizer/") and parameter in mine:
            if parameter in owned:
                parts[name] = whole(room_for(name, entry, entry.shape, DTYPES[entry.dtype], training.rank_model.device))
            else:
                parts[name] = _new_state(name, entry, model[parameter])
    if training.rank_model.techniques.average is not None and manifest.average is not None:
        parts |= _checked(training.rank_model.techniques.average.parts(model, reading=True), manifest)
    if manifest.job.get("compress") == training.fingerprint["compress"]:  # else it is dropped
        parts |= dict(_new_compressed(training, manifest, model))
    return parts | carried_state.wanted(manifest, training.plan, training.place.rank)


def _checked(parts: dict[str, Part], manifest: Manifest) -> dict[str, Part]:
    """Parts of which the checkpoint has all."""
    if lost := sorted(parts.keys() - manifest.tensors.keys()):
        raise Damaged(MANIFEST, f"{lost[0]} is missing in it")
    return parts


def _new_compressed(training: Training, manifest: Manifest, model: dict[str, Part]) -> Iterator[tuple[str, Part]]:
    for name, _, part in _compressed(training, model):
        entry = manifest.tensors.get(name)
        if entry is None or entry.shape != part.shape:
            raise Damaged(MANIFEST, f"it has {name} not at all, or in another shape")
        kind, shape = DTYPES[entry.dtype], tuple(part.tensor.shape)
        yield name, replace(part, tensor=room_for(name, entry, shape, kind, training.rank_model.device))


def _new_state(name: str, entry: Entry, part: Part) -> Part:
    device, dtype = part.tensor.device, DTYPES[entry.dtype]
    if entry.shape == part.shape:
        return replace(part, tensor=room_for(name, entry, tuple(part.tensor.shape), dtype, device))
    if part.whole:
        return whole(room_for(name, entry, entry.shape, dtype, device))
    parameter, key = _split(name)
    what = f"the optimizer's {key} of {parameter} cannot be split as this plan splits {parameter}"
    why = f"it is {list(entry.shape)}, the parameter is {list(part.shape)}"
    raise PlaitError(Problem("K006", what, why=why, fix=("resume under a plan that leaves parameters whole",)))


def give(training: Training, manifest: Manifest, parts: dict[str, Part], hyper: list[dict[str, Any]]) -> list[str]:
    """Take over what was read: optimizer (with these hyperparameters of its groups), loss scale, position.

    The model's parts were filled in place. Returns what to say of it, a line each.
    """
    index = {name: i for i, name in enumerate(_updated(training))}
    state: dict[int, dict[str, Any]] = {}
    own = _own(training, manifest)
    for name, part in parts.items():
        if name.startswith(f"{own}optimizer/"):
            parameter, key = _split(name)
            state.setdefault(index[parameter], {})[key] = part.tensor
    for name, value in manifest.optimizer.scalars.items():
        parameter, _, key = name.removeprefix(own).rpartition("/")
        here = parameter in training.rank_model.params and parameter not in training.rank_model.table.owned_by_others(training.rank_model.mesh.at)
        if parameter in index and here:  # another rank's would stay as it is here
            state.setdefault(index[parameter], {})[key] = _number(value)
    optimizer_state.restore(training.optimizer, state, hyper)
    if training.rank_model.techniques.loss_scale and manifest.scaler:
        training.rank_model.techniques.loss_scale.load_state_dict(structs.asdict(manifest.scaler))
    if training.rank_model.techniques.compressor is not None:
        kept = {key: name for name, key, _ in _compressed(training, model_parts(training)) if name in parts}
        training.rank_model.techniques.compressor.load_state({key: parts[name].tensor for key, name in kept.items()})
    if training.rank_model.techniques.average is not None and manifest.average is not None:
        training.rank_model.techniques.average.load_state_dict(structs.asdict(manifest.average))
    if training.rank_model.techniques.balance and manifest.shares:
        training.rank_model.techniques.balance.load_state_dict(structs.asdict(manifest.shares))
    training.position = Position(**structs.asdict(manifest.position))
    training.rank_model.refresh()
    lines = carried_state.give(training.carried, manifest, training.plan, training.place.rank, parts)
    replica_groups.give(training, manifest)
    return lines


def _own(training: Training, manifest: Manifest) -> str:
    """How the names begin of the optimizer's state that this rank goes on with."""
    return replica_groups.prefix(training) if replica_groups.same(training, manifest) else ""


def implausible(training: Training, manifest: Manifest, hyper: list[dict[str, Any]]) -> str | None:
    """Why the optimizer could not go on with the numbers of this checkpoint, or None."""
    shapes = {name: entry.shape for name, entry in manifest.tensors.items()}
    kept: dict[str, dict[str, Any]] = {}
    for name, shape in shapes.items():
        if name.startswith("optimizer/"):
            parameter, key = _split(name)
            kept.setdefault(parameter, {})[key] = SavedTensor(shape == shapes.get(f"model/{parameter}"))
    for name, value in manifest.optimizer.scalars.items():
        parameter, _, key = name.rpartition("/")
        kept.setdefault(parameter, {})[key] = _number(value)
    ordered = _updated(training)
    return optimizer_state.plausible(training, lambda i: kept.get(ordered[i]), hyper)


def _number(value: object) -> Any:
    return torch.tensor(value.value, dtype=DTYPES[value.dtype]) if isinstance(value, SavedNumber) else value
