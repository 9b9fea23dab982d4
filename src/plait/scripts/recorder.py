"""What a training script does, written down by each of its processes: the file that holds every hook and patch.

`plait prove` puts this file in front of Python's path as `sitecustomize.py`, so every Python process that the command starts loads it. It
does nothing until torch is imported, and imports nothing of plait. Each process that steps an optimizer leaves one JSON line per event:
its rank, the first weights, each batch, each step, the order of each epoch. Tensors lie beside them once each, under their hash.

A recorder watches (`watch`: nothing of the script changes) or prepares a comparison: dropout is off, epochs end after some steps, the
process ends after the last step to compare. With `replay` a process starts with the recorded weights and reads the recorded rows.

Torch's private names stand in `seams`, which raises where one is missing: another torch is never followed by guess.
"""

import atexit
import gc
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

VARIABLE = "PLAIT_PROVE"
"""The environment variable with the settings, as JSON."""
EPOCH_STEPS = 3
"""Steps after which an epoch ends, so that a few steps show two epochs."""
WRAPPERS = ("module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Names under which a wrapper has its only child. They are no part of a parameter's name."""
DROPOUTS = ("dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout")
Event = dict[str, Any]
Reference = list[Any]
"""A stored tensor: its hash, dtype and shape."""


class Unsupported(Exception):
    """This torch lacks something that the recorder needs."""


def seams(torch: Any) -> tuple[Any, ...]:
    """The private names: (DataLoader, its iterator's class, what its property of indices returns, the kind of streams)."""
    data = torch.utils.data.dataloader
    try:
        indices = data.DataLoader._index_sampler
        found = data.DataLoader, data._BaseDataLoaderIter, indices.fget, data._DatasetKind.Iterable
        if not callable(found[2]) or not callable(found[1].__next__):
            raise AttributeError("DataLoader._index_sampler is no property")
        for name in ("register_optimizer_step_pre_hook", "register_optimizer_step_post_hook"):
            getattr(sys.modules["torch.optim.optimizer"], name)
    except (AttributeError, KeyError) as error:
        raise Unsupported(f"torch {torch.__version__}: {error}") from error
    return found


class Store:
    """The events of this process, and the tensors of all."""

    def __init__(self, folder: str, limit: int):
        self.folder, self.left = folder, limit
        self.file = open(os.path.join(folder, f"{os.getpid()}.jsonl"), "a", encoding="utf-8")  # noqa: SIM115  open as long as the process
        self.tensors = os.path.join(os.path.dirname(folder), "tensors")

    def event(self, what: str, **values: Any) -> None:
        """Write an event."""
        self.file.write(json.dumps({"is": what, **values}, default=str) + "\n")
        self.file.flush()

    def tensor(self, torch: Any, t: Any) -> Reference:
        """Store a tensor, if there is room, and return its reference. A collective where it is in parts."""
        t = t.detach()
        t = t.full_tensor() if hasattr(t, "full_tensor") else t
        t = (t if t.layout == torch.strided else t.to_dense()).cpu().contiguous()
        data = t.reshape(-1).view(torch.uint8).numpy().data if t.numel() else b""
        name = hashlib.blake2b(data, digest_size=16).hexdigest()
        path = os.path.join(self.tensors, name)
        if not os.path.exists(path):
            self.left -= len(data)
            if self.left >= 0:
                with open(f"{path}.{os.getpid()}", "wb") as file:
                    file.write(data)
                os.replace(file.name, path)
        return [name, str(t.dtype).removeprefix("torch."), list(t.shape)]

    def read(self, torch: Any, reference: Reference) -> Any:
        """A stored tensor."""
        name, dtype, shape = reference
        with open(os.path.join(self.tensors, name), "rb") as file:
            data = bytearray(file.read())
        return torch.frombuffer(data, dtype=getattr(torch, dtype)).reshape(shape) if data else torch.empty(shape, dtype=getattr(torch, dtype))


class Epoch:
    """One pass over a loader."""

    def __init__(self, loader: int, number: int, size: int | None):
        self.loader, self.number, self.size = loader, number, size
        self.order: list[list[Any]] = []
        """The script's own batches, as indices."""
        self.read = 0
        """Batches that the script got."""
        self.rest: Iterator[Any] | None = None
        """What its sampler has not drawn yet."""

    def drain(self) -> None:
        """Draw the rest of the sampler, without loading anything."""
        for batch in self.rest or ():
            self.order.append(listed(batch))
        self.rest = None

    @property
    def key(self) -> str:
        """As in the rows to read."""
        return f"{self.loader} {self.number}"


class Loader:
    """A loader that was iterated."""

    def __init__(self, number: int, loader: Any):
        self.number, self.loader = number, loader
        self.epochs: list[Epoch] = []
        self.trains = False
        """A loss was differentiated after one of its batches."""

    def begin(self) -> Epoch:
        """A new pass."""
        size = len(self.loader.dataset) if hasattr(self.loader.dataset, "__len__") else None
        self.epochs.append(Epoch(self.number, len(self.epochs), size))
        return self.epochs[-1]


class Indices:
    """What a DataLoader draws indices from, in place of its own sampler."""

    def __init__(self, recorder: "Recorder", loader: Any, own: Any):
        self.recorder, self.loader, self.own = recorder, loader, own

    def __len__(self) -> int:
        return len(self.own)

    def __iter__(self) -> Iterator[Any]:
        epoch = self.recorder.loader(self.loader).begin()
        epoch.rest = iter(self.own)
        return self.drawn(epoch, epoch.rest)

    def drawn(self, epoch: Epoch, rest: Iterator[Any]) -> Iterator[Any]:
        """The script's batches, or the recorded ones."""
        replay = self.recorder.replay
        if replay is None or replay["rows"] is None or epoch.loader != replay["loader"]:
            for batch in rest:
                epoch.order.append(listed(batch))
                yield batch
            return
        single = False
        for batch in rest:
            single = not isinstance(batch, (list, tuple))
            epoch.order.append(listed(batch))
        size = max(map(len, epoch.order), default=1)
        for rows in replay["rows"].get(epoch.key, []):
            for start in range(0, len(rows), size):
                yield rows[start] if single else rows[start : start + size]


class Recorder:
    """The state of the recording in this process."""

    def __init__(self, settings: dict[str, Any], torch: Any):
        self.settings, self.torch, self.watches = settings, torch, bool(settings.get("watch"))
        self.store = Store(settings["out"], settings["limit"])
        self.replay = json.load(open(settings["replay"], encoding="utf-8")) if settings.get("replay") else None
        self.born: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.loaders: dict[int, Loader] = {}
        self.read: Epoch | None = None
        """The pass that the last batch is of."""
        self.batches = 0
        self.names: dict[int, str] = {}
        self.optimizers: list[int] = []
        self.depth = 0
        """Steps of optimizers that have begun and not ended."""
        self.round, self.stepped = 0, set[int]()
        """Steps of the first optimizer, and the optimizers that stepped since."""
        self.losses: list[float] = []
        self.per = 0
        """Batches of the first step."""
        self.after: dict[str, Reference] = {}
        self.before: dict[int, Reference] = {}
        self.step: Event = {}
        self.started = self.is_finished = False
        self.generators: str = ""

    # names

    def modules(self) -> list[Any]:
        """The outermost modules with parameters, in the order in which they were made."""
        module = self.torch.nn.Module
        every = [m for m in gc.get_objects() if isinstance(type(m), type) and issubclass(type(m), module)]
        inner = {id(child) for m in every for child in m.children()}
        tops = [m for m in every if id(m) not in inner and next(m.parameters(), None) is not None]
        return sorted(tops, key=lambda m: (min((self.born.get(child, 1 << 60) for child in m.modules()), default=0), -sum(1 for _ in m.parameters())))

    def named(self, parameters: Iterable[Any] = ()) -> dict[int, str]:
        """Names of parameters by id: of the first model as they are, of others with m1., m2. in front."""
        if not self.names or any(id(p) not in self.names for p in parameters):
            self.names, number = {}, 0
            for top in self.modules():
                found = {id(p): name for name, p in walk(top, "parameters") if id(p) not in self.names}
                self.names |= {key: f"m{number}." * (number > 0) + name for key, name in found.items()}
                number += bool(found)
        return self.names

    def tensors(self) -> dict[str, Any]:
        """Parameters and buffers of all models, by name."""
        by, found = self.named(), {}
        for number, top in enumerate(self.modules()):
            found |= {by[id(p)]: p for _, p in walk(top, "parameters") if id(p) in by}
            found |= {f"m{number}." * (number > 0) + name: b for name, b in walk(top, "buffers")}
        return found

    # the first forward pass

    def first(self, module: Any, arguments: tuple[Any, ...]) -> None:
        """Before the first forward pass that trains: write down the weights, or start with recorded ones."""
        torch = self.torch
        if not (torch.is_grad_enabled() and module.training and any(p.requires_grad for p in module.parameters())):
            return
        self.hook.remove()
        with torch.no_grad():
            for each in (each for top in self.modules() for each in top.modules()):
                if not self.watches and isinstance(each, torch.nn.RNNBase):
                    each.dropout = 0.0
            tensors = self.tensors()
            for name, reference in (self.replay or {}).get("weights", {}).items():
                if name in tensors and list(tensors[name].shape) == reference[2]:
                    place(torch, tensors[name], self.store.read(torch, reference))
            self.begin({name: self.store.tensor(torch, t) for name, t in tensors.items()})
        if self.read is None:  # rows that come from no loader are seen where the model gets them
            self.inputs(arguments)
            self.seen = module.register_forward_pre_hook(lambda _, args, kwargs: self.inputs((args, kwargs)), with_kwargs=True)

    def begin(self, weights: dict[str, Reference]) -> None:
        """Write down who this process is, and its first weights."""
        self.started = True
        distributed = self.torch.distributed
        joined = distributed.is_available() and distributed.is_initialized()
        rank = distributed.get_rank() if joined else int(os.environ.get("RANK", "0"))
        world = distributed.get_world_size() if joined else 1
        trainable = sorted({self.named().get(id(p), "?") for top in self.modules() for p in top.parameters() if p.requires_grad})
        batch_norms = [type(m).__name__ for top in self.modules() for m in top.modules() if "BatchNorm" in type(m).__name__]
        formats = sorted({str(p.dtype).removeprefix("torch.") for top in self.modules() for p in top.parameters()})
        problem = self.narrow() if self.settings["float64"] else ""
        self.store.event(
            "start", rank=rank, world=world, weights=weights, trainable=trainable, batch_norms=batch_norms[:1], formats=formats,
            group=sorted(self.group(rank)), torch=self.torch.__version__, narrow=problem,
        )  # fmt: skip

    def narrow(self) -> str:
        """What computes in another format than float64 though that was asked for."""
        policy = getattr(sys.modules.get("torch.distributed.fsdp"), "MixedPrecisionPolicy", None)
        for each in gc.get_objects() if policy is not None else ():
            if type(each) is policy and (each.param_dtype or each.reduce_dtype):
                return str(each)
        kinds = {p.dtype for top in self.modules() for p in top.parameters() if p.is_floating_point()}
        return ", ".join(sorted(str(kind) for kind in kinds - {self.torch.float64}))

    def group(self, rank: int) -> set[int]:
        """Ranks that read the same rows as this one because they have parts of the same layers (tensor parallelism), by placements alone."""
        sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
        under, meshes = set[int](), dict[str, tuple[Any, list[Any], list[bool]]]()
        for top in self.modules():
            for module in top.modules():
                if sharded and isinstance(module, sharded):
                    under |= {id(p) for p in module.parameters()}
            for p in top.parameters():
                if hasattr(p, "device_mesh"):
                    mesh, placed, is_sharded = meshes.setdefault(str(p.device_mesh.mesh.tolist()), (p.device_mesh, [], []))
                    placed.append(p.placements)
                    is_sharded.append(id(p) in under)
        found = {rank}
        for mesh, placed, is_sharded in meshes.values():
            of_data = {d for d in range(mesh.ndim) if not any(each[d].is_shard() for each in placed)}
            if any(is_sharded):  # fully_shard puts its dimensions in front of others
                of_data |= {0, 1} if mesh.ndim > 1 and 0 in of_data else {0}
            here = mesh.get_coordinate()
            if here is not None:
                found |= set(mesh.mesh[tuple(here[d] if d in of_data else slice(None) for d in range(mesh.ndim))].flatten().tolist())
        return found

    # data

    def loader(self, loader: Any) -> Loader:
        """What is known of a loader."""
        return self.loaders.setdefault(id(loader), Loader(len(self.loaders), loader))

    def next(self, iterator: Any, fetch: Callable[[Any], Any]) -> Any:
        """The next batch of a loader, written down; ends the epoch where enough of it was read."""
        source = getattr(iterator, "_index_sampler", None)
        if isinstance(source, Indices):
            known = self.loader(source.loader)
            epoch = known.epochs[-1]
        else:
            known = self.loader(iterator)  # a stream: each iterator is a pass
            epoch = known.epochs[-1] if known.epochs else self.stream(known)
        if not self.watches and known.trains:
            self.boundary()
            if self.replay is None and self.per and epoch.read >= EPOCH_STEPS * self.per and epoch.read % self.per == 0:
                epoch.drain()
                raise StopIteration
        batch = self.replaced(epoch, fetch, iterator)
        if self.settings["float64"]:
            batch = mapped(batch, lambda t: t.double() if t.is_floating_point() else t, self.torch)
        self.read = epoch
        self.batch(batch, epoch.loader, epoch.number)
        epoch.read += 1
        self.generators = state(self.torch)
        return batch

    def stream(self, known: Loader) -> Epoch:
        """A pass over a loader without indices."""
        known.epochs.append(Epoch(known.number, 0, None))
        return known.epochs[-1]

    def replaced(self, epoch: Epoch, fetch: Callable[[Any], Any], iterator: Any) -> Any:
        """The batch to read: the script's own, or one made of recorded rows."""
        contents = self.replay and self.replay["contents"]
        if not contents or epoch.loader != self.replay["loader"]:
            return fetch(iterator)
        steps = contents.get(epoch.key, [])
        if epoch.read >= len(steps):
            raise StopIteration
        own = fetch(iterator)
        rows = {name: [self.store.read(self.torch, each) for each in parts] for name, parts in steps[epoch.read].items()}
        self.store.event("own", loader=epoch.loader, epoch=epoch.number, rows=hashes(own, self.torch))
        return filled(own, {name: self.torch.cat(parts) for name, parts in rows.items()}, self.torch)

    def inputs(self, given: Any) -> None:
        """Rows that the model gets, where no loader gives any."""
        if self.read is None and self.torch.is_grad_enabled():
            self.batch(given, -1, 0)
            self.generators = state(self.torch)

    def batch(self, batch: Any, loader: int, epoch: int) -> None:
        """Write a batch down."""
        self.batches += 1
        leaves = dict(tree(batch, self.torch))
        stored = {name: self.store.tensor(self.torch, t) for name, t in leaves.items()} if self.replay is None and not self.watches else {}
        self.store.event("batch", loader=loader, epoch=epoch, rows=hashes(batch, self.torch), labels=labels(leaves), stored=stored,
                         shapes=[list(t.shape[1:]) for t in leaves.values()])  # fmt: skip

    # gradients and steps

    def boundary(self) -> None:
        """End the process where the last step to compare has ended."""
        if self.round >= self.settings["steps"] and not self.watches and not self.depth:
            self.finish()

    def backward(self, tensors: Any) -> None:
        """A loss is differentiated."""
        if self.read is not None:
            next(known for known in self.loaders.values() if known.number == self.read.loader).trains = True
        given = [tensors] if isinstance(tensors, self.torch.Tensor) else list(tensors)
        with self.torch.no_grad():
            self.losses += [float((t.full_tensor() if hasattr(t, "full_tensor") else t).detach().double().sum()) for t in given[:1]]
        if self.generators and self.generators != state(self.torch):
            self.drew = True

    drew = False
    """Random numbers were drawn between a batch and its loss."""

    def differentiated(self) -> None:
        """Gradients as the first backward passes leave them."""
        if self.round == 0:
            by = self.named()
            self.after = {by[id(p)]: self.store.tensor(self.torch, p.grad) for top in self.modules() for p in top.parameters() if p.grad is not None and id(p) in by}

    def clipped(self, parameters: Any) -> list[Any]:
        """Gradients that are about to be clipped; the parameters as a list."""
        given = [parameters] if isinstance(parameters, self.torch.Tensor) else list(parameters)
        self.before = {id(p): self.store.tensor(self.torch, p.grad) for p in given if p.grad is not None}
        return given

    def stepping(self, optimizer: Any) -> None:
        """Gradients as an optimizer is about to apply them."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        by = self.named(parameters)
        if id(optimizer) not in self.optimizers:
            self.optimizers.append(id(optimizer))
        number = self.optimizers.index(id(optimizer))
        if number == 0:
            self.stepped = set()
            self.round += 1
        self.stepped.add(number)
        name = lambda p: by.get(id(p), "?")  # noqa: E731
        with_gradient = [p for p in parameters if p.grad is not None]
        self.step = {
            "step": self.round, "optimizer": number, "kind": type(optimizer).__name__, "lr": [float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
            "decay": {name(p): float(group.get("weight_decay") or 0) for group in optimizer.param_groups for p in group["params"]},
            "without": sorted(name(p) for p in parameters if p.grad is None), "losses": self.losses, "loader": self.read.loader if self.read else -1,
            "epoch": self.read.number if self.read else 0, "after": self.after, "drew": self.drew,
            "before": {name(p): self.before[id(p)] for p in with_gradient if id(p) in self.before},
            "applied": {name(p): self.store.tensor(self.torch, p.grad) for p in with_gradient},
        }  # fmt: skip
        self.losses, self.after, self.before = [], {}, {}

    def has_stepped(self, optimizer: Any) -> None:
        """Weights and buffers after a step."""
        if not self.per:
            self.per = max(1, min(len(self.step["losses"]), self.batches))
        by = self.named()
        weights = {by.get(id(p), "?"): self.store.tensor(self.torch, p) for group in optimizer.param_groups for p in group["params"]}
        of_models = [(f"m{n}." * (n > 0) + name, b) for n, top in enumerate(self.modules()) for name, b in walk(top, "buffers")]
        self.store.event("step", **self.step, weights=weights, buffers={name: self.store.tensor(self.torch, b) for name, b in of_models},
                         complete=self.store.left >= 0)  # fmt: skip
        if len(self.stepped) == len(self.optimizers) > 0 and (self.round >= self.settings["steps"] or self.store.left < 0):
            if len(self.optimizers) == 1 or self.round > 1:
                self.boundary() if self.store.left >= 0 else self.watches or self.finish()

    def finish(self, leave: bool = True) -> None:
        """Write down the orders of epochs; end the process."""
        if not self.is_finished and self.started:
            self.is_finished = True
            for known in self.loaders.values():
                for epoch in known.epochs:
                    if not self.watches and known.trains:
                        epoch.drain()
                    self.store.event("epoch", loader=epoch.loader, epoch=epoch.number, order=epoch.order, size=epoch.size, read=epoch.read)
            self.store.event("end", steps=self.round)
        if leave:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


def listed(batch: Any) -> list[Any]:
    """The indices of a batch."""
    return [int(i) if hasattr(i, "__index__") else i for i in (batch if isinstance(batch, (list, tuple)) else [batch])]


def walk(module: Any, what: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Parameters or buffers with their names, in which wrappers do not show."""
    own = module._parameters if what == "parameters" else module._buffers
    yield from ((prefix + name, t) for name, t in own.items() if t is not None)
    children = [(name, child) for name, child in module._modules.items() if child is not None]
    is_wrapper = len(children) == 1 and children[0][0] in WRAPPERS and not module._parameters
    for name, child in children:
        yield from walk(child, what, prefix if is_wrapper else f"{prefix}{name}.")


def place(torch: Any, target: Any, value: Any) -> None:
    """Write a value into a tensor, which may be in parts."""
    value = value.to(target.dtype)
    if hasattr(target, "full_tensor"):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value, target.device_mesh, target.placements)
    target.copy_(value)


