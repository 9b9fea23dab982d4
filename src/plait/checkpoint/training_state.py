"""The state of a training run as named parts of tensors and JSON values, and its restoration from a checkpoint.

A rank handles its own parts only (`RankModel.parts`). Optimizer state of a parameter's shape is sharded as the parameter is. Tensors without
dims are numbers. A tensor of another shape requires an unsharded parameter. With gradient compression every replica has its own residuals,
which other replicas cannot use; the factors of powersgd are the same on all.
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
from plait.checkpoint.checkpoint_reader import allocate_tensor
from plait.checkpoint.manifest import (
    EVAL_PREFIX,
    GROUP_PREFIX,
    MANIFEST_NAME,
    MAX_DEPTH,
    Manifest,
    SavedNumber,
    TensorEntry,
    check_depth,
)
from plait.checkpoint.optimizer_state import PLAIN_TYPES, SavedTensor
from plait.checkpoint.safetensors_file import DTYPE_NAMES, DTYPES, DamagedFileError, LocalChunk
from plait.config.errors import PlaitError, Problem
from plait.config.version import __version__
from plait.data.batch import Position
from plait.model.optimizers import get_eval_weights
from plait.parallel.compression.compressor import RESIDUAL
from plait.tensors.rows import Part, make_full_part


def collect_parts(training: Training) -> dict[str, Part]:
    """Return this rank's part of every tensor to save.

    Names are `model/<name>`, `optimizer/<parameter>/<key>`, `ema/<parameter>`, `eval/<parameter>`, those of `checkpoint/replica_groups.py`,
    and, with gradient compression, `compress/residual/<replica or group>/<parameter>` and `compress/factor/<parameter>`.

    """
    model, own = collect_model_parts(training), replica_groups.group_prefix(training)
    parts, base = replica_groups.group_parts(training, model), training.base
    for name in base.tensors if base is not None else ():
        parts.pop(f"model/{name}", None)
    owned = training.rank_model.shard_plan.list_owned(training.rank_model.mesh.coordinates)
    for name, key, value in _iter_optimizer_state(training):
        if isinstance(value, Tensor) and value.dim():
            part = make_full_part(value) if name in owned else _make_state_part(name, key, value, model[name])
            parts[f"{own}optimizer/{name}/{key}"] = part
    if training.rank_model.techniques.average is not None:
        parts |= training.rank_model.techniques.average.checkpoint_parts(model)
    parts |= _eval_mode_parts(training, model)
    return parts | {name: part for name, _, part in _iter_compressor_parts(training, model)}


def _eval_mode_parts(training: Training, model: dict[str, Part]) -> dict[str, Part]:
    """Return the optimizer's eval-mode weights of the parameters that this rank updates, if it has an eval mode. No communication, so
    that it works after a rank failure."""
    rank_model, found = training.rank_model, dict[str, Part]()
    owned = rank_model.shard_plan.list_owned(rank_model.mesh.coordinates)
    for parameter, tensor in get_eval_weights(rank_model.optimizer):
        name = (rank_model.optimizer_names or {})[id(parameter)]
        if name not in rank_model.params:
            continue  # a placeholder for another rank's parameter
        found[f"{EVAL_PREFIX}{name}"] = make_full_part(tensor) if name in owned else replace(model[name], tensor=tensor)
    return found


def _iter_compressor_parts(training: Training, model: dict[str, Part]) -> Iterator[tuple[str, str, Part]]:
    """Yield (name in a checkpoint, name in `Compressor.state`, part) of this rank's gradient compression state."""
    rank_model = training.rank_model
    place = rank_model.mesh.coordinates["dp" if rank_model.techniques.replica_groups is None else "replica_groups"]
    for key, tensor in (rank_model.techniques.compressor.state() if rank_model.techniques.compressor is not None else {}).items():
        kind, _, parameter = key.partition("/")
        if kind == RESIDUAL:
            own = replace(model[parameter], tensor=tensor)
            yield f"compress/{kind}/{place}/{parameter}", key, own
        else:
            yield f"compress/{key}", key, make_full_part(tensor)


def _iter_optimizer_state(training: Training) -> Iterator[tuple[str, str, object]]:
    """Yield (parameter, key, value) of the optimizer's state."""
    names = training.rank_model.optimizer_names or {}
    for parameter, state in optimizer_state.iter_states(training.optimizer):
        yield from ((names[id(parameter)], key, value) for key, value in state.items())


def _split_state_name(name: str) -> tuple[str, str]:
    """Return (parameter, key) of `optimizer/<parameter>/<key>`, with or without a group's prefix."""
    parameter, _, key = GROUP_PREFIX.sub("", name, 1).removeprefix("optimizer/").rpartition("/")
    return parameter, key


