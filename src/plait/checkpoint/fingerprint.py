"""A short JSON summary of a job and its data, stored in each checkpoint and compared on resume.

It describes data by its length and digests of a few samples, functions by digests of their code and values, and a model by the values that
its modules were created with. Nothing is pickled, and no job code runs except for reading those samples; the random generators are
restored. Entries that an old checkpoint lacks are not compared.
"""

import dataclasses
import functools
import hashlib
import sys
import time
import zlib
from collections.abc import Iterator
from itertools import islice
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from msgspec import structs
from torch import Tensor, nn

from plait.checkpoint import carried_state, replica_groups
from plait.checkpoint.optimizer_state import PLAIN_TYPES
from plait.config.errors import PlaitError, Problem
from plait.config.job import Job
from plait.config.library import is_library, is_user_module
from plait.data.batch import is_map, seeded_sample
from plait.data.sampling import epoch_order
from plait.model.optimizers import KERNEL_OPTIONS
from plait.parallel import precision
from plait.parallel.compression import strategy as compression
from plait.randomness.keyed import preserve_host_state

if TYPE_CHECKING:
    from plait.checkpoint.carried_state import Training
    from plait.checkpoint.manifest import Manifest

SAMPLE_SECONDS = 0.5
"""Maximum seconds for reading samples after the first."""
MAX_CHARS, MAX_VALUES, MAX_DEPTH = 40, 8, 8
"""Characters of a value, values of an attribute or function, and depth of nested values."""
MAX_ELEMENTS, MAX_TENSOR_BYTES, MAX_REFERENCES = 10_000, 16 << 20, 100_000
"""Limits for a digest: elements of a list, bytes of a tensor, values referenced by a function."""
PLAIN_TYPES = (*PLAIN_TYPES, complex, bytes)
Facts = dict[str, Any]


def fingerprint_training(training: "Training") -> Facts:
    """Summarize the job and plan of a training run at its start."""
    job = training.job
    functions = {"loss": job.loss, "weight": job.weight, "schedule": job.schedule}
    if job.evaluate is not None:
        functions["metrics"] = job.evaluate.metrics
    budget, rank = job.token_budget, training.place.rank
    return {
        "steps": job.steps,
        "clip": job.clip,
        "precision": precision.describe_precision(training.plan),
        "compress": compression.describe_compression(training.plan),
        "ema": "none" if job.ema is None else str(job.ema),
        "arguments": training.arguments,
        "python": ".".join(map(str, sys.version_info[:2])),
        "data": fingerprint_data(training.data, job.seed) if rank == 0 else {},
        "order": describe_order(job, training.data) if rank == 0 else "",
        "token budget": f"{budget.tokens}{' padded' * budget.padded}" if budget is not None else "none",
        "functions": {name: digest_function(function) for name, function in functions.items() if function is not None},
        "model": training.rank_model.setup.structure,
        "groups": training.rank_model.hyperparameters,
    }


