"""What a model, a loss and an optimizer carry from step to step outside of parameters, buffers and `optimizer.state`, as checkpoints hold it.

Recurrent layers keep a hidden state, mixtures a running count, queues a list of features, optimizers the step of their own schedule, in
plain attributes; `get_extra_state` gives what else a `state_dict()` has. Whatever of it has changed since the model was made is saved,
unless every step makes it anew (`checkpoint/plain_values.py`). Each rank saves its own. The same plan gives each rank its own back.
Another plan gives all ranks what all of them had; where ranks had different values there is nothing to go on with.

What a checkpoint is taken of, and given back to: a rank's training, of which `engine/engine.py` has the one implementation.

And how its ranks agree: each says something, and all hear it.
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

from plait.checkpoint.manifest import Base, CarriedValue, Manifest
from plait.checkpoint.plain_values import AttributeWatch, Json, Opaque, Restorer, Writer
from plait.checkpoint.reading import room_for
from plait.checkpoint.safetensors_file import DTYPES, UNREADABLE, HeldChunk
from plait.config.errors import USAGE, PlaitError, Problem, problem_of
from plait.config.job import Job, is_user_class
from plait.config.plan import Plan
from plait.data.batch import Data, Position
from plait.launch.place import Place
from plait.model.optimizers import wrapped
from plait.parallel.rank_model import RankModel
from plait.tensors.collectives import exchange
from plait.tensors.modules import OURS, STRUCTURE
from plait.tensors.norm import Rule
from plait.tensors.rows import Part, whole
from plait.tensors.torch_private import own_buffers

LOSS = "Job.loss"
"""How the names of what the loss carries begin."""
OPTIMIZER = "Job.optimizer"
"""How the names of what the optimizer carries begin."""
IGNORED = STRUCTURE | OURS
"""Attributes of every module that say nothing of its state."""
SAVED = frozenset({"state", "param_groups", "defaults"})
"""Attributes of every optimizer that checkpoints hold by parameter (`checkpoint/optimizer_state.py`)."""
CONSTANT = (int, float, bool, str, type(None))
EXTRA = "_extra_state"


@dataclass
class Carried:
    """What one rank carries."""

    values: dict[str, Json] = field(default_factory=dict)
    """By name: the value's JSON, and whether it is in the object that the model was made with."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """`<name>/<number>` -> a tensor of that value."""
    unsaved: dict[str, str] = field(default_factory=dict)
    """Names of what has changed and cannot be saved, and its type."""

    def parts(self, rank: int) -> dict[str, Part]:
        """Its tensors as a checkpoint names those of a rank."""
        return {f"carried/{rank}/{name}": whole(tensor) for name, tensor in self.tensors.items()}

    def told(self, rank: int, world: int, of_all: bool = False) -> dict[str, Any]:
        """What this rank's list of a checkpoint says of it. `of_all`: ranks that are lost had the same."""
        return {"rank": rank, "world": world, "values": self.values, "unsaved": self.unsaved, "of_all": of_all}

    def digests(self) -> dict[str, str]:
        said = {name: json.dumps([told["same"], told["value"]]) for name, told in self.values.items()}
        return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in said.items()}


@dataclass(frozen=True)
class _First:
    """An attribute as the model was made with it."""

    value: object
    told: str

    @staticmethod
    def of(value: object, told: Json) -> "_First":
        return _First(weakref.ref(value) if isinstance(value, Tensor) else value, json.dumps(told))

    def holds(self, value: object) -> bool:
        """Whether it is the same object still."""
        return (self.value() if isinstance(self.value, weakref.ref) else self.value) is value


