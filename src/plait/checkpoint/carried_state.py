"""State that a model, loss and optimizer carry between steps outside of parameters, buffers and `optimizer.state`.

Examples are the hidden state of recurrent layers, running counts, queues of features, and a schedule step kept by an optimizer. They live in
plain attributes or in the result of `get_extra_state`. A value is saved if it changed since the model was created, unless every step
overwrites it before reading it (`checkpoint/plain_values.py`). Each rank saves its own values and gets them back under the same plan.
Under another plan all ranks get the values that were equal on all ranks. Values that differed between ranks are dropped.

`Training` is the interface that checkpoints save and restore; `engine/engine.py` implements it.
`exchange_json` gathers one JSON object of each rank on all ranks.
"""

import hashlib
import json
import weakref
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import Any, Protocol

import torch
from msgspec import structs
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.checkpoint.checkpoint_reader import allocate_tensor
from plait.checkpoint.manifest import BaseWeights, CarriedValue, Manifest
from plait.checkpoint.plain_values import AttributeWatch, Json, OpaqueValueError, ValueReader, ValueWriter
from plait.checkpoint.safetensors_file import DTYPES, PARSE_ERRORS, LocalChunk
from plait.config.errors import USAGE, PlaitError, Problem, parse_problem
from plait.config.job import Job, is_user_class
from plait.config.plan import Plan
from plait.data.batch import Data, Position
from plait.launch.place import Place
from plait.model.optimizers import iter_optimizers
from plait.parallel.rank_model import RankModel
from plait.tensors.collectives import all_gather_bytes
from plait.tensors.module_state import MODULE_ATTRIBUTES, STRATEGY_ATTRIBUTES
from plait.tensors.norm import FiniteRule
from plait.tensors.rows import Part, make_full_part
from plait.tensors.torch_private import own_buffers

LOSS_PREFIX = "Job.loss"
"""Prefix for names of values carried by the loss."""
OPTIMIZER_PREFIX = "Job.optimizer"
"""Prefix for names of values carried by the optimizer."""
IGNORED_ATTRIBUTES = MODULE_ATTRIBUTES | STRATEGY_ATTRIBUTES
"""Attributes of every module that hold none of its state."""
SAVED_ATTRIBUTES = frozenset({"state", "param_groups", "defaults"})
"""Attributes of every optimizer that checkpoints save per parameter (`checkpoint/optimizer_state.py`)."""
CONSTANT_TYPES = (int, float, bool, str, type(None))
EXTRA_STATE = "_extra_state"


@dataclass
class CarriedSnapshot:
    """Carried values of one rank at one step."""

    values: dict[str, Json] = field(default_factory=dict)
    """Name -> the value's JSON, and whether its container is the object that the model was created with."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """`<name>/<number>` -> a tensor of that value."""
    unsaved: dict[str, str] = field(default_factory=dict)
    """Name -> type of each changed value that cannot be saved."""

    def checkpoint_parts(self, rank: int) -> dict[str, Part]:
        """Return the tensors by their names in a checkpoint."""
        return {f"carried/{rank}/{name}": make_full_part(tensor) for name, tensor in self.tensors.items()}

    def to_manifest(self, rank: int, world: int, of_all: bool = False) -> dict[str, Any]:
        """Return this rank's entry for the manifest. `of_all`: failed ranks had the same values."""
        return {"rank": rank, "world": world, "values": self.values, "unsaved": self.unsaved, "of_all": of_all}

    def compute_digests(self) -> dict[str, str]:
        said = {name: json.dumps([told["same"], told["value"]]) for name, told in self.values.items()}
        return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in said.items()}


@dataclass(frozen=True)
class _InitialValue:
    """Initial value of an attribute, as the model was created with it."""

    value: object
    written: str

    @staticmethod
    def capture(value: object, told: Json) -> "_InitialValue":
        return _InitialValue(weakref.ref(value) if isinstance(value, Tensor) else value, json.dumps(told))

    def is_same_object(self, value: object) -> bool:
        """Return whether `value` is still the same object."""
        return (self.value() if isinstance(self.value, weakref.ref) else self.value) is value


