"""Every private or unstable name of torch that plait uses.

Each has a contract test: if a torch release moves a name, one test fails and only this file changes.
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

if TYPE_CHECKING:  # takes a second to import, and only ranks with shards need it
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

Wrapper = TypeVar("Wrapper", bound=Tensor)

GraphExecGroup = checkpoint.GraphExecGroup
__all__ = [
    "BatchNormBase", "DropoutBase", "FakeTensor", "OpOverload", "TreeSpec", "register_pytree_node", "tree_flatten", "tree_leaves",
    "tree_map", "tree_map_only", "tree_unflatten",
]  # fmt: skip
"""Names imported from here under torch's own name."""
vars(_meta_registrations)["random"] = random.Random(0)
"""Collectives on fake tensors draw a random number; in torch's module it comes from Python's generator, which models use for decisions."""

RECURRENT = (torch._VF.lstm, torch._VF.gru, torch._VF.rnn_tanh, torch._VF.rnn_relu)
"""Functions behind recurrent layers."""
item_op = torch.ops.aten._local_scalar_dense.default
"""Operator behind `.item()`, `.tolist()` and `float(…)` of a tensor."""
device_op = torch.ops.prim.device.default
"""Operator through which C++ reads the device of a tensor subclass."""
all_reduce = _functional_collectives.all_reduce
"""(tensor, "sum", group) -> a new tensor, also in a compiled graph."""
all_gather_tensor = getattr(_functional_collectives, "all_gather_single", _functional_collectives.all_gather_tensor)
"""(tensor, 0, group) -> the tensors of all ranks, concatenated, also in a compiled graph. torch 2.11 has its older name."""
copy_ = torch._foreach_copy_
"""(tensors, others) -> copies each tensor from the other list, in one call."""
scale_ = torch._foreach_mul_
"""(tensors, number or tensor) -> multiplies every tensor in place, in one call."""
attention_choice = torch._fused_sdp_choice
"""(q, k, v, mask, dropout, causal, scale=, enable_gqa=) -> torch's choice of kernel, as a `torch.nn.attention.SDPBackend`."""
Kernels = tuple[Callable[..., Any], Callable[..., Any]]
flash_cpu: Kernels = (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward)  # fmt: skip
"""An attention kernel of torch, and its backward; this one for CPUs, the others for GPUs. Forward gives (output, log-sum-exp, …); backward takes
both, over these keys and possibly others."""
flash: Kernels = (torch.ops.aten._scaled_dot_product_flash_attention, torch.ops.aten._scaled_dot_product_flash_attention_backward)
memory_efficient: Kernels = (torch.ops.aten._scaled_dot_product_efficient_attention, torch.ops.aten._scaled_dot_product_efficient_attention_backward)
cudnn: Kernels = (torch.ops.aten._scaled_dot_product_cudnn_attention, torch.ops.aten._scaled_dot_product_cudnn_attention_backward)


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer of torch update all its parameters in one kernel, as if created with `fused=True`."""
    for group in optimizer.param_groups:
        group["fused"] = True
    optimizer.defaults["fused"] = optimizer._step_supports_amp_scaling = True  # pyrefly: ignore[missing-attribute]
    optimizer._need_device_dtype_check_for_fused = True  # pyrefly: ignore[missing-attribute]


def can_skip_on_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's step changes nothing if its attribute `found_inf`, a scalar of its device, is 1 (fused ones)."""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return fused and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def devices_by_driver() -> int | None:
    """Return the number of devices from the driver's library, after which the process can still fork; None: unknown."""
    if torch.cuda.is_initialized():
        return torch.cuda.device_count()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an unusable library raises
        count = torch.cuda._device_count_amdsmi() if torch.version.hip else torch.cuda._device_count_nvml()
    return count if count >= 0 else None


def is_cuda_lost() -> bool:
    """Return whether this process was forked from one with CUDA initialized, and so cannot use CUDA."""
    return torch.cuda._is_in_bad_fork()


def configure_allocator(words: str) -> None:
    """Configure the device allocator, as PYTORCH_ALLOC_CONF would before the import of torch."""
    torch._C._accelerator_setAllocatorSettings(words)