def collect_model_parts(training: Training) -> dict[str, Part]:
    """Return this rank's part of every parameter and persistent buffer."""
    kept = set(training.model.state_dict(keep_vars=True)) | {name for name, _ in training.model.named_parameters()}
    buffers, reshaped = {name for name, _ in training.model.named_buffers()}, training.carried.find_reshaped()
    parts = {name: part for name, part in training.rank_model.get_parts().items() if name in kept or name not in buffers}
    return {name: part for name, part in parts.items() if name not in reshaped}


def _make_state_part(name: str, key: str, value: Tensor, part: Part) -> Part:
    if value.shape == part.tensor.shape:
        return replace(part, tensor=value)
    if part.is_full:
        return make_full_part(value)
    what = f"the optimizer's {key} of {name} cannot be saved under this plan"
    shapes = f"{name} is {list(part.shape)}, here {list(part.tensor.shape)} of it, and {key} is {list(value.shape)}"
    why = f"{shapes}: it matches neither the shard nor a full parameter"
    fix = ("use a plan that does not shard parameters", "use an optimizer whose state has the parameter's shape")
    raise PlaitError(Problem("K006", what, why=why, fix=fix))


def list_local_chunks(parts: dict[str, Part]) -> list[LocalChunk]:
    """Return this rank's chunks for `assign_writers`. K005 for a dtype that files cannot hold."""
    wrong = [name for name, part in parts.items() if part.tensor.dtype not in DTYPE_NAMES]
    if wrong:
        dtype = parts[wrong[0]].tensor.dtype
        raise PlaitError(Problem("K005", f"{wrong[0]} is {dtype}, which safetensors files cannot hold"))
    return [
        LocalChunk(name, DTYPE_NAMES[p.tensor.dtype], p.tensor.element_size(), p.shape, p.start, tuple(p.tensor.shape))
        for name, part in parts.items()
        for p in part.iter_rects()
    ]


def collect_values(training: Training) -> dict[str, Any]:
    """Return the manifest's values other than tensors, as this rank has them. K005 for values that are not JSON."""
    try:
        position = json.loads(json.dumps(asdict(training.position)))
    except (TypeError, ValueError) as error:
        why = str(error)
        raise PlaitError(Problem("K005", "the data set's state_dict() is not made of JSON values", why=why)) from None
    try:
        callbacks = check_depth(json.loads(json.dumps(training.callbacks.state_dict(), allow_nan=False)), MAX_DEPTH)
    except (TypeError, ValueError) as error:
        what = "the state_dict() of a callback is not made of JSON values"
        raise PlaitError(
            Problem("K005", what, why=str(error), fix=("return finite numbers, strings, lists and dicts",))
        ) from None
    return {
        "position": position,
        "plan": str(training.plan),
        "seed": training.job.seed,
        "batch": training.job.batch,
        "versions": {"plait": __version__, "torch": str(torch.__version__)},
        "aliases": find_tied_names(training.model),
        "base": training.base.to_manifest(training.rank_model.params) if training.base is not None else None,
        "scaler": training.rank_model.techniques.loss_scale.state_dict() if training.rank_model.techniques.loss_scale else None,
        "groups": replica_groups.group_values(training),
        "average": training.rank_model.techniques.average.state_dict() if training.rank_model.techniques.average else None,
        "shares": training.rank_model.techniques.balance.state_dict() if training.rank_model.techniques.balance else None,
        "callbacks": callbacks,
        "job": {**training.fingerprint, "factor": fingerprint.schedule_factor(training.job, training.position.samples)},
        "optimizer": {
            "type": type(training.optimizer).__name__,
            "groups": _named_groups(training),
            "scalars": _collect_scalars(training),
        },
    }


def find_tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Return the names of tied tensors -> the name under which they are stored."""
    first: dict[int, str] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: kept for name, tensor in named if (kept := first.setdefault(id(tensor), name)) != name}


def _named_groups(training: Training) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups for a manifest, with the names of this rank's parameters."""
    names, groups = training.rank_model.optimizer_names or {}, optimizer_state.list_parameter_groups(training.optimizer)
    return [{**optimizer_state.plain_hyperparameters(group), "params": [names[id(p)] for p in group["params"]]} for group in groups]


def _list_updated_names(training: Training) -> list[str]:
    """Return the names of the parameters that this rank's optimizer updates, in its order."""
    return [name for group in _named_groups(training) for name in group["params"]]