class CarriedState:
    """Finds, saves and restores carried values. It is created with the model, before the first step."""

    def __init__(
        self, model: nn.Module, loss: object, optimizer: Optimizer | None, device: torch.device, *,
        sampled: Collection[str] = (), process_flags: Collection[str] = (), watch: bool = True,
    ):  # fmt: skip
        """`sampled`: buffers computed from the samples of this rank. `process_flags`: attributes that each forward pass sets per process, such
        as hooks. `watch`: track which attributes every step overwrites."""
        self.device, self.watch, self.steps = device, AttributeWatch(), 0
        self.watch_reads, self._sampled, self._process_flags = watch, frozenset(sampled), frozenset(process_flags)
        self._scalar_places = set[tuple[str, str]]()
        """(owner, attribute) of numbers and strings that steps change."""
        self._scalars_before: dict[str, Any] | None = None
        """Numbers and strings as they were before the current step."""
        self._shared_digests: dict[str, str] = {}
        """Digests of the values that were equal on all ranks at the last save."""
        self._non_persistent = {name for name, _ in model.named_buffers(remove_duplicate=False)} - set(model.state_dict(keep_vars=True))
        """Buffers that are not persistent."""
        self._initial_specs = {name: _buffer_spec(buffer) for name, buffer in model.named_buffers(remove_duplicate=False)}
        self._owners: dict[str, object] = dict(model.named_modules())
        known = set(map(id, self._owners.values()))
        self._owners |= {name: owner for name, owner in _find_loss_owners(loss).items() if id(owner) not in known}
        optimizers = [] if optimizer is None else [optimizer, *iter_optimizers(vars(optimizer))]
        self._owners |= {f"{OPTIMIZER_PREFIX}.{i}" if i else OPTIMIZER_PREFIX: each for i, each in enumerate(optimizers)}
        self._initial: dict[str, _InitialValue] = {}
        for name, value in self._iter_values():
            writer = ValueWriter()
            told = writer.write(value)
            if name.endswith(f".{EXTRA_STATE}") or name == EXTRA_STATE:
                _check_extra_state(name, writer.opaque)
            self._initial[name] = _InitialValue.capture(value, told)

    def _iter_values(self) -> Iterator[tuple[str, Any]]:
        for owner, name, value in self._iter_places():
            yield _join_name(owner, name), value

    def _iter_places(self) -> Iterator[tuple[str, str, Any]]:
        """Yield (owner's name, attribute, value) of every candidate."""
        for at, owner in self._owners.items():
            known = IGNORED_ATTRIBUTES if isinstance(owner, nn.Module) else SAVED_ATTRIBUTES if isinstance(owner, Optimizer) else frozenset[str]()
            for name, value in list(vars(owner).items()):
                if name not in known and not _is_structure(value) and _join_name(at, name) not in self._process_flags:
                    yield at, name, value
            if isinstance(owner, nn.Module):
                yield from ((at, name, buffer) for name, buffer in own_buffers(owner).items() if self._is_rank_specific(at, name))
                if type(owner).get_extra_state is not nn.Module.get_extra_state:
                    yield at, EXTRA_STATE, owner.get_extra_state()

    def _is_rank_specific(self, at: str, name: str) -> bool:
        """Return whether a buffer may differ between ranks, so that it is not saved as a model tensor."""
        key = _join_name(at, name)
        owner = self._owners[at]
        assert isinstance(owner, nn.Module)
        ours = at.startswith(LOSS_PREFIX) or key in self._sampled or key in self._non_persistent
        return ours or self._initial_specs.get(key) != _buffer_spec(own_buffers(owner)[name])

    def find_reshaped(self) -> set[str]:
        """Return names of state buffers whose shape or dtype changed since the model was created."""
        modules = (
            (at, owner)
            for at, owner in self._owners.items()
            if isinstance(owner, nn.Module) and not at.startswith(LOSS_PREFIX)
        )
        named = {_join_name(at, n): b for at, owner in modules for n, b in own_buffers(owner).items()}
        return {name for name, buffer in named.items() if self._initial_specs.get(name) != _buffer_spec(buffer)}

    def close(self) -> None:
        """Remove the attribute descriptors from the classes of the modules."""
        self.watch.close()

    def begin_step(self) -> None:
        self.watch.begin_step()
        self._scalars_before = {_join_name(at, name): vars(self._owners[at]).get(name) for at, name in self._scalar_places}

    def end_step(self) -> None:
        """Count a finished step; after the first, start to watch the attributes that it changed."""
        self.steps, self._scalars_before = self.steps + 1, None
        if self.steps == 1:
            self.snapshot()

    def note_saved(self, digests: list[dict[str, str]]) -> None:
        """Record the digests of each rank's carried values after a save."""
        self._shared_digests = {name: one for name, one in digests[0].items() if all(each.get(name) == one for each in digests)}

    def snapshot_survivor(self) -> CarriedSnapshot | None:
        """Return this rank's values after the last completed step if a failed rank had the same values, else None.

        Values are the same if they have not changed since the last save and were equal on all ranks then. Integers and strings that were
        equal then, such as call counts, may have changed.

        """
        now, before = self.snapshot(), self._scalars_before or {}
        digests = now.compute_digests()
        for name in list(now.values):
            value = before.get(name, now.values[name]["value"])
            if name not in self._shared_digests or (
                digests[name] != self._shared_digests[name] and not isinstance(value, (bool, int, str))
            ):
                return None
            if name in before:
                now.values[name]["value"] = ValueWriter().write(value)
        return now

    def snapshot(self) -> CarriedSnapshot:
        """Return this rank's current values. New values are watched from the next step on."""
        found = CarriedSnapshot()
        for at, name, value in self._iter_places():
            key, owner = _join_name(at, name), self._owners[at]
            first = self._initial.get(key)
            same = first is not None and first.is_same_object(value)
            if (same and isinstance(value, CONSTANT_TYPES)) or self.watch.is_recreated(owner, name):
                continue
            writer = ValueWriter()
            told = writer.write(value)
            if first is not None and json.dumps(told) == first.written and (same or not writer.opaque):
                continue
            if isinstance(owner, Optimizer) and any(tensor.dim() for tensor in writer.tensors):
                continue  # it may depend on the rank's shards of parameters: `check_resumable` raises K011
            if writer.opaque and not same:
                if is_user_class(type(owner)) or at.startswith(LOSS_PREFIX):
                    found.unsaved[key] = writer.opaque[0]
                continue
            if self.watch_reads and name in vars(owner):
                self.watch.add(owner, name)
            if isinstance(value, (bool, int, str)) and name in vars(owner):
                self._scalar_places.add((at, name))
            found.values[key] = {"same": same, "read": self.watch.is_read(owner, name), "value": told}
            found.tensors |= {f"{key}/{i}": tensor for i, tensor in enumerate(writer.tensors)}
        return found

    def copy_from(self, other: "CarriedState") -> None:
        """Copy the carried values of `other`."""
        found = other.snapshot()
        tensors = {name: [t for at, t in found.tensors.items() if at.rpartition("/")[0] == name] for name in found.values}
        self.restore(found.values, {name: [t.clone() for t in kept] for name, kept in tensors.items()})

    def restore(self, values: dict[str, Json], tensors: dict[str, list[Tensor]]) -> list[str]:
        """Restore values (rows of `CarriedValue`). Return the names of those that could not be restored."""
        lost = []
        for key, told in values.items():
            if key in self._process_flags:
                continue
            at, _, name = key.rpartition(".")
            owner = self._owners.get(at)
            try:
                if owner is None:
                    raise OpaqueValueError(key)
                self._restore_value(owner, name, told, ValueReader(tensors.get(key, []), self.device))
            except (OpaqueValueError, RuntimeError, *PARSE_ERRORS):
                lost.append(key)
        return lost

    def _restore_value(self, owner: object, name: str, told: Json, restorer: ValueReader) -> None:
        if name == EXTRA_STATE and isinstance(owner, nn.Module):
            owner.set_extra_state(restorer.read(told["value"]))
            return
        if isinstance(owner, nn.Module) and name in IGNORED_ATTRIBUTES:
            raise OpaqueValueError(name)
        table = own_buffers(owner) if isinstance(owner, nn.Module) and name in own_buffers(owner) else vars(owner)
        there = table.get(name)
        with torch.no_grad():
            table[name] = restorer.read(told["value"], there if told["same"] else None)
        if self.watch_reads and name in vars(owner):
            self.watch.add(owner, name)
            if told["read"]:
                self.watch.note_read(owner, name)