class CarriedState:
    """Finds, saves and restores it. It is made when the model is, before the first step."""

    def __init__(
        self, model: nn.Module, loss: object, optimizer: Optimizer | None, device: torch.device, *,
        sampled: Collection[str] = (), process_flags: Collection[str] = (), watch: bool = True,
    ):  # fmt: skip
        """`sampled`: buffers that are made from the samples a rank sees. `process_flags`: attributes that stand for what a forward pass
        makes in each process anew, such as hooks. `watch`: find out what each step makes anew."""
        self.device, self.watch, self.steps = device, AttributeWatch(), 0
        self.watches, self._sampled, self._process_flags = watch, frozenset(sampled), frozenset(process_flags)
        self._numbers = set[tuple[str, str]]()
        """Places of numbers and texts that steps change."""
        self._before: dict[str, Any] | None = None
        """Numbers and texts as they were before the step that has begun."""
        self._shared: dict[str, str] = {}
        """Digests of what all ranks had alike when it was last saved."""
        self._left_out = {name for name, _ in model.named_buffers(remove_duplicate=False)} - set(model.state_dict(keep_vars=True))
        """Buffers that are not persistent."""
        self._forms = {name: _form_of(buffer) for name, buffer in model.named_buffers(remove_duplicate=False)}
        self._owners: dict[str, object] = dict(model.named_modules())
        known = set(map(id, self._owners.values()))
        self._owners |= {name: owner for name, owner in _inside(loss).items() if id(owner) not in known}
        optimizers = [] if optimizer is None else [optimizer, *wrapped(vars(optimizer))]
        self._owners |= {f"{OPTIMIZER}.{i}" if i else OPTIMIZER: each for i, each in enumerate(optimizers)}
        self._first: dict[str, _First] = {}
        for name, value in self._values():
            writer = Writer()
            told = writer.write(value)
            if name.endswith(f".{EXTRA}") or name == EXTRA:
                _check_extra(name, writer.opaque)
            self._first[name] = _First.of(value, told)

    def _values(self) -> Iterator[tuple[str, Any]]:
        for owner, name, value in self._places():
            yield _key(owner, name), value

    def _places(self) -> Iterator[tuple[str, str, Any]]:
        """(owner's name, attribute, value) of everything that may be carried."""
        for at, owner in self._owners.items():
            known = IGNORED if isinstance(owner, nn.Module) else SAVED if isinstance(owner, Optimizer) else frozenset[str]()
            for name, value in list(vars(owner).items()):
                if name not in known and not _is_structure(value) and _key(at, name) not in self._process_flags:
                    yield at, name, value
            if isinstance(owner, nn.Module):
                yield from ((at, name, buffer) for name, buffer in own_buffers(owner).items() if self._counts(at, name))
                if type(owner).get_extra_state is not nn.Module.get_extra_state:
                    yield at, EXTRA, owner.get_extra_state()

    def _counts(self, at: str, name: str) -> bool:
        """Whether a buffer is not simply one of the model's tensors that all ranks have alike."""
        key = _key(at, name)
        owner = self._owners[at]
        assert isinstance(owner, nn.Module)
        ours = at.startswith(LOSS) or key in self._sampled or key in self._left_out
        return ours or self._forms.get(key) != _form_of(own_buffers(owner)[name])

    def reshaped(self) -> set[str]:
        """Buffers of the model's state that are not of the shape and format that they were made with."""
        modules = (
            (at, owner)
            for at, owner in self._owners.items()
            if isinstance(owner, nn.Module) and not at.startswith(LOSS)
        )
        named = {_key(at, n): b for at, owner in modules for n, b in own_buffers(owner).items()}
        return {name for name, buffer in named.items() if self._forms.get(name) != _form_of(buffer)}

    def close(self) -> None:
        """Leave the classes of the modules as they were."""
        self.watch.close()

    def begin_step(self) -> None:
        self.watch.begin_step()
        self._before = {_key(at, name): vars(self._owners[at]).get(name) for at, name in self._numbers}

    def end_step(self) -> None:
        """A step was made: after the first, what it has changed is watched."""
        self.steps, self._before = self.steps + 1, None
        if self.steps == 1:
            self.take()

    def exchanged(self, digests: list[dict[str, str]]) -> None:
        """What each rank carries was saved, with these digests."""
        self._shared = {name: one for name, one in digests[0].items() if all(each.get(name) == one for each in digests)}

    def of_survivor(self) -> Carried | None:
        """What this rank carried after the last whole step, if a lost rank had the same. That is so of what is as it was when it was
        saved last, and all ranks had it then; and of whole numbers and texts that all ranks had alike then, such as counts of calls."""
        now, before = self.take(), self._before or {}
        digests = now.digests()
        for name in list(now.values):
            value = before.get(name, now.values[name]["value"])
            if name not in self._shared or (
                digests[name] != self._shared[name] and not isinstance(value, (bool, int, str))
            ):
                return None
            if name in before:
                now.values[name]["value"] = Writer().write(value)
        return now

    def take(self) -> Carried:
        """What this rank carries now. What is new among it is watched from the next step on."""
        found = Carried()
        for at, name, value in self._places():
            key, owner = _key(at, name), self._owners[at]
            first = self._first.get(key)
            same = first is not None and first.holds(value)
            if (same and isinstance(value, CONSTANT)) or self.watch.is_made_anew(owner, name):
                continue
            writer = Writer()
            told = writer.write(value)
            if first is not None and json.dumps(told) == first.told and (same or not writer.opaque):
                continue
            if isinstance(owner, Optimizer) and any(tensor.dim() for tensor in writer.tensors):
                continue  # it may be of the rank's parts of parameters: `optimizer_state.check` raises K011
            if writer.opaque and not same:
                if is_user_class(type(owner)) or at.startswith(LOSS):
                    found.unsaved[key] = writer.opaque[0]
                continue
            if self.watches and name in vars(owner):
                self.watch.add(owner, name)
            if isinstance(value, (bool, int, str)) and name in vars(owner):
                self._numbers.add((at, name))
            found.values[key] = {"same": same, "read": self.watch.is_read(owner, name), "value": told}
            found.tensors |= {f"{key}/{i}": tensor for i, tensor in enumerate(writer.tensors)}
        return found

    def take_over(self, other: "CarriedState") -> None:
        """Carry what the other one carries."""
        found = other.take()
        tensors = {name: [t for at, t in found.tensors.items() if at.rpartition("/")[0] == name] for name in found.values}
        self.restore(found.values, {name: [t.clone() for t in kept] for name, kept in tensors.items()})

    def restore(self, values: dict[str, Json], tensors: dict[str, list[Tensor]]) -> list[str]:
        """Put values back (rows of `CarriedValue`); names of what could not be."""
        lost = []
        for key, told in values.items():
            if key in self._process_flags:
                continue
            at, _, name = key.rpartition(".")
            owner = self._owners.get(at)
            try:
                if owner is None:
                    raise Opaque(key)
                self._put(owner, name, told, Restorer(tensors.get(key, []), self.device))
            except (Opaque, RuntimeError, *UNREADABLE):
                lost.append(key)
        return lost

    def _put(self, owner: object, name: str, told: Json, restorer: Restorer) -> None:
        if name == EXTRA and isinstance(owner, nn.Module):
            owner.set_extra_state(restorer.read(told["value"]))
            return
        if isinstance(owner, nn.Module) and name in IGNORED:
            raise Opaque(name)
        table = own_buffers(owner) if isinstance(owner, nn.Module) and name in own_buffers(owner) else vars(owner)
        there = table.get(name)
        with torch.no_grad():
            table[name] = restorer.read(told["value"], there if told["same"] else None)
        if self.watches and name in vars(owner):
            self.watch.add(owner, name)
            if told["read"]:
                self.watch.note_read(owner, name)