def tree(value: Any, torch: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors of a batch with rows, by place."""
    if isinstance(value, torch.Tensor):
        if value.dim():
            yield name, value
    elif hasattr(value, "items"):
        for key, each in value.items():
            yield from tree(each, torch, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for key, each in enumerate(value):
            yield from tree(each, torch, f"{name}.{key}")


def mapped(value: Any, change: Callable[[Any], Any], torch: Any) -> Any:
    """A batch with each tensor changed."""
    return filled(value, {name: change(t) for name, t in tree(value, torch)}, torch)


def filled(value: Any, new: dict[str, Any], torch: Any, name: str = "") -> Any:
    """A batch with tensors replaced by place."""
    if isinstance(value, torch.Tensor):
        return new.get(name, value)
    if hasattr(value, "items"):
        found = {key: filled(each, new, torch, f"{name}.{key}") for key, each in value.items()}
        if type(value) is dict:
            return found
        for key, each in found.items():
            value[key] = each
        return value
    if isinstance(value, (list, tuple)):
        found = [filled(each, new, torch, f"{name}.{key}") for key, each in enumerate(value)]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    return value


def hashes(batch: Any, torch: Any) -> list[str]:
    """A hash of each row of a batch."""
    leaves = [t.detach().cpu().contiguous() for _, t in tree(batch, torch) if t.layout == torch.strided]
    count = leaves[0].shape[0] if leaves else 0
    rows = [t.reshape(count, -1).view(torch.uint8).numpy() for t in leaves if t.shape[0] == count and t.numel()]
    return [hashlib.blake2b(b"".join(row[i].tobytes() for row in rows), digest_size=8).hexdigest() for i in range(count)]


def labels(leaves: dict[str, Any]) -> list[int] | None:
    """How many labels count in a batch: as they are, and without the first of each row (which a causal model shifts out)."""
    whole = {name: t for name, t in leaves.items() if not t.is_floating_point()}
    found = [t for t in whole.values() if (t == -100).any()] or [t for name, t in whole.items() if "label" in name] or [*whole.values()]
    if not found:
        return None
    return [int((found[-1] != -100).sum()), int((found[-1][:, 1:] != -100).sum()) if found[-1].dim() == 2 else 0]


def state(torch: Any) -> str:
    """A hash of the states of the generators that scripts draw from."""
    found = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8)
    found.update(repr(random.getstate()).encode())
    if "numpy" in sys.modules:
        found.update(repr(sys.modules["numpy"].random.get_state()[1:3]).encode())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found.update(torch.cuda.get_rng_state().numpy().tobytes())
    return found.hexdigest()


def install(torch: Any, settings: dict[str, Any]) -> None:
    """Hook a process's torch."""
    try:
        loader, iterator, indices, stream = seams(torch)
    except Unsupported as error:
        with open(os.path.join(settings["out"], "unsupported"), "w", encoding="utf-8") as file:
            file.write(str(error))
        return
    recorder = Recorder(settings, torch)
    own = lambda self: indices(self) if self._dataset_kind == stream else Indices(recorder, self, indices(self))  # noqa: E731
    loader._index_sampler = property(own)
    fetch = iterator.__next__
    iterator.__next__ = lambda self: recorder.next(self, fetch)
    torch.nn.modules.module.register_module_parameter_registration_hook(lambda module, *_: born(recorder, module))
    recorder.hook = torch.nn.modules.module.register_module_forward_pre_hook(recorder.first)
    hook_gradients(torch, recorder)
    optimizers = sys.modules["torch.optim.optimizer"]
    optimizers.register_optimizer_step_pre_hook(lambda *given: before_step(recorder, *given))
    optimizers.register_optimizer_step_post_hook(lambda optimizer, *_: after_step(recorder, optimizer))
    if not recorder.watches:
        without_dropout(torch)
    if settings["float64"]:
        in_float64(torch)
    atexit.register(recorder.finish, False)


def born(recorder: Recorder, module: Any) -> None:
    """Remember the order in which modules got parameters."""
    recorder.born.setdefault(module, len(recorder.born))


def before_step(recorder: Recorder, optimizer: Any, given: Any, keywords: Any) -> Any:
    """Before a step; with a closure, in which gradients are made, after that."""
    recorder.depth += 1
    if recorder.depth > 1:  # of an optimizer inside of another
        return None
    closure = given[1] if len(given) > 1 else keywords.get("closure")
    if not callable(closure):
        recorder.stepping(optimizer)
        return None

    def inside() -> Any:
        value = closure()
        recorder.stepping(optimizer)
        return value

    return ((given[0], inside, *given[2:]), keywords) if len(given) > 1 else (given, {**keywords, "closure": inside})


def after_step(recorder: Recorder, optimizer: Any) -> None:
    """After a step."""
    recorder.depth -= 1
    if recorder.depth == 0:
        recorder.has_stepped(optimizer)


def hook_gradients(torch: Any, recorder: Recorder) -> None:
    """Losses, gradients after backward, and before clipping."""
    backward = torch.autograd.backward

    def differentiate(tensors: Any, *given: Any, **keywords: Any) -> Any:
        recorder.backward(tensors)
        result = backward(tensors, *given, **keywords)
        recorder.differentiated()
        return result

    torch.autograd.backward = differentiate
    places = (torch.nn.utils, torch.nn.utils.clip_grad)
    for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
        if (clip := getattr(places[1], name, None)) is not None:
            clipping = lambda parameters, *a, _clip=clip, **k: _clip(recorder.clipped(parameters), *a, **k)  # noqa: E731
            for each in places:
                setattr(each, name, clipping)


def without_dropout(torch: Any) -> None:
    """Dropout gives its input: ranks cannot draw the masks of one process."""
    functional = torch.nn.functional
    for name in DROPOUTS:
        setattr(functional, name, lambda input, *_, **__: input)
    for name in ("dropout", "dropout_", "alpha_dropout", "feature_dropout"):
        if hasattr(torch, name):
            setattr(torch, name, lambda input, *_, **__: input)
    attention = functional.scaled_dot_product_attention

    def scaled_dot_product_attention(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *given: Any, **keywords: Any) -> Any:
        return attention(query, key, value, attn_mask, 0.0, *given, **keywords)

    functional.scaled_dot_product_attention = scaled_dot_product_attention


def in_float64(torch: Any) -> None:
    """Whatever would be made in a narrower format is made in float64; autocast is off."""
    narrow = {torch.float32, torch.float16, torch.bfloat16}
    wide = lambda value: torch.float64 if isinstance(value, torch.dtype) and value in narrow else value  # noqa: E731
    casts = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}

    class Wide(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = {name: wide(value) for name, value in (kwargs or {}).items()}
            if function in casts:
                return torch.Tensor.double(args[0])
            return function(*map(wide, args), **given)

    torch.set_default_dtype(torch.float64)
    Wide().__enter__()
    begin = torch.autocast.__init__

    def off(self: Any, *given: Any, **keywords: Any) -> None:
        begin(self, *given, **(keywords | {"enabled": False}) if len(given) < 3 else {**keywords})

    torch.autocast.__init__ = off


class AfterTorch(importlib.abc.MetaPathFinder):
    """Hooks torch when the script itself imports it."""

    def __init__(self, settings: dict[str, Any]):
        self.settings = settings

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec of torch, which hooks it after it was loaded."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_hook(module: ModuleType) -> None:
            load(module)
            install(module, self.settings)

        spec.loader.exec_module = load_and_hook
        return spec


def run_own_site() -> None:
    """Load the `sitecustomize` that this file stands in front of, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path or ".") != here])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize" and VARIABLE in os.environ:
    sys.meta_path.insert(0, AfterTorch(json.loads(os.environ[VARIABLE])))
    run_own_site()
