"""Every private or unstable name of torch that plait uses.

Each has a contract test: when a torch release moves a name, one test fails and this file alone changes.
"""

import dataclasses
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as _FakeTensorMode
from torch.distributed import ProcessGroup, _functional_collectives, _meta_registrations, distributed_c10d
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.dropout import _DropoutNd as DropoutBase
from torch.utils import checkpoint, hooks
from torch.utils._python_dispatch import TorchDispatchMode as _TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    register_dataclass,
    register_pytree_node,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)  # fmt: skip

if TYPE_CHECKING:  # a second to import, for ranks with shards alone
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

Wrapper = TypeVar("Wrapper", bound=Tensor)

GraphExecGroup = checkpoint.GraphExecGroup
__all__ = [
    "BatchNormBase", "DropoutBase", "FakeTensor", "OpOverload", "TreeSpec", "register_pytree_node", "tree_flatten", "tree_leaves",
    "tree_map", "tree_map_only", "tree_unflatten",
]  # fmt: skip
"""What others import from here under torch's own name."""
vars(_meta_registrations)["random"] = random.Random(0)
"""Collectives of fake tensors draw a number: with torch's own module from Python's generator, by which models decide what to run."""

RECURRENT = (torch._VF.lstm, torch._VF.gru, torch._VF.rnn_tanh, torch._VF.rnn_relu)
"""What recurrent layers call."""
scalar_of = torch.ops.aten._local_scalar_dense.default
"""The operator behind `.item()`, `.tolist()` and `float(…)` of a tensor."""
asks_device = torch.ops.prim.device.default
"""The operator by which C++ asks a tensor subclass for its device."""
all_reduce = _functional_collectives.all_reduce
"""(tensor, "sum", group) -> a new tensor, also in a compiled graph."""
all_gather_tensor = getattr(_functional_collectives, "all_gather_single", _functional_collectives.all_gather_tensor)
"""(tensor, 0, group) -> those of all ranks, one after the other, also in a compiled graph. In torch 2.11 by its older name."""
copy_ = torch._foreach_copy_
"""(tensors, others) -> every tensor written with another's values, in one call."""
scale_ = torch._foreach_mul_
"""(tensors, number or tensor) -> every tensor multiplied in place, in one call."""
attention_choice = torch._fused_sdp_choice
"""(q, k, v, mask, dropout, causal, scale=, enable_gqa=) -> the kernel that torch would take, as a `torch.nn.attention.SDPBackend`."""
Kernels = tuple[Callable[..., Any], Callable[..., Any]]
flash_cpu: Kernels = (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward)  # fmt: skip
"""An attention kernel of torch, and its backward. Forward gives (output, logarithms of the sums of the weights, …); backward takes both,
over these keys and perhaps others. This one is for CPUs, the others for GPUs."""
flash: Kernels = (torch.ops.aten._scaled_dot_product_flash_attention, torch.ops.aten._scaled_dot_product_flash_attention_backward)
memory_efficient: Kernels = (torch.ops.aten._scaled_dot_product_efficient_attention, torch.ops.aten._scaled_dot_product_efficient_attention_backward)
cudnn: Kernels = (torch.ops.aten._scaled_dot_product_cudnn_attention, torch.ops.aten._scaled_dot_product_cudnn_attention_backward)


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer of torch update all its parameters in one kernel, as if it had been made with `fused=True`."""
    for group in optimizer.param_groups:
        group["fused"] = True
    optimizer.defaults["fused"] = optimizer._step_supports_amp_scaling = True  # pyrefly: ignore[missing-attribute]
    optimizer._need_device_dtype_check_for_fused = True  # pyrefly: ignore[missing-attribute]


def takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's step changes nothing where its attribute `found_inf`, a scalar of its device, is 1: fused ones do."""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return fused and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def devices_by_driver() -> int | None:
    """Number of devices by the driver's library, which unlike torch.cuda leaves the process able to fork; None: unknown."""
    if torch.cuda.is_initialized():
        return torch.cuda.device_count()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a library that cannot be used says so
        count = torch.cuda._device_count_amdsmi() if torch.version.hip else torch.cuda._device_count_nvml()
    return count if count >= 0 else None


