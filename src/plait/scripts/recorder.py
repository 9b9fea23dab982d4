"""Record the training of a script, in each of its processes. This file has every hook and patch.

`scripts/sitecustomize.py` loads it after the script imported torch; it imports nothing of plait. Each process that steps an optimizer writes
one JSON line per event: its rank and first weights, each batch, each step, the order of each pass of a loader. Tensors are stored in a folder,
once each, under their hash. A recorder watches (`watch`: the script is unchanged) or prepares a comparison: dropout is off, passes end after
some steps, the process ends after the last step to compare. With `replay` it starts with recorded weights and reads recorded rows.

Torch's private names are used only in `install`: a torch without one is rejected, never guessed.
"""

import atexit
import functools
import gc
import itertools
import json
import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .values import (
    RecordedTensor,
    TensorFolder,
    count_labels,
    dtype_name,
    gather_full,
    hash_generators,
    hash_rows,
    is_split,
    iterate_tensors,
    replace_by_name,
)  # fmt: skip

EPOCH_STEPS = 3
"""Steps after which an epoch ends, so that a few steps cover two epochs."""
MAX_INDICES = 1 << 22
"""Maximum indices of a pass drawn at its end; rows of longer passes are not counted."""
OUTER, INNER = ("module", "_forward_module"), ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Names of the only child of wrappers: of a model, and of any module. They are not part of a parameter's name."""
DROPOUTS = ("dropout", "dropout_", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_alpha_dropout")
Event = dict[str, Any]


class LoaderPass:
    """One pass of a loader: the script's own batches as indices, how many were read, and the undrawn rest of its sampler."""

    def __init__(self, loader: "RecordedLoader"):
        self.loader, self.source = loader, f"{loader.number} {len(loader.passes)}"
        self.order, self.undrawn, self.read_count, self.size = list[list[Any]](), iter(loader.own_indices), 0, 0
        self.is_complete, self.is_batched = False, True
        loader.passes.append(self)

    def draw(self) -> Iterator[Any]:
        for batch in self.undrawn:
            indices = batch if isinstance(batch, (list, tuple)) else [batch]
            self.is_batched = indices is batch
            self.order.append([int(i) if hasattr(i, "__index__") else i for i in indices])
            yield batch
        self.is_complete = True

    def draw_rest(self) -> None:
        """Draw the rest of the order without loading it, up to a limit, since a sampler may be endless."""
        drawn = 0
        for _ in self.draw():
            if (drawn := drawn + len(self.order[-1])) >= MAX_INDICES:
                return

    def iterate_recorded(self, rows: list[list[Any]]) -> Iterator[Any]:
        """Yield the recorded rows of each step, as one batch, or one by one if the script's own loader does not batch."""
        self.draw_rest()
        for step in rows:
            yield from [step] if self.is_batched else step


class RecordedLoader:
    """An iterated loader, and the replacement of its sampler."""

    def __init__(self, number: int, loader: object, rows: dict[str, list[list[Any]]]):
        self.number, self.loader, self.rows = number, loader, rows
        self.own_indices: Collection[object] = ()
        self.passes, self.is_trained = list[LoaderPass](), False
        """Whether a loss was differentiated after one of its batches."""

    def __len__(self) -> int:
        return len(self.own_indices)

    def __iter__(self) -> Iterator[Any]:
        self.passes = [each for each in self.passes if each.order]  # a loader with workers starts twice
        began = LoaderPass(self)
        rows = self.rows.get(began.source)
        return began.draw() if rows is None else began.iterate_recorded(rows)


class ScriptRecorder:
    """Records the training of one process, or replays a recording in it."""
    def __init__(self, settings: Event):
        self.settings, self.tensors = settings, TensorFolder(settings["tensors"], settings["room"])
        self.file = open(os.path.join(settings["out"], f"{os.getpid()}.jsonl"), "a", encoding="utf-8")  # noqa: SIM115  as long as the process
        self.replay: Event = settings["replay"]
        self.created: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self.loaders, self.names, self.optimizers = dict[int, RecordedLoader](), dict[int, str](), dict[int, int]()
        self.last_pass: LoaderPass | None = None
        """The pass of the last batch. Then: open steps, steps of the first optimizer, batches read until each of them."""
        self.depth, self.step_count, self.batch_counts = 0, 0, list[int]()
        self.stepped, self.losses = set[int](), list[float]()
        self.after_grads, self.before_clip = dict[str, RecordedTensor](), dict[int, RecordedTensor]()
        self.formats = set[str]()
        """Number formats of weights, of FSDP and of autocast so far."""
        self.has_drawn, self.generators, self.first_hook = False, "", list[Any]()

    def write_event(self, what: str, **values: Any) -> None:
        print(json.dumps({"is": what, **values}, default=str), file=self.file, flush=True)

    def find_modules(self) -> list[nn.Module]:
        """Find the outermost modules whose parameters have values, in order of creation."""
        every = [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]
        inner = {id(child) for m in every for child in m.children()}
        real = [m for m in every if id(m) not in inner and any(map(has_values, m.parameters()))]
        return sorted(
            real, key=lambda m: (min((self.created.get(child, 1 << 60) for child in m.modules()), default=0), -sum(1 for _ in m.parameters()))
        )

    def name_tensors(self) -> dict[str, Tensor]:
        """Name parameters and buffers: those of the first model unprefixed, of others with m1., m2. in front. Keeps the names by id."""
        self.names, found, number = {}, dict[str, Tensor](), 0
        for top in self.find_modules():
            new = [(strip_wrappers(name), p) for name, p in top.named_parameters() if id(p) not in self.names]
            prefix = f"m{number}." * (number > 0)
            self.names |= {id(p): prefix + name for name, p in new}
            found |= {prefix + name: t for name, t in (*new, *((strip_wrappers(name), b) for name, b in top.named_buffers())) if has_values(t)}
            number += bool(new)
        return found

    def get_name(self, p: Tensor) -> str:
        """Return the name of a parameter; `?` if no module has it."""
        if id(p) not in self.names:
            self.name_tensors()
        return self.names.setdefault(id(p), "?")

    def record_start(self, module: nn.Module, arguments: object) -> None:
        """Before the first training forward pass, record the weights, or load recorded ones."""
        if not (torch.is_grad_enabled() and module.training and any(p.requires_grad for p in module.parameters())):
            return
        self.first_hook.pop().remove()
        tensors = self.name_tensors()
        with torch.no_grad():
            for name, each in self.replay.get("weights", {}).items():
                if name in tensors and [*tensors[name].shape] == each[2]:
                    target, value = tensors[name], self.tensors.load(RecordedTensor(*each))
                    if is_split(target):
                        value = sys.modules["torch.distributed.tensor"].distribute_tensor(value, target.device_mesh, target.placements)
                    target.copy_(value)
            weights = {name: self.tensors.store(t) for name, t in tensors.items()}
        joined = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank, world = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if joined else (0, 1)
        policies = [vars(each) for each in gc.get_objects() if type(each).__name__ == "MixedPrecisionPolicy"]  # of FSDP
        of_policies = {each.get(of) for each in policies for of in ("param_dtype", "reduce_dtype")} - {None}
        self.formats |= {dtype_name(dtype) for dtype in {t.dtype for t in tensors.values() if t.is_floating_point()} | of_policies}
        self.write_event(
            "start", rank=rank, world=world, weights=weights, group=sorted(self.find_row_group(rank)),
            trainable=[name for name, t in tensors.items() if isinstance(t, nn.Parameter) and t.requires_grad],
            batch_norms=sorted({kind for top in self.find_modules() for each in top.modules() if "BatchNorm" in (kind := type(each).__name__)}),
        )  # fmt: skip
        if self.last_pass is None:
            self.follow_inputs(module, arguments)

    def follow_inputs(self, module: nn.Module, arguments: object) -> None:
        """Record rows at the model's inputs if no loader is used. Keywords of the first call are available only after it."""
        began = hash_generators()

        def called(_: nn.Module, __: object, keywords: Event, ___: object) -> None:
            first_call.remove()
            self.record_inputs(module, arguments, keywords)
            self.generators = began

        first_call = module.register_forward_hook(called, with_kwargs=True)
        module.register_forward_pre_hook(self.record_inputs, with_kwargs=True, prepend=True)

    def find_row_group(self, rank: int) -> set[int]:
        """Find the ranks that read the same rows as this one under tensor parallelism, by placements alone."""
        sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
        tops, meshes, found = self.find_modules(), dict[str, list[Any]](), {rank}
        under = {id(p) for top in tops for module in top.modules() if isinstance(module, sharded) for p in module.parameters()}
        for p in (p for top in tops for p in top.parameters() if is_split(p)):
            meshes.setdefault(str(p.device_mesh.mesh.tolist()), []).append(p)
        for parameters in meshes.values():
            mesh = parameters[0].device_mesh
            of_data = {d for d in range(mesh.ndim) if not any(p.placements[d].is_shard() for p in parameters)}
            if any(id(p) in under for p in parameters):  # fully_shard puts its dimensions in front of others
                of_data |= {0, 1} if mesh.ndim > 1 and 0 in of_data else {0}
            here = mesh.get_coordinate()
            if here is not None:
                found |= set(mesh.mesh[tuple(here[d] if d in of_data else slice(None) for d in range(mesh.ndim))].flatten().tolist())
        return found

    def get_loader(self, loader: object, own: Collection[object] = ()) -> RecordedLoader:
        """Get the record of a loader. `own`: the indices of its own sampler."""
        known = self.loaders.setdefault(id(loader), RecordedLoader(len(self.loaders), loader, self.replay.get("rows", {})))
        known.own_indices = own
        return known

    def read_batch(self, iterator: object, indices: object, fetch: Callable[[Any], object]) -> object:
        """Read and record the next batch of a loader's iterator; ends the pass after enough steps. `indices`: the source of its indices."""
        known = indices if isinstance(indices, RecordedLoader) else self.get_loader(iterator)  # each iterator of a stream is a pass
        now = known.passes[-1] if known.passes else LoaderPass(known)
        if known.is_trained and not self.settings["watch"]:
            if self.step_count >= self.settings["steps"]:
                self.finish()
            per = max(1, self.batch_counts[1] - self.batch_counts[0]) if len(self.batch_counts) > 1 else sys.maxsize  # a rank may read ahead
            if not self.replay and now.read_count >= EPOCH_STEPS * per and now.read_count % per == 0:
                now.draw_rest()
                raise StopIteration
        contents = self.replay.get("contents", {}).get(now.source)
        if contents is not None and now.read_count >= len(contents):
            raise StopIteration
        batch = fetch(iterator)
        now.size = now.size or len(hash_rows(batch))
        if contents is not None:
            rows = {name: torch.cat([self.tensors.load(RecordedTensor(*each)) for each in parts]) for name, parts in contents[now.read_count].items()}
            batch = replace_by_name(batch, rows)
        if self.settings["float64"]:
            batch = replace_by_name(batch, {name: t.double() for name, t in iterate_tensors(batch) if t.is_floating_point()})
        self.last_pass = now
        self.record_batch(batch, now.source, now.order[now.read_count] if now.read_count < len(now.order) else None)
        now.read_count += 1
        return batch

    def record_inputs(self, _: nn.Module, given: object, keywords: Event) -> None:
        if self.last_pass is None and torch.is_grad_enabled():
            self.record_batch((given, keywords))

    def record_batch(self, batch: object, source: str = "", indices: list[Any] | None = None) -> None:
        """Record a batch; `indices`: those that the script's own sampler drew for it."""
        leaves = dict(iterate_tensors(batch))
        kept = {} if self.replay else {name: self.tensors.store(t) for name, t in leaves.items()}
        known = indices if indices is not None and all(isinstance(i, (int, str)) for i in indices) else None
        shapes = [list(t.shape[1:]) for t in leaves.values()]
        self.write_event("batch", source=source, rows=hash_rows(batch), indices=known, labels=count_labels(leaves), stored=kept, shapes=shapes)
        self.generators = hash_generators()

    def backward(self, own: Callable[..., None], tensors: Tensor | Iterable[Tensor], *given: Any, **keywords: Any) -> None:
        """Record the loss value before backward, and the gradients after the first backward passes."""
        if self.last_pass is not None:
            self.last_pass.loader.is_trained = True
        self.losses.append(float(gather_full(tensors if isinstance(tensors, Tensor) else next(iter(tensors))).double().sum()))
        self.has_drawn = self.has_drawn or self.generators not in ("", hash_generators())
        own(tensors, *given, **keywords)
        if self.step_count == 0:
            self.after_grads = {
                self.get_name(p): self.tensors.store(p.grad) for top in self.find_modules() for p in top.parameters() if p.grad is not None
            }

    def record_clip(self, own: Callable[..., Any], parameters: Tensor | Iterable[Tensor], *given: Any, **keywords: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else [*parameters]
        self.before_clip = {id(p): self.tensors.store(p.grad) for p in parameters if p.grad is not None}
        return own(parameters, *given, **keywords)

    def before_step(self, *_: object) -> None:
        self.depth += 1

    def after_step(self, optimizer: Optimizer, *_: object) -> None:
        """Record a step at its end, since a closure computes gradients inside it. Ends the process after the last step to compare."""
        self.depth -= 1
        if self.depth:  # of an optimizer inside of another
            return
        number = self.optimizers.setdefault(id(optimizer), len(self.optimizers))
        if number == 0:
            self.step_count, self.stepped = self.step_count + 1, set()
            self.batch_counts.append(sum(each.read_count for each in self.last_pass.loader.passes) if self.last_pass is not None else 0)
        self.stepped.add(number)
        groups = [(group, p) for group in optimizer.param_groups for p in group["params"]]
        applied = {p: self.tensors.store(p.grad) for _, p in groups if p.grad is not None}
        weights = {self.get_name(p): self.tensors.store(p) for _, p in groups}
        buffers = {name: self.tensors.store(t) for name, t in self.name_tensors().items() if not isinstance(t, nn.Parameter)}
        is_full = self.tensors.room < 0
        self.write_event(
            "step", step=self.step_count, optimizer=number, kind=type(optimizer).__name__, formats=sorted(self.formats),
            lr={self.get_name(p): float(group.get("lr") or 0) for group, p in groups},
            decay={self.get_name(p): float(group.get("weight_decay") or 0) for group, p in groups}, losses=self.losses, drew=self.has_drawn,
            source=self.last_pass.source if self.last_pass else "", after=self.after_grads,
            gradients={self.get_name(p): self.before_clip.get(id(p), t) for p, t in applied.items()},
            applied={self.get_name(p): t for p, t in applied.items()}, weights=weights, buffers=buffers, complete=not is_full,
        )  # fmt: skip
        self.losses, self.after_grads, self.before_clip = [], {}, {}
        if not self.settings["watch"] and (is_full or (self.step_count >= self.settings["steps"] and len(self.stepped) == len(self.optimizers))):
            self.finish()

    def finish(self, leave: bool = True) -> None:
        """Record the orders of passes; end the process."""
        for each in (each for known in self.loaders.values() for each in known.passes):
            if each.loader.is_trained and not self.settings["watch"]:
                each.draw_rest()
            self.write_event(
                "epoch", source=each.source, order=each.order, own=len(each.order[0]) if each.order else each.size, complete=each.is_complete
            )
        if leave:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


def has_values(t: Tensor) -> bool:
    """Return False on the meta device and for torch's fake tensors, with which a script may count operations."""
    return not t.is_meta and type(t.data).__name__ != "FakeTensor"


def strip_wrappers(name: str) -> str:
    """Return the name without wrappers: `module._orig_mod.head.module.bias` is `head.module.bias`."""
    parts = [part for part in name.split(".") if part not in INNER]
    return ".".join(itertools.dropwhile(lambda part: part in OUTER, parts))


def install(settings: Event) -> None:
    """Hook the torch of this process. A torch without a required private name is left unchanged, and reported in a file."""
    data, steps, modules = cast(Any, torch.utils.data.dataloader), sys.modules["torch.optim.optimizer"], nn.modules.module
    try:
        loader, iterator, stream = data.DataLoader, data._BaseDataLoaderIter, data._DatasetKind.Iterable
        indices, fetch, enter = loader._index_sampler.fget, iterator.__next__, torch.autocast.__enter__
        clips = {name: getattr(nn.utils, name) for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")}
        recorder = ScriptRecorder(settings)
        steps.register_optimizer_step_pre_hook(recorder.before_step)
        steps.register_optimizer_step_post_hook(recorder.after_step)
        modules.register_module_parameter_registration_hook(lambda module, *_: (recorder.created.setdefault(module, len(recorder.created)), None)[1])
        recorder.first_hook.append(modules.register_module_forward_pre_hook(recorder.record_start))
    except AttributeError as error:
        Path(settings["out"], "unsupported").write_text(f"torch {torch.__version__}: {error}", "utf-8")
        return
    torch.autograd.backward = functools.partial(recorder.backward, torch.autograd.backward)
    for place, (name, clip) in itertools.product((nn.utils, nn.utils.clip_grad), clips.items()):
        setattr(place, name, functools.partial(recorder.record_clip, clip))

    def enter_autocast(self: torch.autocast) -> Any:
        value = enter(self)
        if torch.is_autocast_enabled(self.device):
            recorder.formats.add(dtype_name(torch.get_autocast_dtype(self.device)))
        return value

    torch.autocast.__enter__ = enter_autocast
    own = lambda self: indices(self) if self._dataset_kind == stream else recorder.get_loader(self, indices(self))  # noqa: E731
    loader._index_sampler, iterator.__next__ = property(own), lambda self: recorder.read_batch(self, self._index_sampler, fetch)
    if not settings["watch"]:
        disable_dropout()
    if settings["float64"]:
        force_float64()
    atexit.register(recorder.finish, False)


def disable_dropout() -> None:
    """Make dropout return its input: ranks cannot draw the masks of one process."""
    functional, recurrent = nn.functional, cast(Any, nn.RNNBase)
    for place, name in itertools.product((functional, torch), DROPOUTS):
        if hasattr(place, name):
            setattr(place, name, lambda input, *_, **__: input)
    recurrent.dropout = property(lambda _: 0.0, lambda *_: None)
    attention = functional.scaled_dot_product_attention

    def without(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, *given: Any, **more: Any):
        return attention(query, key, value, attn_mask, 0.0, *given, **more)

    functional.scaled_dot_product_attention = without


def force_float64() -> None:
    """Compute in float64 instead of narrower formats; autocast is off."""
    wide = lambda value: torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value  # noqa: E731
    casts = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}

    class InFloat64(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Event | None = None) -> Any:
            if func in casts:
                return torch.Tensor.double(args[0])
            return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})

    torch.set_default_dtype(torch.float64)
    InFloat64().__enter__()
    begin = torch.autocast.__init__
    torch.autocast.__init__ = lambda self, device, *_, **more: begin(self, device, **more | {"enabled": False})