def set_group_timeout(patience: timedelta) -> None:
    """Set the timeout for later operations of every process group. New groups start with torch's default."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # neither gloo nor NCCL: a group of another library
        for group in list(distributed_c10d._world.pg_map):
            distributed_c10d._set_pg_timeout(patience, group)


def schema(op: OpOverload) -> torch.FunctionSchema:
    """Return the schema of an operator: its arguments, the written ones, and their defaults."""
    return op._schema


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the parameters of a module itself, by name; changing the dict changes the module."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the buffers of a module itself, by name; changing the dict changes the module."""
    return module._buffers


def count_hooks() -> int:
    """Return the number of hooks, on modules and tensors, that this process has registered."""
    return hooks.RemovableHandle.next_id


def forward_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the hooks before and after a module's forward, by number; changing a dict changes the module."""
    return module._forward_pre_hooks, module._forward_hooks


def gradient_hooks(parameter: Tensor) -> tuple[Any, Any]:
    """Return a parameter's gradient hooks, by number, or None: those before, and those after accumulation."""
    return parameter._backward_hooks, parameter._post_accumulate_grad_hooks


def set_gradient_hooks(parameter: Tensor, before: dict[int, Callable[..., object]], after: dict[int, Callable[..., object]]) -> None:
    """Replace both tables. Use empty ones: autograd would still see the second kind after None."""
    parameter._backward_hooks, parameter._post_accumulate_grad_hooks = before, after  # pyrefly: ignore


def storage_key(tensor: Tensor) -> int:
    """Return an identifier of a tensor's storage, valid while it is alive, also for fake tensors."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def version(tensor: Tensor) -> int:
    """Return the tensor's version counter, which grows with every in-place write."""
    with torch._C.DisableTorchFunction():  # active modes would see the query
        return 0 if tensor.is_inference() else tensor._version


def check_dims(norm: BatchNormBase, input: Tensor) -> None:
    """Raise torch's error if the input of a batch norm has the wrong number of dims."""
    norm._check_input_dim(input)


def warm_up() -> None:
    """Import the modules that a rank's optimizer, shards and recomputation would import."""
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.utils.flop_counter  # noqa: F401


def set_recompile_limit(times: int) -> None:
    """Set how often one function may be recompiled for different inputs, and compare modules' hooks before reuse of a compiled graph."""
    import torch._dynamo.config as config

    config.recompile_limit = max(config.recompile_limit, times)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 8 * times)
    config.skip_nnmodule_hook_guards = False


def count_compiled() -> tuple[int, int]:
    """Return (graphs compiled by torch.compile in this process, functions that exceeded the recompile limit)."""
    from torch._dynamo.utils import counters

    given_up = sum(n for reason, n in counters["unimplemented"].items() if "limit exceeded" in reason)
    return counters["stats"]["unique_graphs"], given_up


@cache
def is_seeded(op: object) -> bool:
    """Return whether an operator draws from a generator."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


def is_without_memory(t: Tensor) -> bool:
    """Return whether a tensor has no memory, or none counted by its storage. (The device of a fake one is an operator.)"""
    return t.fake_device.type == "meta" if isinstance(t, FakeTensor) else t.is_meta or t.layout is not torch.strided


def dataclass_leaves(tree: object) -> list[Any]:
    """Return the leaves of a tree, also inside dataclasses, whose classes are registered with torch's pytrees on first use."""
    if isinstance(tree, Tensor):
        return [tree]
    flat = tree_leaves(tree)
    for leaf in flat:
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            register_dataclass(type(leaf))
            return dataclass_leaves(tree)
    return flat


def init_fake_world(rank: int, world: int) -> None:
    """Initialize torch.distributed with its fake backend: nothing is sent, and receive buffers are unchanged."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # takes a second to import and is rarely needed

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


def find_process_group(value: object) -> ProcessGroup | None:
    """Return the process group if this argument of an operator is one, else None."""
    try:
        return ProcessGroup.unbox(value) if isinstance(value, torch.ScriptObject) else None
    except RuntimeError:
        return None


def checkpoint_frame() -> object:
    """Return the innermost non-reentrant activation checkpoint whose function is running, or None."""
    if torch.compiler.is_compiling():
        return None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks[0] if hooks is not None and hooks[0].__qualname__.startswith("_checkpoint_hook") else None


class _ReusableHolder(checkpoint._Holder):
    """A saved tensor of an activation checkpoint, which may be unpacked more than once in a `GraphExecGroup`."""

    def __init__(self) -> None:
        super().__init__()
        self.handles = _ReusableHandles()


class _ReusableHandles(dict[int, checkpoint._Handle | None]):
    def __setitem__(self, group: int, handle: checkpoint._Handle | None) -> None:
        if handle is not None:  # torch's mark of a requested tensor
            super().__setitem__(group, handle)


def recompute_once() -> None:
    """Let the backward passes of one `GraphExecGroup` recompute an activation checkpoint only once."""
    checkpoint._Holder = _ReusableHolder  # pyrefly: ignore


def local_tensor(t: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, sharing its storage; a plain tensor itself."""
    return getattr(t, "_local_tensor", t)