def _collect_scalars(training: Training) -> dict[str, Any]:
    scalars: dict[str, Any] = {}
    for parameter, key, value in _iter_optimizer_state(training):
        name = f"{replica_groups.group_prefix(training)}{parameter}/{key}"
        if isinstance(value, Tensor) and value.dim() == 0 and value.dtype in DTYPE_NAMES and not value.is_complex():
            scalars[name] = {"dtype": DTYPE_NAMES[value.dtype], "value": value.item()}
        elif isinstance(value, PLAIN_TYPES):
            scalars[name] = value
        elif not isinstance(value, Tensor) or value.dim() == 0:
            what = f"optimizer state {name} is a {type(value).__name__}, which cannot be saved"
            raise PlaitError(Problem("K005", what))
    return scalars


def find_job_mismatch(training: Training, manifest: Manifest, everyone: set[str]) -> str | None:
    """Return a reason if the checkpoint belongs to another job, else None. `everyone`: names of the model's tensors on all ranks."""
    saved = {name.removeprefix("model/") for name in manifest.tensors if name.startswith("model/")}
    specs = {name: (manifest.tensors[f"model/{name}"].dtype, manifest.tensors[f"model/{name}"].shape) for name in saved}
    specs |= {
        name: (kind, shape) for name, (_, kind, shape) in (manifest.base.tensors if manifest.base else {}).items()
    }
    reshaped = manifest.carried.values.keys() - saved
    wrong = sorted((specs.keys() ^ everyone) - reshaped)
    for name, part in collect_model_parts(training).items():
        kind, shape = specs.get(name, (None, None))
        if kind is not None and (shape != part.shape or DTYPES[kind] != part.tensor.dtype):
            wrong.append(name)
    if wrong:
        return f"{len(wrong)} tensors differ: {', '.join(wrong[:3])}"
    if manifest.optimizer.type != type(training.optimizer).__name__:
        return f"its optimizer is {manifest.optimizer.type}, the job's is {type(training.optimizer).__name__}"
    mine = _named_groups(training)
    if len(mine) != len(manifest.optimizer.groups) or not all(map(_is_same_group, mine, manifest.optimizer.groups)):
        return "the parameter groups of the optimizer differ"
    return None


def _is_same_group(mine: dict[str, Any], saved: dict[str, Any]) -> bool:
    """Return whether the saved group contains this rank's parameters and its values have the same kinds."""
    kinds = all(k not in mine or _has_same_kind(mine[k], v) for k, v in saved.items() if k != "params")
    return kinds and set(mine["params"]) <= set(saved["params"])


def _has_same_kind(a: object, b: object) -> bool:
    number = (int, float)
    if isinstance(a, (list, tuple)) and isinstance(b, list):
        return len(a) == len(b) and all(map(_has_same_kind, a, b))
    both = isinstance(a, number) and isinstance(b, number) and isinstance(a, bool) == isinstance(b, bool)
    if both and isinstance(b, float) and not math.isfinite(b) and math.isfinite(a):
        return False
    return both or a is None or b is None or type(a) is type(b)


def allocate_parts(training: Training, manifest: Manifest) -> dict[str, Part]:
    """Return the parts that this rank must read: its own of the model, and new tensors for the optimizer's state."""
    model = collect_model_parts(training)
    parts, own = replica_groups.select_group_parts(training, manifest, model), _state_prefix(training, manifest)
    for name in (*(manifest.base.tensors if manifest.base is not None else ()), *manifest.carried.values):
        if f"model/{name}" not in manifest.tensors:
            parts.pop(f"model/{name}", None)
    elsewhere = training.rank_model.shard_plan.list_owned_by_others(training.rank_model.mesh.coordinates)
    owned = training.rank_model.shard_plan.list_owned(training.rank_model.mesh.coordinates)
    mine = {name for name in _list_updated_names(training) if name in model and name not in elsewhere}
    for name, entry in manifest.tensors.items():
        parameter, _ = _split_state_name(name)
        if name.startswith(f"{own}optimizer/") and parameter in mine:
            if parameter in owned:
                parts[name] = make_full_part(allocate_tensor(name, entry, entry.shape, DTYPES[entry.dtype], training.rank_model.device))
            else:
                parts[name] = _allocate_state_part(name, entry, model[parameter])
    if training.rank_model.techniques.average is not None and manifest.average is not None:
        parts |= _check_present(training.rank_model.techniques.average.checkpoint_parts(model, reading=True), manifest)
    if manifest.job.get("compress") == training.fingerprint["compress"]:  # otherwise dropped
        parts |= dict(_allocate_compressor(training, manifest, model))
    return parts | carried_state.allocate_carried(manifest, training.plan, training.place.rank)


def _check_present(parts: dict[str, Part], manifest: Manifest) -> dict[str, Part]:
    """Return the parts. DamagedFileError if the checkpoint lacks one."""
    if lost := sorted(parts.keys() - manifest.tensors.keys()):
        raise DamagedFileError(MANIFEST_NAME, f"{lost[0]} is missing in it")
    return parts