def cuda_lost() -> bool:
    """Whether this process was forked from one that had asked the CUDA runtime something, and so cannot use CUDA."""
    return torch.cuda._is_in_bad_fork()


def set_allocator(words: str) -> None:
    """Set up the allocator of devices, as PYTORCH_ALLOC_CONF would have before torch was imported."""
    torch._C._accelerator_setAllocatorSettings(words)


def let_wait(patience: timedelta) -> None:
    """How long what is asked of every process group from now on may wait. New groups have torch's own time until they are told."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # neither gloo nor NCCL: a group of somebody else's
        for group in list(distributed_c10d._world.pg_map):
            distributed_c10d._set_pg_timeout(patience, group)


def schema(op: OpOverload) -> torch.FunctionSchema:
    """The schema of an operator: its arguments, which of them it writes, and their defaults."""
    return op._schema


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of a module itself, by name; changing the dict changes the module."""
    return module._buffers


def hooks_made() -> int:
    """How many hooks, on modules and on tensors, this process has registered."""
    return hooks.RemovableHandle.next_id


def hooks_of(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """The hooks before and after a module's forward, by number; changing a dict changes the module."""
    return module._forward_pre_hooks, module._forward_hooks


def gradient_hooks(parameter: Tensor) -> tuple[Any, Any]:
    """The hooks on a parameter's gradient, by number, or None: those given the gradient, and those called once it is added up."""
    return parameter._backward_hooks, parameter._post_accumulate_grad_hooks


def put_gradient_hooks(parameter: Tensor, before: dict[int, Callable[..., object]], after: dict[int, Callable[..., object]]) -> None:
    """Exchange both tables. Empty ones: None would leave those of the second kind where autograd finds them."""
    parameter._backward_hooks, parameter._post_accumulate_grad_hooks = before, after  # pyrefly: ignore


def storage_key(tensor: Tensor) -> int:
    """An identifier of a tensor's storage, valid while it lives; fake tensors have one too."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def version(tensor: Tensor) -> int:
    """The tensor's version counter: it grows with every in-place write."""
    with torch._C.DisableTorchFunction():  # modes that are active would be asked what it is
        return 0 if tensor.is_inference() else tensor._version


def check_dims(norm: BatchNormBase, input: Tensor) -> None:
    """Raise what torch raises when the input of a batch norm has the wrong number of dims."""
    norm._check_input_dim(input)


def warm_up() -> None:
    """Import what one of a rank's optimizer, shards and recomputation would import."""
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.utils.flop_counter  # noqa: F401


def let_compile(times: int) -> None:
    """Let one function be compiled so often for inputs that differ, and compare modules' hooks before what was compiled for one runs for another."""
    import torch._dynamo.config as config

    config.recompile_limit = max(config.recompile_limit, times)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 8 * times)
    config.skip_nnmodule_hook_guards = False


def compiled_so_far() -> tuple[int, int]:
    """(graphs that torch.compile made in this process, functions that it gave up because it had compiled them too often)."""
    from torch._dynamo.utils import counters

    given_up = sum(n for reason, n in counters["unimplemented"].items() if "limit exceeded" in reason)
    return counters["stats"]["unique_graphs"], given_up