def fsdp_placement() -> Any:
    """Return torch's `FSDPMeshInfo` and, since torch 2.12, `ShardPlacementResult`, which place one parameter of a module on another mesh."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    return _fsdp_common


def set_fsdp_comms(module: "FSDPModule", scatter: Callable[..., None], gather: Callable[..., Any] | None) -> None:
    """Set how FSDP2 reduces gradients of a module on every mesh, and, unless `gather` is None, gathers parameters, without waiting."""
    for group in _param_groups(module._get_fsdp_state()):
        group._reduce_scatter_comm, group._all_gather_comm = scatter, gather or group._all_gather_comm  # pyrefly: ignore[bad-assignment]
        group.unshard_async_op = gather is not None


def prefetch_gather(module: "FSDPModule") -> None:
    """Start FSDP2's gather of a module's parameters for forward, on its own streams; an async `unshard` queues behind the current stream."""
    for group in _param_groups(module._get_fsdp_state()):
        type(group)._prefetch_unshard(group, "forward")


def hook_after_reduce(module: "FSDPModule", hook: Callable[[Tensor], None]) -> None:
    """Call `hook` with each reduced gradient shard before use, on FSDP2's all-reduce stream; `set_all_reduce_hook` rejects several meshes."""
    for group in _param_groups(module._get_fsdp_state()):
        group._all_reduce_hook = hook


def _param_groups(state: "FSDPState") -> "list[FSDPParamGroup]":
    """Return the parameter groups of a sharded module, one for each mesh. (torch 2.11 supports one mesh.)"""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def list_sharded_params(module: "FSDPModule") -> list[tuple[Tensor, Tensor | None]]:
    """Return the parameters gathered with this sharded module: (this rank's shard, the gathered parameter, once gathered)."""
    held = [p for group in _param_groups(module._get_fsdp_state()) for p in group.fsdp_params]
    return [(p.sharded_param, getattr(p, "_unsharded_param", None)) for p in held]


def reduce_unused_params(module: "FSDPModule") -> None:
    """Count parameters without a gradient as zeros, so that all ranks reduce the same; submodules are left unchanged."""
    known = hasattr(module, "set_reduce_scatter_unused_params")
    if known:
        module.set_reduce_scatter_unused_params(True, recurse=False)
    for group in _param_groups(module._get_fsdp_state()):
        group.post_backward = _unify_grad_dtypes(group, group.post_backward, known)


def _unify_grad_dtypes(group: "FSDPParamGroup", reduce: Callable[[], None], known: bool) -> Callable[..., None]:
    """Give a group's gradients, which FSDP2 reduces in one message, the widest of their dtypes. `known`: torch makes zeros itself."""

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


def make_wide_sum(root: "FSDPModule", parameter: Tensor) -> Callable[[], None]:
    """Return a function that moves a gathered parameter's gradient into a sum in the reduce dtype."""
    held = (p for group in _all_param_groups(root) for p in group.fsdp_params)
    mine = next(p for p in held if getattr(p, "_unsharded_param", None) is parameter)

    def add() -> None:
        if mine.unsharded_accumulated_grad is None:
            mine.to_accumulated_grad_if_needed()
        else:
            mine.accumulate_unsharded_grad_if_needed()

    return add


@contextmanager
def keep_fake_shards() -> Iterator[None]:
    """Context in which FSDP2 keeps fake shards; as they have no address, it would take them for new ones and pad again."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    before, kept = FSDPParam.reset_sharded_param, lambda self: setattr(self, "_sharding_spec", self.sharded_param._spec)
    FSDPParam.reset_sharded_param = kept  # pyrefly: ignore[bad-assignment]
    try:
        yield
    finally:
        FSDPParam.reset_sharded_param = before


def end_backward(root: "FSDPModule") -> None:
    """Notify a sharded model that the step's backward passes are complete; it reduces the remaining gradients."""
    for group in _all_param_groups(root):
        group.post_backward()
    root._get_fsdp_state()._root_post_backward_final_callback()