def without_copies(held: list[list[HeldChunk]], digests: list[dict[str, str]]) -> list[list[HeldChunk]]:
    """What each rank holds, without what a rank before it carries too. `digests`: those of each rank's values."""
    first: dict[tuple[str, str], int] = {}
    kept = list[list[HeldChunk]]()
    for rank, (mine, known) in enumerate(zip(held, digests)):
        again = tuple(
            f"carried/{rank}/{name}/" for name, each in known.items() if first.setdefault((name, each), rank) < rank
        )
        kept.append([one for one in mine if not one.name.startswith(again)] if again else mine)
    return kept


def merged(said: list[dict[str, Any]]) -> dict[str, Any]:
    """One manifest's words of what all ranks told: each different value once, with its ranks."""
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


def _is_of(manifest: Manifest, plan: Plan) -> bool:
    """Whether the checkpoint was saved under this plan."""
    return manifest.plan == str(plan) and manifest.carried.world == plan.world


def _differing(manifest: Manifest, plan: Plan) -> list[str]:
    """Names of what ranks had different values of, and steps read, where this plan has no place for them."""
    if _is_of(manifest, plan):
        return []
    values = manifest.carried.values
    differing = (name for name, rows in values.items() if not _alike(manifest, rows) and any(row.read for row in rows))
    return [name for name in differing if f"model/{name}" not in manifest.tensors]