@preserve_host_state()
def fingerprint_data(data: object, seed: int) -> Facts:
    """Return the length of indexed data and digests of some samples; of an iterable only its type."""
    if not is_map(data):
        return {"kind": type(data).__name__}
    length, digests, start = len(data), dict[str, str](), 0.0
    try:
        for i in dict.fromkeys((0, length - 1, length // 2, length // 4, 3 * length // 4)):
            if digests and time.perf_counter() - start > SAMPLE_SECONDS:
                break
            start = start or time.perf_counter()
            twice = [_digest_value(seeded_sample(data, seed, 0, i)) for _ in range(2)]
            if twice[0] == twice[1]:  # else it draws unseeded random numbers
                digests[str(i)] = twice[0]
    except Exception:  # training will raise it, with its source line
        digests = {}
    return {"kind": "map", "length": length, "samples": digests}


def describe_order(job: Job, data: object) -> str:
    """Describe the order of the first epoch: a permutation, or a digest of the job's own order."""
    if job.order is None or not is_map(data):
        return "a permutation"
    return f"own {zlib.crc32(epoch_order(job.order, job.seed, 0, len(data)).tobytes()):08x}"


def describe_modules(model: nn.Module) -> Facts:
    """Return the simple values that modules were created with, by class and attribute, such as dropout rates and sizes."""
    values_of: dict[str, dict[str, None]] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if not name.startswith("_") and name != "training" and isinstance(value, (bool, int, float, str)):
                values_of.setdefault(f"{type(module).__name__}.{name}", {})[repr(value)[:MAX_CHARS]] = None
    few = {name: list(values) for name, values in values_of.items() if len(values) <= MAX_VALUES}
    classes = {type(module) for module in model.modules()}
    own = {f"the code of {kind.__name__}": [_digest_value(kind)] for kind in classes if is_user_module(kind.__module__)}
    return dict(sorted({**few, **own}.items()))


def digest_function(function: object) -> Facts:
    """Return a digest of a function and the simple values that its code uses by name."""
    inner = function.func if isinstance(function, functools.partial) else function
    if isinstance(inner, FunctionType) and is_library(inner.__code__.co_filename):
        used = function.keywords.items() if isinstance(function, functools.partial) else ()
    else:
        used = _iter_used_values(function)
    values = {name: _shorten(value) for name, value in used if isinstance(value, PLAIN_TYPES)}
    digests = _DigestCache()
    facts = {"code": digests.digest(function), "values": dict(list(values.items())[: 4 * MAX_VALUES])}
    return facts if digests.remaining else facts | {"most": MAX_REFERENCES}


def _shorten(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return "".join(c for c in text if c.isprintable())[:MAX_CHARS]


def _iter_used_values(function: object) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of a function's closure, defaults and referenced globals."""
    if isinstance(function, functools.partial):
        yield from function.keywords.items()
        function = function.func
    function = function.__func__ if isinstance(function, MethodType) else function
    if not isinstance(function, FunctionType):
        yield from ((k, v) for k, v in _list_attributes(function) if isinstance(v, PLAIN_TYPES))
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not yet filled
            continue
    defaults = function.__defaults__ or ()
    places = function.__code__.co_varnames[: function.__code__.co_argcount]
    yield from zip(places[len(places) - len(defaults) :], defaults)
    yield from (function.__kwdefaults__ or {}).items()
    names = list(dict.fromkeys(_iter_names(function.__code__)))
    for name in names:
        value = function.__globals__.get(name, function)
        if isinstance(value, ModuleType) and is_user_module(value.__name__):
            yield from ((inner, vars(value)[inner]) for inner in names if inner in vars(value))
        elif value is not function:
            yield name, value


def _iter_names(of: CodeType) -> Iterator[str]:
    yield from of.co_names
    for constant in of.co_consts:
        if isinstance(constant, CodeType):
            yield from _iter_names(constant)


def _list_attributes(value: object) -> list[tuple[str, Any]]:
    own = getattr(value, "__dict__", None)
    return [(k, v) for k, v in own.items() if not k.startswith("__")][:200] if isinstance(own, dict) else []


def _digest_value(value: object) -> str:
    """Return a digest that is equal for equal values in every process; addresses and line numbers are excluded."""
    return _DigestCache().digest(value)


class _DigestCache:
    """Digests of a value and of all values that it references, each computed once. After `most` values a digest is the type alone."""

    def __init__(self, most: int = MAX_REFERENCES):
        self.remaining = most
        self._known = dict[int, str]()
        self._alive = list[object]()
        """Keeps digested objects alive, so that their ids in `_known` are not reused."""

    def digest(self, value: object, depth: int = 0) -> str:
        """Return the digest of a value. For cycles, below `MAX_DEPTH`, and after `most` values it is the type's name."""
        if id(value) in self._known:
            return self._known[id(value)]
        if depth > MAX_DEPTH or self.remaining <= 0:
            return type(value).__qualname__
        self.remaining -= 1
        self._alive.append(value)
        self._known[id(value)] = type(value).__qualname__  # for parts that refer back to it
        digest = hashlib.sha256()
        for part in self._iter_parts(value, depth + 1):
            digest.update(part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass"))
            digest.update(b"\0")
        self._known[id(value)] = digest.hexdigest()[:16]
        return self._known[id(value)]

    def _digest_part(self, value: object, depth: int) -> str:
        return repr(value) if isinstance(value, PLAIN_TYPES) else self.digest(value, depth)

    def _iter_parts(self, value: object, depth: int) -> Iterator[bytes | str]:
        yield type(value).__qualname__
        inner: list[Any] = []
        if isinstance(value, (*PLAIN_TYPES, np.generic, torch.dtype, torch.device)):
            yield repr(value)
        elif isinstance(value, Tensor):
            yield from (str(value.dtype), str(tuple(value.shape)), _tensor_bytes(value))
        elif isinstance(value, np.ndarray) and value.dtype != object:
            yield from (str(value.dtype), str(value.shape), value.tobytes())
        elif isinstance(value, (list, tuple)):
            yield str(len(value))
            inner = list(value[:MAX_ELEMENTS])
        elif isinstance(value, (set, frozenset)):
            yield from sorted(self.digest(v, depth) for v in value) if len(value) < MAX_ELEMENTS else [str(len(value))]
        elif isinstance(value, dict):
            yield str(len(value))
            inner = [part for item in islice(value.items(), MAX_ELEMENTS) for part in item]
        elif isinstance(value, CodeType):
            yield value.co_code
            inner = [*value.co_names, *value.co_freevars, *value.co_consts[1 if _has_docstring(value) else 0 :]]
        elif isinstance(value, ModuleType):
            yield value.__name__
        elif isinstance(value, FunctionType) and not is_library(value.__code__.co_filename):
            inner = [value.__code__, *(v for _, v in _iter_used_values(value))]
        elif isinstance(value, MethodType):
            inner = [value.__func__, value.__self__]
        elif isinstance(value, functools.partial):
            inner = [value.func, value.args, value.keywords]
        elif isinstance(value, type):
            yield value.__qualname__
            methods = is_user_module(value.__module__)
            inner = [v for v in vars(value).values() if isinstance(v, FunctionType)] if methods else []
        elif isinstance(value, (FunctionType, BuiltinFunctionType)):
            yield f"{value.__module__}.{value.__qualname__}"
        elif hasattr(value, "tobytes"):  # an image
            yield bytes(value.tobytes())
        else:
            yield str(getattr(value, "__qualname__", ""))
            fields = [f.name for f in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
            own = is_user_module(type(value).__module__) or isinstance(value, nn.Module)
            inner = [type(value), *((n, getattr(value, n, None)) for n in fields)]
            inner += [(k, v) for k, v in _list_attributes(value) if own or isinstance(v, PLAIN_TYPES)]
        for part in inner:
            yield self._digest_part(part, depth)


def _has_docstring(of: CodeType) -> bool:
    """Return whether the first constant is a docstring (or None for a missing one), which does not affect behavior."""
    return bool(of.co_consts) and (of.co_consts[0] is None or isinstance(of.co_consts[0], str))


def _tensor_bytes(value: Tensor) -> bytes:
    if value.device.type == "meta" or value.layout is not torch.strided:
        return b""
    if value.nbytes > MAX_TENSOR_BYTES:
        return b""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@dataclasses.dataclass
class JobChanges:
    """Differences between a checkpoint's job and this job: `accepted` ones are printed, `rejected` ones must be allowed."""

    accepted: list[str]
    rejected: list[Problem]


def compare_job(manifest: "Manifest", training: "Training", now: Facts) -> JobChanges:
    """Compare a checkpoint with the job that resumes it. Entries that only one of them has are skipped."""
    old, job, result = manifest.job, training.job, JobChanges([], [])
    _add_change(result.accepted, "batch", manifest.batch, job.batch)
    for name in ("steps", "clip", "precision", "token budget"):
        if name in old:
            _add_change(result.accepted, name, old[name], now[name])
    _compare_average(result.accepted, manifest, now["ema"])
    _compare_arguments(result.accepted, old.get("arguments"), now["arguments"])
    if manifest.seed != job.seed:
        why = "sample order, dropout and augmentation depend on the seed"
        result.rejected.append(_k010_problem(manifest, f"seed {manifest.seed} → {job.seed}", why))
    if other := replica_groups.explain_group_mismatch(training, manifest):
        result.rejected.append(_k010_problem(manifest, *other))
    if other := carried_state.explain_lost_values(manifest, training.plan):
        result.rejected.append(_k010_problem(manifest, *other))
    result.accepted += carried_state.describe_reset_values(manifest, training.plan)
    _compare_compression(result, manifest, old.get("compress", ""), now["compress"])
    _compare_data(result, manifest, old.get("data"), now["data"])
    _compare_order(result, manifest, old.get("order"), now["order"])
    if old.get("python") == now["python"]:
        functions = _as_dict(old.get("functions"))
        for name in sorted({*functions, *now["functions"]}):
            result.accepted += describe_code_changes(name, functions.get(name), now["functions"].get(name))
    before, seen = old.get("factor"), manifest.position.samples
    if isinstance(before, (int, float)) and job.schedule is not None:
        after = float(job.schedule(seen))
        if abs(after - before) > 1e-12 * max(abs(after), abs(before)):
            result.accepted.append(f"schedule: the factor after {seen} samples {before:.6g} → {after:.6g}")
    _compare_model(result.accepted, old, now)
    return result


def skip_to_next_epoch(manifest: "Manifest") -> "Manifest":
    """Return the manifest at the start of the next epoch, for data that is now shorter than the saved position."""
    at = manifest.position
    return structs.replace(manifest, position=structs.replace(at, epoch=at.epoch + 1, start=0, state=None))


def schedule_factor(job: Job, samples_seen: int) -> float | None:
    """Return the learning rate factor of the schedule after `samples_seen` samples."""
    return None if job.schedule is None else float(job.schedule(samples_seen))


def _k010_problem(manifest: "Manifest", what: str, why: str) -> Problem:
    fix = ("resume with the original job and plan", "--allow-changes    resume anyway", "start without --resume")
    what = f"the checkpoint of step {manifest.position.step} cannot be continued: {what}"
    return Problem("K010", what, why=why, fix=fix)


def _as_dict(value: object) -> Facts:
    return value if isinstance(value, dict) else {}


def _add_change(lines: list[str], name: str, old: object, new: object) -> None:
    if old != new:
        lines.append(f"{name} {_shorten(old)} → {_shorten(new)}")


def _compare_arguments(lines: list[str], old: object, new: dict[str, str]) -> None:
    if not isinstance(old, dict):
        return
    for name in sorted({*old, *new}):
        _add_change(lines, f"--job.{_shorten(name)}", old.get(name, "(the job's own)"), new.get(name, "(the job's own)"))


def _compare_average(lines: list[str], manifest: "Manifest", new: str) -> None:
    old = _shorten(manifest.job.get("ema", "EMA")) if manifest.average is not None else "none"
    if old != (new := _shorten(new)):
        then = {"none": ": it starts as a copy of the weights"}.get(old, "") or ": it is dropped" * (new == "none")
        lines.append(f"ema: {old} → {new}{then}")


def _compare_compression(result: JobChanges, manifest: "Manifest", old: object, new: str) -> None:
    if old == new:
        return
    words = f"compress: {_shorten(old) if old else 'none'} → {new or 'none'}"
    if not old:
        result.accepted.append(words)
        return
    words += ", without the residuals"
    why = "a replica's residual is the part of its gradients that it has not sent yet; other replicas and formats cannot use it"
    result.rejected.append(_k010_problem(manifest, words, why))


def _compare_data(result: JobChanges, manifest: "Manifest", old: object, new: Facts) -> None:
    was = _as_dict(old)
    if was.get("kind") != new.get("kind"):
        if was:
            _add_change(result.accepted, "data: read as", was.get("kind"), new.get("kind"))
        return
    if was.get("length") != new.get("length"):
        words, at = f"data: length {_shorten(was.get('length'))} → {new.get('length')}", manifest.position
        if at.start == 0:
            result.accepted.append(words)
        else:
            why = f"it is at sample {at.start} of epoch {at.epoch}; another length changes the order of all samples"
            result.rejected.append(_k010_problem(manifest, words, why))
    before, after = _as_dict(was.get("samples")), new.get("samples", {})
    differ = [i for i in after if i in before and before[i] != after[i]]
    if differ:
        shared = sum(i in before for i in after)
        result.accepted.append(f"data: {len(differ)} of {shared} compared samples differ: {', '.join(differ)}")


def _compare_order(result: JobChanges, manifest: "Manifest", old: object, new: str) -> None:
    """Compare the epoch orders. Another order is accepted at the start of an epoch and rejected within one."""
    if not old or old == new:  # only rank 0 records it, so it is missing if a surviving rank takes over
        return
    words, at = f"order: {_shorten(old)} → {new}", manifest.position
    if at.start == 0:
        result.accepted.append(words)
        return
    why = f"it is at sample {at.start} of epoch {at.epoch}; in another order some samples would repeat and others would be skipped"
    result.rejected.append(_k010_problem(manifest, words, why))


def describe_code_changes(name: str, old: object, new: Facts | None) -> list[str]:
    """Describe the changes of a function since a checkpoint, a line each."""
    lines = list[str]()
    if new is not None and "most" in new:
        lines.append(f"{name}: only the first {new['most']:,} values that it uses were compared")
    if old is None or new is None:
        _add_change(lines, name, "none" if old is None else "a function", "none" if new is None else "a function")
    elif _as_dict(old).get("code") != new["code"]:
        before, values = _as_dict(_as_dict(old).get("values")), list[str]()
        for key, value in new["values"].items():
            if key in before:
                _add_change(values, f"{name}: {key}", before[key], value)
        lines += values or [f"{name}: its code, or a value that it uses, changed"]
    return lines


def _compare_model(lines: list[str], old: Facts, now: Facts) -> None:
    before, after = _as_dict(old.get("model")), now["model"]
    for name in sorted({*before, *after} if before else ()):
        if name.startswith("the code of"):
            if name in before and name in after and old.get("python") == now["python"] and before[name] != after[name]:
                lines.append(f"model: {name} changed")
        elif before.get(name) != after.get(name):
            values = [table.get(name) for table in (before, after)]
            words = [", ".join(map(_shorten, v)) if isinstance(v, list) else "none" for v in values]
            _add_change(lines, f"model: {_shorten(name)}", *words)


def merge_hyperparameters(manifest: "Manifest", now: Facts) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the hyperparameters of each group and messages. Values that the job changed since the run's start are the job's."""
    first = manifest.job.get("groups")
    first = first if isinstance(first, list) and len(first) == len(manifest.optimizer.groups) else manifest.optimizer.groups
    result, lines = list[dict[str, Any]](), dict[str, int]()
    for saved, began, mine in zip(manifest.optimizer.groups, first, now["groups"]):
        began = began if isinstance(began, dict) else saved
        kept = {k: v for k, v in saved.items() if k not in ("params", *KERNEL_OPTIONS)}
        for key, value in mine.items():
            old = began.get("initial_lr", began.get(key)) if key == "lr" else began.get(key, value)
            if _tuple_to_list(old) != _tuple_to_list(value):
                kept[key] = value
                if key != "initial_lr":
                    words = f"{key} {_shorten(_tuple_to_list(old))} → {_shorten(_tuple_to_list(value))}"
                    lines[words] = lines.get(words, 0) + 1
        result.append(kept)
    count = len(manifest.optimizer.groups)
    return result, [f"{words} ({n} of {count} groups)" if count > 1 else words for words, n in lines.items()]


def _tuple_to_list(value: object) -> Any:
    return list(value) if isinstance(value, tuple) else value


def raise_rejected_changes(result: JobChanges, allow: bool) -> None:
    """Raise K010 for rejected changes, unless `allow` is set."""
    if result.rejected and not allow:
        raise PlaitError(result.rejected)
    result.accepted += [problem.what.partition(": ")[2] for problem in result.rejected]