class FakeTensorMode(_FakeTensorMode):
    """torch's mode for fake tensors, shared by deep copies of its tensors. torch copies it too, and frees the copy's weak references twice, which
    corrupts the process's memory."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "FakeTensorMode":
        return self

    def dispatch(self, func, types, args: tuple[Any, ...] = (), kwargs=None) -> Any:  # pyrefly: ignore[bad-override]
        """Run grouped matmul in bfloat16, the only dtype of torch's fake rule; the real kernels support other dtypes too."""
        if func is not torch.ops.aten._grouped_mm.default or args[0].dtype == torch.bfloat16:
            return super().dispatch(func, types, args, kwargs or {})
        shaped: Tensor = super().dispatch(func, types, (args[0].bfloat16(), args[1].bfloat16(), *args[2:]), kwargs or {})  # type: ignore[assignment]
        return shaped.to(args[0].dtype)


def active_fake_mode() -> _FakeTensorMode | None:
    """Return the active mode for fake tensors, if any. It runs after all other modes, in any order of entry."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def is_view(t: Tensor) -> bool:
    """Return whether autograd tracks a tensor as a view of another."""
    return t._is_view()


def map_tensors(root: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """Replace each parameter and buffer of the module by the result of `change`, and return the module."""
    return root._apply(change)


def is_in_backward() -> bool:
    """Return whether autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


def alias(t: Tensor) -> Tensor:
    """Inside a dispatch mode: return the tensor detached from autograd's graph, with its version counter."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return t.detach()


class TorchDispatchMode(_TorchDispatchMode):
    """torch's dispatch mode that also passes higher-order operators, and hides queries of a fake tensor's device, which autograd makes often."""

    supports_higher_order_operators = True

    def __init_subclass__(cls, **given: Any) -> None:
        own = cls.__dict__.get("__torch_dispatch__")
        if own is not None:

            def dispatch(self, func, types, args: tuple[Any, ...] = (), kwargs=None):
                if func is device_op and isinstance(args[0], FakeTensor):
                    return args[0].device
                if isinstance(func, HigherOrderOperator):
                    return self.run_higher_order(func, args, kwargs or {})
                return own(self, func, types, args, kwargs)

            cls.__torch_dispatch__ = dispatch  # type: ignore[method-assign]
        super().__init_subclass__(**given)

    def run_higher_order(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a higher-order operator without inspecting it."""
        return func(*args, **kwargs)


@contextmanager
def intercept_compiled(run: Callable[[str, Callable[..., Any], Any, Any], Any]) -> Iterator[None]:
    """Context in which `run(name, compiled, args, kwargs)` calls the functions that a higher-order operator compiles for itself."""
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
"""(function) -> one that torch.compile skips; torch's public decorator imports its compiler at once."""
no_modes = _disable_current_modes
"""Context without dispatch modes: new tensors are real."""
no_functions = torch._C.DisableTorchFunction
"""Context in which no torch function mode and no tensor subclass sees a call."""
has_storage = torch._C._has_storage
"""Whether a tensor has memory of its own or a view of it; tensors inside of a torch.func transform have none."""
no_subclass_functions = torch._C.DisableTorchFunctionSubclass
"""Context in which torch functions ignore tensor subclasses."""


class WrapperTensor(Tensor):
    """Base of wrapper subclasses: a shape and no storage. `wraps_region`: random draws for it are draws for `local`, its part on this rank."""

    wraps_region = False
    local: Tensor

    def with_local(self, local: Tensor) -> Tensor:
        """Return a tensor of this class whose part on this rank is `local`."""
        raise NotImplementedError

    @staticmethod
    def create(cls: type[Wrapper], like: Tensor, shape: Sequence[int]) -> Wrapper:
        """Create a tensor of class `cls` that differs from `like` in shape."""
        return Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device, requires_grad=like.requires_grad)

    @classmethod
    def __torch_dispatch__(cls, func: Callable[..., Any], *_: Any) -> Any:  # pyrefly: ignore[bad-override]
        raise NotImplementedError(f"{func} of a tensor that has no numbers")


def leaves_with_paths(tree: object) -> tuple[list[tuple[str, Any]], Any]:
    """Return (the leaves of a tree with their paths, its structure), also inside dataclasses."""
    dataclass_leaves(tree)
    flat, spec = tree_flatten_with_path(tree)
    return [(keystr(path), leaf) for path, leaf in flat], spec