def changes(manifest: Manifest, plan: Plan) -> list[str]:
    """What a run of this plan begins anew although it has changed, a line each; `refused` has the rest."""
    lines = [f"{name} ({kind}) was not saved: it begins anew" for name, kind in manifest.carried.unsaved.items()]
    if _is_of(manifest, plan):
        return lines
    told, values = set(_differing(manifest, plan)), manifest.carried.values
    differing = (name for name, rows in values.items() if name not in told and not _alike(manifest, rows))
    return [*lines, *(f"{name} begins anew: ranks had different values" for name in differing)]


def _alike(manifest: Manifest, rows: tuple[CarriedValue, ...]) -> bool:
    """Whether all ranks that run the module had one value. Under pp those of some stages run it."""
    if len(rows) > 1:
        return False
    world, having = manifest.carried.world, set(rows[0].ranks)
    stages = dict(enumerate(_stages(manifest.plan, world)))
    return {rank for rank in range(world) if stages[rank] in {stages.get(r) for r in having}} == having


def _stages(plan: str, world: int) -> list[int]:
    """The pipeline stage of each rank of a plan."""
    try:
        known = Plan.stored(plan).fill(world)
        return [known.at(rank)["pp"] for rank in range(world)]
    except PlaitError:  # of another version
        return [0] * world


def refused(manifest: Manifest, plan: Plan) -> tuple[str, str] | None:
    """(what, why) this plan cannot go on exactly, where different values of ranks are the reason."""
    names = _differing(manifest, plan)
    if not names:
        return None
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    why = f"{names[0]}{more} had another value on each rank under {manifest.plan}, and {plan} has no place for these values"
    return f"what {names[0]} carries from step to step, without its values", why


def _chosen(manifest: Manifest, plan: Plan, rank: int) -> dict[str, CarriedValue]:
    """The values that a rank of this plan goes on with."""
    values = manifest.carried.values
    if _is_of(manifest, plan):
        return {name: row for name, rows in values.items() for row in rows if rank in row.ranks}
    return {name: rows[0] for name, rows in values.items() if _alike(manifest, rows)}


def _tensors(manifest: Manifest, name: str, row: CarriedValue) -> list[str]:
    named = (f"carried/{row.ranks[0]}/{name}/{i}" for i in count())
    return list(takewhile(manifest.tensors.__contains__, named))


def wanted(manifest: Manifest, plan: Plan, rank: int) -> dict[str, Part]:
    """Room for the tensors that a rank of this plan goes on with."""
    parts, cpu = dict[str, Part](), torch.device("cpu")
    for name, row in _chosen(manifest, plan, rank).items():
        for each in _tensors(manifest, name, row):
            entry = manifest.tensors[each]
            parts[each] = whole(room_for(each, entry, entry.shape, DTYPES[entry.dtype], cpu))
    return parts