@cache
def is_seeded(op: object) -> bool:
    """Whether an operator draws from a generator."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


def held_on_meta(t: Tensor) -> bool:
    """Whether a tensor has no memory, or none that is counted by its storage. (A fake one's device is an operator.)"""
    return t.fake_device.type == "meta" if isinstance(t, FakeTensor) else t.is_meta or t.layout is not torch.strided


def leaves(tree: object) -> list[Any]:
    """The leaves of a tree, also inside dataclasses: their classes are registered with torch's pytrees when first met."""
    if isinstance(tree, Tensor):
        return [tree]
    flat = tree_leaves(tree)
    for leaf in flat:
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            register_dataclass(type(leaf))
            return leaves(tree)
    return flat


def fake_world(rank: int, world: int) -> None:
    """Initialise torch.distributed with its fake backend: nothing is sent, and receive buffers stay as they are."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # a second to import, for few who need it

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


def group_in(value: object) -> ProcessGroup | None:
    """The process group among an operator's arguments: None when this one is something else."""
    try:
        return ProcessGroup.unbox(value) if isinstance(value, torch.ScriptObject) else None
    except RuntimeError:
        return None


def checkpoint_frame() -> object:
    """The innermost activation checkpoint (non-reentrant) whose function is running now, or None."""
    if torch.compiler.is_compiling():
        return None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks[0] if hooks is not None and hooks[0].__qualname__.startswith("_checkpoint_hook") else None


class _Unspent(checkpoint._Holder):
    """What an activation checkpoint keeps for a tensor: may be asked for more than once in a `GraphExecGroup`."""

    def __init__(self) -> None:
        super().__init__()
        self.handles = _Handles()


class _Handles(dict[int, checkpoint._Handle | None]):
    def __setitem__(self, group: int, handle: checkpoint._Handle | None) -> None:
        if handle is not None:  # torch's mark of a tensor that was asked for
            super().__setitem__(group, handle)


def recompute_once() -> None:
    """From now on the backward passes of one `GraphExecGroup` recompute an activation checkpoint once, not each."""
    checkpoint._Holder = _Unspent  # pyrefly: ignore


def local_of(t: Tensor) -> Tensor:
    """The tensor that a DTensor wraps on this rank, storage shared; a plain tensor itself."""
    return getattr(t, "_local_tensor", t)


def fsdp_placement() -> Any:
    """Where torch has `FSDPMeshInfo` and, since torch 2.12, `ShardPlacementResult`, by which a parameter of a module lies on another mesh."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    return _fsdp_common


def exchange_by(module: "FSDPModule", scatter: Callable[..., None], gather: Callable[..., Any] | None) -> None:
    """How FSDP2 sums gradients of a module's parameters, on every mesh they lie on, and, unless `gather` is None, gathers them: not waiting."""
    for group in _param_groups(module._get_fsdp_state()):
        group._reduce_scatter_comm, group._all_gather_comm = scatter, gather or group._all_gather_comm  # pyrefly: ignore[bad-assignment]
        group.unshard_async_op = gather is not None


def gather_ahead(module: "FSDPModule") -> None:
    """Begin to gather a sharded module's parameters for its forward pass, as FSDP2 does where it gathers ahead by itself: on its own
    streams. What its `unshard` begins asynchronously waits in line with what the current stream computes."""
    for group in _param_groups(module._get_fsdp_state()):
        type(group)._prefetch_unshard(group, "forward")


def sum_after(module: "FSDPModule", hook: Callable[[Tensor], None]) -> None:
    """Call `hook` with each summed part of a module's gradients, before it is used, on FSDP2's stream for all-reduces. Its own
    `set_all_reduce_hook` refuses parameters that lie on several meshes."""
    for group in _param_groups(module._get_fsdp_state()):
        group._all_reduce_hook = hook


def _param_groups(state: "FSDPState") -> "list[FSDPParamGroup]":
    """The groups of parameters of a sharded module: one for each mesh they lie on. (torch 2.11 knows one mesh.)"""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def sharded_here(module: "FSDPModule") -> list[tuple[Tensor, Tensor | None]]:
    """The parameters gathered with this sharded module: (this rank's part, what the model's code sees, once it was gathered)."""
    held = [p for group in _param_groups(module._get_fsdp_state()) for p in group.fsdp_params]
    return [(p.sharded_param, getattr(p, "_unsharded_param", None)) for p in held]


def sum_unused(module: "FSDPModule") -> None:
    """A parameter of this sharded module that a rank's backward did not come to counts as zeros there, so that all ranks
    sum the same. Its modules inside are left as they are."""
    known = hasattr(module, "set_reduce_scatter_unused_params")
    if known:
        module.set_reduce_scatter_unused_params(True, recurse=False)
    for group in _param_groups(module._get_fsdp_state()):
        group.post_backward = _of_one_format(group, group.post_backward, known)


def _of_one_format(group: "FSDPParamGroup", reduce: Callable[[], None], known: bool) -> Callable[..., None]:
    """FSDP2 sums a group's gradients in one message, of one format. Zeros, and gradients of one micro-batch, are those of the
    weights; sums over micro-batches are wider. Where there is one of these, all are. `known`: torch makes zeros itself."""

    def post_backward(*unused: Any) -> None:
        held = [p for p in group.fsdp_params if group.reduce_grads and hasattr(p, "_unsharded_param")]
        held = [p for p in held if p._unsharded_param.requires_grad]
        wide = any(p.unsharded_accumulated_grad is not None for p in held)
        for p in held:
            if p._unsharded_param.grad is None and p.unsharded_accumulated_grad is None:
                if wide:
                    p.unsharded_accumulated_grad = torch.zeros_like(p._unsharded_param, dtype=p.reduce_dtype)
                elif not known:
                    p._unsharded_param.grad = torch.zeros_like(p._unsharded_param)
            elif wide and p.unsharded_accumulated_grad is None:
                p.to_accumulated_grad_if_needed()
        reduce()

    return post_backward


def _all_param_groups(root: "FSDPModule") -> "Iterator[FSDPParamGroup]":
    for state in root._get_fsdp_state()._state_ctx.all_states:
        yield from _param_groups(state)


def widened(root: "FSDPModule", parameter: Tensor) -> Callable[[], None]:
    """Moves a gathered parameter's gradient, as a backward pass leaves it, into a sum in the format that ranks sum in."""
    held = (p for group in _all_param_groups(root) for p in group.fsdp_params)
    mine = next(p for p in held if getattr(p, "_unsharded_param", None) is parameter)

    def add() -> None:
        if mine.unsharded_accumulated_grad is None:
            mine.to_accumulated_grad_if_needed()
        else:
            mine.accumulate_unsharded_grad_if_needed()

    return add


@contextmanager
def parts_as_they_are() -> Iterator[None]:
    """A context in which FSDP2 keeps fake shards as they are: it takes them, having no address, for new ones and pads again."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    before, kept = FSDPParam.reset_sharded_param, lambda self: setattr(self, "_sharding_spec", self.sharded_param._spec)
    FSDPParam.reset_sharded_param = kept  # pyrefly: ignore[bad-assignment]
    try:
        yield
    finally:
        FSDPParam.reset_sharded_param = before


def end_backward(root: "FSDPModule") -> None:
    """Tell a sharded model that the step's backward passes are over: it reduces the gradients that are left."""
    for group in _all_param_groups(root):
        group.post_backward()
    root._get_fsdp_state()._root_post_backward_final_callback()


class FakeTensorMode(_FakeTensorMode):
    """torch's mode for fake tensors, shared by deep copies of its tensors.

    torch copies the mode with the tensor. The copy's weak references to storages are freed twice, which damages the process's memory."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "FakeTensorMode":
        return self

    def dispatch(self, func, types, args: tuple[Any, ...] = (), kwargs=None) -> Any:  # pyrefly: ignore[bad-override]
        """torch's rule for products of groups, as in mixtures of experts, takes bfloat16 alone; its kernels take other formats too."""
        if func is not torch.ops.aten._grouped_mm.default or args[0].dtype == torch.bfloat16:
            return super().dispatch(func, types, args, kwargs or {})
        shaped: Tensor = super().dispatch(func, types, (args[0].bfloat16(), args[1].bfloat16(), *args[2:]), kwargs or {})  # type: ignore[assignment]
        return shaped.to(args[0].dtype)


def fakes_around() -> _FakeTensorMode | None:
    """The active mode for fake tensors, if any. It comes after all other modes, whenever it was entered."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def is_view(t: Tensor) -> bool:
    """Whether autograd follows a tensor as a view of another."""
    return t._is_view()


def each_tensor(root: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """The module, each of its parameters and buffers replaced by what `change` returns for it."""
    return root._apply(change)


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


def alias(t: Tensor) -> Tensor:
    """Inside a dispatch mode: the tensor without its place in autograd's graph, but with its version counter."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return t.detach()


class TorchDispatchMode(_TorchDispatchMode):
    """torch's dispatch mode, which lets higher-order operators pass. Modes do not see the question for a fake tensor's device, which
    autograd asks twice as often as operators run."""

    supports_higher_order_operators = True

    def __init_subclass__(cls, **given: Any) -> None:
        own = cls.__dict__.get("__torch_dispatch__")
        if own is not None:

            def dispatch(self, func, types, args: tuple[Any, ...] = (), kwargs=None):
                if func is asks_device and isinstance(args[0], FakeTensor):
                    return args[0].device
                if isinstance(func, HigherOrderOperator):
                    return self.passed(func, args, kwargs or {})
                return own(self, func, types, args, kwargs)

            cls.__torch_dispatch__ = dispatch  # type: ignore[method-assign]
        super().__init_subclass__(**given)

    def passed(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of higher order, without a look into it."""
        return func(*args, **kwargs)


@contextmanager
def compiled_by(run: Callable[[str, Callable[..., Any], Any, Any], Any]) -> Iterator[None]:
    """A context in which `run(name, compiled, args, kwargs)` calls what a higher-order operator compiles for itself."""
    before = torch.compile

    def compile(model: Callable[..., Any] | None = None, **how: Any) -> Any:
        made = before(model, **how)
        own = str(getattr(model, "__module__", "")).startswith(("torch._higher_order_ops", "torch.nn.attention"))
        if model is None or not own:
            return made
        name = model.__qualname__.partition(".")[0].strip("_")
        return lambda *args, **kwargs: run(name, made, args, kwargs)

    torch.compile = compile  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = before  # type: ignore[assignment]


uncompiled = torch._disable_dynamo
"""(function) -> one that torch.compile does not look into; torch's public decorator imports its compiler at once."""
no_modes = _disable_current_modes
"""A context without dispatch modes: tensors that are made in it are real."""
no_functions = torch._C.DisableTorchFunction
"""A context in which no torch function mode and no tensor subclass sees a call."""
has_storage = torch._C._has_storage
"""Whether a tensor has memory of its own or a view of it; tensors inside of a transform of torch.func have none."""
plainly = torch._C.DisableTorchFunctionSubclass
"""A context in which torch functions ignore tensor subclasses."""


class WrapperTensor(Tensor):
    """Base of tensor subclasses that have a shape and no storage of their own (torch: wrapper subclass).

    `inside`: random draws for it are draws for `local`, its part on this rank.
    """

    inside = False
    local: Tensor

    def like(self, local: Tensor) -> Tensor:
        """The tensor of this class that stands for the whole of which `local` is the part."""
        raise NotImplementedError

    @staticmethod
    def made(cls: type[Wrapper], like: Tensor, shape: Sequence[int]) -> Wrapper:
        """A tensor of class `cls` that differs from `like` in shape."""
        return Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device, requires_grad=like.requires_grad)

    @classmethod
    def __torch_dispatch__(cls, func: Callable[..., Any], *_: Any) -> Any:  # pyrefly: ignore[bad-override]
        raise NotImplementedError(f"{func} of a tensor that has no numbers")


def named_leaves(tree: object) -> tuple[list[tuple[str, Any]], Any]:
    """(the leaves of a tree with their paths, its structure), also inside dataclasses."""
    leaves(tree)
    flat, spec = tree_flatten_with_path(tree)
    return [(keystr(path), leaf) for path, leaf in flat], spec
