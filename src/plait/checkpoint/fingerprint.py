"""What a run's training depends on, in a few words of JSON: kept in each checkpoint, compared when it is resumed.

Data is told by its length and digests of a few samples; functions by digests of their code and of the values that it uses,
and the simple ones of these by name; a model by the values its modules were made with. Nothing is pickled, nothing is run but
the reading of those samples, with the generators put back. What is not told of an old checkpoint is not compared.
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
from plait.checkpoint.optimizer_state import SIMPLE
from plait.config.errors import PlaitError, Problem
from plait.config.job import Job
from plait.config.library import is_library, is_user_module
from plait.data.batch import is_map, seeded_sample
from plait.data.sampling import epoch_order
from plait.model.optimizers import OPEN
from plait.parallel import precision
from plait.parallel.compression import strategy as compression
from plait.randomness.keyed import host_kept

if TYPE_CHECKING:
    from plait.checkpoint.carried_state import Training
    from plait.checkpoint.manifest import Manifest

SECONDS = 0.5
"""How long samples are read at most, once the first is there."""
SHOWN, VALUES, DEPTH = 40, 8, 8
"""Characters of a value, values of an attribute or function, and how far values are followed into each other."""
MANY, LARGEST, MOST = 10_000, 16 << 20, 100_000
"""Elements of a list, bytes of a tensor, and values that a function refers to, of which a digest is taken."""
PLAIN = (*SIMPLE, complex, bytes)
Facts = dict[str, Any]


def of(training: "Training") -> Facts:
    """Of the job and plan of a training, as they stand at the start."""
    job = training.job
    functions = {"loss": job.loss, "weight": job.weight, "schedule": job.schedule}
    if job.evaluate is not None:
        functions["metrics"] = job.evaluate.metrics
    budget, rank = job.token_budget, training.place.rank
    return {
        "steps": job.steps,
        "clip": job.clip,
        "precision": precision.named(training.plan),
        "compress": compression.named(training.plan),
        "ema": "none" if job.ema is None else str(job.ema),
        "arguments": training.arguments,
        "python": ".".join(map(str, sys.version_info[:2])),
        "data": samples(training.data, job.seed) if rank == 0 else {},
        "order": ordered(job, training.data) if rank == 0 else "",
        "token budget": f"{budget.tokens}{' padded' * budget.padded}" if budget is not None else "none",
        "functions": {name: code(function) for name, function in functions.items() if function is not None},
        "model": training.rank_model.setup.structure,
        "groups": training.rank_model.hyperparameters,
    }


@host_kept()
def samples(data: object, seed: int) -> Facts:
    """Length of data that is read by index, and digests of some samples; nothing but its kind of what is only iterated."""
    if not is_map(data):
        return {"kind": type(data).__name__}
    length, digests, start = len(data), dict[str, str](), 0.0
    try:
        for i in dict.fromkeys((0, length - 1, length // 2, length // 4, 3 * length // 4)):
            if digests and time.perf_counter() - start > SECONDS:
                break
            start = start or time.perf_counter()
            twice = [_digest(seeded_sample(data, seed, 0, i)) for _ in range(2)]
            if twice[0] == twice[1]:  # else it draws numbers that nobody seeds
                digests[str(i)] = twice[0]
    except Exception:  # training will raise it, with its place
        digests = {}
    return {"kind": "map", "length": length, "samples": digests}


def ordered(job: Job, data: object) -> str:
    """The order of the first epoch in a word: a permutation, or a digest of the job's own."""
    if job.order is None or not is_map(data):
        return "a permutation"
    return f"own {zlib.crc32(epoch_order(job.order, job.seed, 0, len(data)).tobytes()):08x}"


def structure(model: nn.Module) -> Facts:
    """The simple values that modules were made with, by class and attribute: rates of dropout, sizes, switches."""
    values_of: dict[str, dict[str, None]] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if not name.startswith("_") and name != "training" and isinstance(value, (bool, int, float, str)):
                values_of.setdefault(f"{type(module).__name__}.{name}", {})[repr(value)[:SHOWN]] = None
    few = {name: list(values) for name, values in values_of.items() if len(values) <= VALUES}
    classes = {type(module) for module in model.modules()}
    own = {f"the code of {kind.__name__}": [_digest(kind)] for kind in classes if is_user_module(kind.__module__)}
    return dict(sorted({**few, **own}.items()))