def give(carried: "CarriedState", manifest: Manifest, plan: Plan, rank: int, parts: dict[str, Part]) -> list[str]:
    """Put back what a rank of this plan goes on with; a line on each value that could not be."""
    chosen = _chosen(manifest, plan, rank)
    tensors = {name: [parts[each].tensor for each in _tensors(manifest, name, row)] for name, row in chosen.items()}
    lost = carried.restore({name: structs.asdict(row) for name, row in chosen.items()}, tensors)
    return [f"{name} begins anew: this model has no place for what was saved" for name in lost]


def _inside(loss: object) -> dict[str, object]:
    """What of a loss may carry something, by name: its modules, or an object of the user's own class."""
    if isinstance(loss, nn.Module):
        return {f"{LOSS}.{name}".removesuffix("."): module for name, module in loss.named_modules()}
    return {LOSS: loss} if hasattr(loss, "__dict__") and is_user_class(type(loss)) else {}


def _key(owner: str, name: str) -> str:
    """The name of an attribute, by its owner's; the model's own is ""."""
    return f"{owner}.{name}".lstrip(".")


def _form_of(buffer: Tensor | None) -> tuple[Any, ...] | None:
    return None if buffer is None else (tuple(buffer.shape), buffer.dtype)


def _is_structure(value: object) -> bool:
    """Whether a value is part of what the model is, not of its state: modules, parameters, functions, classes."""
    return isinstance(value, (nn.Module, nn.Parameter, type, weakref.ref)) or callable(value)


def _check_extra(name: str, opaque: list[str]) -> None:
    if not opaque:
        return
    what = f"{name} holds a {opaque[0]}, which cannot be saved"
    why = "a module's get_extra_state() returns it, and state in checkpoints is tensors and plain values: nothing is pickled"
    fix = ("return tensors, numbers, texts, and lists or dicts of these from get_extra_state()",)
    raise PlaitError(Problem("K024", what, why=why, fix=fix))


class CallbackState(Protocol):
    """What is kept beside a training as JSON values: the state of callbacks (`engine/callbacks.py`)."""

    def state_dict(self) -> dict[str, Any]:
        ...

    def load_state_dict(self, kept: dict[str, Any]) -> list[str]:
        """Take them up; what there is to say of them, a line each."""
        ...


class Training(Protocol):
    """One rank's part of a training."""

    job: Job
    plan: Plan
    place: Place
    rank_model: RankModel
    data: Data
    position: Position
    arguments: dict[str, str]
    base: Base | None
    """Where frozen parameters are that its checkpoints do not hold."""

    carried: CarriedState
    """What it carries from step to step outside of parameters and buffers."""

    @property
    def callbacks(self) -> CallbackState:
        """What has a state of its own."""

    @property
    def model(self) -> torch.nn.Module:
        """The rank's part of the model."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of that part."""

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What the training depends on (`checkpoint/fingerprint.py`)."""

    @property
    def rule(self) -> Rule:
        """Which of its tensors are to be finite."""


def exchange_json(training: Training, word: dict[str, Any]) -> list[dict[str, Any]]:
    """What every rank says, by rank; all ranks call it."""
    said = exchange(json.dumps(word).encode(), training.rank_model.mesh.everyone, training.rank_model.device)
    return [json.loads(text) for text in said]


def problems_in(error: PlaitError) -> dict[str, Any]:
    """An error as a word for `exchange_json`."""
    return {"problems": [vars(problem) for problem in error.problems]}


def raise_first(said: Iterable[dict[str, Any]], exit_code: int = USAGE) -> None:
    """The problems of the first rank that has any, on all ranks."""
    for word in said:
        if word.get("problems"):
            raise PlaitError(map(problem_of, word["problems"]), exit_code)