def drop_duplicate_chunks(held: list[list[LocalChunk]], digests: list[dict[str, str]]) -> list[list[LocalChunk]]:
    """Return each rank's chunks without those that an earlier rank carries too. `digests`: of each rank's values."""
    first: dict[tuple[str, str], int] = {}
    kept = list[list[LocalChunk]]()
    for rank, (mine, known) in enumerate(zip(held, digests)):
        again = tuple(
            f"carried/{rank}/{name}/" for name, each in known.items() if first.setdefault((name, each), rank) < rank
        )
        kept.append([one for one in mine if not one.name.startswith(again)] if again else mine)
    return kept


def merge_carried(said: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the entries of all ranks into one manifest entry that lists each distinct value once, with its ranks."""
    values = dict[str, list[dict[str, Any]]]()
    for word in sorted(said, key=lambda word: word["rank"]):
        for name, told in word["values"].items():
            rows = values.setdefault(name, [])
            row = next((row for row in rows if all(row[key] == told[key] for key in ("same", "value"))), None)
            if row is None:
                rows.append({**told, "ranks": [word["rank"]]})
            else:
                row["ranks"].append(word["rank"])
                row["read"] = row["read"] or told["read"]
    for row in (row for rows in values.values() for row in rows if all(word["of_all"] for word in said)):
        row["ranks"] += [rank for rank in range(said[0]["world"]) if rank not in row["ranks"]]
    unsaved = {name: kind for word in said for name, kind in word["unsaved"].items()}
    return {"world": said[0]["world"], "values": values, "unsaved": unsaved} if values or unsaved else {}


def _has_same_plan(manifest: Manifest, plan: Plan) -> bool:
    """Return whether the checkpoint was saved under this plan."""
    return manifest.plan == str(plan) and manifest.carried.world == plan.world


def _find_lost_values(manifest: Manifest, plan: Plan) -> list[str]:
    """Return names of values that differed between ranks, are read by steps, and have no place in this plan."""
    if _has_same_plan(manifest, plan):
        return []
    values = manifest.carried.values
    differing = (name for name, rows in values.items() if not _is_shared_value(manifest, rows) and any(row.read for row in rows))
    return [name for name in differing if f"model/{name}" not in manifest.tensors]


def describe_reset_values(manifest: Manifest, plan: Plan) -> list[str]:
    """Return one line for each changed value that restarts from its initial value; `explain_lost_values` covers the others."""
    lines = [f"{name} ({kind}) was not saved: it restarts from its initial value" for name, kind in manifest.carried.unsaved.items()]
    if _has_same_plan(manifest, plan):
        return lines
    told, values = set(_find_lost_values(manifest, plan)), manifest.carried.values
    differing = (name for name, rows in values.items() if name not in told and not _is_shared_value(manifest, rows))
    return [*lines, *(f"{name} restarts from its initial value: ranks had different values" for name in differing)]


def _is_shared_value(manifest: Manifest, rows: tuple[CarriedValue, ...]) -> bool:
    """Return whether all ranks that run the module had one value. Under pipeline parallelism only some stages run it."""
    if len(rows) > 1:
        return False
    world, having = manifest.carried.world, set(rows[0].ranks)
    stages = dict(enumerate(_find_stages(manifest.plan, world)))
    return {rank for rank in range(world) if stages[rank] in {stages.get(r) for r in having}} == having


def _find_stages(plan: str, world: int) -> list[int]:
    """Return the pipeline stage of each rank of a plan."""
    try:
        known = Plan.stored(plan).fill(world)
        return [known.at(rank)["pp"] for rank in range(world)]
    except PlaitError:  # a plan of another version
        return [0] * world


def explain_lost_values(manifest: Manifest, plan: Plan) -> tuple[str, str] | None:
    """Return (what, why) if values that differed between ranks prevent an exact resume under this plan, else None."""
    names = _find_lost_values(manifest, plan)
    if not names:
        return None
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    why = f"{names[0]}{more} differed between ranks under {manifest.plan}, and {plan} has no place for these values"
    return f"the carried state {names[0]} would be lost", why


def _select_values(manifest: Manifest, plan: Plan, rank: int) -> dict[str, CarriedValue]:
    """Return the saved values that a rank of this plan restores."""
    values = manifest.carried.values
    if _has_same_plan(manifest, plan):
        return {name: row for name, rows in values.items() for row in rows if rank in row.ranks}
    return {name: rows[0] for name, rows in values.items() if _is_shared_value(manifest, rows)}


def _list_tensor_names(manifest: Manifest, name: str, row: CarriedValue) -> list[str]:
    named = (f"carried/{row.ranks[0]}/{name}/{i}" for i in count())
    return list(takewhile(manifest.tensors.__contains__, named))


def allocate_carried(manifest: Manifest, plan: Plan, rank: int) -> dict[str, Part]:
    """Allocate the tensors that a rank of this plan restores."""
    parts, cpu = dict[str, Part](), torch.device("cpu")
    for name, row in _select_values(manifest, plan, rank).items():
        for each in _list_tensor_names(manifest, name, row):
            entry = manifest.tensors[each]
            parts[each] = make_full_part(allocate_tensor(each, entry, entry.shape, DTYPES[entry.dtype], cpu))
    return parts


def restore_carried(carried: "CarriedState", manifest: Manifest, plan: Plan, rank: int, parts: dict[str, Part]) -> list[str]:
    """Restore the values of a rank of this plan. Return a line on each value that could not be restored."""
    chosen = _select_values(manifest, plan, rank)
    tensors = {name: [parts[each].tensor for each in _list_tensor_names(manifest, name, row)] for name, row in chosen.items()}
    lost = carried.restore({name: structs.asdict(row) for name, row in chosen.items()}, tensors)
    return [f"{name} restarts from its initial value: this model has no attribute for the saved one" for name in lost]


def _find_loss_owners(loss: object) -> dict[str, object]:
    """Return the objects of a loss that may carry state, by name: its modules, or an object of a user class."""
    if isinstance(loss, nn.Module):
        return {f"{LOSS_PREFIX}.{name}".removesuffix("."): module for name, module in loss.named_modules()}
    return {LOSS_PREFIX: loss} if hasattr(loss, "__dict__") and is_user_class(type(loss)) else {}


def _join_name(owner: str, name: str) -> str:
    """Return the dotted name of an attribute. The model itself has the name ""."""
    return f"{owner}.{name}".lstrip(".")


def _buffer_spec(buffer: Tensor | None) -> tuple[Any, ...] | None:
    return None if buffer is None else (tuple(buffer.shape), buffer.dtype)


def _is_structure(value: object) -> bool:
    """Return whether a value is part of the model's structure rather than its state: a module, parameter, function or class."""
    return isinstance(value, (nn.Module, nn.Parameter, type, weakref.ref)) or callable(value)


def _check_extra_state(name: str, opaque: list[str]) -> None:
    if not opaque:
        return
    what = f"{name} holds a {opaque[0]}, which cannot be saved"
    why = "get_extra_state() of a module returns it; checkpoints hold tensors and plain values, and never pickle objects"
    fix = ("return tensors, numbers, strings, and lists or dicts of these from get_extra_state()",)
    raise PlaitError(Problem("K024", what, why=why, fix=fix))


class CallbackState(Protocol):
    """State of callbacks as JSON values (`engine/callbacks.py`)."""

    def state_dict(self) -> dict[str, Any]:
        ...

    def load_state_dict(self, kept: dict[str, Any]) -> list[str]:
        """Load the state. Return messages for the user, a line each."""
        ...


class Training(Protocol):
    """One rank's part of a training run."""

    job: Job
    plan: Plan
    place: Place
    rank_model: RankModel
    data: Data
    position: Position
    arguments: dict[str, str]
    base: BaseWeights | None
    """Base weights, if checkpoints omit the frozen parameters."""

    carried: CarriedState
    """State outside of parameters and buffers."""

    @property
    def callbacks(self) -> CallbackState:
        """State of the job's callbacks."""

    @property
    def model(self) -> torch.nn.Module:
        """This rank's part of the model."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of this rank's part."""

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Summary of the job and its data (`checkpoint/fingerprint.py`)."""

    @property
    def rule(self) -> FiniteRule:
        """Which tensors must be finite."""


def exchange_json(training: Training, word: dict[str, Any]) -> list[dict[str, Any]]:
    """Gather one JSON object of each rank, in the order of ranks. Collective."""
    said = all_gather_bytes(json.dumps(word).encode(), training.rank_model.mesh.world_group, training.rank_model.device)
    return [json.loads(text) for text in said]


def encode_problems(error: PlaitError) -> dict[str, Any]:
    """Encode an error for `exchange_json`."""
    return {"problems": [vars(problem) for problem in error.problems]}


def raise_first_problem(said: Iterable[dict[str, Any]], exit_code: int = USAGE) -> None:
    """Raise the problems of the first rank that has any, on all ranks."""
    for word in said:
        if word.get("problems"):
            raise PlaitError(map(parse_problem, word["problems"]), exit_code)