def code(function: object) -> Facts:
    """A digest of a function, and the simple values that its code uses by name."""
    inner = function.func if isinstance(function, functools.partial) else function
    if isinstance(inner, FunctionType) and is_library(inner.__code__.co_filename):
        used = function.keywords.items() if isinstance(function, functools.partial) else ()
    else:
        used = _used(function)
    values = {name: _shown(value) for name, value in used if isinstance(value, SIMPLE)}
    digests = _Digests()
    facts = {"code": digests.of(function), "values": dict(list(values.items())[: 4 * VALUES])}
    return facts if digests.left else facts | {"most": MOST}


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return "".join(c for c in text if c.isprintable())[:SHOWN]


def _used(function: object) -> Iterator[tuple[str, Any]]:
    """(name, value) of what a function closes over, its defaults and the globals that it names."""
    if isinstance(function, functools.partial):
        yield from function.keywords.items()
        function = function.func
    function = function.__func__ if isinstance(function, MethodType) else function
    if not isinstance(function, FunctionType):
        yield from ((k, v) for k, v in _attributes(function) if isinstance(v, SIMPLE))
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
    names = list(dict.fromkeys(_names(function.__code__)))
    for name in names:
        value = function.__globals__.get(name, function)
        if isinstance(value, ModuleType) and is_user_module(value.__name__):
            yield from ((inner, vars(value)[inner]) for inner in names if inner in vars(value))
        elif value is not function:
            yield name, value


def _names(of: CodeType) -> Iterator[str]:
    yield from of.co_names
    for constant in of.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _attributes(value: object) -> list[tuple[str, Any]]:
    own = getattr(value, "__dict__", None)
    return [(k, v) for k, v in own.items() if not k.startswith("__")][:200] if isinstance(own, dict) else []


def _digest(value: object) -> str:
    """Of what a value is, without addresses and lines: equal for equal values, in every process."""
    return _Digests().of(value)