def _allocate_compressor(training: Training, manifest: Manifest, model: dict[str, Part]) -> Iterator[tuple[str, Part]]:
    for name, _, part in _iter_compressor_parts(training, model):
        entry = manifest.tensors.get(name)
        if entry is None or entry.shape != part.shape:
            raise DamagedFileError(MANIFEST_NAME, f"{name} is missing in it, or has another shape")
        kind, shape = DTYPES[entry.dtype], tuple(part.tensor.shape)
        yield name, replace(part, tensor=allocate_tensor(name, entry, shape, kind, training.rank_model.device))


def _allocate_state_part(name: str, entry: TensorEntry, part: Part) -> Part:
    device, dtype = part.tensor.device, DTYPES[entry.dtype]
    if entry.shape == part.shape:
        return replace(part, tensor=allocate_tensor(name, entry, tuple(part.tensor.shape), dtype, device))
    if part.is_full:
        return make_full_part(allocate_tensor(name, entry, entry.shape, dtype, device))
    parameter, key = _split_state_name(name)
    what = f"the optimizer's {key} of {parameter} cannot be split as this plan splits {parameter}"
    why = f"it is {list(entry.shape)}, the parameter is {list(part.shape)}"
    raise PlaitError(Problem("K006", what, why=why, fix=("resume under a plan that does not shard parameters",)))


def restore_training(training: Training, manifest: Manifest, parts: dict[str, Part], hyper: list[dict[str, Any]]) -> list[str]:
    """Restore the optimizer (with the hyperparameters `hyper` of its groups), loss scale and position from the parts read.

    The model's parts were read in place. Returns messages, a line each.

    """
    index = {name: i for i, name in enumerate(_list_updated_names(training))}
    state: dict[int, dict[str, Any]] = {}
    own = _state_prefix(training, manifest)
    for name, part in parts.items():
        if name.startswith(f"{own}optimizer/"):
            parameter, key = _split_state_name(name)
            state.setdefault(index[parameter], {})[key] = part.tensor
    for name, value in manifest.optimizer.scalars.items():
        parameter, _, key = name.removeprefix(own).rpartition("/")
        here = (
            parameter in training.rank_model.params
            and parameter
            not in training.rank_model.shard_plan.list_owned_by_others(training.rank_model.mesh.coordinates)
        )
        if parameter in index and here:  # another rank's state is not restored here
            state.setdefault(index[parameter], {})[key] = _to_tensor(value)
    optimizer_state.restore_optimizer(training.optimizer, state, hyper)
    if training.rank_model.techniques.loss_scale and manifest.scaler:
        training.rank_model.techniques.loss_scale.load_state_dict(structs.asdict(manifest.scaler))
    if training.rank_model.techniques.compressor is not None:
        kept = {key: name for name, key, _ in _iter_compressor_parts(training, collect_model_parts(training)) if name in parts}
        training.rank_model.techniques.compressor.load_state({key: parts[name].tensor for key, name in kept.items()})
    if training.rank_model.techniques.average is not None and manifest.average is not None:
        training.rank_model.techniques.average.load_state_dict(structs.asdict(manifest.average))
    if training.rank_model.techniques.balance and manifest.shares:
        training.rank_model.techniques.balance.load_state_dict(structs.asdict(manifest.shares))
    training.position = Position(**structs.asdict(manifest.position))
    training.rank_model.refresh()
    lines = carried_state.restore_carried(training.carried, manifest, training.plan, training.place.rank, parts)
    replica_groups.restore_groups(training, manifest)
    return lines


def _state_prefix(training: Training, manifest: Manifest) -> str:
    """Return the prefix for names of the optimizer state that this rank restores."""
    return replica_groups.group_prefix(training) if replica_groups.has_same_group_count(training, manifest) else ""


def find_implausible_values(training: Training, manifest: Manifest, hyper: list[dict[str, Any]]) -> str | None:
    """Return a reason if the optimizer cannot make steps from this checkpoint's values, else None."""
    shapes = {name: entry.shape for name, entry in manifest.tensors.items()}
    kept: dict[str, dict[str, Any]] = {}
    for name, shape in shapes.items():
        if name.startswith("optimizer/"):
            parameter, key = _split_state_name(name)
            kept.setdefault(parameter, {})[key] = SavedTensor(shape == shapes.get(f"model/{parameter}"))
    for name, value in manifest.optimizer.scalars.items():
        parameter, _, key = name.rpartition("/")
        kept.setdefault(parameter, {})[key] = _to_tensor(value)
    ordered = _list_updated_names(training)
    return optimizer_state.find_implausible_state(training, lambda i: kept.get(ordered[i]), hyper)


def _to_tensor(value: object) -> Any:
    return torch.tensor(value.value, dtype=DTYPES[value.dtype]) if isinstance(value, SavedNumber) else value