class _Digests:
    """Digests of a value and of all values that it references, each computed once. `most`: after so many values a digest is the type alone."""

    def __init__(self, most: int = MOST):
        self.left = most
        self._known = dict[int, str]()
        self._alive = list[object]()
        """Those that `_known` knows by their numbers, which must not be used again meanwhile."""

    def of(self, value: object, depth: int = 0) -> str:
        """The digest of a value. It is the name of its type for a reference to an outer value, below `DEPTH`, and after `most` values."""
        if id(value) in self._known:
            return self._known[id(value)]
        if depth > DEPTH or self.left <= 0:
            return type(value).__qualname__
        self.left -= 1
        self._alive.append(value)
        self._known[id(value)] = type(value).__qualname__  # what its own parts see of it
        digest = hashlib.sha256()
        for part in self._parts(value, depth + 1):
            digest.update(part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass"))
            digest.update(b"\0")
        self._known[id(value)] = digest.hexdigest()[:16]
        return self._known[id(value)]

    def _contents(self, value: object, depth: int) -> str:
        return repr(value) if isinstance(value, PLAIN) else self.of(value, depth)

    def _parts(self, value: object, depth: int) -> Iterator[bytes | str]:
        yield type(value).__qualname__
        inner: list[Any] = []
        if isinstance(value, (*PLAIN, np.generic, torch.dtype, torch.device)):
            yield repr(value)
        elif isinstance(value, Tensor):
            yield from (str(value.dtype), str(tuple(value.shape)), _bytes(value))
        elif isinstance(value, np.ndarray) and value.dtype != object:
            yield from (str(value.dtype), str(value.shape), value.tobytes())
        elif isinstance(value, (list, tuple)):
            yield str(len(value))
            inner = list(value[:MANY])
        elif isinstance(value, (set, frozenset)):
            yield from sorted(self.of(v, depth) for v in value) if len(value) < MANY else [str(len(value))]
        elif isinstance(value, dict):
            yield str(len(value))
            inner = [part for item in islice(value.items(), MANY) for part in item]
        elif isinstance(value, CodeType):
            yield value.co_code
            inner = [*value.co_names, *value.co_freevars, *value.co_consts[1 if _documented(value) else 0 :]]
        elif isinstance(value, ModuleType):
            yield value.__name__
        elif isinstance(value, FunctionType) and not is_library(value.__code__.co_filename):
            inner = [value.__code__, *(v for _, v in _used(value))]
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
            inner += [(k, v) for k, v in _attributes(value) if own or isinstance(v, SIMPLE)]
        for part in inner:
            yield self._contents(part, depth)


def _documented(of: CodeType) -> bool:
    """Whether the first constant is a docstring (or None where there is none): no part of what a function does."""
    return bool(of.co_consts) and (of.co_consts[0] is None or isinstance(of.co_consts[0], str))


def _bytes(value: Tensor) -> bytes:
    if value.device.type == "meta" or value.layout is not torch.strided:
        return b""
    if value.nbytes > LARGEST:
        return b""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@dataclasses.dataclass
class Changes:
    """What differs between a checkpoint's job and this one: what is told, and what is refused unless it is allowed."""

    told: list[str]
    refused: list[Problem]


def changes(manifest: "Manifest", training: "Training", now: Facts) -> Changes:
    """Compare a checkpoint with the job that resumes it. What only one of them tells is left out."""
    old, job, result = manifest.job, training.job, Changes([], [])
    _line(result.told, "batch", manifest.batch, job.batch)
    for name in ("steps", "clip", "precision", "token budget"):
        if name in old:
            _line(result.told, name, old[name], now[name])
    _average(result.told, manifest, now["ema"])
    _arguments(result.told, old.get("arguments"), now["arguments"])
    if manifest.seed != job.seed:
        why = "the order of the samples, dropout and augmentation are drawn from it"
        result.refused.append(_refusal(manifest, f"seed {manifest.seed} → {job.seed}", why))
    if other := replica_groups.refused(training, manifest):
        result.refused.append(_refusal(manifest, *other))
    if other := carried_state.refused(manifest, training.plan):
        result.refused.append(_refusal(manifest, *other))
    result.told += carried_state.changes(manifest, training.plan)
    _compress(result, manifest, old.get("compress", ""), now["compress"])
    _data(result, manifest, old.get("data"), now["data"])
    _order(result, manifest, old.get("order"), now["order"])
    if old.get("python") == now["python"]:
        functions = _table(old.get("functions"))
        for name in sorted({*functions, *now["functions"]}):
            result.told += function_changes(name, functions.get(name), now["functions"].get(name))
    before, seen = old.get("factor"), manifest.position.samples
    if isinstance(before, (int, float)) and job.schedule is not None:
        after = float(job.schedule(seen))
        if abs(after - before) > 1e-12 * max(abs(after), abs(before)):
            result.told.append(f"schedule: the factor after {seen} samples {before:.6g} → {after:.6g}")
    _model(result.told, old, now)
    return result


def allowed(manifest: "Manifest") -> "Manifest":
    """The checkpoint, to be resumed with data that has become shorter than where it is: at the next epoch."""
    at = manifest.position
    return structs.replace(manifest, position=structs.replace(at, epoch=at.epoch + 1, start=0, state=None))


def factor(job: Job, samples_seen: int) -> float | None:
    """What the schedule multiplies learning rates by after so many samples."""
    return None if job.schedule is None else float(job.schedule(samples_seen))


def _refusal(manifest: "Manifest", what: str, why: str) -> Problem:
    fix = ("resume with what it was started with", "--allow-changes    to go on all the same", "start without --resume")
    what = f"the checkpoint of step {manifest.position.step} cannot be continued: {what}"
    return Problem("K010", what, why=why, fix=fix)


def _table(value: object) -> Facts:
    return value if isinstance(value, dict) else {}


def _line(told: list[str], name: str, old: object, new: object) -> None:
    if old != new:
        told.append(f"{name} {_shown(old)} → {_shown(new)}")


def _arguments(told: list[str], old: object, new: dict[str, str]) -> None:
    if not isinstance(old, dict):
        return
    for name in sorted({*old, *new}):
        _line(told, f"--job.{_shown(name)}", old.get(name, "(the job's own)"), new.get(name, "(the job's own)"))


def _average(told: list[str], manifest: "Manifest", new: str) -> None:
    old = _shown(manifest.job.get("ema", "EMA")) if manifest.average is not None else "none"
    if old != (new := _shown(new)):
        then = {"none": ": it begins as a copy of the weights"}.get(old, "") or ": it is dropped" * (new == "none")
        told.append(f"ema: {old} → {new}{then}")


def _compress(result: Changes, manifest: "Manifest", old: object, new: str) -> None:
    if old == new:
        return
    words = f"compress: {_shown(old) if old else 'none'} → {new or 'none'}"
    if not old:
        result.told.append(words)
        return
    words += ", without the residuals"
    why = "a copy's residual is the part of its gradients that it has not sent yet; of other copies, or of another format, it would be lost"
    result.refused.append(_refusal(manifest, words, why))


def _data(result: Changes, manifest: "Manifest", old: object, new: Facts) -> None:
    was = _table(old)
    if was.get("kind") != new.get("kind"):
        if was:
            _line(result.told, "data: read as", was.get("kind"), new.get("kind"))
        return
    if was.get("length") != new.get("length"):
        words, at = f"data: length {_shown(was.get('length'))} → {new.get('length')}", manifest.position
        if at.start == 0:
            result.told.append(words)
        else:
            why = f"it is at sample {at.start} of epoch {at.epoch}; another length is another order of all samples"
            result.refused.append(_refusal(manifest, words, why))
    before, after = _table(was.get("samples")), new.get("samples", {})
    differ = [i for i in after if i in before and before[i] != after[i]]
    if differ:
        shared = sum(i in before for i in after)
        result.told.append(f"data: {len(differ)} of {shared} samples that were looked at differ: {', '.join(differ)}")


def _order(result: Changes, manifest: "Manifest", old: object, new: str) -> None:
    """Another order is honoured from the next epoch on; in the middle of one it cannot be meant."""
    if not old or old == new:  # rank 0 alone knows it: a survivor that is another rank tells nothing
        return
    words, at = f"order: {_shown(old)} → {new}", manifest.position
    if at.start == 0:
        result.told.append(words)
        return
    why = f"it is at sample {at.start} of epoch {at.epoch}, in another order: some would be seen twice and some not at all"
    result.refused.append(_refusal(manifest, words, why))


def function_changes(name: str, old: object, new: Facts | None) -> list[str]:
    """What changed in a function since a checkpoint, a line each."""
    lines = list[str]()
    if new is not None and "most" in new:
        lines.append(f"{name}: of what it uses, {new['most']:,} values were compared and the rest was not")
    if old is None or new is None:
        _line(lines, name, "none" if old is None else "a function", "none" if new is None else "a function")
    elif _table(old).get("code") != new["code"]:
        before, values = _table(_table(old).get("values")), list[str]()
        for key, value in new["values"].items():
            if key in before:
                _line(values, f"{name}: {key}", before[key], value)
        lines += values or [f"{name}: its code, or a value that it uses, is another"]
    return lines


def _model(told: list[str], old: Facts, now: Facts) -> None:
    before, after = _table(old.get("model")), now["model"]
    for name in sorted({*before, *after} if before else ()):
        if name.startswith("the code of"):
            if name in before and name in after and old.get("python") == now["python"] and before[name] != after[name]:
                told.append(f"model: {name} is another")
        elif before.get(name) != after.get(name):
            values = [table.get(name) for table in (before, after)]
            words = [", ".join(map(_shown, v)) if isinstance(v, list) else "none" for v in values]
            _line(told, f"model: {_shown(name)}", *words)


def hyperparameters(manifest: "Manifest", now: Facts) -> tuple[list[dict[str, Any]], list[str]]:
    """Of each group what to go on with, and what is told. What the job sets otherwise than at the run's start is the job's."""
    first = manifest.job.get("groups")
    first = first if isinstance(first, list) and len(first) == len(manifest.optimizer.groups) else manifest.optimizer.groups
    result, lines = list[dict[str, Any]](), dict[str, int]()
    for saved, began, mine in zip(manifest.optimizer.groups, first, now["groups"]):
        began = began if isinstance(began, dict) else saved
        kept = {k: v for k, v in saved.items() if k not in ("params", *OPEN)}
        for key, value in mine.items():
            old = began.get("initial_lr", began.get(key)) if key == "lr" else began.get(key, value)
            if _listed(old) != _listed(value):
                kept[key] = value
                if key != "initial_lr":
                    words = f"{key} {_shown(_listed(old))} → {_shown(_listed(value))}"
                    lines[words] = lines.get(words, 0) + 1
        result.append(kept)
    count = len(manifest.optimizer.groups)
    return result, [f"{words} ({n} of {count} groups)" if count > 1 else words for words, n in lines.items()]


def _listed(value: object) -> Any:
    return list(value) if isinstance(value, tuple) else value


def refuse(result: Changes, allow: bool) -> None:
    """K010 for what cannot be meant, unless it is allowed."""
    if result.refused and not allow:
        raise PlaitError(result.refused)
    result.told += [problem.what.partition(": ")[2] for problem in result.refused]
